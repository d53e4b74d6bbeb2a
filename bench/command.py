"""The command line of the benchmark: options with defaults and help, and what is said while it measures."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.measure import Enough
from opgrad.base.terminal import console, visible

# What a result file keeps of the options.
KEPT = ("device", "ops", "dtypes", "shapes", "peers", "seconds", "quick", "groups", "sweep", "isa")
TYPES = {Path | None: Path, float | None: float}  # of the options that are no text


def said(help: str, metavar: str | None = None) -> dict[str, Any]:
    """What is said of an option. metavar: what stands for its value."""
    return {"help": help, "metavar": metavar}


@dataclass(frozen=True)
class CommandLine:
    """Options; "" and None stand for the default. A list of paths is an argument without a name."""

    isa: str = field(
        default="",
        metadata=said(
            "An instruction set of x86-64, avx2 or avx512; below what the processor has, everybody is held to it. "
            "Default: what the processor has.",
            "NAME",
        ),
    )
    seconds: float | None = field(
        default=None, metadata=said("How long to measure each cell; default: by the kind of cell.")
    )
    json: Path | None = field(default=None, metadata=said("A file for the result; default: none.", "FILE"))
    plot: Path | None = field(
        default=None, metadata=said("A PNG file for a picture of the result; default: none.", "FILE")
    )

    @classmethod
    def parsed(cls, parser: argparse.ArgumentParser, words: Sequence[str] | None) -> Self:
        """The options of a command line; None: of this process's."""
        hints = get_type_hints(cls)
        for each in fields(cls):
            kind, flag, given = hints[each.name], f"--{each.name.replace('_', '-')}", dict(each.metadata)
            if kind is bool:
                parser.add_argument(flag, action="store_true", help=given["help"])
            elif kind == list[Path] | None:
                parser.add_argument(each.name, nargs="*", type=Path, **given)
            else:
                parser.add_argument(flag, type=TYPES.get(kind, str), default=each.default, **given)
        return cls(**vars(parser.parse_args(words)))

    def names(self, name: str) -> list[str]:
        """The names that an option lists."""
        return [word.strip() for word in getattr(self, name).split(",") if word.strip()]

    def seconds_of(self, usual: float) -> float:
        """How long to measure each cell, where nothing else is asked for so long."""
        return usual if self.seconds is None else self.seconds


@dataclass(frozen=True)
class BenchOptions(CommandLine):
    """What to measure, as the command line has it."""

    device: str = field(default="cpu", metadata=said("The device, cpu or cuda.", "NAME"))
    ops: str = field(default="", metadata=said("Operators; default: all.", "NAME,…"))
    dtypes: str = field(default="", metadata=said("Default: float32,bfloat16,float16; there is float64 too.", "NAME,…"))
    shapes: str = field(default="", metadata=said("Shapes such as 4096x1000; default: those of the table.", "SHAPE,…"))
    peers: str = field(
        default="",
        metadata=said(
            "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger, quack. "
            "Default: those installed.",
            "NAME,…",
        ),
    )
    groups: str = field(
        default="",
        metadata=said(
            "Of plain; graph: the operators that only training graphs have; losses, attention: steps in PyTorch; "
            "of --sweep: rows, inner, axes, shapes. Default: all.",
            "NAME,…",
        ),
    )
    update: bool = field(default=False, metadata=said("Keep the cells of the JSON file that are not measured now."))
    quick: bool = field(default=False, metadata=said("A few cells, without torch.compile, in two minutes."))
    sweep: bool = field(
        default=False,
        metadata=said("Measure rows of every length, and other shapes; with --update those that the file lacks."),
    )

    def check(self) -> None:
        """Raise ValueError for the first option that does not go with the others."""
        if self.update and self.json is None:
            raise ValueError("bench: --update needs --json with the file to be updated")
        if self.isa and self.device == "cuda":
            raise ValueError("bench: isa is of processors, but the device is 'cuda'")

    def kept(self) -> dict[str, Any]:
        """What a result file says of them."""
        return {name: getattr(self, name) for name in KEPT}


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
