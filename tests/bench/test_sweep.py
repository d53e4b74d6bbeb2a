"""The sweep over lengths of rows, on tiny arrays."""

import pytest
from rich.console import Console

from bench import sweep
from bench.command import BenchOptions
from bench.plots import drawing, save
from bench.run import prepared, read, store
from bench.sweep import Curve, curves
from bench.tables import _curve_row, full_table, parts, show


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(sweep, "ELEMENTS", 1 << 10)
    monkeypatch.setattr(sweep, "QUICK_LENGTHS", (1, 7, 2000))


def measured(old=None, **options):
    return prepared(BenchOptions(dtypes="float32", seconds=0.0, quick=True, sweep=True, **options), old)(
        lambda *_: None
    )


def test_a_sweep_has_a_curve_for_each_operator(tiny, tmp_path):
    result = measured(ops="softmax,softmax_grad", peers="numpy")
    found = curves(result)
    assert [curve.operator for curve in found] == ["softmax", "softmax_grad"]
    assert all(list(curve.times) == [1, 7, 2000] for curve in found)
    assert {cell["workload"] for cell in result["cells"]} == {"1024x1", "146x7", "1x2000"}
    save(drawing(result), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    show(screen := Console(record=True, width=150), parts(result))
    assert "Rows of every length" in screen.export_text()
    assert full_table(result).count("`softmax`") == 1


def test_a_sweep_goes_on_where_it_ended(tiny, tmp_path):
    path = tmp_path / "sweep.json"
    store(path, measured(ops="softmax", peers="numpy"), None)
    more = measured(read(path), ops="softmax,log_softmax", peers="numpy")
    assert {cell["operator"] for cell in more["cells"]} == {"log_softmax"}
    assert len(store(path, more, read(path))["cells"]) == 6


def test_every_length_is_swept_by_default():
    found = sweep.cells([], ["float32"], quick=False)
    assert {cell.op.name for cell in found} == set(sweep.OPERATORS)
    assert [cell.workload.shape[1] for cell in found[: len(sweep.LENGTHS)]] == sorted(sweep.LENGTHS)


def test_other_axes_are_swept_too(tiny):
    every = sweep.cells([], ["float32"], quick=False)
    shapes = [(cell.workload.shape, cell.workload.attributes.get("axis", -1)) for cell in every]
    for shape in ((8, 1000, 49, 81), (32, 150, 32, 32), (16, 1000, 7, 7), (16, 1000, 56, 56)):
        assert shapes.count((shape, 1)) == len(sweep.OPERATORS)
    assert {axis for _, axis in shapes} == {-1, 0, 1}
    assert len({(cell.op.name, shape) for cell, shape in zip(every, shapes, strict=True)}) == len(every)


def test_curves_along_other_axes(monkeypatch, tiny, tmp_path):
    for name, value in {"INNER_SIZES": (3, 49), "INNER_LENGTHS": (2, 5), "FIRST_LENGTHS": (2, 10)}.items():
        monkeypatch.setattr(sweep, name, value)
    monkeypatch.setattr(sweep, "NETWORKS", ((2, 3, 2, 2), (2, 5, 3, 1)))
    result = measured(ops="softmax", peers="numpy", groups="inner,axes,shapes,rows")
    found = {curve.along: list(curve.times) for curve in curves(result)}
    inner = {"axis 1, inner 3": [2, 5], "axis 1, inner 49": [2, 5]}
    assert found == {**inner, "axis 0": [2, 10], "rows": [1, 7, 2000]}
    assert [cell.workload for cell in sweep.shapes(result)] == ["2x3x2x2, axis 1", "2x5x3x1, axis 1"]
    text = full_table(result)
    assert "| `softmax` | float32 | axis 1, inner 49 | 2 |" in text
    assert "| `softmax` | 2x5x3x1, axis 1 | float32 |" in text
    save(drawing(result), tmp_path / "sweep.png")


def test_a_sweep_has_neither_shapes_nor_other_operators():
    for options in (BenchOptions(sweep=True, shapes="3x4"), BenchOptions(sweep=True, groups="plain")):
        with pytest.raises(ValueError, match="the sweep is of the CPU"):
            prepared(options)
    with pytest.raises(ValueError, match="operator is 'relu', expected for the sweep one of"):
        prepared(BenchOptions(sweep=True, ops="relu"))


def test_what_a_curve_says():
    curve = Curve("softmax", "float32", "rows", {1: (1.0, 2.0), 2: (2.0, 1.0), 4: (1.0, None)})
    assert curve.ratios == {1: 2.0, 2: 0.5}
    assert curve.cliff == (2.0, 2)
    assert _curve_row(curve)[-6:] == ["1.00", "1", "0.50", "2", "2.00", "2"]
    assert _curve_row(Curve("softmax", "float32", "rows", {1: (1.0, None)}))[-6:] == ["none", "0", "", "", "1.00", "0"]
