"""The pictures of a result: they say what the tables say."""

from pathlib import Path

import benchmark_tables
import pytest
import report
from bench_results import made_up_result

from bench.steps import tables as step_tables

pytest.importorskip("matplotlib")

import opgrad
from bench import plots
from bench.figures import figures, read
from bench.measure import GIVEN, NEW, WAYS
from bench.tables import WHERE, title

ROOT = Path(__file__).parents[2]


def dots(axes):
    """The places of the dots of each dtype, and what the lines are called."""
    found = {each.get_label(): each.get_offsets()[:, 0].tolist() for each in axes.collections}
    return found, [line.get_label() for line in axes.lines]


def test_a_picture_has_a_dot_for_each_cell_with_a_peer():
    drawn = plots.drawing(made_up_result([2.0, 0.5, 4.0]))
    panels = dict(zip(WAYS, map(dots, drawn.axes), strict=True))
    assert panels[NEW][0] == {"float32": [2.0, 0.5, 4.0]}
    assert [axes.get_title(loc="right") for axes in drawn.axes] == ["", "geometric mean 1.59"]
    assert panels[GIVEN][0] == {}
    assert plots.svg(drawn) == plots.svg(drawn)


@pytest.mark.parametrize("picture", ["cells", "sweep", "releases", "steps"])
def test_no_picture_is_cut_and_no_legend_lies_on_a_panel(picture):
    steps = [each for each in report.all_results(ROOT).values() if "training" in each]
    drawn = {
        "cells": lambda: plots.drawing(*report.newest_of_sets(ROOT)),
        "sweep": lambda: plots.drawing(*report.newest_sweeps(ROOT)),
        "releases": lambda: benchmark_tables.history(report.history(ROOT)),
        "steps": lambda: step_tables.drawing(*steps),
    }[picture]()
    drawn.canvas.draw()
    renderer, whole = drawn.canvas.get_renderer(), drawn.bbox
    boxes = [each.get_tightbbox(renderer) for each in (*drawn.axes, *drawn.legends, *drawn.texts)]
    for box in boxes:
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    (legend,) = drawn.legends
    assert not any(axes.get_legend() or axes.bbox.overlaps(legend.get_window_extent(renderer)) for axes in drawn.axes)


def test_without_a_peer_there_is_no_picture(tmp_path):
    assert plots.drawing(made_up_result([])) is None
    assert benchmark_tables.history({"machine": [made_up_result([])]}) is None
    with pytest.raises(ValueError, match=r"^bench: no cell has a peer, nothing to plot$"):
        plots.save(plots.drawing(made_up_result([])), tmp_path / "plot.png")


def test_releases_are_a_line_for_each_machine():
    results = [made_up_result([ratio]) for ratio in (2.0, 3.0)]
    for result, version in zip(results, ("0.1.0", "0.2.0"), strict=True):
        result["versions"]["opgrad"] = version
    (line,) = benchmark_tables.history({"fast": results}).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == (["0.1.0", "0.2.0"], pytest.approx([2.0, 3.0]))


def kept(folder):
    return {path.name: read(path) for path in folder.glob("*.json")}


def test_the_results_of_every_release_are_kept_and_drawn():
    """bench/history/VERSION has that version's files, those that bench/results still has among them."""
    for folder in (ROOT / report.HISTORY).iterdir():
        assert {result["versions"]["opgrad"] for result in kept(folder).values()} == {folder.name}
    for name, result in kept(ROOT / report.RESULTS).items():
        version = result["versions"]["opgrad"]
        if version != opgrad.__version__:
            assert name in kept(ROOT / report.HISTORY / version), f"copy it to {report.HISTORY / version}"
    lines = benchmark_tables.history(report.history(ROOT)).axes[0].lines
    drawn = {line.get_label().partition(", results")[0] for line in lines}
    every = {name: each for device in ("cpu", "cuda") for name, each in report.results(ROOT, device).items()}
    assert drawn == {title(result) for result in every.values() if figures(result)}


def test_instruction_sets_have_panels_of_their_own():
    results = [made_up_result([ratio]) for ratio in (2.0, 3.0)]
    results[1]["machine"] |= {"vector_bits": 512}
    drawn = plots.drawing(*results)
    titles = [f"{name}, results in {WHERE[way]}" for name in ("AVX2", "AVX-512") for way in WAYS]
    assert [axes.get_title(loc="left") for axes in drawn.axes] == titles
    assert [dots(axes)[0] for axes in drawn.axes] == [{}, {"float32": [2.0]}, {}, {"float32": [3.0]}]
