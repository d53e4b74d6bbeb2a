"""A picture of a result: each cell's time against the best peer's."""

from os import PathLike
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from opgrad.bench.figures import figures, geometric_mean

COLOURS = {"float32": "tab:blue", "bfloat16": "tab:orange", "float16": "tab:green", "float64": "tab:purple"}
ROW = 0.3  # inches for each operator
SPREAD = 0.22  # of a row, between dtypes


def plot(result: dict[str, Any], path: str | PathLike[str]) -> None:
    """Draw the ratio to the best peer: one row for each operator, one dot for each of its cells.

    result: as `bench.run.run` returns it. path: the PNG file. Raises ValueError if no cell has a peer.
    """
    cells = [cell for cell in figures(result) if cell.ratio]
    if not cells:
        raise ValueError("bench: no cell has a peer, nothing to plot")
    operators = list(dict.fromkeys(cell.operator for cell in cells))
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    figure = Figure(figsize=(8.0, 1.3 + ROW * len(operators)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, dtype in enumerate(dtypes):
        chosen = [cell for cell in cells if cell.dtype == dtype]
        shift = SPREAD * (number - (len(dtypes) - 1) / 2)
        heights = [operators.index(cell.operator) + shift for cell in chosen]
        ratios = [cell.ratio or 1.0 for cell in chosen]
        axes.scatter(ratios, heights, s=14, alpha=0.75, color=COLOURS[dtype], label=dtype)
    axes.axvline(1, color="black", linewidth=0.8)
    mean = geometric_mean(cells) or 1.0
    axes.axvline(mean, color="grey", linestyle="--", linewidth=0.8, label=f"geometric mean: {mean:.2f}")
    axes.set_yticks(range(len(operators)), operators, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.set_xlabel("times as fast as the best peer, one dot for each cell")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, format="png")
