"""Batch normalization that trains, in models with gradients: a run changes neither model nor the caller's arrays."""

import numpy as np
import pytest
from differences import build, computed
from gradient_cases import numbers

from opgrad.gradients import gradients
from opgrad.onnx.passes import prepare
from opgrad.onnxruntime import InferenceSession

CHANNELS = 3
FRESH = {"bias": np.zeros(CHANNELS), "mean": np.zeros(CHANNELS), "scale": np.ones(CHANNELS), "var": np.ones(CHANNELS)}
LAYER = "BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)"
OUTPUT = f"float[N, {CHANNELS}, 4] y"


def model_of(body=f"y = {LAYER}", outputs=OUTPUT, fed=()):
    """A layer that nobody has trained yet: bias and mean, scale and variance are equal."""
    given = ", ".join([f"float[N, {CHANNELS}, 4] x", *(f"float[{CHANNELS}] {name}" for name in fed)])
    constants = {name: value.astype(np.float32) for name, value in FRESH.items() if name not in fed}
    return build(f"g ({given}) => ({outputs}) {{ {body} }}", constants=constants)


def pictures():
    return 3 + 2 * numbers(5, CHANNELS, 4).astype(np.float32)


@pytest.mark.parametrize("wanted", [["x"], ["x", "scale", "bias"]])
@pytest.mark.parametrize("plain", [True, False])
def test_all_runs_are_the_same(plain, wanted):
    moved = f"{OUTPUT}, float[{CHANNELS}] a_m, float[{CHANNELS}] a_v"
    found = gradients(model_of(f"y, a_m, a_v = {LAYER}", moved), "y", wanted, plain=plain)
    session, x = InferenceSession(found.SerializeToString()), pictures()
    first, *others = [[each.copy() for each in session.run(None, {"x": x})] for _ in range(4)]
    for other in others:
        for mine, again in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, again)
    mean, var = x.mean((0, 2)), x.var((0, 2))
    expected = (x - mean[:, None]) / np.sqrt(var + 1e-5)[:, None]
    np.testing.assert_allclose(first[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(first[1], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(first[2], 0.9 + 0.1 * var, rtol=1e-5)


def test_arrays_of_the_caller_stay():
    found = gradients(model_of(fed=("mean", "var")), "y", "x")
    assert [each.name for each in found.graph.output] == ["y", "x_grad"]
    feeds = {"x": pictures(), "mean": np.ones(CHANNELS, np.float32), "var": np.ones(CHANNELS, np.float32)}
    computed(found, feeds, plain=False)
    assert feeds["mean"].tolist() == feeds["var"].tolist() == [1] * CHANNELS
    plain = gradients(model_of(fed=("mean", "var")), "y", "x", plain=True)
    assert [each.name for each in plain.graph.output] == ["y", "x_grad"]


def test_two_layers_with_the_same_statistics():
    model = model_of(f"a = {LAYER}\n y = {LAYER.replace('(x', '(a')}")
    session, x = InferenceSession(gradients(model, "y", "x").SerializeToString()), pictures()
    first, second = (session.run(None, {"x": x})[0].copy() for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_what_is_computed_again_has_the_statistics_of_the_batch():
    model, feeds = model_of(f"b = {LAYER}\n c = Tanh(b)\n d = Mul(c, c)\n y = Tanh(d)"), {"x": pictures()}
    made = [gradients(model, "y", "x", checkpoint_segments=count) for count in (None, 2)]
    for mine, other in zip(*(computed(each, feeds, plain=False) for each in made), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_a_training_graph_goes_on_moving_its_statistics():
    internal = f"y = com.microsoft.{LAYER.replace('BatchNormalization', 'BatchNormInternal')}"
    feeds = {"x": pictures(), "mean": np.zeros(CHANNELS, np.float32), "var": np.ones(CHANNELS, np.float32)}
    computed(gradients(model_of(internal, fed=("mean", "var")), "y", "x"), feeds, plain=False)
    assert (feeds["mean"] != 0).all()


def test_statistics_of_a_layer_that_trains_are_its_own():
    names = [each.name for each in prepare(model_of()).graph.initializer]
    assert sorted(names) == sorted(FRESH)
