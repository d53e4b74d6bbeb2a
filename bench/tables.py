"""A result as text: tables in the terminal, and Markdown for the documents."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench import instruction_sets
from bench.cells import ATTENTION, GRAPH, LOSSES, PLAIN, SWEEP
from bench.figures import (
    Figures,
    Result,
    Times,
    described,
    few_samples,
    figures,
    geometric_mean,
    key,
    losses,
    machine_line,
    rivals,
)
from bench.measure import GIVEN, NEW, OURS, WAYS
from bench.sweep import Curve, curves, shapes

PEERS_IN = ("best peer", "its time", "ratio")
COLUMNS = (
    "operator", "shape", "dtype", "given", *PEERS_IN, "new", *PEERS_IN, "GB/s", "of copy", "ulp", "samples"
)  # fmt: skip
NOBODY = "none"  # in place of the best peer, where no peer works this way
STEP_COLUMNS = (
    "function", "shape", "dtype", "time", *PEERS_IN, "memory", "over needed", "its memory", "least of a peer"
)  # fmt: skip
TITLES = {
    PLAIN: "Operators",
    GRAPH: "Operators of training graphs",
    LOSSES: "Losses in PyTorch",
    ATTENTION: "Attention in PyTorch",
    SWEEP: "Rows of every length",
}
WHERE = {GIVEN: "memory that is given", NEW: "new memory"}  # results lie
SHAPES_COLUMNS = ("operator", "shape", "dtype", "given", "GB/s", "of copy", *PEERS_IN)
SWEEP_COLUMNS = ("operator", "dtype", "along", "lengths", "ratio", "behind", "worst", "at", "step up", "at")
NAMES = ("operator", "function")  # columns whose entries are code in Markdown
RULES = {"l": ":--", "r": "--:"}  # Markdown's marks for columns that are aligned left and right
PIPE_WIDTH = 200  # of a table in a file or a pipe


@dataclass(frozen=True)
class Table:
    """Rows of text under columns.

    align: l or r for each column; those beyond its end are aligned right. slower: places of the rows shown in red.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    align: str = "lll"
    slower: Sequence[int] = ()

    def shown(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title or None, title_justify="left")
        for column, side in zip(self.columns, self._sides, strict=True):
            table.add_column(column, justify="left" if side == "l" else "right", no_wrap=True)
        for place, row in enumerate(self.rows):
            table.add_row(*row, style="red" if place in self.slower else "")
        return table

    def markdown(self, titled: bool = False) -> str:
        """The table for the documents. titled: with its title, if it has one."""
        code = self.columns[0] in NAMES
        rows = [[f"`{row[0]}`" if code else row[0], *row[1:]] for row in self.rows]
        lines = [self.columns, [RULES[side] for side in self._sides], *rows]
        head = f"#### {self.title}\n\n" if titled and self.title else ""
        return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    @property
    def _sides(self) -> str:
        return self.align.ljust(len(self.columns), "r")


def show(console: Console, parts: Iterable[str | Table]) -> None:
    """Print lines and tables, as wide as they are where there is no terminal."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    for part in parts:
        if isinstance(part, Table):
            console.print(part.shown())
        else:
            console.print(part, highlight=False, markup=False)


def text(parts: Iterable[str | Table]) -> str:
    """Lines and tables for the documents."""
    return "\n\n".join(part if isinstance(part, str) else part.markdown(titled=True) for part in parts)


def full_table(result: Result) -> str:
    """Markdown of a result of cells."""
    return text(parts(result))


def parts(result: Result) -> Iterator[str | Table]:
    """What is said of a result of cells: where and when, the geometric mean, every cell, and what was left out."""
    yield from filter(None, (machine_line(result), described(result), few_samples(result)))
    if cells := figures(result):
        yield from (summary(cells), _table(cells))
    if notes := left_out(result):
        yield "\n".join(f"* left out: {line}" for line in notes)
    if examples := figures(result, GRAPH):
        yield _table(examples, TITLES[GRAPH])
    for group, columns in ((LOSSES, STEP_COLUMNS), (ATTENTION, (*STEP_COLUMNS, "ulp"))):
        if rows := [_step_row(cell)[: len(columns)] for cell in result["cells"] if cell.get("group") == group]:
            yield Table(columns, rows, TITLES[group])
    if found := curves(result):
        yield Table(SWEEP_COLUMNS, list(map(_curve_row, found)), TITLES[SWEEP])
    if others := shapes(result):
        yield Table(SHAPES_COLUMNS, list(map(_shape_row, others)), "Shapes of networks")


# --- sentences ------------------------------------------------------------------------------------------------------


def summary(cells: Sequence[Figures]) -> str:
    """The geometric mean over all cells that have a peer, and how many are slower, for each way in which peers work."""
    said = [
        f"{mean:.2f} times as fast as the best peer with results in {WHERE[way]} (geometric mean), "
        f"slower in {len(losses(cells, way)) or 'none'}"
        for way in WAYS
        if (mean := geometric_mean(cells, way)) is not None
    ]
    return f"Over {len(cells)} cells, {'; '.join(said)}." if said else f"{len(cells)} cells, no peer."


def left_out(result: Result) -> list[str]:
    """The cells that could not be measured, and what kept a peer from how many cells."""
    lines = [f"{' '.join(key(cell))}: {cell['left_out']}" for cell in result.get("left_out", [])]
    kept: dict[tuple[str, str], list[str]] = {}
    for cell in result["cells"]:
        for measured in cell["ways"].values():
            for note in measured["notes"].items():
                kept.setdefault(note, []).append(" ".join(key(cell)))
    for (peer, note), names in kept.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cells such as {names[0]}"
        lines.append(f"{peer} in {where}: {note}")
    return lines


def title(result: Result) -> str:
    """What was measured and on what machine: a name for people."""
    groups = dict.fromkeys(cell.get("group", PLAIN) for cell in result.get("cells", ()))
    kinds = re.sub(
        ", [A-Z]", lambda found: found[0].lower(), ", ".join(TITLES[each] for each in groups if each in TITLES)
    )
    if "training" in result:
        kinds = "Training steps" if result["training"] else "Training steps with attention"
    machine = result["machine"]
    if "device" in result:
        return f"{kinds} on {result['device']['name']}"
    held = "" if "processor_has" in machine else f" ({re.sub('^znver', 'Zen ', machine['llvm_cpu'])})"
    return f"{kinds}: {instruction_sets.title(machine)}, {machine['cpu']}{held}"


# --- rows -----------------------------------------------------------------------------------------------------------


def _table(cells: Sequence[Figures], title: str = "") -> Table:
    """A row for each cell in both ways; on a device one column more, the time after which a call returns."""
    slower = [place for place, cell in enumerate(cells) if any(times.is_slower for times in cell.ways.values())]
    columns = (*COLUMNS, "host") if cells[0].first.host_seconds else COLUMNS
    return Table(columns, list(map(_row, cells)), title, slower=slower)


def _row(cell: Figures) -> list[str]:
    ways, first = [cell.ways.get(way) for way in WAYS], cell.first
    times = [text for times in ways for text in (_times(times) if times else [""] * 4)]
    host = [] if first.host_seconds is None else [duration(first.host_seconds)]
    return [*cell.key, *times, *_speed(first), _ulp(cell.error_ulp), str(cell.samples), *host]


def _shape_row(cell: Figures) -> list[str]:
    """A shape of a network in a sweep."""
    ours, *best = _times(cell.first)
    return [*cell.key, ours, *_speed(cell.first), *best]


def _times(times: Times) -> list[str]:
    return _compared(times.seconds, times.peer, times.peer_seconds)


def _speed(times: Times) -> tuple[str, str]:
    """Bytes a second, and that beside a copy's."""
    return f"{times.gigabytes:.1f}", f"{times.share_of_copy:.0%}"


def _compared(ours: float, peer: str | None, theirs: float | None) -> list[str]:
    """Our time, the best peer, its time, and that over ours."""
    best = [peer, duration(theirs), f"{theirs / ours:.2f}"] if peer and theirs else [NOBODY, "", ""]
    return [duration(ours), *best]


def _step_row(cell: Mapping[str, Any]) -> list[str]:
    """Our time beside the fastest peer's, what both take beyond arguments, results and gradients, and our error.

    `over needed` is our peak over the bytes of these: 1 would be nothing beyond them.
    """
    (ours, peer, theirs), beyond = rivals(cell["ways"][NEW]), cell["beyond"]
    mine = beyond[OURS]
    least = min((size for name, size in beyond.items() if name != OURS and size is not None), default=None)
    over = "" if mine is None else f"{1 + mine / cell['needed']:.2f}"
    memory = [_mebibytes(mine), over, _mebibytes(beyond[peer] if peer else None), _mebibytes(least)]
    return [*key(cell), *_compared(ours, peer, theirs), *memory, _ulp(cell.get("error_ulp"))]


def _curve_row(curve: Curve) -> list[str]:
    """The mean ratio to the best peer, at how many lengths it is below 1, the worst of it, and the largest step up."""
    ratios = curve.ratios
    behind = sum(round(ratio, 2) < 1 for ratio in ratios.values())
    step, length = curve.cliff
    best = [NOBODY, str(behind), "", ""]
    if ratios:
        worst = min(ratios, key=lambda length: (ratios[length], length))
        best = [f"{statistics.geometric_mean(ratios.values()):.2f}", str(behind), f"{ratios[worst]:.2f}", str(worst)]
    return [curve.operator, curve.dtype, curve.along, str(len(curve.times)), *best, f"{step:.2f}", str(length)]


def duration(seconds: float) -> str:
    """Three digits of seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _ulp(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.2f}"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"
