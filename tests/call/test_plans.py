"""One plan for each signature in a process, whoever asks for it."""

import os

import numpy as np
import pytest
from callers import call_at_once
from planned import softmax_plan
from subprocesses import run_python

import opgrad
from opgrad.call import functions
from opgrad.cli.examples import signatures
from opgrad.contract import Spec
from opgrad.contract.signature import prepare
from opgrad.cpu import plans
from opgrad.cpu.compiler import decorators
from opgrad.ops import graph_operators, operators

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
    from onnx import TensorProto, helper

    import opgrad.onnxruntime

    opgrad.softmax_grad(X, X)
    node = helper.make_node("SoftmaxGrad_13", ["dy", "y"], ["dx"], domain="com.microsoft", axis=-1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m"]) for name in ("dy", "y", "dx")]
    graph = helper.make_graph([node], "one", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
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
            results = [made.problem.specs[name] for name in of.results]
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
from opgrad.call import functions; from opgrad.cpu import plans
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


# Which Python functions the second call of a signature meets.
SECOND = """
import sys
import numpy as np
import opgrad

seen = []
def note(frame, event, argument):
    path = frame.f_code.co_filename.replace(chr(92), "/")
    if event == "call" and "/opgrad/" in path:
        seen.append((path.rpartition("/opgrad/")[2], frame.f_code.co_name))

x = np.ones((3, 300), np.float32)
opgrad.softmax(x)
sys.setprofile(note)
opgrad.softmax(x)
sys.setprofile(None)
assert not seen, seen
"""


@pytest.mark.skipif(not functions.SUPPORTED, reason="this Python has no native calls")
def test_the_second_call_meets_no_python():
    run_python(SECOND)
