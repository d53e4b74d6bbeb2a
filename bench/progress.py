"""What `python -m bench` says while it measures: how long it will take, how far it is, and whether it is alone."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.measure import Enough
from opgrad.base.terminal import console, visible

QUICK_LIMIT = 90.0  # seconds after which `--quick` begins no further cell
LINES = 10.0  # seconds between two lines where there is no terminal
LOOK = 0.5  # seconds in which the other work on the machine is counted
CORES = os.cpu_count() or 1
BUSY = 0.25  # cores with other work, from which on figures are off

Tell = Callable[[int, int, Any], None]


@contextmanager
def told(each: float, limit: float | None = None) -> Iterator[Tell]:
    """What is called before each cell: a bar in a terminal, else lines; on stderr, for results go to stdout.

    each: seconds that a cell is likely to take. limit: seconds after which no further cell begins.
    """
    screen = console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    options: dict[str, Any] = {"transient": True, "refresh_per_second": 2, "disable": not screen.is_terminal}
    with Progress(*columns, console=screen, **options) as bar:
        teller = _Teller(screen, bar, each, limit)
        yield teller
    teller.finish()


class _Teller:
    """Shows how many cells are done."""

    def __init__(self, screen: Console, bar: Progress, each: float, limit: float | None):
        self._screen, self._bar, self._each, self._limit = screen, bar, each, limit
        self._task = bar.add_task("", total=None)
        self._start = self._said = 0.0
        self._load: Load | None = None

    def __call__(self, done: int, total: int, cell: Any) -> None:
        """Raises `Enough` when the time is over."""
        if not done:
            self._announce(total)
        name, now = visible(getattr(cell, "name", cell)), time.perf_counter()
        if done and self._limit is not None and now - self._start > self._limit:
            self._say(f"{done} of {total} cells are measured: --quick ends here, --ops and --groups choose others")
            raise Enough
        self._bar.update(self._task, completed=done, total=total, description=name)
        if self._screen.is_terminal or (done and now - self._said < LINES):
            return
        self._said = now
        left = f", {duration((now - self._start) / done * (total - done))} left" if done else ""
        self._say(f"{done + 1}/{total} {name}{left}")

    def finish(self) -> None:
        """Say whether there was other work."""
        if self._load is not None:
            self._warn(self._load, "kept")

    def _announce(self, total: int) -> None:
        load = Load()
        time.sleep(LOOK)
        self._warn(load, "keeps")
        self._load = Load()
        self._start = self._said = time.perf_counter()
        expected = total * self._each
        if self._limit is not None:
            expected = min(expected, self._limit)
        text = f"{total} cells, {duration(expected)}" if total > 1 else "one cell"
        self._say(f"{text}; Ctrl-C ends it with what is measured by then")

    def _warn(self, load: "Load", keeps: str) -> None:
        others = load.others()
        if others is not None and others > BUSY:
            text = f"other work on this machine {keeps} {others:.1f} of {CORES} cores busy: figures are off"
            self._screen.print(text, style="yellow", highlight=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._screen.print(text, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time as people say it."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"


class Load:
    """Measures the work of other processes on this machine, from the moment at which the object is made."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _others_seconds()

    def others(self) -> float | None:
        """How many cores other processes have kept busy; None if the system does not tell."""
        now = _others_seconds()
        if now is None or self._busy is None:
            return None
        return max(0.0, (now - self._busy) / max(time.perf_counter() - self._start, 1e-3))


def _others_seconds() -> float | None:
    """The time for which other processes have kept processors busy; None except on Linux."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, system, _, _, interrupts, soft = map(int, words[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
