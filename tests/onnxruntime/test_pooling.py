"""The gradients of pooling in stock onnxruntime: beside its own operators, with the shapes that graphs declare."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx_models import one_node, run

import opgrad
from opgrad.onnxruntime import InferenceSession

F = np.float32


def pooled(op_type, x, opset=17, **attributes):
    """The forward's outputs, from onnxruntime itself."""
    outputs = ["y", "indices"][: 1 + (op_type == "MaxPool")]
    node = helper.make_node(op_type, ["x"], outputs, **attributes)
    infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, (1, 7), strict=False)]
    graph = helper.make_graph([node], "forward", [helper.make_tensor_value_info("x", 1, x.shape)], infos)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})


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
    y, indices = pooled("MaxPool", x, **attributes)
    dy = rng.normal(size=y.shape).astype(F)
    model = one_node(
        "MaxPoolGrad", [("dy", "float32"), ("indices", "int64")], [("dx", "float32")],
        domain="", shapes={"dx": ["N", *shape[1:]]}, **attributes,
    )  # fmt: skip
    dx = run(model, {"dy": dy, "indices": indices})[0]
    np.testing.assert_allclose((dx * direction).sum(), (dy * direction.ravel()[indices]).sum(), rtol=1e-4, atol=1e-4)
    for flag in (0, 1):
        averaged = {**attributes, "count_include_pad": flag}
        model = one_node(
            "AveragePoolGrad", [("dy", "float32")], [("dx", "float32")], domain="", shapes={"dx": shape}, **averaged
        )
        dx = run(model, {"dy": dy})[0]
        change = pooled("AveragePool", direction, **averaged)[0]
        np.testing.assert_allclose((dx * direction).sum(), (dy * change).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [9, 13, 17, 22])
@pytest.mark.parametrize("imports_microsoft", [False, True])
def test_beside_onnxruntimes_own_operators(opset, imports_microsoft):
    nodes = [
        helper.make_node("Add", ["dy", "dy"], ["twice"]),
        helper.make_node("MaxPoolGrad", ["twice", "indices"], ["dx"], kernel_shape=[2]),
        helper.make_node("Relu", ["dx"], ["z"]),
    ]
    infos = [helper.make_tensor_value_info("dy", 1, ["N", 1, 2]), helper.make_tensor_value_info("indices", 7, None)]
    graph = helper.make_graph(
        nodes, "g", infos, [helper.make_tensor_value_info("z", 1, None)],
        value_info=[helper.make_tensor_value_info("dx", 1, ["N", 1, 5])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets[: 1 + imports_microsoft], ir_version=4)
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
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    infos = [helper.make_tensor_value_info(name, 1, [2, 3]) for name in "xy"]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    x = np.array([[1, 2, 3], [0, 0, 5]], F)
    plain = onnxruntime.InferenceSession(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(InferenceSession(model).run(None, {"x": x})[0], plain)


INPUTS = [("dy", "float32"), ("indices", "int64")]


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
        InferenceSession(one_node("MaxPoolGrad", INPUTS, [("dx", "float32")], domain="", shapes=shapes))


def test_declared_shape_and_dy_disagree():
    model = one_node("MaxPoolGrad", INPUTS, [("dx", "float32")], domain="", shapes={"dx": [1, 1, 5]})
    with pytest.raises(Exception, match=r"max_pool_grad: dy has shape \(1, 1, 2, 2\), expected \(1, 1, …\) of 3 dim"):
        run(model, {"dy": np.zeros((1, 1, 2, 2), F), "indices": np.zeros((1, 1, 2, 2), np.int64)})


def test_out_of_range():
    model = one_node("MaxPoolGrad", INPUTS, [("dx", "float32")], domain="", shapes={"dx": [1, 2, 5]})
    with pytest.raises(Exception, match=r"max_pool_grad: indices\[0, 1, 0\] is 4, expected 5 to 9"):
        run(model, {"dy": np.zeros((1, 2, 1), F), "indices": np.array([[[0], [4]]])})


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


def test_same_numbers_as_the_original():
    """dx of onnxruntime-training 1.19.2 for overlapping windows with padding."""
    dy = np.arange(1, 10, dtype=F).reshape(1, 1, 3, 3)
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    for flag, expected in ORIGINAL.items():
        model = one_node(
            "AveragePoolGrad", [("dy", "float32")], [("dx", "float32")], domain="", shapes={"dx": [1, 1, 5, 5]},
            count_include_pad=flag, **attributes,
        )  # fmt: skip
        np.testing.assert_allclose(run(model, {"dy": dy})[0][0, 0], expected, rtol=1e-6)
