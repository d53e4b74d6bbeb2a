"""What operators lose after a pause, and while another process keeps one core busy."""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import peers
from bench.case import Case
from bench.cells import Cell, select
from bench.measure import GIVEN, OURS, interleaved, timed
from bench.tables import Table, duration

OPERATORS = ("softmax", "softmax_grad", "relu")
SHAPES = ("2048x32000", "1048576", "16777216")
COLUMNS = ("operator", "shape", "dtype", "contestant", "alone", "after a pause", "loaded", "lost")
PAUSE, PAUSES = 0.02, 15  # seconds in which all threads fall asleep, and how often
SECONDS = 2.0  # a cell: the system moves threads between cores in tens of milliseconds
STARTING = 0.3  # seconds until the other process computes
BUSY = "while True: pass"


def after_pauses(call: Callable[[], object]) -> float:
    """The median time of a call that follows a pause."""
    times = []
    for _ in range(PAUSES):
        time.sleep(PAUSE)
        times.append(timed(call, 1))
    return statistics.median(times)


def rows(cell: Cell, names: Sequence[str], seconds: float) -> list[list[str]]:
    """The median times of ours and of these peers alone, after a pause and with the load, and what that costs."""
    case = Case(cell)
    calls: dict[str, Any] = {OURS: case.call(GIVEN), **peers.calls(case, names, GIVEN)[0]}
    alone = interleaved(calls, seconds / 2)
    paused = {name: after_pauses(call) for name, call in calls.items()}
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY]) as process:
        try:
            time.sleep(STARTING)
            loaded = interleaved(calls, seconds / 2)
        finally:
            process.kill()
    times = {name: (alone[name]["median"], paused[name], loaded[name]["median"]) for name in calls}
    return [[*cell.known.values(), name, *map(duration, of), f"{of[2] / of[0] - 1:.0%}"] for name, of in times.items()]


def main() -> None:
    """Measure softmax, its gradient and relu, print the table."""
    parser = argparse.ArgumentParser("python -m bench.load", description=__doc__)
    parser.add_argument("--peers", default="", help="Peers beside ours, with commas. Default: all that are installed.")
    wanted = peers.chosen(list(filter(None, parser.parse_args().peers.split(","))), peers.installed())
    cells = select(OPERATORS, ("float32",), SHAPES, False, groups=("plain",))
    found = [row for cell in cells for row in rows(cell, wanted, SECONDS)]
    print(Table(COLUMNS, found, align="llll").markdown())


if __name__ == "__main__":
    main()
