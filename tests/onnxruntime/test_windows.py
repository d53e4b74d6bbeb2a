"""The gradients of convolution and pooling in stock onnxruntime, beside its own operators."""

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import parser
from onnx_models import one_node, run, run_node
from small_models import build

import opgrad
from opgrad.onnxruntime import InferenceSession

F = np.float32
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


def forward(op_type, feeds, *outputs, **attributes):
    """The outputs of onnxruntime's own operator."""
    model = one_node(op_type, [(name, "float32") for name in feeds], outputs, domain="", **attributes)
    return onnxruntime.InferenceSession(model).run(None, feeds)


@pytest.mark.parametrize(
    ("op", "shape", "window", "attributes"),
    [*(("Conv", *each) for each in DIRECT), *(("ConvTranspose", *each) for each in TRANSPOSED)],
)
def test_derivative_of_onnxruntimes_own_convolution(op, shape, window, attributes):
    rng = np.random.default_rng(0)
    x, dx, w, dw = (rng.normal(size=each).astype(F) for each in (shape, shape, window, window))

    def conv(x, w):
        return forward(op, {"x": x, "w": w}, ("y", "float32"), **attributes)[0]

    dy = rng.normal(size=conv(x, w).shape).astype(F)
    found = run_node(f"{op}Grad", {"dy": dy, "x": x, "w": w}, "dx", "dw", "db", **attributes)
    np.testing.assert_allclose((found[0] * dx).sum(), (dy * conv(dx, w)).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((found[1] * dw).sum(), (dy * conv(x, dw)).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[2], dy.sum((0, *range(2, dy.ndim))), rtol=1e-4, atol=1e-4)


def test_same_numbers_as_the_original():
    """Whole numbers, of which onnxruntime-training 1.19.2 gives these exact sums."""
    x = (np.arange(18, dtype=F).reshape(1, 2, 3, 3) % 7) - 3
    w = (np.arange(8, dtype=F).reshape(2, 1, 2, 2) % 5) - 2
    dy = ((np.arange(18, dtype=F) * 5) % 11 - 5).reshape(1, 2, 3, 3)
    attributes = {"pads": [1, 0, 0, 1], "group": 2, "kernel_shape": [2, 2]}
    dx, dw, db = run_node("ConvGrad", {"dy": dy, "x": x, "w": w}, "dx", "dw", "db", **attributes)
    assert dx.tolist() == [[[[2, -12, 0], [-6, 2, 3], [0, 3, -3]], [[4, 9, -7], [8, -17, 11], [-4, 2, -3]]]]
    assert dw.tolist() == [[[[-2, -5], [24, 14]]], [[[-8, 23], [11, -18]]]]
    assert db.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 3, 11), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
        ((2, 3, 8, 9), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((2, 3, 8, 9), {"kernel_shape": [3, 4], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
        ((1, 2, 7, 9), {"kernel_shape": [3, 4], "strides": [2, 3], "pads": [1, 0, 0, 2], "ceil_mode": 1}),
        ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2]}),
    ],
)
def test_derivative_of_onnxruntimes_own_pooling(shape, attributes):
    rng = np.random.default_rng(0)
    x = rng.permutation(np.prod(shape)).reshape(shape).astype(F) / np.prod(shape).astype(F)
    direction = rng.normal(size=shape).astype(F)
    y, indices = forward("MaxPool", {"x": x}, ("y", "float32"), ("indices", "int64"), **attributes)
    dy = rng.normal(size=y.shape).astype(F)
    declared = {"domain": "", "shapes": {"dx": ["N", *shape[1:]]}}
    dx = run_node("MaxPoolGrad", {"dy": dy, "indices": indices}, **declared, **attributes)[0]
    np.testing.assert_allclose((dx * direction).sum(), (dy * direction.ravel()[indices]).sum(), rtol=1e-4, atol=1e-4)
    for flag in (0, 1):
        averaged = {**attributes, "count_include_pad": flag}
        dx = run_node("AveragePoolGrad", {"dy": dy}, domain="", shapes={"dx": shape}, **averaged)[0]
        change = forward("AveragePool", {"x": direction}, ("y", "float32"), **averaged)[0]
        np.testing.assert_allclose((dx * direction).sum(), (dy * change).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [9, 13, 17, 22])
@pytest.mark.parametrize("imports_microsoft", [False, True])
def test_beside_onnxruntimes_own_operators(opset, imports_microsoft):
    model = parser.parse_model(
        f"""<ir_version: 4, opset_import: ["": {opset}{', "com.microsoft": 1' if imports_microsoft else ""}]>
        g (float[N, 1, 2] dy, int64[] indices) => (float[] z) <float[N, 1, 5] dx> {{
            twice = Add (dy, dy)  dx = MaxPoolGrad <kernel_shape = [2]> (twice, indices)  z = Relu (dx)
        }}"""
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    opgrad.onnxruntime.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for images in (1, 3):
        dy = np.arange(1, 2 * images + 1, dtype=F).reshape(images, 1, 2)
        indices = (np.arange(images) * 5).reshape(-1, 1, 1) + np.array([1, 4])
        z = session.run(None, {"dy": dy, "indices": indices})[0]
        expected = np.zeros((images, 1, 5), F)
        expected[..., [1, 4]] = 2 * dy
        np.testing.assert_array_equal(z, expected)


def test_models_of_plain_operators_stay_as_they_are():
    text = "g (float[2, 3] x) => (float[2, 3] y) { y = Softmax <axis = 1> (x) }"
    model = build(text, opset=13).SerializeToString()
    x = np.array([[1, 2, 3], [0, 0, 5]], F)
    plain = onnxruntime.InferenceSession(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(InferenceSession(model).run(None, {"x": x})[0], plain)


POOLED = [("dy", "float32"), ("indices", "int64")]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "MaxPoolGrad: dx has no declared shape, expected one: add a value_info entry"),
        (
            {"dx": ["N", "C", "H", 4]},
            r"MaxPoolGrad: dx is declared with shape \(\?, \?, \?, 4\), expected numbers from axis 2",
        ),
    ],
)
def test_shapes_that_the_graph_does_not_give(shapes, message):
    with pytest.raises(Exception, match=message):
        InferenceSession(one_node("MaxPoolGrad", POOLED, [("dx", "float32")], domain="", shapes=shapes))


@pytest.mark.parametrize(
    ("declared", "indices", "message"),
    [
        ([1, 1, 5], np.zeros((1, 1, 2, 2), int), r"dy has shape \(1, 1, 2, 2\), expected \(1, 1, …\) of 3 dim"),
        ([1, 2, 5], np.array([[[0], [4]]]), r"indices\[0, 1, 0\] is 4, expected 5 to 9"),
    ],
    ids=["another shape than the declared one", "out of range"],
)
def test_wrong_indices(declared, indices, message):
    feeds = {"dy": np.zeros(indices.shape, F), "indices": indices}
    with pytest.raises(Exception, match=f"max_pool_grad: {message}"):
        run_node("MaxPoolGrad", feeds, domain="", shapes={"dx": declared})


ORIGINAL = {  # by count_include_pad
    0: [
        [0.25, 0.5833333730697632, 0.3333333432674408, 1.0833333730697632, 0.75],
        [0.9166666865348816, 1.8055555820465088, 0.888888955116272, 2.6388888359069824, 1.75],
        [0.6666666865348816, 1.2222223281860352, 0.5555555820465088, 1.5555555820465088, 1.0],
        [2.4166667461395264, 4.305555820465088, 1.888888955116272, 5.138888835906982, 3.25],
        [1.75, 3.0833334922790527, 1.3333333730697632, 3.5833334922790527, 2.25],
    ],
    1: [
        [0.1111111119389534, 0.3333333432674408, 0.2222222238779068, 0.5555555820465088, 0.3333333432674408],
        [0.5555555820465088, 1.3333333730697632, 0.7777777910232544, 1.777777910232544, 1.0],
        [0.4444444477558136, 1.0, 0.5555555820465088, 1.2222223281860352, 0.6666666865348816],
        [1.2222222089767456, 2.6666667461395264, 1.4444444179534912, 3.1111111640930176, 1.6666667461395264],
        [0.7777777910232544, 1.6666667461395264, 0.8888888955116272, 1.8888888359069824, 1.0],
    ],
}


def test_pooling_has_the_numbers_of_the_original():
    """dx of onnxruntime-training 1.19.2 for overlapping windows with padding."""
    dy = np.arange(1, 10, dtype=F).reshape(1, 1, 3, 3)
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    for flag, expected in ORIGINAL.items():
        given = {"domain": "", "shapes": {"dx": [1, 1, 5, 5]}, "count_include_pad": flag, **attributes}
        np.testing.assert_allclose(run_node("AveragePoolGrad", {"dy": dy}, **given)[0][0, 0], expected, rtol=1e-6)
