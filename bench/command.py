"""The command line of the benchmark: options with defaults and help, and what is said while it measures."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from bench.measure import Enough
from opgrad.base.terminal import console, visible
from opgrad.cli.options import opt, takes_groups

# What a result file keeps of the options.
KEPT = ("device", "ops", "dtypes", "shapes", "peers", "seconds", "quick", "groups", "sweep", "isa")


@dataclass(frozen=True)
class CommandLine:
    """Options; "" and None stand for the default."""

    isa: str = opt(
        "An instruction set of x86-64, avx2 or avx512; below what the processor has, everybody is held to it. "
        "Default: what the processor has.",
        default="",
        metavar="NAME",
    )
    seconds: float | None = opt("How long to measure each cell; default: by the kind of cell.")
    json: Path | None = opt("A file for the result; default: none.", metavar="FILE")
    plot: Path | None = opt("A PNG file for a picture of the result; default: none.", metavar="FILE")

    def names(self, name: str) -> list[str]:
        """The names that an option lists."""
        return [word.strip() for word in getattr(self, name).split(",") if word.strip()]

    def seconds_of(self, usual: float) -> float:
        """How long to measure each cell, where nothing else is asked for so long."""
        return usual if self.seconds is None else self.seconds


@dataclass(frozen=True)
class BenchOptions(CommandLine):
    """What to measure, as the command line has it."""

    device: str = opt("The device, cpu or cuda.", default="cpu", metavar="NAME")
    ops: str = opt("Operators; default: all.", default="", metavar="NAME,…")
    dtypes: str = opt("Default: float32,bfloat16,float16; there is float64 too.", default="", metavar="NAME,…")
    shapes: str = opt("Shapes such as 4096x1000; default: those of the table.", default="", metavar="SHAPE,…")
    peers: str = opt(
        "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger. "
        "Default: those installed.",
        default="",
        metavar="NAME,…",
    )
    groups: str = opt(
        "Of plain; graph: the operators that only training graphs have; losses, attention: steps in PyTorch; "
        "of --sweep: rows, inner, axes, shapes. Default: all.",
        default="",
        metavar="NAME,…",
    )
    update: bool = opt("Keep the cells of the JSON file that are not measured now.", default=False)
    quick: bool = opt("A few cells, without torch.compile, in two minutes.", default=False)
    sweep: bool = opt(
        "Measure rows of every length, and other shapes; with --update those that the file lacks.", default=False
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


def run(command: Callable[..., object], words: Sequence[str] | None = None) -> None:
    """Run a command with a command line's words; None: with this process's."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(takes_groups(command))
    try:
        app(words, standalone_mode=words is None)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


QUICK_LIMIT = 90.0  # seconds after which `--quick` begins no further cell
LINES = 10.0  # seconds between two lines
LOOK = 0.5  # seconds in which the other work on the machine is counted
CORES = os.cpu_count() or 1
BUSY = 0.25  # cores with other work, from which on figures are off


@contextmanager
def told(each: float, limit: float | None = None) -> Iterator[Callable[[int, int, Any], None]]:
    """What is called before each cell, and says how many are done; on stderr, for results go to stdout.

    each: seconds that a cell is likely to take. limit: seconds after which no further cell begins: it raises `Enough`.
    """
    screen = console(stderr=True)
    start = last = 0.0
    began: Load | None = None  # when the first cell did

    def say(text: str, style: str | None = None) -> None:
        screen.print(text, style=style, highlight=False, soft_wrap=True)

    def warn(load: Load, keeps: str) -> None:
        if (others := load.others()) > BUSY:
            say(f"other work on this machine {keeps} {others:.1f} of {CORES} cores busy: figures are off", "yellow")

    def tell(done: int, total: int, cell: Any) -> None:
        nonlocal start, last, began
        if not done:
            look = Load()
            time.sleep(LOOK)
            warn(look, "keeps")
            began, start = Load(), time.perf_counter()
            expected = duration(min(total * each, limit or total * each))
            text = f"{total} cells, {expected}" if total > 1 else "one cell"
            say(f"{text}; Ctrl-C ends it with what is measured by then")
        now = time.perf_counter()
        if done and limit is not None and now - start > limit:
            say(f"{done} of {total} cells are measured: --quick ends here, --ops and --groups choose others")
            raise Enough
        if done and now - last < LINES:
            return
        last = now
        left = f", {duration((now - start) / done * (total - done))} left" if done else ""
        say(f"{done + 1}/{total} {visible(getattr(cell, 'name', cell))}{left}")

    yield tell
    if began is not None:
        warn(began, "kept")


def duration(seconds: float) -> str:
    """A time as people say it."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"


class Load:
    """Measures the work of other processes on this machine, from the moment at which the object is made."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _others_seconds()

    def others(self) -> float:
        """How many cores other processes have kept busy; 0 except on Linux, which alone tells."""
        return max(0.0, (_others_seconds() - self._busy) / max(time.perf_counter() - self._start, 1e-3))


def _others_seconds() -> float:
    """The time for which other processes have kept processors busy; 0 except on Linux."""
    if not (file := Path("/proc/stat")).exists():
        return 0.0
    user, nice, system, _, _, interrupts, soft = map(int, file.read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
