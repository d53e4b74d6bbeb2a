"""Batch normalization as models are read: in evaluation mode it has one output."""

import numpy as np
import onnxruntime
import pytest
from small_models import build, normal

from opgrad.onnx.graph.conversion import evaluating
from opgrad.onnx.graph.loading import read_model
from opgrad.onnxruntime import lower

ARRAYS = normal(scale=(2,), bias=(2,), mean=(2,)) | {"var": np.array([0.5, 2], np.float32)}


def model(mode, outputs, opset=15, result="y"):
    """One normalization; mode: its attribute, None without."""
    attribute = "" if mode is None else f"<training_mode = {mode}>"
    text = f"""g (float[n, 2, 3] x) => (float{"[2]" if result == "m" else "[n, 2, 3]"} {result}) {{
        {outputs} = BatchNormalization{attribute}(x, scale, bias, mean, var)
    }}"""
    return build(text, ARRAYS, opset)


def eval_model(content, who):
    """A model as the front ends for training read it to evaluate."""
    found = read_model(content, who)
    evaluating(found)
    return found


def run(found):
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    return x, session.run(None, {"x": x})[0]


def by_given_statistics(x):
    scale, bias, mean, var = (ARRAYS[name].reshape(2, 1).astype(np.float64) for name in ARRAYS)
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


@pytest.mark.parametrize(
    ("mode", "outputs", "opset"),
    [(0, "y, m, v", 15), (None, "y, m, v", 14), (1, "y, m, v", 15), (1, "y", 15), (None, "y, m, v, s, i", 13)],
)
def test_an_eval_model_takes_given_statistics(mode, outputs, opset):
    """Also one that says that it trains: by the attribute or, in older opsets, by its outputs."""
    found = eval_model(model(mode, outputs, opset).SerializeToString(), "test")
    assert list(found.graph.node[0].output) == ["y"]
    x, y = run(found)
    np.testing.assert_allclose(y, by_given_statistics(x), rtol=1e-5, atol=1e-6)


def test_any_model_is_read_with_what_onnx_allows():
    for source in (model(0, "y, m, v"), model(None, "y, m, v", 14)):
        assert list(read_model(source.SerializeToString(), "test").graph.node[0].output) == ["y"]
        assert list(lower(source).graph.node[0].output) == ["y"]
    for trains in (model(1, "y, m, v"), model(None, "y, m, v, s, i", 13)):
        assert read_model(trains.SerializeToString(), "test").graph == trains.graph


def test_statistics_that_somebody_reads_are_those_that_were_given():
    y = run(eval_model(model(0, "y, m, v", result="m").SerializeToString(), "test"))[1]
    np.testing.assert_array_equal(y, ARRAYS["mean"])
