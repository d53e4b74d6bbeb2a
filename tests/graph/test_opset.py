"""Raising the opset of a model keeps what it computes, and all that is in it."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper, parser

from opgrad.gradients import gradients
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnxruntime import lower


def build(text, opset, **constants):
    """A model from the text of its graph, with initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "my": 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), key) for key, each in constants.items())
    return model


def run(model, **feeds):
    """The results of a model in stock onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


X = np.linspace(-3, 3, 48, dtype=np.float32).reshape(1, 2, 4, 6)
MEANINGS = {
    "Upsample, linear": (7, 'y = Upsample <mode = "linear", scales = [1.0, 1.0, 2.0, 1.5]> (x)'),
    "Upsample, nearest": (9, "y = Upsample(x, scales)"),
    "Resize, linear": (10, 'y = Resize <mode = "linear"> (x, scales)'),
    "Resize, nearest": (10, "y = Resize(x, scales)"),
    "Resize, smaller": (10, "y = Resize(x, less)"),
    "Clip": (7, "y = Clip <min = -1.5, max = 2.0> (x)"),
    "Pad": (7, "y = Pad <pads = [0, 0, 1, 1, 0, 0, 0, 2], value = 0.5> (x)"),
    "Softmax": (7, "y = Softmax <axis = 2> (x)"),
    "Dropout": (7, "y = Dropout(x)"),
}


@pytest.mark.parametrize("least", [11, 16])
@pytest.mark.parametrize("name", MEANINGS)
def test_results_stay(name, least):
    opset, text = MEANINGS[name]
    constants = {"scales": [1, 1, 1.5, 2], "less": [1, 1, 0.5, 0.4]}
    arrays = {key: np.array(each, np.float32) for key, each in constants.items()}
    model = build(f"g (float[1, 2, 4, 6] x) => (float[n, c, h, w] y) {{ {text} }}", opset, **arrays)
    expected = run(model, x=X)[0]
    raise_opset(model, least)
    np.testing.assert_allclose(run(model, x=X)[0], expected, rtol=1e-4, atol=1e-5)


def test_batch_normalization_goes_on_training():
    text = "y, m, v, sm, sv = BatchNormalization(x, two, two, two, two)"
    model = build(f"g (float[1, 2, 4, 6] x) => (float[1, 2, 4, 6] y) {{ {text} }}", 12, two=np.ones(2, np.float32))
    raise_opset(model, 16)
    (node,) = model.graph.node
    assert list(node.output) == ["y", "m", "v"]
    assert {each.name: each.i for each in node.attribute}["training_mode"] == 1


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("text", ["y = Clip <max = 2.0> (x)", "y = Pad <pads = [0, 1], value = 0.5> (x)"])
def test_bounds_and_fillers_have_the_type_of_the_data(kind, text):
    model = build(f"g (float[3] x) => (float[n] y) {{ {text} }}", 7)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    raise_opset(model, 11)
    onnx.checker.check_model(model, full_check=True)


def test_what_the_converter_does_not_know_stays():
    text = """g (float[2000] x) => (float[2000] y) { a = my.Double(x) b = Unknown <alpha = 2.0> (a) y = Add(b, large) }
        <domain: "my", opset_import: ["": 13]> Double (a) => (b) { b = Add(a, a) }"""
    model = build(text, 13, large=np.arange(2000, dtype=np.float32))
    model.metadata_props.add(key="who", value="me")
    raise_opset(model, 16)
    assert [(node.domain, node.op_type) for node in model.graph.node] == [
        ("my", "Double"),
        ("", "Unknown"),
        ("", "Add"),
    ]
    assert [each.name for each in model.functions] == ["Double"]
    assert model.functions[0].opset_import[0].version == 16
    assert [(each.key, each.value) for each in model.metadata_props] == [("who", "me")]
    assert [each.name for each in model.graph.input] == ["x"]
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), np.arange(2000))
    assert {each.domain: each.version for each in model.opset_import} == {"": 16, "my": 1}


@pytest.mark.parametrize("opset", [11, 12])
def test_gradients_of_pooling_are_lowered_from_any_opset(opset):
    text = """g (float[1, 2, 4, 6] x) => (float[1, 2, 1, 2] y) {
        a = MaxPool <kernel_shape = [2, 2], strides = [2, 1]> (x)
        y = AveragePool <kernel_shape = [2, 3], strides = [1, 2]> (a)
    }"""
    found = [run(lower(gradients(build(text, each), "y", "x")), x=X) for each in (opset, 17)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
