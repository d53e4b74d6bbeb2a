"""Pictures of results, drawn by Matplotlib: as PNG for files, as SVG for pages."""

import io
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from bench import instruction_sets
from bench.figures import Figures, Result, figures, geometric_mean
from bench.measure import WAYS
from bench.sweep import ROWS, Curve, curves
from bench.tables import WHERE
from opgrad.base.files import replace_file

COLOURS = {"float32": "tab:blue", "bfloat16": "tab:orange", "float16": "tab:green", "float64": "tab:purple"}
ROW = 0.3  # inches for each operator, and for each bar
SPREAD = 0.22  # of a row, between dtypes
# Text stays text in SVG, so that a page gives it its own colour; the other two make equal pictures equal bytes.
SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "opgrad"}
NO_DATE = {"Date": None}


def save(drawn: Drawing | None, path: str | PathLike[str]) -> None:
    """Write a picture into a PNG file. Raises ValueError if there is nothing to draw."""
    if drawn is None:
        raise ValueError("bench: no cell has a peer, nothing to plot")
    content = io.BytesIO()
    drawn.savefig(content, format="png")
    replace_file(Path(path), content.getvalue())


def svg(drawn: Drawing) -> str:
    """A picture as a part of a page, whose background shows through."""
    content = io.StringIO()
    with mpl.rc_context(SVG):
        drawn.savefig(content, format="svg", metadata=NO_DATE, transparent=True)
    return content.getvalue()[content.getvalue().index("<svg") :]


def drawing(*results: Result) -> Drawing | None:
    """The picture of a result, or of several for different instruction sets; None where there is nothing to draw.

    Results are of cells or of a sweep, all of one kind.
    """
    named = instruction_sets.titled(results)
    found = {name: curves(result) for name, result in named.items()}
    if any(curve.along == ROWS for each in found.values() for curve in each):
        return _sweep(found)
    return _cells({name: figures(each) for name, each in named.items()})


def _cells(sets: Mapping[str, Sequence[Figures]]) -> Drawing | None:
    """The ratio to the best peer: a row for each operator, a dot for each of its cells; panels for ways and sets."""
    panels = {
        (name, way): [cell for cell in cells if way in cell.ways and cell.ways[way].ratio]
        for name, cells in sets.items()
        for way in WAYS
    }
    if not any(panels.values()):
        return None
    operators = list(dict.fromkeys(cell.operator for cells in sets.values() for cell in cells))
    figure = blank(11.0, len(sets) * (1.5 + ROW * len(operators)))
    all_axes = figure.subplots(len(sets), len(WAYS), sharex=True, sharey=True, squeeze=False)
    for axes, ((name, way), cells) in zip(all_axes.flat, panels.items(), strict=True):
        dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
        for number, dtype in enumerate(dtypes):
            chosen = [cell for cell in cells if cell.dtype == dtype]
            shift = SPREAD * (number - (len(dtypes) - 1) / 2)
            heights = [operators.index(cell.operator) + shift for cell in chosen]
            ratios = [cell.ways[way].ratio for cell in chosen]
            axes.scatter(ratios, heights, s=14, alpha=0.75, color=COLOURS[dtype], label=dtype)
        axes.axvline(1, color="black", linewidth=0.8)
        if mean := geometric_mean(cells, way):
            axes.axvline(mean, color="grey", linestyle="--", linewidth=0.8)
            axes.set_title(f"geometric mean {mean:.2f}", fontsize=8, loc="right")
        axes.set_yticks(range(len(operators)), operators, fontsize=8)
        if not axes.yaxis_inverted():
            axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(", ".join(filter(None, (name, f"results in {WHERE[way]}"))), fontsize=9, loc="left")
    figure.supxlabel("times as fast as the best peer, one dot for each cell", fontsize=9)
    _legend(figure)
    return figure


def _legend(figure: Drawing) -> None:
    """One legend for all panels, beside them: within one it would lie on what is drawn."""
    found = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found.keys(), fontsize=8, loc="outside upper center", ncols=len(found))


def _sweep(sets: Mapping[str, Sequence[Curve]]) -> Drawing:
    """The time per element over the length of rows: a panel for each operator and dtype."""
    every = [(name, curve) for name, found in sets.items() for curve in found if curve.along == ROWS]
    operators = list(dict.fromkeys(curve.operator for _, curve in every))
    dtypes = list(dict.fromkeys(curve.dtype for _, curve in every))
    lines = list(dict.fromkeys(name for name, _ in every))
    figure = blank(4.0 * len(dtypes), 2.4 * len(operators) + 0.5)
    grid = figure.subplots(len(operators), len(dtypes), sharex=True, squeeze=False)
    for name, curve in every:
        axes = grid[operators.index(curve.operator)][dtypes.index(curve.dtype)]
        colour = f"C{lines.index(name)}"
        where = f", {name}" if name else ""
        ours = [time for time, _ in curve.times.values()]
        axes.plot([*curve.times], ours, color=colour, linewidth=1.2, label=f"opgrad{where}")
        best = [float("nan") if time is None else time for _, time in curve.times.values()]
        axes.plot([*curve.times], best, color=colour, linewidth=0.9, linestyle="--", label=f"best peer{where}")
        axes.set_title(f"{curve.operator}, {curve.dtype}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    _legend(figure)
    figure.supxlabel("elements in a row", fontsize=9)
    figure.supylabel("ns per element", fontsize=9)
    return figure


def blank(width: float, height: float) -> Drawing:
    """A picture without content, of so many inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches: letters reach beyond the boxes that it knows
    figure = Drawing(figsize=(width, height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    return figure


PLAIN_NUMBERS = FuncFormatter(lambda number, _: f"{number:g}")
