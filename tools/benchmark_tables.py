"""Tables and pictures of results that documents alone have: README's ten rows, the headline, the releases."""

from collections.abc import Mapping, Sequence
from typing import Any

from opgrad.bench import instruction_sets
from opgrad.bench.figures import Figures, Times, figures, geometric_mean
from opgrad.bench.measure import GIVEN, WAYS
from opgrad.bench.tables import Table, by_key, duration, machine_line, summary


def short_table(results: Sequence[dict[str, Any]], rows: Sequence[tuple[str, str]]) -> str:
    """Markdown: these operators and shapes in float32, with results in new memory: our time, and how it compares.

    results: one, or one for each instruction set, with columns of its own.
    """
    found = [by_key(result) for result in results]
    columns = ["operator, float32"]
    for result in results:
        of_set = f"{instruction_sets.title(result['machine'])}: " if len(results) > 1 else ""
        columns += [f"{of_set}time of a call", f"{of_set}beside the fastest peer"]
    shown = [
        [f"`{name}` {shape}", *(text for cells in found for text in _short(cells.get((name, shape, "float32"))))]
        for name, shape in rows
        if any((name, shape, "float32") in cells for cells in found)
    ]
    table = Table(columns, shown, align="l" + "rl" * len(results)).markdown()
    return "\n\n".join([table, *map(machine_line, results)])


def _short(cell: Figures | None) -> tuple[str, str]:
    return (duration(cell.new.seconds), _rival(cell.new)) if cell else ("", "")


def headline_table(result: dict[str, Any]) -> str:
    """Markdown: the workloads with large arrays, one column for each dtype."""
    cells = figures(result)
    chosen = [cell for cell in cells if cell.headline]
    dtypes = list(dict.fromkeys(cell.dtype for cell in chosen))
    found = {(cell.operator, cell.workload, cell.dtype): cell for cell in chosen}
    rows = [
        [operator, workload, *(_entry(found.get((operator, workload, dtype))) for dtype in dtypes)]
        for operator, workload in dict.fromkeys((cell.operator, cell.workload) for cell in chosen)
    ]
    table = Table(("operator", "shape", *dtypes), rows, align="ll")
    return "\n\n".join([summary(cells), table.markdown(), machine_line(result)])


def _entry(cell: Figures | None) -> str:
    """Our time and speed with results in new memory, and both ways' ratios."""
    if cell is None:
        return ""
    given = cell.ways.get(GIVEN)
    of_given = f"; given {_rival(given)}" if given else ""
    return f"{duration(cell.new.seconds)}, {cell.new.gigabytes:.0f} GB/s, **{_rival(cell.new)}**{of_given}"


def _rival(times: Times) -> str:
    return f"{times.ratio:.2f}x {times.peer}" if times.ratio else "no peer"


def history(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """How many times as fast as the best peer, by release: a line for each machine and way.

    results: of each machine, its results in the order of the releases. Returns None where no result has peers.
    """
    from opgrad.bench.plots import TITLES, blank

    lines = {}
    for machine, found in results.items():
        for way in WAYS:
            means = {each["versions"].get("opgrad"): geometric_mean(figures(each), way) for each in found}
            if known := {version: mean for version, mean in means.items() if version and mean}:
                lines[f"{machine}, {TITLES[way]}"] = known
    if not lines:
        return None
    figure = blank(8.0, 3.6)
    axes = figure.subplots()
    for name, known in lines.items():
        axes.plot(list(known), list(known.values()), "o-", label=name)
    axes.set(xlabel="release", ylabel="times as fast as the best peer")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def predictions_table() -> str:
    """The table of docs/cuda.md: all predictions, and how many bytes memory moves for the fewest possible."""
    from opgrad.bench.cuda.predictions import GPUS, every, predictions

    rows = []
    for (operator, shape, dtype, *times), own in zip(every(), predictions().values(), strict=True):
        regimes = dict.fromkeys(said["regime"] for said in own.values())
        traffic = max(said["traffic"] for said in own.values())
        rows.append([operator, shape, dtype, " / ".join(regimes), f"{traffic:.3f}", *times])
    return Table(("operator", "shape", "dtype", "regime", "traffic / fewest", *GPUS), rows, align="llll").markdown()
