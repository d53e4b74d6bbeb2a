"""A result as text: a table in the terminal, and Markdown for the documents."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.bench import loss_tables
from opgrad.bench.cells import ATTRIBUTES, BROADCAST, GRADIENTS, GRAPH, LOSSES, PLANS, POST_OPS, TYPES
from opgrad.bench.figures import Figures, Times, figures, forms, geometric_mean, losses, plans, times_of_fastest
from opgrad.bench.load import Loss
from opgrad.bench.memories import DEFAULT
from opgrad.bench.sweep import Curve, curves
from opgrad.bench.ways import GIVEN, NEW, WAYS

OURS_IN = {NEW: ("time", "GB/s", "of copy"), GIVEN: ("given",)}
PEERS_IN = ("best peer", "its time", "ratio")
COLUMNS = ("operator", "shape", "dtype", *OURS_IN[NEW], *PEERS_IN, *OURS_IN[GIVEN], *PEERS_IN, "ulp")
NOBODY = "none"  # in place of the best peer, where no peer works this way
OF_FASTEST = "of fastest"  # one more for the forms of softmax
PLAN_COLUMNS = ("operator", "shape", "dtype", "plan", "call", "kernel", "plan - kernel")
TITLES = {
    TYPES: "Softmax between dtypes",
    POST_OPS: "Softmax with functions as post-ops",
    BROADCAST: "Softmax with an operand, by the axes that it has",
    ATTRIBUTES: "Softmax with attributes",
    GRADIENTS: "Gradients of softmax with mixed dtypes and attributes",
    PLANS: "Plans",
    GRAPH: "Operators of training graphs",
    LOSSES: "Losses in PyTorch",
}
SWEEP_TITLE = "Rows of every length"
SWEEP_COLUMNS = ("operator", "dtype", "memory", "lengths", "ratio", "behind", "worst", "at", "step up", "at")
LOAD_COLUMNS = ("operator", "shape", "dtype", "of", "alone", "with a core busy", "lost")
HOST = "host"  # one more on a device: the time after which a call returns
LEFT = 3  # columns with text; the others hold numbers
PIPE_WIDTH = 200  # of a table in a file or a pipe


def show(console: Console, result: dict[str, Any]) -> None:
    """Print every cell, the geometric mean and the cells where a peer is faster."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    cells = figures(result)
    if cells:
        slower = [cell.new.is_slower for cell in cells]
        console.print(_table("", _columns(result), [_row(cell) for cell in cells], slower))
        console.print(summary(cells))
    for title, columns, rows in _form_tables(result):
        console.print(_table(title, columns, rows))
    if found := curves(result):
        console.print(_table(SWEEP_TITLE, SWEEP_COLUMNS, [_curve_row(curve) for curve in found]))
    console.print(machine_line(result), highlight=False)
    for cell in losses(cells):
        console.print(f"  slower: {cell.name}, {cell.new.ratio:.2f}x {cell.new.peer}", highlight=False)
    for line in left_out(result):
        console.print(f"  left out: {line}", highlight=False, markup=False)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], slower: Sequence[bool] = ()) -> Table:
    table = Table(title=title or None, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < LEFT else "right", no_wrap=True)
    for place, row in enumerate(rows):
        table.add_row(*row, style="red" if slower and slower[place] else "")
    return table


def summary(cells: Sequence[Figures]) -> str:
    """The geometric mean over all cells that have a peer, and how many are slower, for each way."""
    said = [said for way in WAYS if (said := _summary_of(cells, way))]
    return f"Over {len(cells)} cells, {'; '.join(said)}." if said else f"{len(cells)} cells, no peer."


def _summary_of(cells: Sequence[Figures], way: str) -> str:
    """Of one way; nothing where nobody works so."""
    mean = geometric_mean(cells, way)
    if mean is None:
        return ""
    where = "new memory" if way == NEW else "memory that is given"
    slower = f"slower in {len(losses(cells, way)) or 'none'}"
    return f"{mean:.2f} times as fast as the best peer with results in {where} (geometric mean), {slower}"


def left_out(result: dict[str, Any]) -> list[str]:
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


def machine_line(result: dict[str, Any]) -> str:
    """Machine, threads or device, versions and date in one sentence."""
    machine, versions = result["machine"], result["versions"]
    if "device" in result:
        return f"{_device(result['device'])}; on {machine['cpu']}; {_packages(versions)}; {result['date']}."
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in machine["caches"].items())
    cpu = f"{machine['cpu']} ({machine['llvm_cpu']}, {machine['vector_bits']}-bit vectors)"
    return f"{cpu}, {result['threads']} threads; {caches}; {_packages(versions)}; {result['date']}."


def _device(device: dict[str, Any]) -> str:
    memory, l2 = device["memory"] / (1 << 30), device["l2"] >> 20
    parts = f"{device['multiprocessors']} multiprocessors, L2 {l2} MiB, memory {memory:.0f} GiB"
    return f"{device['name']} ({parts}), driver {device['driver'] or 'unknown'}, CUDA {device['cuda']}"


def _packages(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _columns(result: dict[str, Any]) -> tuple[str, ...]:
    return (*COLUMNS, HOST) if "device" in result else COLUMNS


def full_table(result: dict[str, Any]) -> str:
    """Markdown: every cell, the forms of softmax in tables of their own."""
    cells = figures(result)
    parts = [machine_line(result)]
    if cells:
        parts += ["", summary(cells), "", *_markdown(_columns(result), [_row(cell, code=True) for cell in cells])]
    notes = [f"* left out: {line}" for line in left_out(result)]
    parts += ["", *notes] if notes else []
    for title, columns, rows in _form_tables(result, code=True):
        parts += ["", f"#### {title}", "", *_markdown(columns, rows)]
    return "\n".join(parts)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rules = [":--"] * LEFT + ["--:"] * (len(columns) - LEFT)
    return [_line(columns), _line(rules), *map(_line, rows)]


def _form_tables(result: dict[str, Any], code: bool = False) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """The tables of the forms of softmax: title, columns, rows."""
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for group, cells in forms(result).items():
        if group == GRAPH:
            tables.append((TITLES[group], COLUMNS, [_row(cell, code) for cell in cells]))
            continue
        rows = [[*_row(cell, code), f"{times:.2f}"] for cell, times in zip(cells, times_of_fastest(cells), strict=True)]
        tables.append((TITLES[group], (*COLUMNS, OF_FASTEST), rows))
    if found := plans(result):
        rows = [
            [_name_of(each.operator, code), each.workload, each.dtype]
            + [duration(seconds) for seconds in (each.plan, each.call, each.kernel, each.plan - each.kernel)]
            for each in found
        ]
        tables.append((TITLES[PLANS], PLAN_COLUMNS, rows))
    if rows := [[_name_of(name, code), *row] for name, *row in loss_tables.rows(result)]:
        tables.append((TITLES[LOSSES], loss_tables.COLUMNS, rows))
    return tables


def _name_of(operator: str, code: bool) -> str:
    return f"`{operator}`" if code else operator


def short_table(result: dict[str, Any], rows: Sequence[tuple[str, str]]) -> str:
    """Markdown: these operators and shapes in float32, with results in new memory: our time, and how it compares."""
    found = {(cell.operator, cell.workload): cell.new for cell in figures(result) if cell.dtype == "float32"}
    chosen = {row: found[row] for row in rows if row in found}
    lines = [_line(["operator, float32", "time of a call", "beside the fastest peer"]), _line([":--", "--:", ":--"])]
    lines += [_line([f"`{name}` {shape}", duration(new.seconds), _rival(new)]) for (name, shape), new in chosen.items()]
    return "\n".join([*lines, "", machine_line(result)])


def headline_table(result: dict[str, Any]) -> str:
    """Markdown: the workloads with large arrays, one column for each dtype."""
    cells = figures(result)
    chosen = [cell for cell in cells if cell.headline]
    dtypes = list(dict.fromkeys(cell.dtype for cell in chosen))
    found = {(cell.operator, cell.workload, cell.dtype): cell for cell in chosen}
    lines = [_line(["operator", "shape", *dtypes]), _line([":--", ":--"] + ["--:"] * len(dtypes))]
    for operator, workload in dict.fromkeys((cell.operator, cell.workload) for cell in chosen):
        entries = [_entry(found.get((operator, workload, dtype))) for dtype in dtypes]
        lines.append(_line([f"`{operator}`", workload, *entries]))
    return "\n".join([summary(cells), "", *lines, "", machine_line(result)])


def _line(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _entry(cell: Figures | None) -> str:
    """Our time and speed with results in new memory, and both ways' ratios."""
    if cell is None:
        return ""
    given = cell.ways.get(GIVEN)
    of_given = f"; given {_rival(given)}" if given else ""
    return f"{duration(cell.new.seconds)}, {cell.new.gigabytes:.0f} GB/s, **{_rival(cell.new)}**{of_given}"


def _rival(times: Times) -> str:
    return f"{times.ratio:.2f}x {times.peer}" if times.ratio else "no peer"


def _row(cell: Figures, code: bool = False) -> list[str]:
    new, given = cell.new, cell.ways.get(GIVEN)
    return [
        _name_of(cell.operator, code),
        cell.workload,
        cell.dtype if cell.memory == DEFAULT else f"{cell.dtype}, {cell.memory} memory",
        duration(new.seconds),
        f"{new.gigabytes:.1f}",
        f"{new.share_of_copy:.0%}",
        *_best(new),
        *([duration(given.seconds), *_best(given)] if given else [""] * 4),
        f"{cell.error_ulp:.2f}" if cell.error_ulp is not None else "not finite",
        *([] if new.host_seconds is None else [duration(new.host_seconds)]),
    ]


def _best(times: Times) -> tuple[str, str, str]:
    """The best peer, its time, and that over ours."""
    if times.peer_seconds is None:
        return NOBODY, "", ""
    return times.peer or "", duration(times.peer_seconds), f"{times.ratio:.2f}"


def duration(seconds: float) -> str:
    """Three digits of milliseconds or microseconds."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _curve_row(curve: Curve, code: bool = False) -> list[str]:
    """The mean ratio to the best peer, at how many lengths it is below 1, the worst of it, and the largest step up."""
    worst, at = curve.worst or (None, 0)
    step, length = curve.cliff
    behind = sum(round(ratio, 2) < 1 for ratio in curve.ratios)
    return [
        _name_of(curve.operator, code), curve.dtype, curve.memory, str(len(curve.lengths)),
        f"{curve.mean:.2f}" if curve.mean else NOBODY, str(behind),
        *((f"{worst:.2f}", str(at)) if worst else ("", "")), f"{step:.2f}", str(length),
    ]  # fmt: skip


def sweep_table(result: dict[str, Any]) -> str:
    """Markdown: a row for each curve of a sweep."""
    rows = [_curve_row(curve, code=True) for curve in curves(result)]
    return "\n".join([*_markdown(SWEEP_COLUMNS, rows), "", machine_line(result)])


def _lost(loss: Loss) -> tuple[str, str, str]:
    return duration(loss.alone), duration(loss.loaded), f"{loss.share:.0%}"


def show_load(console: Console, losses: Sequence[Loss]) -> None:
    """Print what each contestant loses while another process keeps one core busy."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    rows = [[each.operator, each.shape, each.dtype, each.contestant, *_lost(each)] for each in losses]
    console.print(_table("", LOAD_COLUMNS, rows))
