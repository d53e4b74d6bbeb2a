"""Charts of results that one can point at, for `opgrad bench --html` and for the documentation, drawn by plotly."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly
from plotly import graph_objects as go

from opgrad.bench.figures import Figures, figures, geometric_mean
from opgrad.bench.tables import duration
from opgrad.bench.training import GRAPH, OLD, STEP, TORCH
from opgrad.bench.ways import GIVEN, NEW, WAYS

# Near Okabe and Ito's colours, which colour-blind readers tell apart; each shows on white and on black.
COLOURS = {"float32": "#2F8FD0", "bfloat16": "#E69F00", "float16": "#009E73", "float64": "#CC79A7"}
SYMBOLS = {"float32": "circle", "bfloat16": "diamond", "float16": "square", "float64": "cross"}
TITLES = {NEW: "Results in new memory", GIVEN: "Results in memory that is given"}
STEPS = {STEP: "opgrad", GRAPH: "opgrad, the graph alone", OLD: "onnxruntime-training 1.19.2", TORCH: "torch"}
GRID = "rgba(128, 128, 128, 0.3)"
CLEAR = "rgba(0, 0, 0, 0)"
ROW, SURROUNDINGS = 26, 150  # pixels: of an operator, and of title, legend and axis
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)


def library() -> str:
    """plotly's JavaScript, which a page with charts needs once."""
    return str(plotly.offline.get_plotlyjs())


def html(figure: Any) -> str:
    """A chart as a part of a page."""
    config = {"responsive": True, "displaylogo": False, "displayModeBar": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def ratios(result: Mapping[str, Any], way: str) -> Any:
    """Each cell's ratio to the best peer: a row for each operator, a mark for each of its cells.

    result: as `bench.run.run` returns it. way: one of `bench.ways.WAYS`. Returns None where no cell has a peer.
    """
    cells = [cell for cell in figures(dict(result)) if way in cell.ways and cell.ways[way].ratio]
    if not cells:
        return None
    figure = go.Figure([_marks(cells, way, dtype) for dtype in dict.fromkeys(cell.dtype for cell in cells)])
    mean = geometric_mean(cells, way)
    figure.add_vline(x=1, line_width=1.5, line_color="gray")
    if mean is not None:
        figure.add_vline(x=mean, line_width=1.5, line_dash="dot", line_color="gray")
    rows = len({cell.operator for cell in cells})
    title = f"{TITLES[way]}: {mean:.2f} times as fast (geometric mean)"
    _lay_out(figure, title, rows * ROW + SURROUNDINGS)
    figure.update_yaxes(autorange="reversed", categoryorder="trace", dtick=1)
    figure.update_xaxes(
        type="log", title="time of the best peer / time of opgrad", tickvals=TICKS, ticktext=[f"{x:g}" for x in TICKS]
    )
    return figure


def _marks(cells: Sequence[Figures], way: str, dtype: str) -> Any:
    chosen = [cell for cell in cells if cell.dtype == dtype]
    texts = [_told(cell, way) for cell in chosen]
    return go.Scatter(
        x=[cell.ways[way].ratio for cell in chosen],
        y=[cell.operator for cell in chosen],
        mode="markers",
        name=dtype,
        marker={"color": COLOURS[dtype], "symbol": SYMBOLS[dtype], "size": 9, "opacity": 0.8},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
    )


def _told(cell: Figures, way: str) -> str:
    """What is shown when a mark is pointed at."""
    times = cell.ways[way]
    peer = f"{times.peer}: {duration(times.peer_seconds or 0.0)}, {times.ratio:.2f} times"
    return f"<b>{cell.name}</b><br>opgrad: {duration(times.seconds)}, {times.gigabytes:.1f} GB/s<br>{peer}"


def steps(result: Mapping[str, Any]) -> Any:
    """The times of training steps by artifact set and batch; None for a result without any."""
    cells = [cell for cell in result.get("training", ()) if "times" in cell]
    if not cells:
        return None
    names = [f"{cell['set']}, {cell['batch']} rows" for cell in cells]
    bars = []
    for key, name in STEPS.items():
        values = [1e3 * cell["times"][key]["median"] if key in cell["times"] else None for cell in cells]
        if any(values):
            bars.append(go.Bar(x=values, y=names, name=name, orientation="h", hovertemplate="%{y}: %{x:.3g} ms"))
    figure = go.Figure(bars)
    _lay_out(figure, "A training step", len(cells) * 3 * ROW + SURROUNDINGS)
    figure.update_layout(barmode="group")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(type="log", title="milliseconds")
    return figure


def history(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """How many times as fast as the best peer, by release: a line for each machine and way.

    results: of each machine, its results in the order of the releases. Returns None where no result has peers.
    """
    lines = []
    for machine, found in results.items():
        for way in WAYS:
            means = {each["versions"].get("opgrad"): geometric_mean(figures(dict(each)), way) for each in found}
            known = {version: mean for version, mean in means.items() if version and mean}
            if known:
                name = f"{machine}, {TITLES[way].lower()}"
                lines.append(go.Scatter(x=list(known), y=list(known.values()), name=name, mode="lines+markers"))
    if not lines:
        return None
    figure = go.Figure(lines)
    _lay_out(figure, "By release", 380)
    figure.update_xaxes(type="category", title="release")
    figure.update_yaxes(rangemode="tozero", title="times as fast as the best peer")
    return figure


def _lay_out(figure: Any, title: str, height: int) -> None:
    """What all charts share; their text takes the page's colours."""
    figure.update_layout(
        title={"text": title, "x": 0.01, "xref": "container", "font": {"size": 15}},
        height=height,
        margin={"l": 10, "r": 10, "t": 80, "b": 50},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        font={"size": 13},
        showlegend=True,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
