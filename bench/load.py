"""What operators lose while another process keeps one core busy: `python -m bench.load --peers torch`."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench import peers
from bench.case import Case
from bench.cells import Cell, select
from bench.measure import GIVEN, OURS, interleaved
from bench.tables import Table, duration

OPERATORS = ("softmax", "softmax_grad", "relu")
SHAPES = ("2048x32000", "16777216")
COLUMNS = ("operator", "shape", "dtype", "contestant", "alone", "loaded", "lost")
SECONDS = 2.0  # a cell: the system moves threads between cores in tens of milliseconds
STARTING = 0.3  # seconds until the other process computes
BUSY = "while True: pass"


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


def rows(cell: Cell, names: Sequence[str], seconds: float) -> list[list[str]]:
    """The median times of ours and of these peers without and with the load, and what is lost."""
    case = Case(cell)
    calls: dict[str, Any] = {OURS: case.call(GIVEN), **peers.calls(case, names, GIVEN)[0]}
    alone = interleaved(calls, seconds / 2)
    with busy_core():
        loaded = interleaved(calls, seconds / 2)
    where = cell.op.name, cell.workload.label, cell.dtype
    medians = {name: (alone[name]["median"], loaded[name]["median"]) for name in calls}
    return [[*where, name, duration(a), duration(b), f"{b / a - 1:.0%}"] for name, (a, b) in medians.items()]


def main() -> None:
    """Measure softmax, its gradient and relu, print the table."""
    parser = argparse.ArgumentParser("python -m bench.load", description=__doc__)
    parser.add_argument("--peers", default="", help="Peers beside ours, with commas. Default: all that are installed.")
    wanted = peers.chosen(list(filter(None, parser.parse_args().peers.split(","))), peers.installed())
    found = [
        row
        for cell in select(OPERATORS, ("float32",), SHAPES, False, groups=("plain",))
        for row in rows(cell, wanted, SECONDS)
    ]
    print(Table(COLUMNS, found, align="llll").markdown())


if __name__ == "__main__":
    main()
