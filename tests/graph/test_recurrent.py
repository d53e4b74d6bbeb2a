"""Recurrent layers with the batch in front, which stock onnxruntime refuses, are computed with time in front."""

import numpy as np
import onnxruntime
import pytest
from differences import build, run
from gradient_cases import numbers
from onnx import numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import load
from opgrad.onnxruntime import InferenceSession, lower

LAYERS = {"RNN": 1, "GRU": 3, "LSTM": 4}  # and their gates
BODY = '{results} = {op} <hidden_size = 2, direction = "bidirectional", layout = 1> (x, w, r, b, {states})'


def model_of(op, inside=False):
    """A layer that makes all of its results; inside of the branch of an If, too."""
    names = ["h", "c"][: 1 + (op == "LSTM")]
    body = BODY.format(op=op, results=", ".join(["y", *(f"y{each}" for each in names)]), states=f", {', '.join(names)}")
    inputs = ", ".join(["float[N, T, 3] x", *(f"float[N, 2, 2] {each}" for each in names)])
    text = f"{body}\n s = ReduceSum <keepdims = 0> (yh)\n z = Add(y, s)"
    if inside:
        branch = f"{{ {text} }}".replace("z = ", "inner = ")
        text = (
            f"z = If (yes) <then_branch = a () => (float[N, T, 2, 2] inner) {branch}, "
            f"else_branch = e () => (float[N, T, 2, 2] inner) {branch}>"
        )
    model = build(f"g ({inputs}) => (float[N, T, 2, 2] z) {{ {text} }}", 14)
    gates = LAYERS[op]
    constants = {
        "w": numbers(2, 2 * gates, 3),
        "r": numbers(2, 2 * gates, 2, seed=1),
        "b": numbers(2, 4 * gates, seed=2),
    }
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    feeds = {"x": numbers(4, 5, 3), **{each: numbers(4, 2, 2, seed=3) for each in names}}
    return model, {name: value.astype(np.float32) for name, value in feeds.items()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("op", LAYERS)
def test_results_are_those_of_the_layer(op, inside):
    """The reference takes batches in front; onnxruntime takes what becomes of the layer, in branches, too."""
    model, feeds = model_of(op, inside)
    expected = run(model_of(op)[0], feeds)[0]
    written = load(model, "test")
    assert onnxruntime.InferenceSession(written.SerializeToString()).run(None, feeds)[0] == pytest.approx(
        expected, 1e-5
    )
    lowered = lower(model)
    assert onnxruntime.InferenceSession(lowered.SerializeToString()).run(None, feeds)[0] == pytest.approx(
        expected, 1e-5
    )


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("op", LAYERS)
def test_gradients_run_in_onnxruntime(op, plain):
    """They are those of the reference, which tests/gradients/test_rules.py compares with differences."""
    model, feeds = model_of(op)
    wanted = [*feeds, "w", "r", "b"]
    expected = run(gradients(model, "z", wanted, plain=True), feeds)
    graph = gradients(model, "z", wanted, plain=plain)
    session = (onnxruntime.InferenceSession if plain else InferenceSession)(graph.SerializeToString())
    for mine, other in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
