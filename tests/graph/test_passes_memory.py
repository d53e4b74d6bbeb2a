"""Segments whose activations are computed again, and the order of nodes: what is alive at once, in onnxruntime."""

import numpy as np
import onnx
import pytest
from passes_cases import build, close, floats, operators, run, same_gradients, without_passes

from bench.steps.liveness import peak_bytes
from opgrad.gradients import gradients

WIDTH, LAYERS, ROWS = 16, 12, 256
IN_USE = 4  # gradients and intermediate results of the layer at work


def layered(layer, layers=LAYERS, inputs=""):
    """A chain of layers whose text has {i} and {o} for what it reads and makes, {n} for its number."""
    text = "\n".join(layer.format(i=f"h{n}", o=f"h{n + 1}", n=n) for n in range(layers))
    weights = {f"w{n}": floats(WIDTH, WIDTH, seed=n) / 2 for n in range(layers)}
    body = f"h0 = Identity(x)\n {text}\n q = Mul(h{layers}, h{layers})\n loss = ReduceSum <keepdims = 0> (q)"
    return build(f"g (float[N, {WIDTH}] x{inputs}) => (float loss) {{ {body} }}", weights), list(weights)


DENSE = "m{n} = MatMul({i}, w{n})\n t{n} = Tanh(m{n})\n s{n} = Sin(t{n})\n {o} = Add(s{n}, {i})"


def test_activations_that_are_computed_again_halve_the_memory():
    model, weights = layered(DENSE)
    feeds = {"x": floats(ROWS, WIDTH)}
    everything = gradients(model, "loss", weights)
    expected, before = run(everything, feeds), peak_bytes(everything, feeds)
    for segments in (2, 4, ["h3", "h6", "h9"]):
        found = gradients(model, "loss", weights, checkpoint_segments=segments)
        for one, other in zip(run(found, feeds), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        # All but one of k segments are forgotten; one tensor between each two stays, and some that are in use.
        count = segments if isinstance(segments, int) else len(segments) + 1
        most = before / count + (count - 1 + IN_USE) * ROWS * WIDTH * 4
        assert peak_bytes(found, feeds) <= most < 0.75 * before
    assert operators(gradients(model, "loss", weights, checkpoint_segments=1)) == operators(everything)


def test_gradients_of_weights_are_computed_as_soon_as_they_can_be():
    """In the order of the file alone, the one of the first layer would wait for none of the others."""
    model, weights = layered("m{n} = MatMul({i}, w{n})\n {o} = Tanh(m{n})")
    feeds = {"x": floats(ROWS, WIDTH)}
    with without_passes():
        before = peak_bytes(gradients(model, "loss", weights), feeds)
    assert peak_bytes(gradients(model, "loss", weights), feeds) < 0.8 * before


def test_dropout_is_computed_again_with_its_mask():
    layer = "m{n} = MatMul({i}, w{n})\n d{n}, k{n} = Dropout <seed = {n}> (m{n}, ratio, train)\n {o} = Tanh(d{n})"
    model, weights = layered(layer, 4, ", bool train")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.25), "ratio"))
    feeds = {"x": floats(32, WIDTH), "train": np.array(True)}
    found = gradients(model, "loss", ["x", *weights], checkpoint_segments=2)
    assert operators(found).count("Dropout") == 4
    for train in (True, False):
        feeds["train"] = np.array(train)
        # onnxruntime draws from a seed what it drew in another session from this seed.
        close(run(found, feeds), run(gradients(model, "loss", ["x", *weights]), feeds))


def test_batch_normalization_is_computed_again_and_moves_its_statistics_once():
    text = """g (float[N, 2, 8, 8] x) => (float loss, float[2] mean1, float[2] var1) {
        a = Sin(x)\n y, mean1, var1 = BatchNormalization <training_mode = 1, momentum = 0.5> (a, scale, bias, mean, var)
        c = Mul(y, y)\n b = Tanh(c)\n d = Sin(b)\n e = Mul(d, d)\n loss = ReduceSum <keepdims = 0> (e) }"""
    constants = {name: floats(2, seed=place) + 2 for place, name in enumerate(("scale", "bias", "mean", "var"))}
    model = build(text, constants)
    feeds = {"x": floats(3, 2, 8, 8)}
    found = same_gradients(model, ["x", "scale", "bias"], feeds, checkpoint_segments=["b"])
    assert operators(found).count("BatchNormTraining") == 1
    assert operators(found).count("BatchNormalization") == 1


def test_segments_of_a_graph_with_branches_and_several_outputs():
    text = """g (float[N, 16] x, int64[N] ids) => (float loss, float[N, 16] c, float metric) {
        e = Gather(table, ids)\n a = Add(x, e)\n b = Tanh(a)\n c = Sin(b)\n d = Exp(a)\n f = Mul(c, d)\n g = Add(f, a)
        h = Tanh(g)\n i = Mul(h, h)\n metric = ReduceMax <keepdims = 0> (h)
        loss = ReduceSum <keepdims = 0> (i) }"""
    model = build(text, {"table": floats(5, 16)})
    feeds = {"x": floats(3, 16), "ids": np.array([0, 4, 0])}
    for segments in (2, 3, 5, ["a"], ["f", "g"]):
        for plain in (False, True):
            same_gradients(model, ["x", "table"], feeds, checkpoint_segments=segments, plain=plain)


def test_more_segments_than_nodes():
    model = build("g (float[N, 4] x) => (float loss) { y = Tanh(x)\n loss = ReduceSum <keepdims = 0> (y) }")
    same_gradients(model, ["x"], {"x": floats(2, 4)}, checkpoint_segments=100)


def test_equal_calls_give_equal_bytes():
    model, weights = layered(DENSE, 3)
    found = [gradients(model, "loss", weights, checkpoint_segments=2) for _ in range(2)]
    assert len({each.SerializeToString(deterministic=True) for each in found}) == 1


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (0, ValueError, "the number of segments is 0, expected at least 1"),
        ("h1", TypeError, "checkpoint_segments is 'h1', expected a number of segments or names"),
        (1.5, TypeError, "checkpoint_segments is 1.5"),
        ([], TypeError, "expected a number of segments or names"),
        (["h1", "no"], ValueError, "no node between inputs and loss makes 'no'"),
    ],
)
def test_other_segments_are_refused(segments, error, message):
    model, weights = layered(DENSE, 2)
    with pytest.raises(error, match=message):
        gradients(model, "loss", weights, checkpoint_segments=segments)
