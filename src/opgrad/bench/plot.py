"""A picture of a result: each cell's time against the best peer's, with results in new memory and in memory given."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from opgrad.bench.figures import Figures, figures, geometric_mean
from opgrad.bench.sweep import Curve, curves
from opgrad.bench.ways import GIVEN, NEW, WAYS

COLOURS = {"float32": "tab:blue", "bfloat16": "tab:orange", "float16": "tab:green", "float64": "tab:purple"}
TITLES = {NEW: "results in new memory", GIVEN: "results in memory that is given"}
ROW = 0.3  # inches for each operator
SPREAD = 0.22  # of a row, between dtypes


def plot(result: dict[str, Any], path: str | PathLike[str]) -> None:
    """Draw the ratio to the best peer: one row for each operator, one dot for each of its cells, a panel for each way.

    Of a sweep, the time per element over the length of rows: a panel for each operator and dtype.

    result: as `bench.run.run` returns it. path: the PNG file. Raises ValueError if no cell has a peer.
    """
    if found := curves(result):
        _sweep(found).savefig(path, format="png")
    else:
        _cells(figures(result)).savefig(path, format="png")


def _cells(every: Sequence[Figures]) -> Drawing:
    panels = {way: [cell for cell in every if way in cell.ways and cell.ways[way].ratio] for way in WAYS}
    if not any(panels.values()):
        raise ValueError("bench: no cell has a peer, nothing to plot")
    operators = list(dict.fromkeys(cell.operator for cell in every))
    figure = _figure(11.0, 1.5 + ROW * len(operators))
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (way, cells) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, cells, way, operators)
    figure.supxlabel("times as fast as the best peer, one dot for each cell", fontsize=9)
    return figure


def _draw(axes: Any, cells: Sequence[Figures], way: str, operators: Sequence[str]) -> None:
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    for number, dtype in enumerate(dtypes):
        chosen = [cell for cell in cells if cell.dtype == dtype]
        shift = SPREAD * (number - (len(dtypes) - 1) / 2)
        heights = [operators.index(cell.operator) + shift for cell in chosen]
        ratios = [cell.ways[way].ratio for cell in chosen]
        axes.scatter(ratios, heights, s=14, alpha=0.75, color=COLOURS[dtype], label=dtype)
    mean = geometric_mean(cells, way)
    axes.axvline(1, color="black", linewidth=0.8)
    if mean:
        axes.axvline(mean, color="grey", linestyle="--", linewidth=0.8, label=f"geometric mean: {mean:.2f}")
        axes.legend(fontsize=8, loc="lower right")
    axes.set_title(TITLES[way], fontsize=9)
    axes.set_yticks(range(len(operators)), operators, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.grid(axis="x", alpha=0.3)


def _figure(width: float, height: float) -> Drawing:
    """So many inches."""
    figure = Drawing(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _sweep(found: Sequence[Curve]) -> Drawing:
    operators = list(dict.fromkeys(curve.operator for curve in found))
    dtypes = list(dict.fromkeys(curve.dtype for curve in found))
    memories = list(dict.fromkeys(curve.memory for curve in found))
    figure = _figure(4.0 * len(dtypes), 2.4 * len(operators) + 0.5)
    grid = figure.subplots(len(operators), len(dtypes), sharex=True, squeeze=False)
    for curve in found:
        axes = grid[operators.index(curve.operator)][dtypes.index(curve.dtype)]
        colour = f"C{memories.index(curve.memory)}"
        where = f", {curve.memory} memory" if len(memories) > 1 else ""
        axes.plot(curve.lengths, curve.ours, color=colour, linewidth=1.2, label=f"opgrad{where}")
        best = [float("nan") if time is None else time for time in curve.best]
        axes.plot(curve.lengths, best, color=colour, linewidth=0.9, linestyle="--", label=f"best peer{where}")
        axes.set_title(f"{curve.operator}, {curve.dtype}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:g}"))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=7)
    figure.supxlabel("elements in a row", fontsize=9)
    figure.supylabel("ns per element", fontsize=9)
    return figure
