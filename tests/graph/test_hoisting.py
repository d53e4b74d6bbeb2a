"""Weights that a model keeps inside of its branches: they are moved out, results stay, and they are trained."""

import numpy as np
import onnx
import onnxruntime
from differences import build
from gradient_cases import numbers
from onnx import helper, numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import load

TEXT = """g (float[N, 3] x, bool positive) => (float[N, 2] y) {
    y = If (positive) <
        then_branch = a () => (float[N, 2] y1) {
            inner = If (positive) <
                then_branch = b () => (float[N, 2] y2) { y2 = MatMul(x, deep) },
                else_branch = c () => (float[N, 2] y3) { y3 = MatMul(x, deep) }
            >
            shifted = Add(inner, bias)
            y1 = Tanh(shifted)
        },
        else_branch = d () => (float[N, 2] y4) { p = MatMul(x, w)
            y4 = Add(p, bias) }
    >
}"""
# The branches with a weight, its name there, and whether it is a node; two names stand in two branches each.
PLACES = {"a": ("bias", False), "b": ("deep", True), "c": ("deep", False), "d": ("bias", True)}
SHAPES = {"bias": (2,), "deep": (3, 2)}


def branches(graph):
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
                yield from branches(attribute.g)


def model_of():
    model = build(TEXT)
    for seed, branch in enumerate(branches(model.graph)):
        name, is_node = PLACES[branch.name]
        tensor = numpy_helper.from_array(numbers(*SHAPES[name], seed=seed).astype(np.float32), name)
        if is_node:
            branch.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        else:
            branch.initializer.append(tensor)
    model.graph.initializer.append(numpy_helper.from_array(numbers(3, 2, seed=9).astype(np.float32), "w"))
    onnx.checker.check_model(model, full_check=True)
    return model


def both(model):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = numbers(4, 3).astype(np.float32)
    return [session.run(None, {"x": x, "positive": np.array(positive)})[0] for positive in (True, False)]


def test_results_stay_and_every_weight_is_an_initializer():
    written = load(model_of(), "test")
    assert all(not each.initializer for each in branches(written.graph))
    assert not any(node.op_type == "Constant" for each in branches(written.graph) for node in each.node)
    assert sorted(list(each.dims) for each in written.graph.initializer) == [[2], [2], [3, 2], [3, 2], [3, 2]]
    for mine, other in zip(both(written), both(model_of()), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_constant_that_is_a_result_stays():
    """onnxruntime takes no result of a branch that the branch does not make."""
    text = """g (bool c) => (float[2] y) { y = If (c) <
        then_branch = a () => (float[2] p) { p = Constant <value = float[2] {1, 2}> () },
        else_branch = b () => (float[2] q) { q = Constant <value = float[2] {3, 4}> () }> }"""
    written = load(build(text), "test")
    session = onnxruntime.InferenceSession(written.SerializeToString())
    assert [session.run(None, {"c": np.array(c)})[0].tolist() for c in (True, False)] == [[1, 2], [3, 4]]


def test_gradients_are_asked_for_by_their_names():
    model = build(
        """g (float[N, 3] x, bool c) => (float[N, 2] y) { y = If (c) <
        then_branch = a () => (float[N, 2] p) { w = Constant <value = float[3, 2] {1, 2, 3, 4, 5, 6}> ()
            p = MatMul(x, w) },
        else_branch = b () => (float[N, 2] q) { q = MatMul(x, v) }> }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((3, 2), np.float32), "v"))
    graph = gradients(model, "y", ["w", "v"], plain=True)
    x = numbers(4, 3).astype(np.float32)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    _, dw, dv = session.run(None, {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(dw, np.repeat(x.sum(0)[:, None], 2, 1), rtol=1e-5)
    assert not dv.any()
