"""The state of a training run in a checkpoint, from which another run goes on."""

import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.training.files.checkpoint import Checkpoint, read_checkpoint
from opgrad.training.files.dataset import Dataset
from opgrad.training.run.metrics import EpochMetrics, best_epoch
from opgrad.training.run.recipe import Recipe, is_count

PROPERTY = "opgrad.run"  # of the checkpoint, a JSON text
FORMAT = 1
MOST = 2**62
TIMES = ("learning_rate", "seconds", "samples_per_second")  # and the like: finite, and not below 0
MOST_THREADS = 4096
LAST, BEST = "last.checkpoint", "best.checkpoint"


@dataclass
class RunState:
    """The progress of a run.

    recipe: its settings.
    data: the fingerprint of its training rows.
    threads: of onnxruntime; another number may change the last digits.
    history: the finished epochs.
    steps: the steps of the run.
    optimizer_steps: the optimizer's steps, which are more if the run began with a checkpoint that had some.
    rows, batches, loss_sum, seconds: of the epoch that has begun: rows, batches, the sum of their losses, the time.
    initial_loss: that of some training rows before the first step.
    """

    recipe: Recipe
    data: int
    threads: int
    history: list[EpochMetrics] = field(default_factory=list)
    steps: int = 0
    optimizer_steps: int = 0
    rows: int = 0
    batches: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    initial_loss: float | None = None

    @property
    def stopped_early(self) -> bool:
        """Whether the validation loss has not fallen for as many epochs as the recipe waits."""
        best, patience = best_epoch(self.history), self.recipe.patience
        return best is not None and patience is not None and len(self.history) - best >= patience

    @property
    def all_seconds(self) -> float:
        """The time of all steps, without evaluation, writing and progress bar."""
        return sum(epoch.seconds for epoch in self.history) + self.seconds

    def to_text(self) -> str:
        """All of it as one line of JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_text(cls, text: Any, file: str | PathLike[str] = "the state") -> "RunState":
        """The reverse of `to_text`. Raises ValueError for any other text, with the name of its file."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise ValueError
            recipe, history = Recipe(**values.pop("recipe")), values.pop("history")
            state = cls(recipe=recipe, history=[EpochMetrics(**each) for each in history], **values)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            text = f"resume: {file}: the property {PROPERTY} is none that this version of opgrad wrote"
            raise ValueError(text) from None
        _check(state, f"resume: {file}: {PROPERTY}")
        return state


def _check(state: RunState, what: str) -> None:
    """Raise ValueError unless every field of a state has a value that a run may have had. what: for messages."""
    _check_fields(state, what)
    if not 1 <= state.threads <= MOST_THREADS:
        raise ValueError(f"{what}: threads is {state.threads}, expected a whole number from 1 to {MOST_THREADS}")
    steps = 0
    for number, epoch in enumerate(state.history, 1):
        _check_fields(epoch, f"{what}: epoch {number}")
        if epoch.epoch != number or epoch.steps < steps:
            raise ValueError(f"{what}: epoch {number} has the number {epoch.epoch} and ends at step {epoch.steps}")
        steps = epoch.steps
    if len({each.validation_loss is None for each in state.history}) > 1:
        raise ValueError(f"{what}: validation_loss is missing in some epochs, expected in all or in none")
    if state.steps < steps:
        raise ValueError(f"{what}: steps is {state.steps}, expected at least {steps}, those of the epochs")
    if state.batches > state.rows or (state.rows and not state.batches):
        raise ValueError(f"{what}: batches is {state.batches}, expected the batches of {state.rows} rows")


def _check_fields(values: RunState | EpochMetrics, what: str) -> None:
    """Raise ValueError unless fields of numbers have some; whole ones are not below 0."""
    for name, kind in type(values).__annotations__.items():
        value, is_time = getattr(values, name), name in TIMES
        if kind is int:
            right, expected = is_count(value, 0, MOST), f"a whole number from 0 to {MOST}"
        elif kind in (float, float | None):
            number = isinstance(value, float) or is_count(value, -MOST, MOST)
            right = (number and (not is_time or 0 <= value < math.inf)) or (value is None and kind is not float)
            expected = "a number of at least 0" if is_time else "a number"
        else:
            continue
        if not right:
            raise ValueError(f"{what}: {name} is {value!r}, expected {expected}")


def fingerprint(data: Dataset) -> int:
    """A checksum of names, dtypes, shapes and values."""
    value = 0
    for name, array in sorted(data.arrays.items()):
        value = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, value)
    return value


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from.

    path: the file.
    checkpoint: what it holds.
    state: of the run that wrote it; None for a checkpoint that `opgrad train` did not write, or with which another
        program went on. Its parameters and moments begin a new run.
    best: the checkpoint of the run's best epoch; None if it has no validation.
    may_be_done: whether a run that has made all its steps counts as finished instead of being refused: its results
    are not beside the checkpoint, or restarted processes were lost after it was written.
    """

    path: Path
    checkpoint: Checkpoint
    state: RunState | None
    best: Checkpoint | None
    may_be_done: bool = False

    @classmethod
    def read(cls, path: str | PathLike[str], may_be_done: bool = False) -> "Resumption":
        """Read a checkpoint, and best.checkpoint beside it if the run has one.

        Raises what `read_checkpoint` raises, and ValueError if best.checkpoint does not belong to it.
        """
        path = Path(path)
        checkpoint = read_checkpoint(path)
        if PROPERTY not in checkpoint.properties:
            return cls(path, checkpoint, None, None)
        state = RunState.from_text(checkpoint.properties[PROPERTY], path)
        if {group.step for group in checkpoint.optimizers.values()} != {state.optimizer_steps}:
            return cls(path, checkpoint, None, None)
        epoch, best = best_epoch(state.history), None
        if epoch is not None:
            best = checkpoint if epoch == len(state.history) and not state.rows else _read_best(path, state, epoch)
        return cls(path, checkpoint, state, best, may_be_done or not path.with_name("metrics.json").is_file())

    @property
    def properties(self) -> dict[str, int | float | str]:
        """The properties of the checkpoint that the run did not write itself."""
        return {name: value for name, value in self.checkpoint.properties.items() if name != PROPERTY}


def _read_best(path: Path, state: RunState, epoch: int) -> Checkpoint:
    """The checkpoint of a run's best epoch, beside its last one."""
    file = path.with_name(BEST)
    if not file.is_file():
        raise ValueError(f"resume: {file} is missing, expected the parameters of epoch {epoch}, the best so far")
    best = read_checkpoint(file)
    history = RunState.from_text(best.properties.get(PROPERTY), file).history
    if repr(history) != repr(state.history[:epoch]):  # a NaN is not equal to itself
        raise ValueError(f"resume: {file} is of another run or another epoch, expected epoch {epoch} of this run")
    return best
