"""Softmax with attributes as one kernel: the bits of stages, within the same ranges."""

import numpy as np
import pytest
from primitive_cases import Placed, check_forward, check_gradient, fortran, laid_out, numbers
from samples import bits, cast

import opgrad
from opgrad import Dropout, post_ops
from opgrad.call import arrays
from opgrad.cpu import plans
from opgrad.cpu.programs.softmax import VARIABLE
from opgrad.ops import graph_operators, operators


@pytest.fixture
def fusion(monkeypatch):
    """Choose how calls from now on are computed."""
    return lambda choice: monkeypatch.setenv(VARIABLE, choice)


def runner(name, values, attributes):
    """A new plan for this call, and what runs it."""
    op = (operators() | graph_operators())[name]
    of, given = arrays.expanded(op, dict(zip(op.parameters, values, strict=False)) | attributes)
    given = arrays.as_given(of, given)
    plans.PLANS.values.clear()
    found = arrays.ArrayRunner(of, (), given)
    return found, lambda: found((), given)


def several(results):
    return [bits(each) for each in (results if isinstance(results, tuple) else (results,))]


# By layout: shapes with tails and several parts, an operand for each element, one for all rows, and one of two loops.
SHAPES = {"rows": ((5, 67, 133), -1), "columns": ((3, 131, 5, 9), 1), "split": ((1, 131077), -1)}


def operands_for(rng, shape, axis):
    own = [size if place in (axis, axis % len(shape)) else 1 for place, size in enumerate(shape)]
    repeated = [1 if place == 1 and len(shape) > 2 else size for place, size in enumerate(shape)]
    return numbers(rng, own, "bfloat16", 1.0), rng.random(repeated) < 0.7


@pytest.mark.parametrize(("name", "layout"), [("softmax", "rows"), ("log_softmax", "columns"), ("softmax", "split")])
def test_forward(name, layout, fusion, rng):
    """Also of rows of -inf, and of rows with NaN and inf."""
    shape, axis = SHAPES[layout]
    x = numbers(rng, shape, "float32")
    x[0, :60] = -np.inf
    if layout != "split":
        x[1], x[2, 7], x[2, 30] = -np.inf, np.nan, np.inf
    bias, mask = operands_for(rng, shape, axis)
    attributes = {
        "axis": axis, "where": mask, "logit_scale": 0.5, "result_scale": 2.0, "out_scale": 0.01, "stats": True,
        "save": True, "dropout": Dropout(0.2, 3, 1, mask=True), "post_ops": [post_ops.add(bias)], "out_dtype": "int8",
    }  # fmt: skip
    fusion("never")
    expected = several(runner(name, (x,), attributes)[1]())
    fusion("now")
    found, call = runner(name, (x,), attributes)
    assert found.plan.implementation == f"fused, {layout}, float32"
    assert several(call()) == expected
    threads = opgrad.get_num_threads()
    opgrad.set_num_threads(1)
    assert several(call()) == expected
    opgrad.set_num_threads(threads)
    check_forward(name, x, place=Placed, **attributes)


@pytest.mark.parametrize(
    ("name", "layout"), [("softmax_grad", "rows"), ("log_softmax_grad", "columns"), ("softmax_grad", "split")]
)
def test_gradient(name, layout, fusion, rng):
    shape, axis = SHAPES[layout]
    dy = numbers(rng, shape, "bfloat16", 1.0)
    y = cast(operators()[name.removesuffix("_grad")].reference(numbers(rng, shape, "float64", 1.5), axis), "float32")
    factor, mask = operands_for(rng, shape, axis)
    attributes = {
        "axis": axis, "where": mask, "result_scale": 2.0, "post_ops": [post_ops.mul(factor), post_ops.relu()],
        "out_dtype": "float32",
    } | ({"dropout": Dropout(0.2, 3, 1)} if layout == "rows" else {})  # fmt: skip
    fusion("never")
    expected = several(runner(name, (dy, y), attributes)[1]())
    fusion("now")
    found, call = runner(name, (dy, y), attributes)
    assert found.plan.implementation == f"fused, {layout}, float32"
    assert several(call()) == expected
    check_gradient(name, dy, y, place=Placed, **attributes)
    assert several(runner(name, (dy, out := y.copy()), attributes | {"out": out})[1]()) == expected


def test_rare_calls_go_through_stages(fusion, rng):
    """Nothing of these is compiled: other strides, three loops of an operand, many post-ops, short rows."""
    fusion("now")
    x = numbers(rng, (6, 5, 4, 130), "float32")
    many = [post_ops.add(x)] * 8
    for values, attributes in [
        ((x[..., ::2],), {"logit_scale": 2.0}),
        ((x,), {"where": rng.random((6, 1, 4, 130)) < 0.5, "post_ops": [post_ops.add(x[:, :, ::-1])]}),
        ((x,), {"post_ops": many}),
        ((x[..., :7],), {"logit_scale": 2.0}),
        ((laid_out(x, fortran),), {"dropout": Dropout(0.5), "axis": -1}),
        ((x,), {"post_ops": [post_ops.add(x.astype(np.float64))]}),
    ]:
        found, _ = runner("softmax", values, attributes)
        assert found.plan.implementation.startswith("stages"), attributes


def test_a_scale_that_float32_does_not_hold(fusion, rng):
    x = numbers(rng, (9, 131), "float32") * np.float32(1e37)
    fusion("never")
    expected = several(runner("softmax", (x,), {"logit_scale": 1e-40})[1]())
    fusion("now")
    found, call = runner("softmax", (x,), {"logit_scale": 1e-40})
    assert found.plan.implementation == "fused, rows, float32"
    assert several(call()) == expected
    check_forward("softmax", x, place=Placed, logit_scale=1e-40)


def test_softmax_of_attention(fusion, rng):
    x, bias = numbers(rng, (4, 6, 131), "float32"), numbers(rng, (4, 1, 131), "float32")
    mask, y = rng.random(x.shape) < 0.7, np.exp(-np.abs(x))
    for name, values in [("bias_softmax", (x, bias)), ("softmax_dropout_grad", (x, mask, y))]:
        fusion("never")
        expected = several(runner(name, values, {})[1]())
        fusion("now")
        found, call = runner(name, values, {})
        assert found.plan.implementation == "fused, rows, float32"
        assert several(call()) == expected


def test_refuses_another_choice(fusion, rng):
    fusion("soon")
    with pytest.raises(ValueError, match="OPGRAD_FUSION is 'soon', expected one of now, never"):
        opgrad.softmax(numbers(rng, (3, 211), "float32"), logit_scale=2.0)
