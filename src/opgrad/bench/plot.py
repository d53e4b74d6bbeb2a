"""A picture of a result: each cell's time against the best peer's, with results in new memory and in memory given."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from opgrad.bench.figures import Figures, figures, geometric_mean
from opgrad.bench.ways import GIVEN, NEW, WAYS

COLOURS = {"float32": "tab:blue", "bfloat16": "tab:orange", "float16": "tab:green", "float64": "tab:purple"}
TITLES = {NEW: "results in new memory", GIVEN: "results in memory that is given"}
ROW = 0.3  # inches for each operator
SPREAD = 0.22  # of a row, between dtypes


def plot(result: dict[str, Any], path: str | PathLike[str]) -> None:
    """Draw the ratio to the best peer: one row for each operator, one dot for each of its cells, a panel for each way.

    result: as `bench.run.run` returns it. path: the PNG file. Raises ValueError if no cell has a peer.
    """
    every = figures(result)
    panels = {way: [cell for cell in every if way in cell.ways and cell.ways[way].ratio] for way in WAYS}
    if not any(panels.values()):
        raise ValueError("bench: no cell has a peer, nothing to plot")
    operators = list(dict.fromkeys(cell.operator for cell in every))
    figure = Drawing(figsize=(11.0, 1.5 + ROW * len(operators)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (way, cells) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, cells, way, operators)
    figure.supxlabel("times as fast as the best peer, one dot for each cell", fontsize=9)
    figure.savefig(path, format="png")


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
