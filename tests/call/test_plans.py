"""Plans: one for each signature in a process, and those of users: results, arrays, what is refused, threads."""

import os

import numpy as np
import pytest
from callers import call_at_once
from planned import softmax_grad_plan, softmax_plan
from primitive_attributes import SHARED, every_attribute, typed_call
from samples import bits, packed, refused, several
from subprocesses import run_python

import opgrad
from opgrad import post_ops
from opgrad.cli.examples import signatures
from opgrad.contract import Spec
from opgrad.contract.signature import prepare
from opgrad.cpu import plans
from opgrad.cpu.compiler import decorators
from opgrad.ops import graph_operators, operators
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import TYPES

X = np.linspace(-1, 1, 26 * 11, dtype=np.float32).reshape(26, 11)


@pytest.fixture
def made(monkeypatch):
    """The operators of the plans that are made from now on, by name."""
    found, make = [], plans._new_plan
    monkeypatch.setattr(plans, "_new_plan", lambda prepared: found.append(prepared.operator.name) or make(prepared))
    return found


def test_numpy_functions_and_plans_that_users_keep(made):
    """A result that a call makes or brings, and an axis in any spelling, are one signature."""
    y = opgrad.softmax(X)
    for axis in (-1, 1, (1,), np.int64(1)):
        np.testing.assert_array_equal(opgrad.softmax(X, axis=axis), y)
        np.testing.assert_array_equal(opgrad.softmax(X, axis, out=np.empty_like(X)), y)
    assert softmax_plan(X.shape, "float32")(X, out=np.empty_like(X)).tobytes() == y.tobytes()
    opgrad.plan(opgrad.softmax, X, out=np.empty_like(X))
    assert made == ["softmax"]


def test_tensors(made):
    torch = pytest.importorskip("torch")
    opgrad.relu(X)
    np.testing.assert_array_equal(opgrad.relu(torch.from_numpy(X)).numpy(), np.maximum(X, 0))
    opgrad.relu(torch.from_numpy(X), out=torch.empty(X.shape))
    assert made == ["relu"]


def test_jax(made):
    jax = pytest.importorskip("jax")
    y = opgrad.tanh(X)
    np.testing.assert_array_equal(opgrad.tanh(jax.numpy.asarray(X)), y)
    np.testing.assert_array_equal(jax.jit(opgrad.tanh)(X), y)
    assert made.count("tanh") == 1


def test_nodes_of_onnxruntime(made):
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import parser

    import opgrad.onnxruntime

    opgrad.softmax_grad(X, X)
    text = """<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[n,m] dy, float[n,m] y) => (float[n,m] dx) { dx = com.microsoft.SoftmaxGrad_13 <axis = -1> (dy, y) }"""
    model = parser.parse_model(text).SerializeToString()
    for _ in range(2):
        options = onnxruntime.SessionOptions()
        opgrad.onnxruntime.register(options)
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        (dx,) = session.run(None, {"dy": X, "y": X})
        assert dx.tobytes() == opgrad.softmax_grad(X, X).tobytes()
    assert made == ["softmax_grad"]


def test_threads_that_ask_at_once(made):
    found = []
    op = operators()["tanh"]
    call_at_once(8, lambda number: found.append(plans.plan(op, [Spec(X.shape, X.dtype)], {})))
    assert made == ["tanh"]
    assert len(set(map(id, found))) == 1


def test_results_that_are_made_and_brought_are_one_signature():
    """Of every example of every operator."""
    for op in {**operators(), **graph_operators()}.values():
        for of, specs, attributes in signatures(op, "float32"):
            made = prepare(of, specs, attributes)
            results = [made.specs[name] for name in of.results]
            assert plans._key(made) == plans._key(prepare(of, specs, attributes, results)) is not None, of.name


def test_the_oldest_plan_goes_first(monkeypatch, made):
    monkeypatch.setattr(plans.PLANS, "most", 2)
    op = operators()["tanh"]
    for size in (1, 2, 3, 3, 2, 1):
        plans.plan(op, [Spec((size,), X.dtype)], {})
    assert len(made) == 4


def test_a_plan_that_may_lack_kernels_is_not_kept(made):
    """While kernels are noted, and not compiled, plans cannot be run."""
    op = operators()["tanh"]
    with decorators.noting():
        noted = plans.plan(op, [Spec(X.shape, X.dtype)], {})
    assert plans.plan(op, [Spec(X.shape, X.dtype)], {}) is not noted
    assert made == ["tanh", "tanh"]


FORK = """
import os
import re
from pathlib import Path
import numpy as np, opgrad
from opgrad.cpu.compiler import decorators
from opgrad.cpu import plans
x = np.ones((3, 41), np.float32)
opgrad.relu(x)
before = dict(plans.PLANS.values)
child = os.fork()
if child == 0:
    plan = opgrad.plan(opgrad.relu, x, out=np.empty_like(x))
    opgrad.tanh(x)
    os._exit(0 if plan._runner.plan in before.values() and len(plans.PLANS.values) == len(before) + 1 else 1)
print(os.waitpid(child, 0)[1] == 0 and plans.PLANS.values == before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_child_has_the_plans():
    assert run_python(FORK) == "True"


SHAPE = (6, 50)


@pytest.fixture
def x(rng):
    return rng.normal(0, 2, SHAPE).astype(np.float32)


def test_attributes_and_dtypes(rng):
    calls = [(rng.normal(size=SHARED).astype("float32"), every_attribute(rng))]
    for x, attributes in [*calls, *(typed_call(TYPES.index(each), rng) for each in ("bfloat16", "int8"))]:
        expected = opgrad.softmax(x, **attributes)
        out = tuple(map(np.empty_like, several(expected)))
        given = packed(out)
        assert softmax_plan(x.shape, x.dtype, **attributes)(x, out=given) is given
        assert [bits(each) for each in out] == [bits(each) for each in several(expected)]


def test_other_plans(x):
    y, dx = opgrad.log_softmax(x), np.empty_like(x)
    softmax_plan(SHAPE, np.float32, function=opgrad.log_softmax)(x, out=dx)
    assert bits(dx) == bits(y)
    softmax_grad_plan(SHAPE, "float32", function=opgrad.log_softmax_grad)(x, y, out=dx)
    assert bits(dx) == bits(opgrad.log_softmax_grad(x, y))
    half = y.astype(np.float16)
    softmax_grad_plan(SHAPE, "float32", y_dtype="float16", logit_scale=2.0)(x, half, out=dx)
    assert bits(dx) == bits(opgrad.softmax_grad(x, half, logit_scale=2.0))


def test_a_plan_of_any_operator(x):
    out = np.empty_like(x)
    opgrad.plan(opgrad.relu_grad, x, x, out=out)(x, x[::1], out=out)
    assert bits(out) == bits(opgrad.relu_grad(x, x))
    labels, loss, gradient = np.arange(6), np.empty((), np.float32), np.empty_like(x)
    plan = opgrad.plan(opgrad.softmax_cross_entropy_loss_and_grad, x, labels, out=(loss, gradient))
    plan(x, labels, out=(loss, gradient))
    expected = opgrad.softmax_cross_entropy_loss_and_grad(x, labels)
    assert bits(loss) == bits(expected[0])
    assert bits(gradient) == bits(expected[1])


def test_an_error_in_the_data_is_told(x):
    labels, loss = np.full(6, 99), np.empty((), np.float32)
    plan = opgrad.plan(opgrad.softmax_cross_entropy_loss_only, x, np.zeros(6, int), out=loss)
    refused(ValueError, "labels", plan, x, labels, out=loss)


def test_more_arrays_than_native_code_takes_one_by_one(x, rng):
    operands = [rng.normal(size=SHAPE).astype(np.float32) for _ in range(9)]
    chain = [post_ops.add(each) for each in operands]
    plan, y = softmax_plan(SHAPE, "float32", post_ops=chain), np.empty_like(x)
    plan(x, out=y)
    assert bits(y) == bits(opgrad.softmax(x, post_ops=chain))
    refused(ValueError, "out for y overlaps post_ops", plan, x, out=operands[3])


def test_arrays_of_attributes_may_change(x, rng):
    bias, other = rng.normal(size=(2, 50)).astype(np.float32)
    where, y, twice = rng.random(SHAPE) < 0.5, np.empty(SHAPE, np.float16), post_ops.linear(2.0)
    given = {"post_ops": [twice, post_ops.mul(bias)], "where": ~where, "dropout": Dropout(0.5, seed=1)}
    plan = softmax_plan(SHAPE, "float32", **given, out_dtype="float16")
    plan(x, out=y, operands=[other], where=where, seed=2, offset=3)
    changed = {"post_ops": [twice, post_ops.mul(other)], "where": where, "dropout": Dropout(0.5, 2, 3)}
    assert bits(y) == bits(opgrad.softmax(x, **changed, out_dtype="float16"))
    bias[:] = 0
    assert not plan(x, out=y).any()


def test_seeds_are_those_of_dropout(x):
    dropout = Dropout(0.5, seed=5)
    plan, y = softmax_plan(SHAPE, "float32", dropout=dropout), np.zeros_like(x)
    dropout.seed = 6  # which the plan does not see
    plan(x, out=y)
    assert bits(y) == bits(opgrad.softmax(x, dropout=Dropout(0.5, seed=5)))
    for seed in (-1, 2**64 - 1, 2**63, np.int32(7)):
        plan(x, out=y, seed=seed, offset=seed)
        assert bits(y) == bits(opgrad.softmax(x, dropout=Dropout(0.5, seed, seed)))
    y[:] = 0
    for wrong, error in ((1.5, TypeError), ("1", TypeError), (2**64, ValueError)):
        refused(error, "seed is", plan, x, out=y, seed=wrong)
    assert not y.any()


def test_strides(x):
    plan = softmax_plan(SHAPE, "float32", strides=(4, 24), out_strides=(400, 8))
    memory = np.empty((6, 100), np.float32)
    columns = np.asfortranarray(x)
    plan(columns, out=memory[:, ::2])
    assert bits(memory[:, ::2]) == bits(opgrad.softmax(columns))
    refused(ValueError, r"x has strides \(200, 4\), expected \(4, 24\), as planned", plan, x, out=memory[:, ::2])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": np.zeros((6, 51), np.float32)}, ValueError, r"x has shape \(6, 51\), expected \(6, 50\), as planned"),
        ({"x": np.zeros(SHAPE)}, TypeError, "x has dtype float64, expected float32, as planned"),
        ({"x": [[0.0] * 50] * 6}, TypeError, "x is list, expected a NumPy array"),
        ({"out": np.zeros((50, 6), np.float32)}, ValueError, r"out for y has shape \(50, 6\), expected \(6, 50\)"),
        ({"out": np.zeros(SHAPE, np.float16)}, TypeError, "out for y has dtype float16, expected float32"),
        ({"out": (np.zeros(SHAPE, np.float32),) * 2}, TypeError, "1 arrays and 2 for out, expected x and 1 for out"),
        ({"where": np.ones(SHAPE, bool)}, ValueError, "where is given, but none is planned"),
        ({"operands": [1.0]}, ValueError, "operands has 1 arrays, expected 0"),
        ({"seed": 1}, ValueError, "seed is given, but no dropout is planned"),
    ],
)
def test_refuses_what_is_not_as_planned(x, given, error, message):
    plan, y = softmax_plan(SHAPE, "float32"), np.zeros_like(x)
    arguments = {"x": x, "out": y} | given
    refused(error, message, plan, arguments.pop("x"), **arguments)
    assert not y.any()


def test_refuses_a_read_only_out_and_an_overlap(x):
    plan = softmax_plan((5, 50), "float32")
    y = np.zeros((5, 50), np.float32)
    y.flags.writeable = False
    refused(ValueError, "out for y is read-only, expected a writable array", plan, x[:5], out=y)
    refused(ValueError, "out for y overlaps x, expected x itself or separate memory", plan, x[:5], out=x[1:])


def test_an_equal_dtype_that_is_another_object(x):
    y, other = np.empty_like(x), np.dtype(np.float32).newbyteorder("=")
    same = x.view(np.dtype(x.dtype.str, metadata={"from": "elsewhere"}))
    assert other == x.dtype
    softmax_plan(SHAPE, "float32")(same, out=y)
    assert bits(y) == bits(opgrad.softmax(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: softmax_plan(SHAPE, "float32", axis=2), ValueError, "softmax: axis is 2"),
        (lambda: softmax_plan(SHAPE, "int64"), TypeError, "softmax: x has dtype int64"),
        (lambda: opgrad.plan(len, [1]), TypeError, "plan: function is .*, expected an operator of opgrad"),
        (lambda: opgrad.plan(opgrad.relu, np.ones(3)), TypeError, "plan: relu has no out, expected an array"),
    ],
)
def test_refuses_to_plan(call, error, message):
    refused(error, message, call)


def test_tells_how():
    plan = softmax_plan((6, 40), "float32", post_ops=[post_ops.add(np.zeros(40, np.float32))])
    assert plan.implementation == "fused, rows, float32"
    assert plan.bytes_moved == 6 * 40 * 4 + 40 * 4 + 6 * 40 * 4
    assert plan.scratch_bytes > 0
    assert "softmax" in repr(plan)
    assert softmax_plan(SHAPE, "float16").implementation == "softmax_rows"
