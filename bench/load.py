"""What operators lose while another process keeps one core busy: `python -m bench --load`."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import peers
from bench.case import Case
from bench.cells import Cell, select
from bench.measure import GIVEN, OURS, interleaved, measure_each

OPERATORS = ("softmax", "softmax_grad", "relu")
SHAPES = ("2048x32000", "16777216")
PEERS = ("torch",)
SECONDS = 2.0  # a cell: the system moves threads between cores in tens of milliseconds
STARTING = 0.3  # seconds until the other process computes
BUSY = "while True: pass"


@dataclass(frozen=True)
class Loss:
    """The median times of a contestant without and with the load, in seconds."""

    operator: str
    shape: str
    dtype: str
    contestant: str
    alone: float
    loaded: float

    @property
    def share(self) -> float:
        """What is lost, as a share of the time without load."""
        return self.loaded / self.alone - 1


@contextmanager
def busy_core() -> Iterator[None]:
    """Meanwhile another process computes, as much as one core can."""
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
    try:
        time.sleep(STARTING)
        yield
    finally:
        process.kill()
        process.wait()


def cells(ops: Sequence[str], dtypes: Sequence[str], shapes: Sequence[str]) -> list[Cell]:
    """What is measured under load; empty sequences mean the default."""
    return select(ops or OPERATORS, dtypes or ("float32",), shapes or SHAPES, False, groups=("plain",))


def measure(chosen: Sequence[Cell], names: Sequence[str], seconds: float, progress: Callable[..., None]) -> list[Loss]:
    """The losses of ours and of these peers, cell by cell."""
    found = measure_each(chosen, lambda cell: {"losses": _losses(cell, names, seconds)}, progress)
    return [loss for each in found for loss in each["losses"]]


def _losses(cell: Cell, names: Sequence[str], seconds: float) -> list[Loss]:
    case = Case(cell)
    calls: dict[str, Any] = {OURS: case.call(GIVEN), **peers.calls(case, names, GIVEN)[0]}
    alone = interleaved(calls, seconds / 2)
    with busy_core():
        loaded = interleaved(calls, seconds / 2)
    where = cell.op.name, cell.workload.label, cell.dtype
    return [Loss(*where, name, alone[name]["median"], loaded[name]["median"]) for name in calls]
