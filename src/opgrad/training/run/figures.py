"""The figures of a run while it goes: a line of JSON for every step and epoch, and event files of TensorBoard."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from opgrad.base.arguments import ArgumentError
from opgrad.base.reading import open_regular
from opgrad.base.writing import replace_file

FILE = "metrics.jsonl"
LOGGERS = ("tensorboard",)  # a folder of that name gets the event files
INTERVAL = 1.0  # seconds between two writes to the disk, unless a step takes longer; a step may take less than 0.1 ms
Log = Callable[[int, Mapping[str, Any]], None]


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown logger, ModuleNotFoundError where its package is missing."""
    for name in names:
        if name not in LOGGERS:
            raise ArgumentError("loggers", f"is {name!r}, expected {' or '.join(LOGGERS)}")
        import tensorboardX  # noqa: F401


@contextmanager
def logged(output: Path, names: Sequence[str], steps: int) -> Iterator[Log]:
    """What writes the figures of a step, or of the epoch that ends with it, into a folder, within the `with` block.

    names: of `LOGGERS`. steps: how many a run that goes on has made; figures of later ones are written anew.
    """
    path = output / FILE
    replace_file(path, b"".join(_lines(path, steps)) if steps else b"")
    with ExitStack() as stack:
        file, written = stack.enter_context(path.open("a", encoding="utf-8")), time.perf_counter()
        boards = [_board(output / name, steps, stack) for name in names]

        def log(step: int, figures: Mapping[str, Any]) -> None:
            nonlocal written
            file.write(json.dumps({"step": step, **figures}) + "\n")
            if time.perf_counter() - written >= INTERVAL:
                file.flush()
                written = time.perf_counter()
            for board in boards:
                for name, value in figures.items():
                    if value is not None:
                        board.add_scalar(name, value, step)

        yield log


def _lines(path: Path, steps: int) -> Iterator[bytes]:
    """The lines about the first steps, without one that was not written to its end."""
    if path.is_file():
        with open_regular(path) as file:
            yield from (line for line in file if line.endswith(b"\n") and json.loads(line)["step"] <= steps)


def _board(folder: Path, steps: int, stack: ExitStack) -> Any:
    """A writer of event files; TensorBoard shows no figures of steps that are made anew."""
    from tensorboardX import SummaryWriter

    board = SummaryWriter(str(folder), purge_step=steps + 1 if steps else None, flush_secs=10)
    stack.callback(board.close)
    return board
