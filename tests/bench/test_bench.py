"""The benchmark on tiny arrays: what it computes and writes, not how fast anything is."""

import io
import json
import math

import numpy as np
import pytest
from bench_cells import tiny_cells
from bench_command import run_bench
from bench_results import made_up_result, summarized
from benchmark_tables import headline_table
from rich.console import Console
from samples import each_kind

from bench import measure
from bench.case import Case, GraphCase
from bench.cells import DTYPES, GRAPH, GROUPS, PLAIN, WORKLOADS, Cell, Workload, large_cases, select
from bench.command import BenchOptions
from bench.cpu_target import Copy, Target
from bench.figures import described, figures, geometric_mean, losses, read, stamped
from bench.measure import GIVEN, NEW, WAYS
from bench.run import prepared, previous, run, store, target
from bench.tables import NOBODY, TITLES, duration, full_table, parts, show, summary
from opgrad.cli.examples.arguments import error_in_ulp, last_place
from opgrad.contract import DTYPES as NUMPY_DTYPES
from opgrad.contract import FLOATS
from opgrad.ops import graph_operators, operators


def test_every_operator_has_workloads(op):
    assert WORKLOADS[op.kind]
    assert any(workload.quick for workload in WORKLOADS[op.kind])


@each_kind
@pytest.mark.one_in(2)
def test_a_sample_of_large_results_is_compared(monkeypatch, op):
    monkeypatch.setattr("bench.case.CHECKED", 16)
    for cell in tiny_cells(op):
        case = Case(cell)
        case.call()()
        assert case.error() < 64


def test_wrong_results_have_a_large_error():
    case = Case(Cell(operators()["relu"], Workload((9,)), "float32"))
    case.call()()
    case.results["y"][3] += 1
    assert case.error() > 1e6


@pytest.mark.parametrize(
    ("name", "workload", "dtype", "traffic"),
    [
        ("softmax_grad", Workload((10, 8)), "float16", 3 * 10 * 8 * 2),
        ("gather", Workload((1000, 8), indices=10), "float32", 2 * 10 * 8 * 4 + 10 * 8),  # no more than it writes
        ("softmax_cross_entropy_loss_only", Workload((10, 8)), "bfloat16", 10 * 8 * 2 + 10 * 8 + 2),
    ],
)
def test_traffic_counts_each_array_once(name, workload, dtype, traffic):
    assert Case(Cell(operators()[name], workload, dtype)).traffic == traffic


def test_the_copy_copies():
    copy = Copy(1 << 16)
    copy.target.fill(0)
    copy.copy()
    assert copy.bytes == 1 << 16
    np.testing.assert_array_equal(copy.source, copy.target)


def test_times_of_all_calls_are_taken():
    taken = measure.interleaved({"a": lambda: None, "b": lambda: sum(range(1000))}, 0)
    assert taken["a"]["samples"] >= measure.FEWEST
    assert 0 < taken["a"]["minimum"] <= taken["a"]["median"] < taken["b"]["median"]


def test_selection():
    assert {cell.dtype for cell in select([], [], [], quick=True, groups=[PLAIN])} == set(DTYPES)
    assert len(select([], [], [], quick=True)) < len(select([], [], [], quick=False))
    (cell,) = select(["softmax"], ["float64"], ["4096x1000"], quick=False)
    assert (cell.workload.headline, cell.name) == (True, "softmax 4096x1000 float64")
    (cell,) = select(["gather"], ["float32"], ["30x4"], quick=False)
    assert cell.workload == Workload((30, 4), indices=30)
    assert not select(["softmax_cross_entropy_loss"], [], ["30"], quick=False)


def test_selection_of_groups():
    every = select([], [], [], quick=False)
    assert len({(cell.op.name, cell.workload.label, cell.dtype) for cell in every}) == len(every)
    for group in GROUPS:
        quick = select([], [], [], quick=True, groups=[group])
        assert quick
        assert {cell.workload.group for cell in quick} == {group}
    names = [cell.name for cell in select(["softmax"], ["float32"], ["4096x1000"], quick=False, groups=["plain"])]
    assert names == ["softmax 4096x1000 float32"]
    with pytest.raises(ValueError, match=r"^bench: group is 'types', expected one of plain, graph, losses, attention"):
        select([], [], [], quick=False, groups=["types"])


def test_every_large_example_is_measured():
    for name in {*graph_operators()} - {"broadcast_gradient_args"}:  # which takes integers alone
        chosen = select([name], [], [], quick=False)
        assert {cell.workload.example for cell in chosen} == {*range(len(large_cases(name)))}
        assert len(select([name], ["float32"], [], quick=True)) <= 1
    labels = {GraphCase(cell).label for cell in select(["conv_grad"], ["float32"], [], quick=False)}
    assert len(labels) == len(large_cases("conv_grad")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((["softmx"], [], []), "bench: operator is 'softmx', expected one of in_place"),
        (([], ["int8"], []), "bench: dtype is 'int8', expected one of float32, float64"),
        (([], [], ["4x"]), "bench: shape is '4x', expected sizes such as 4096x1000"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(ValueError, match="^" + message.partition(", expected")[0]):
        select(*options, quick=False)


def test_result_tables_and_losses():
    result = made_up_result([4.0, 0.25, 0.998, 1.0])
    cells = figures(result)
    assert [cell.ways[NEW].ratio for cell in cells] == [4.0, 0.25, pytest.approx(0.998), 1.0, None]
    assert [(cell.ways[GIVEN].seconds, cell.ways[GIVEN].peer) for cell in cells] == [(2e-3, None)] * 5
    assert cells[0].first is cells[0].ways[GIVEN]
    assert cells[0].ways[NEW].gigabytes == pytest.approx(10)
    assert [cell.ways[NEW].share_of_copy for cell in cells] == pytest.approx([1, 1, 1, 1, 0.5])
    assert (geometric_mean(cells, NEW), geometric_mean(cells)) == (pytest.approx(0.998**0.25), None)
    assert [cell.workload for cell in losses(cells, NEW)] == ["1x7"]
    assert losses(cells) == []
    of_mean = "1.00 times as fast as the best peer with results in new memory (geometric mean), slower in 1"
    assert summary(cells) == f"Over 5 cells, {of_mean}."
    text = full_table(result)
    assert text.count("\n| `softmax` |") == 5
    assert f"| 2 ms | {NOBODY} |  |  | 1 ms | torch | 4 ms | 4.00 | 5.0 | 50% | 0.50 | 1 |" in text
    assert "5 of 5 cells have fewer than 7 samples of a time, down to 1: older ones." in text
    assert "* left out: torch in 5 cells such as softmax 0x7 float32: has no such way" in text
    assert headline_table(result).count("\n| `softmax` |") == 1
    assert "2 ms, 5 GB/s, **no peer**; new 4.00x torch" in headline_table(result)
    assert summary(cells[-1:]) == "1 cells, no peer."
    result["cells"][0]["ways"][GIVEN]["times"]["numpy"] = summarized(8e-3)
    assert " 4.00 times as fast as the best peer with results in memory that is given (" in summary(figures(result))


def test_durations_have_three_digits():
    assert [duration(t) for t in (0.01234, 9.4e-4, 1.2345e-6)] == ["12.3 ms", "940 µs", "1.23 µs"]


def test_the_command_writes_json_and_a_plot(tmp_path):
    result_file, plot_file = tmp_path / "new" / "result.json", tmp_path / "plot.png"
    options = ["--ops", "relu,softmax_grad", "--dtypes", "float32", "--shapes", "8x9", "--peers", "numpy"]
    options += ["--seconds", "0", "--json", str(result_file), "--plot", str(plot_file)]
    done = run_bench(*options)
    assert done.exit_code == 0
    assert "relu" in done.output
    result = read(result_file)
    assert [cell["operator"] for cell in result["cells"]] == ["relu", "softmax_grad"]
    for cell in result["cells"]:
        assert {way: set(cell["ways"][way]["times"]) for way in WAYS} == {NEW: {"opgrad", "numpy"}, GIVEN: {"opgrad"}}
        assert cell["copy"]["median"] > 0
    assert result["options"]["shapes"] == "8x9"
    assert result["versions"]["numpy"] == np.__version__
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@each_kind
def test_a_result_is_json(op):
    seen = []

    def progress(done, total, cell):
        seen.append((done, total, cell.name))

    result = run(Target(), tiny_cells(op)[:1], ["numpy"], 0, {}, progress)
    assert seen == [(0, 1, tiny_cells(op)[0].name)]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_an_example_has_a_table_of_its_own():
    cells = select(["reduce_all_l2"], ["float32"], [], quick=True, groups=[GRAPH])
    result = run(Target(), cells, ["numpy"], 0, {}, lambda done, total, cell: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    console = Console(record=True, file=io.StringIO())
    show(console, parts(result))
    assert TITLES[GRAPH] in console.export_text()
    assert "Over " not in full_table(result)


def test_an_interrupt_keeps_what_was_measured():
    def progress(done, total, cell):
        if done == 1:
            raise KeyboardInterrupt

    relu = operators()["relu"]
    cells = [Cell(relu, Workload((size,)), "float32") for size in (8, 9)]
    result = run(Target(), cells, [], 0, {}, progress)
    assert [cell["workload"] for cell in result["cells"]] == ["8"]
    with pytest.raises(KeyboardInterrupt):
        run(Target(), cells, [], 0, {}, lambda done, total, cell: progress(1, total, cell))


def test_a_result_file_is_updated(tmp_path):
    path = tmp_path / "new" / "result.json"
    old, new = made_up_result([4.0, 0.25]), made_up_result([2.0])
    new["cells"] = new["cells"][:1]
    assert previous(path, update=True) is None
    assert store(path, old, None) == old == read(path)
    assert previous(path, update=True) == old
    assert previous(path, update=False) is None
    new["left_out"] = [{"operator": "relu", "workload": "9", "dtype": "float32", "left_out": "too large"}]
    merged = store(path, new, old)
    assert merged == read(path)
    ratios = {cell.workload: cell.ways[NEW].ratio for cell in figures(merged)}
    assert ratios == {"0x7": 2.0, "1x7": 0.25, "2x7": None}
    assert merged["left_out"] == new["left_out"]
    assert store(path, new, None) == read(path) == new


def test_cells_say_when_and_with_which_options_they_were_measured(tmp_path):
    """A file that is updated keeps the date of each cell, and its options where they are known."""
    relu, path = operators()["relu"], tmp_path / "result.json"
    options = {"ops": "relu", "shapes": "8", "seconds": 0}
    new = run(Target(), [Cell(relu, Workload((8,)), "float32")], [], 0, options, lambda done, total, cell: None)
    (cell,) = new["cells"]
    assert (cell["date"], cell["options"]) == (new["date"], options)
    assert described(new) == f"Runs: 1 cells, {cell['date'][:10]}, `python -m bench --ops relu --shapes 8 --seconds 0`."
    old = made_up_result([4.0, 0.25]) | {"options": {"ops": "softmax", "shapes": "1x7"}}
    assert [stamped(old, each)["options"] for each in old["cells"]] == [None, old["options"], None]
    merged = store(path, new, old)
    assert [each["date"] for each in merged["cells"]] == [*["2026-01-01"] * 3, cell["date"]]
    assert [each["options"] for each in merged["cells"]] == [None, old["options"], None, options]
    assert store(path, new, merged) == merged
    assert described(merged).startswith("Runs: 2 cells, until 2026-01-01, options not kept; 1 cells, 2026-01-01")
    text = full_table(merged)
    assert "the last of several runs." in text


def test_a_result_of_another_machine_is_not_updated():
    with pytest.raises(ValueError, match=r"^bench: the file has another machine, so its cells cannot be kept: "):
        prepared(BenchOptions(ops="relu"), made_up_result([2.0]))


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match=r"^bench: device is 'rocm', expected one of cpu, cuda$"):
        target("rocm")


def test_other_files_are_no_results(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no result file"):
        read(path)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_ulp_is_the_distance_of_neighbours(dtype):
    for magnitude in (1.0, 1.5, 0.999, 3e-5, 1000.0, 0.0):
        near = np.array(magnitude, NUMPY_DTYPES[dtype])
        further = np.nextafter(near, np.array(math.inf, near.dtype))
        distance = further.astype(np.float64) - near.astype(np.float64)
        assert last_place(near.dtype, near.astype(np.float64)) == distance


def test_nan_and_infinity_elsewhere_are_infinitely_wrong():
    exact = np.array([1.0, np.nan, np.inf, -np.inf])
    assert error_in_ulp(exact.astype(np.float32), exact) == 0
    for place, value in ((0, np.nan), (1, 1.0), (2, 1.0), (3, np.inf)):
        wrong = exact.astype(np.float32)
        wrong[place] = value
        assert error_in_ulp(wrong, exact) == math.inf
