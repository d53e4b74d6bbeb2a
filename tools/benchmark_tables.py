"""Tables and pictures of results that documents alone have: README's ten rows, the headline, the releases."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import instruction_sets
from bench.figures import Figures, Times, described, few_samples, figures, geometric_mean
from bench.measure import NEW, WAYS
from bench.tables import WHERE, Table, duration, machine_line, summary, title


def short_table(results: Sequence[dict[str, Any]], rows: Sequence[tuple[str, str]]) -> str:
    """Markdown: these operators and shapes in float32, in both ways: our time, and how it compares.

    results: one, or one for each instruction set, with columns of its own.
    """
    found = [{cell.key: cell for cell in figures(result)} for result in results]
    columns = ["operator, float32"]
    for result in results:
        of_set = f"{instruction_sets.title(result['machine'])}: " if len(results) > 1 else ""
        columns += [f"{of_set}{WHERE[way]}" for way in WAYS]
    shown = [
        [f"`{name}` {shape}", *(text for cells in found for text in _short(cells.get((name, shape, "float32"))))]
        for name, shape in rows
        if any((name, shape, "float32") in cells for cells in found)
    ]
    table = Table(columns, shown, align="l" * len(columns)).markdown()
    lines = (" ".join(filter(None, (machine_line(each), few_samples(each)))) for each in results)
    return "\n".join([table, "", *(f"* {line}" for line in lines)])


def _short(cell: Figures | None) -> list[str]:
    """Our time and how it compares, in each way."""
    found = [cell.ways.get(way) if cell else None for way in WAYS]
    return [f"{duration(times.seconds)}, {_rival(times)}" if times else "" for times in found]


def headline_table(result: dict[str, Any]) -> str:
    """Markdown: the workloads with large arrays, one column for each dtype."""
    cells = figures(result)
    chosen = [cell for cell in cells if cell.headline]
    dtypes = list(dict.fromkeys(cell.dtype for cell in chosen))
    found = {cell.key: cell for cell in chosen}
    rows = [
        [operator, workload, *(_entry(found.get((operator, workload, dtype))) for dtype in dtypes)]
        for operator, workload in dict.fromkeys((cell.operator, cell.workload) for cell in chosen)
    ]
    table = Table(("operator", "shape", *dtypes), rows, align="ll")
    parts = [summary(cells), few_samples(result), table.markdown(), machine_line(result), described(result)]
    return "\n\n".join(filter(None, parts))


def _entry(cell: Figures | None) -> str:
    """Our time and speed with results in memory that is given, and both ways' ratios."""
    if cell is None:
        return ""
    of_new = f"; new {_rival(cell.ways[NEW])}" if NEW in cell.ways and cell.first is not cell.ways[NEW] else ""
    return f"{duration(cell.first.seconds)}, {cell.first.gigabytes:.0f} GB/s, **{_rival(cell.first)}**{of_new}"


def _rival(times: Times) -> str:
    return f"{times.ratio:.2f}x {times.peer}" if times.ratio else "no peer"


def history(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """How many times as fast as the best peer, by release: a line for each machine and way.

    results: of each machine, its results in the order of the releases. Returns None where no result has peers.
    """
    from bench.plots import blank

    lines = {}
    for found in results.values():
        for way in WAYS:
            means = {each["versions"].get("opgrad"): geometric_mean(figures(each), way) for each in found}
            if known := {version: mean for version, mean in means.items() if version and mean}:
                lines[f"{title(found[-1])}, results in {WHERE[way]}"] = known
    if not lines:
        return None
    figure = blank(8.0, 3.6 + 0.2 * len(lines))
    axes = figure.subplots()
    for name, known in lines.items():
        axes.plot(list(known), list(known.values()), "o-", label=name)
    axes.set(xlabel="release", ylabel="times as fast as the best peer")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")
    return figure


def regimes_table(file: Path) -> str:
    """For each cell of `tools/gpu/regimes.py` the regime that was chosen then, and the fastest of those tried."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        shape = "x".join(map(str, line["shape"]))
        found.setdefault((line["operator"], shape, line["dtype"]), []).append(line)
    rows = []
    for cell, lines in found.items():
        chosen, fastest = lines[0], min(lines, key=lambda line: float(line["us"]))
        options = fastest["options"]
        said = "the same"
        if options:
            said = f"{options['name']}, {options['rows']} x {options['block']}, {options['warps']} warps"
            said += f", {options['stages']} stages" if options.get("stages", 1) > 1 else ""
        shares = [f"{line['us']:.0f} ({line['share']:.0%})" for line in (chosen, fastest)]
        rows.append([*cell, *shares, said])
    head = ("operator", "shape", "dtype", "chosen, µs (of a copy)", "fastest, µs (of a copy)", "fastest: rows x block")
    return Table(head, rows, align="lllrrl").markdown()
