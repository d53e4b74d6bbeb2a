"""A result as text: tables in the terminal, and Markdown for the documents."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench import instruction_sets
from bench.cells import ATTENTION, GRAPH, LOSSES, PLAIN
from bench.figures import (
    Figures,
    Result,
    Times,
    described,
    few_samples,
    figures,
    geometric_mean,
    losses,
    machine_line,
    rivals,
)
from bench.measure import GIVEN, NEW, OURS, WAYS
from bench.sweep import Curve, curves, is_sweep, shapes

PEERS_IN = ("best peer", "its time", "ratio")
COLUMNS = (
    "operator", "shape", "dtype", "given", *PEERS_IN, "new", *PEERS_IN, "GB/s", "of copy", "ulp", "samples"
)  # fmt: skip
NOBODY = "none"  # in place of the best peer, where no peer works this way
STEP_COLUMNS = (
    "function", "shape", "dtype", "time", *PEERS_IN, "memory", "over needed", "its memory", "least of a peer"
)  # fmt: skip
TITLES = {
    GRAPH: "Operators of training graphs",
    LOSSES: "Losses in PyTorch",
    ATTENTION: "Attention in PyTorch",
}
WHERE = {GIVEN: "memory that is given", NEW: "new memory"}  # results lie
SWEEP_TITLE, SHAPES_TITLE = "Rows of every length", "Shapes of networks"
SHAPES_COLUMNS = ("operator", "shape", "dtype", "given", "GB/s", "of copy", *PEERS_IN)
SWEEP_COLUMNS = ("operator", "dtype", "along", "lengths", "ratio", "behind", "worst", "at", "step up", "at")
HOST = "host"  # one more on a device: the time after which a call returns
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
        yield from (summary(cells), _plain_table(result))
    if notes := left_out(result):
        yield "\n".join(f"* left out: {line}" for line in notes)
    yield from _other_tables(result)
    yield from _sweep_tables(result)


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
    lines = [f"{_name(cell)}: {cell['left_out']}" for cell in result.get("left_out", [])]
    kept: dict[tuple[str, str], list[str]] = {}
    for cell in result["cells"]:
        for measured in cell["ways"].values():
            for note in measured["notes"].items():
                kept.setdefault(note, []).append(_name(cell))
    for (peer, note), names in kept.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cells such as {names[0]}"
        lines.append(f"{peer} in {where}: {note}")
    return lines


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['operator']} {cell['workload']} {cell['dtype']}"


def title(result: Result) -> str:
    """What was measured and on what machine: a name for people."""
    groups = dict.fromkeys(cell.get("group", PLAIN) for cell in result.get("cells", ()))
    if "training" in result:
        kinds = ["Training steps" if result["training"] else "Training steps with attention"]
    elif is_sweep(result):
        kinds = [SWEEP_TITLE]
    else:
        own = {PLAIN: "Operators", **{group: TITLES[group] for group in (GRAPH, LOSSES, ATTENTION)}}
        kinds = [own[group] for group in groups if group in own]
    machine = result["machine"]
    if "device" in result:
        return f"{_listed(kinds)} on {result['device']['name']}"
    held = "" if "processor_has" in machine else f" ({re.sub('^znver', 'Zen ', machine['llvm_cpu'])})"
    return f"{_listed(kinds)}: {instruction_sets.title(machine)}, {machine['cpu']}{held}"


def _listed(kinds: Sequence[str]) -> str:
    """Names in one, of which only the first begins with a capital letter."""
    return ", ".join([*kinds[:1], *(kind[0].lower() + kind[1:] for kind in kinds[1:])])


# --- rows -----------------------------------------------------------------------------------------------------------


def _plain_table(result: Result) -> Table:
    cells = figures(result)
    slower = [place for place, cell in enumerate(cells) if any(times.is_slower for times in cell.ways.values())]
    columns = (*COLUMNS, HOST) if "device" in result else COLUMNS
    return Table(columns, list(map(_row, cells)), slower=slower)


def _other_tables(result: Result) -> Iterator[Table]:
    """A table for each group of cells that are not plain."""
    if rows := list(map(_row, figures(result, GRAPH))):
        yield Table(COLUMNS, rows, TITLES[GRAPH])
    for group, columns, row_of in (
        (LOSSES, STEP_COLUMNS, _step_row),
        (ATTENTION, (*STEP_COLUMNS, "ulp"), lambda cell: [*_step_row(cell), _ulp(cell["error_ulp"])]),
    ):
        if rows := [row_of(cell) for cell in result["cells"] if cell.get("group") == group]:
            yield Table(columns, rows, TITLES[group])


def _row(cell: Figures) -> list[str]:
    ways, first = [cell.ways.get(way) for way in WAYS], cell.first
    return [
        cell.operator,
        cell.workload,
        cell.dtype,
        *(text for times in ways for text in ([duration(times.seconds), *_best(times)] if times else [""] * 4)),
        *_speed(first),
        _ulp(cell.error_ulp),
        str(cell.samples),
        *([] if first.host_seconds is None else [duration(first.host_seconds)]),
    ]


def _speed(times: Times) -> tuple[str, str]:
    """Bytes a second, and that beside a copy's."""
    return f"{times.gigabytes:.1f}", f"{times.share_of_copy:.0%}"


def _best(times: Times) -> tuple[str, str, str]:
    """The best peer, its time, and that over ours."""
    if times.peer_seconds is None:
        return NOBODY, "", ""
    return times.peer or "", duration(times.peer_seconds), f"{times.ratio:.2f}"


def _step_row(cell: Mapping[str, Any]) -> list[str]:
    """Our time beside the fastest peer's, and what both take beyond arguments, results and gradients.

    `over needed` is our peak over the bytes of these: 1 would be nothing beyond them.
    """
    (ours, peer, theirs), beyond = rivals(cell["ways"][NEW]), cell["beyond"]
    mine = beyond[OURS]
    best = [peer, _milliseconds(theirs), f"{theirs / ours:.2f}"] if peer and theirs else [NOBODY, "", ""]
    least = min((size for name, size in beyond.items() if name != OURS and size is not None), default=None)
    over = "" if mine is None else f"{1 + mine / cell['needed']:.2f}"
    known = [cell["operator"], cell["workload"], cell["dtype"], _milliseconds(ours), *best, _mebibytes(mine), over]
    return [*known, _mebibytes(beyond[peer] if peer else None), _mebibytes(least)]


def _sweep_tables(result: Result) -> Iterator[Table]:
    """A table of the curves, and one of the shapes that lie on none."""
    if found := curves(result):
        yield Table(SWEEP_COLUMNS, list(map(_curve_row, found)), SWEEP_TITLE)
    if others := shapes(result):
        pairs = [(cell, cell.ways[GIVEN]) for cell in others]
        rows = [
            [cell.operator, cell.workload, cell.dtype, duration(times.seconds), *_speed(times), *_best(times)]
            for cell, times in pairs
        ]
        yield Table(SHAPES_COLUMNS, rows, SHAPES_TITLE)


def _curve_row(curve: Curve) -> list[str]:
    """The mean ratio to the best peer, at how many lengths it is below 1, the worst of it, and the largest step up."""
    worst, at = curve.worst or (None, 0)
    step, length = curve.cliff
    behind = sum(round(ratio, 2) < 1 for ratio in curve.ratios.values())
    mean = f"{curve.mean:.2f}" if curve.mean else NOBODY
    lowest = (f"{worst:.2f}", str(at)) if worst else ("", "")
    known = [curve.operator, curve.dtype, curve.along, str(len(curve.lengths)), mean, str(behind)]
    return [*known, *lowest, f"{step:.2f}", str(length)]


def duration(seconds: float) -> str:
    """Three digits of seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return _milliseconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _ulp(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"
