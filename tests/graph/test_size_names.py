"""Sizes may have any name: what tools write for a size that they do not know, and what people write."""

import numpy as np
import onnxruntime
import pytest
from differences import build
from gradient_cases import numbers
from onnx import numpy_helper

from opgrad.gradients import gradients
from opgrad.onnxruntime import InferenceSession, lower

NAMES = [
    "batch size", "größe", "批", "😀", "a.b/c:d", "p2o.DynamicDimension.0", "N+1", "2*N", "-N", "floor(N/2)", "%s",
    "{", '"',
    "\n", " ", "a" * 300,
    # what looks like a number
    "0", "1", "3", "007", "1e3", "-1", "--1", "+1", "1.0", "0x10", "inf",
    # what stands for no name
    "", "?", "unk__0", "unknown", "None", "null", "nan", "*", "any",
    # names of values of the graph, and of those that are made
    "x", "w", "y", "x_grad", "target", "loss", "0_grad",
]  # fmt: skip
# Everything that is concluded from sizes: shape arithmetic, reshaping, broadcasting, windows without known sizes.
BODY = """
    h = MatMul(x, w)
    c = Conv <kernel_shape = [1, 1]> (h, k)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
    a = AveragePool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (c)
    s = Shape(h)
    n = Gather(s, first)
    wanted = Concat <axis = 0> (n, rest)
    flat = Reshape(h, wanted)
    t = ReduceSum <keepdims = 0> (flat)
    u = ReduceSum <keepdims = 0> (p)
    v = ReduceMean <keepdims = 0> (a)
    r = Add(t, u)
    q = Add(r, v)
    z = Mul(h, q)
    y = Add(z, bias)
"""
WEIGHTS = {"w": numbers(6, 4), "k": numbers(2, 2, 1, 1), "bias": numbers(4)}


def model_of(*names):
    """A graph of pictures [.., 2, .., 6] with these names of the first size and of the third."""
    model = build(f"g (float[A, 2, B, 6] x) => (float[A, 2, B, 4] y) {{ {BODY} }}")
    for value in (*model.graph.input, *model.graph.output):
        for axis, name in zip((0, 2), names, strict=True):
            value.type.tensor_type.shape.dim[axis].dim_param = name
    arrays = {
        **{name: each.astype(np.float32) for name, each in WEIGHTS.items()},
        "first": np.array([0]),
        "rest": np.array([-1, 8]),
    }
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in arrays.items())
    return model


def results(names, x):
    """The gradients in both forms, and the results of the lowered model."""
    plain, other = (gradients(model_of(*names), "y", ["x", *WEIGHTS], plain=plain) for plain in (True, False))
    yield from onnxruntime.InferenceSession(plain.SerializeToString()).run(None, {"x": x})
    yield from InferenceSession(other.SerializeToString()).run(None, {"x": x})
    yield from onnxruntime.InferenceSession(lower(model_of(*names)).SerializeToString()).run(None, {"x": x})


def pictures():
    return numbers(3, 2, 5, 6).astype(np.float32)


@pytest.fixture(scope="module")
def expected():
    return list(results(("N", "H"), pictures()))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_gradients_are_the_same_by_any_name(name, expected):
    """For one size, for the other, and where one name stands for both, though they differ."""
    for names in ((name, "H"), ("N", name), (name, name)):
        for found, other in zip(results(names, pictures()), expected, strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)
