"""The benchmark's losses on tiny tensors: ours and PyTorch's composition agree in every form; tables and results."""

import json
from dataclasses import replace

import pytest
from bench_results import made_up_result, summarized

from bench import cells, cpu_target
from bench.cells import FORMS, LINEAR, LOGITS, LOSSES, SHAPES, WORKLOADS, select
from bench.cpu_target import Target
from bench.measure import OURS
from bench.peers import COMPILE
from bench.run import run
from bench.tables import TITLES, full_table

torch = pytest.importorskip("torch")


def tiny(cell):
    shape = (12, 30) if cell.op.name == LOGITS else (12, 30, 5)
    return replace(cell, workload=replace(cell.workload, shape=shape), dtype="float32")


EVERY = list(
    {each.name: each for each in map(tiny, select([], ["float32"], [], quick=False, groups=[LOSSES]))}.values()
)


@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
@pytest.mark.one_in(3)
def test_everybody_computes_the_same_loss_and_gradients(cell):
    case = cpu_target.LossCase(cell)
    found = {}
    for name, loss in case.functions(["torch"]).items():
        case.step(loss)
        found[name] = [loss(*case.leaves).detach(), *(leaf.grad for leaf in case.leaves)]
    assert len(found) > 1
    for values in found.values():
        torch.testing.assert_close(values, found[OURS])


@pytest.mark.parametrize("form", SHAPES)
def test_classes_may_lie_along_axis_1(form):
    (large,) = [each for each in WORKLOADS[LOGITS] if each.form == form]
    assert len(large.shape) == 4
    cell = replace(EVERY[0], workload=replace(large, shape=(3, 7, 2, 5)))
    test_everybody_computes_the_same_loss_and_gradients(cell)


def test_selection_of_losses():
    assert {cell.op.name for cell in EVERY} == set(cells.LOSS_FUNCTIONS)
    assert [each.form for each in WORKLOADS[LOGITS]] == list(FORMS)
    chosen = select([LINEAR], ["bfloat16"], ["512x32000x256"], quick=False)
    assert [(cell.workload.shape, cell.dtype) for cell in chosen] == [((512, 32000, 256), "bfloat16")]
    for name in cells.LOSS_FUNCTIONS[1:]:
        (cell,) = select([name], ["float32"], ["30x40x5", "30x40"], quick=False)
        assert cell.workload.label == "30x40x5"
    assert not select([LINEAR], ["float16"], [], quick=False)


def test_a_result_is_json_and_is_shown(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: _broken)
    layer = [cell for cell in EVERY if cell.op.name == LINEAR][-1:]
    result = run(Target(), layer, ["torch", COMPILE], 0, {}, lambda done, total, cell: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    (cell,) = result["cells"]
    assert cell["ways"]["new"]["notes"] == {COMPILE: "RuntimeError: no compiler"}
    assert cell["beyond"].keys() == cell["ways"]["new"]["times"].keys()
    text = full_table(result)
    assert f"#### {TITLES[LOSSES]}" in text
    assert "torch.compile in linear_cross_entropy 12x30x5 float32: RuntimeError: no compiler" in text


def _broken(*_):
    raise RuntimeError("no compiler")


def test_the_table_has_the_fastest_peer_and_the_least_memory_of_any():
    times = {"opgrad": 2e-3, "torch": 8e-3, "torch.compile": 4e-3}
    cell = {"operator": LINEAR, "workload": "4x5x6", "dtype": "float32", "group": LOSSES, "headline": False}
    cell["ways"] = {"new": {"times": {name: summarized(each) for name, each in times.items()}, "notes": {}}}
    cell["needed"] = 8 << 20
    cell["beyond"] = {"opgrad": 1 << 20, "torch": 4 << 20, "torch.compile": 5 << 20}
    result = made_up_result([4.0])
    before = full_table(result)
    result["cells"].append(cell)
    parts = [part for part in before.split("\n\n") if " cells" not in part]  # those that count them are others
    assert [part for part in parts if part not in full_table(result)] == []
    ratios = "2.00 | 1 MiB | 1.12 | 5 MiB | 4 MiB |"
    row = f"| `linear_cross_entropy` | 4x5x6 | float32 | 2 ms | torch.compile | 4 ms | {ratios}"
    assert row in full_table(result)
    cell["beyond"] = dict.fromkeys(times)
    assert "| 2.00 |  |  |  |  |" in full_table(result)


def test_without_pytorch_the_cells_are_left_out(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    result = run(Target(), EVERY[:1], [], 0, {}, lambda done, total, cell: None)
    assert [cell["left_out"] for cell in result["left_out"]] == ["needs PyTorch"]


def test_growth_is_what_a_call_takes_at_most():
    if cpu_target.growth(lambda: None) is None:
        pytest.skip("the system does not tell")
    grown = cpu_target.growth(lambda: torch.ones(1 << 24).sum().item())
    assert grown == pytest.approx(1 << 26, abs=1 << 23)  # the system counts pages in batches for each thread
