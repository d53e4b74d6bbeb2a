"""The benchmark's attention on tiny tensors: which cells there are, ours beside PyTorch's, tables and results."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.cells import ATTENTION, ATTENTION_FORMS, ATTENTION_SHAPES, select
from bench.cells import ATTENTION_FUNCTION as FUNCTION
from bench.cpu_target import AttentionCase, Target
from bench.measure import OURS
from bench.run import run
from bench.tables import TITLES, full_table
from opgrad.cli.examples.arguments import finfo, tolerance
from opgrad.contract import DTYPES

torch = pytest.importorskip("torch")

EVERY = select([], [], [], quick=False, groups=[ATTENTION])
LENGTH = 20


def allowed(dtype):
    """In ulp of the dtype: what ours may be off, and what torch's in float32 may be, since neither is exact."""
    theirs = tolerance("float32", LENGTH) * float(finfo("float32").eps / finfo(DTYPES[dtype]).eps)
    return tolerance(dtype, LENGTH) + theirs


def tiny(cell):
    batch, _, *of_keys, _, _ = cell.workload.shape
    return replace(cell, workload=replace(cell.workload, shape=(batch, 4, *of_keys, LENGTH, 8)))


# Each rank once: batches and heads of the others differ alone.
TINY = [tiny(cell) for cell in EVERY if cell.workload.shape in (ATTENTION_SHAPES[0], ATTENTION_SHAPES[-1])]


def reads_rounded_result(cell):
    """Whether a gradient is computed from a result that was rounded to 16 bits, so that it is off by more itself."""
    return cell.dtype == "bfloat16" and ATTENTION_FORMS[cell.workload.form]


@pytest.mark.parametrize("cell", [cell for cell in TINY if not reads_rounded_result(cell)], ids=lambda cell: cell.name)
@pytest.mark.one_in(3)
def test_ours_is_as_close_to_torch_in_float32_as_a_sum_of_that_length(cell):
    assert AttentionCase(cell).error() <= allowed(cell.dtype)


@pytest.mark.parametrize("cell", [TINY[0], TINY[4], TINY[-1]], ids=lambda cell: cell.name)
def test_a_wrong_result_has_a_large_error(cell):
    case = AttentionCase(cell)
    case.ours = lambda *leaves: case.theirs(*leaves) * 1.5
    assert case.error() > allowed(cell.dtype)


@pytest.mark.parametrize("cell", TINY, ids=lambda cell: cell.name)
def test_gradients_are_computed_where_the_form_has_them(cell):
    case = AttentionCase(cell)
    backward = ATTENTION_FORMS[cell.workload.form]
    for function in case.functions(["torch"]).values():
        y = case.step(function)
        assert y.requires_grad == backward
        grads = [leaf.grad for leaf in case.leaves if leaf.grad is not None]
        assert len(grads) == 3 * backward
        assert case.kept == sum(each.nbytes for each in (y, *grads))
        arguments = sum(leaf.nbytes for leaf in case.leaves) + (case.upstream.nbytes if backward else 0)
        assert case.needed == arguments + case.kept


def test_selection():
    sizes = {(cell.workload.shape, cell.workload.form, cell.dtype) for cell in EVERY}
    dtypes = ("float32", "bfloat16")
    assert sizes == {(s, f, d) for s in ATTENTION_SHAPES for f in ATTENTION_FORMS for d in dtypes}
    assert len(EVERY) == len(sizes)
    assert EVERY[-1].name == f"{FUNCTION} 1x8x2x4096x128, with backward, causal bfloat16"
    (quick,) = select([], [], [], quick=True, groups=[ATTENTION])
    assert quick.name == f"{FUNCTION} 4x12x512x64, forward float32"
    own = select([FUNCTION], ["bfloat16"], ["2x6x30x16", "2x6x3x30x16"], quick=False)
    assert [cell.workload.shape for cell in own] == [(2, 6, 30, 16)] * 4 + [(2, 6, 3, 30, 16)] * 4
    assert {cell.dtype for cell in own} == {"bfloat16"}
    assert not select([FUNCTION], [], ["2x6x4x30x16", "2x6x30x257", "4096x1000"], quick=False)
    assert not select([FUNCTION], ["float16"], [], quick=False)


def test_a_result_is_json_and_is_shown():
    result = run(Target(), [TINY[0], TINY[-1]], ["torch", "numpy"], 0, {}, lambda done, total, cell: None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for cell in result["cells"]:
        assert cell["ways"]["new"]["times"].keys() == {OURS, "torch"} == cell["beyond"].keys()
        assert np.isfinite(cell["error_ulp"])
    result["cells"][1]["error_ulp"] = None
    text = full_table(result)
    assert f"#### {TITLES[ATTENTION]}" in text
    first, second = (line for line in text.splitlines() if line.startswith(f"| `{FUNCTION}`"))
    assert first.startswith(f"| `{FUNCTION}` | 4x4x20x8, forward | float32 |")
    assert first.endswith(f"| {result['cells'][0]['error_ulp']:.2f} |")
    assert second.endswith("| not finite |")
