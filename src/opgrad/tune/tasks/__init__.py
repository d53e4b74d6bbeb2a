"""The tasks that a model is trained for; see `Task`."""

from opgrad.base.arguments import require
from opgrad.tune.options import parsed
from opgrad.tune.tasks.base import TRAIN_ON, Task, Write
from opgrad.tune.tasks.classify import Classify, Rank
from opgrad.tune.tasks.embed import Embed
from opgrad.tune.tasks.prefer import Prefer

__all__ = ["TASKS", "TRAIN_ON", "Task", "Write", "task_of"]

TASKS: dict[str, type[Task]] = {each.NAME: each for each in (Write, Prefer, Embed, Classify, Rank)}


def task_of(text: str) -> Task:
    """The task by its text, such as `write`, or a name with options: `name, option=value`. Raises ArgumentError."""
    name, _, options = text.partition(",")
    known = f"one of {', '.join(TASKS)}, perhaps with options behind it"
    require(name.strip() in TASKS, "task", text, known)
    return parsed(TASKS[name.strip()], options, "task")
