"""The gradients of convolution in stock onnxruntime: what a node asks for, and beside onnxruntime's own convolution."""

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx_models import one_node, run

import opgrad
from opgrad.ops import graph_operators

F = np.float32
OP = graph_operators()["conv_grad"]
INPUTS = [("dy", "float32"), ("x", "float32"), ("w", "float32")]


def small():
    rng = np.random.default_rng(0)
    shapes = {"dy": (2, 6, 5, 4), "x": (2, 4, 5, 4), "w": (6, 2, 3, 3)}
    return {name: rng.normal(size=shape).astype(F) for name, shape in shapes.items()}


ATTRIBUTES = {"pads": [1, 1, 1, 1], "group": 2}


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(("dx", "dw", "db"), n)])
def test_any_outputs(wanted):
    last = max(("dx", "dw", "db").index(name) for name in wanted) + 1
    outputs = [(name, "float32") if name in wanted else None for name in ("dx", "dw", "db")[:last]]
    found = run(one_node("ConvGrad", INPUTS, outputs, **ATTRIBUTES), small())
    expected = opgrad.conv_grad(**small(), pads=(1, 1, 1, 1), group=2, needs=wanted)
    for got, exact in zip(found, expected if len(wanted) > 1 else [expected], strict=True):
        assert got.tobytes() == exact.tobytes()


def test_one_session_for_many_shapes():
    model = one_node("ConvGrad", INPUTS, [None, ("dw", "float32"), ("db", "float32")], strides=[2, 2])
    session = opgrad.onnxruntime.InferenceSession(model)
    rng = np.random.default_rng(1)
    for batch, size in ((1, 7), (3, 9), (1, 7), (2, 8)):
        x, w = rng.normal(size=(batch, 3, size, size)).astype(F), rng.normal(size=(5, 3, 3, 3)).astype(F)
        dy = rng.normal(size=(batch, 5, (size - 3) // 2 + 1, (size - 3) // 2 + 1)).astype(F)
        found = session.run(None, {"dy": dy, "x": x, "w": w})
        for got, exact in zip(found, opgrad.conv_grad(dy, x, w, strides=(2, 2), needs=("dw", "db")), strict=True):
            assert got.tobytes() == exact.tobytes()


DIRECT = [
    ((2, 4, 9), (6, 2, 3), {"strides": [2], "pads": [2, 1], "dilations": [2], "group": 2}),
    ((2, 3, 8, 9), (4, 3, 3, 4), {"strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 8, 9), (4, 3, 3, 4), {"strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 4, 7, 7), (4, 1, 3, 3), {"auto_pad": "VALID", "group": 4}),
    ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]}),
]
TRANSPOSED = [
    ((2, 4, 9), (4, 3, 3), {"strides": [2], "pads": [2, 1], "dilations": [2], "group": 2, "output_padding": [1]}),
    ((2, 3, 8, 9), (3, 4, 3, 4), {"strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 8, 9), (3, 4, 3, 2), {"strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 4, 7, 7), (4, 1, 3, 3), {"auto_pad": "VALID", "group": 4, "strides": [4, 1]}),
    ((1, 2, 4, 5), (2, 3, 3, 3), {"strides": [2, 2], "output_shape": [8, 12]}),
    ((1, 2, 3, 5), (2, 3, 2, 2), {"strides": [2, 2], "output_shape": [5, 9], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 4, 5, 6), (2, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]}),
]


@pytest.mark.parametrize(
    ("op", "shape", "window", "attributes"),
    [*(("Conv", *each) for each in DIRECT), *(("ConvTranspose", *each) for each in TRANSPOSED)],
)
def test_derivative_of_onnxruntimes_own_convolution(op, shape, window, attributes):
    rng = np.random.default_rng(0)
    x, dx, w, dw = (rng.normal(size=each).astype(F) for each in (shape, shape, window, window))

    def conv(x, w):
        node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
        infos = [helper.make_tensor_value_info(name, 1, None) for name in "xwy"]
        graph = helper.make_graph([node], "forward", infos[:2], infos[2:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w": w})[0]

    dy = rng.normal(size=conv(x, w).shape).astype(F)
    outputs = [(name, "float32") for name in ("dx", "dw", "db")]
    found = run(one_node(f"{op}Grad", INPUTS, outputs, **attributes), {"dy": dy, "x": x, "w": w})
    np.testing.assert_allclose((found[0] * dx).sum(), (dy * conv(dx, w)).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((found[1] * dw).sum(), (dy * conv(x, dw)).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[2], dy.sum((0, *range(2, dy.ndim))), rtol=1e-4, atol=1e-4)


def test_same_numbers_as_the_original():
    """Whole numbers, of which onnxruntime-training 1.19.2 gives these exact sums."""
    x = (np.arange(18, dtype=F).reshape(1, 2, 3, 3) % 7) - 3
    w = (np.arange(8, dtype=F).reshape(2, 1, 2, 2) % 5) - 2
    dy = ((np.arange(18, dtype=F) * 5) % 11 - 5).reshape(1, 2, 3, 3)
    outputs = [(name, "float32") for name in ("dx", "dw", "db")]
    model = one_node("ConvGrad", INPUTS, outputs, pads=[1, 0, 0, 1], group=2, kernel_shape=[2, 2])
    dx, dw, db = run(model, {"dy": dy, "x": x, "w": w})
    assert dx.tolist() == [[[[2, -12, 0], [-6, 2, 3], [0, 3, -3]], [[4, 9, -7], [8, -17, 11], [-4, 2, -3]]]]
    assert dw.tolist() == [[[[-2, -5], [24, 14]]], [[[-8, 23], [11, -18]]]]
    assert db.tolist() == [3, 1]


def test_wrong_shapes():
    feeds = small()
    feeds["dy"] = feeds["dy"][:, :, :4]
    with pytest.raises(Exception, match=r"conv_grad: dy has shape \(2, 6, 4, 4\), expected \(2, 6, 5, 4\)"):
        run(one_node("ConvGrad", INPUTS, [("dx", "float32")], **ATTRIBUTES), feeds)
