"""The installed onnxruntime has the texts and the layout that opgrad relies on; without the texts opgrad works, too."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_models import one_node

from opgrad.onnxruntime import InferenceSession, private


def stock_error(model, feeds=None):
    """The error of loading a model in stock onnxruntime or, with `feeds`, of running it."""
    with pytest.raises(Exception, match=r"ONNXRuntimeError") as caught:
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return caught.value


def model_of(node, domain="com.microsoft", elements=TensorProto.FLOAT):
    x = helper.make_tensor_value_info("x", elements, ["N"])
    graph = helper.make_graph([node], "graph", [x], [helper.make_tensor_value_info("y", elements, None)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("node", "operator"),
    [
        (helper.make_node("Nothing", ["x"], ["y"], domain="com.microsoft"), "com.microsoft:Nothing"),
        (helper.make_node("BitwiseNot", ["x"], ["y"]), None),
    ],
)
def test_errors_of_models_name_operator_and_reason(node, operator):
    error = stock_error(model_of(node))
    assert private.unknown_operator(error) == operator
    assert private.BEFORE_REASON[1] in str(error)
    assert "onnxruntime/core" not in private.reason(error)
    assert private.BEFORE_REASON[1] not in private.reason(error)


def test_a_type_without_kernel_is_an_unknown_operator():
    error = stock_error(model_of(helper.make_node("ThresholdedRelu", ["x"], ["y"]), elements=TensorProto.DOUBLE))
    assert private.unknown_operator(error) == "ThresholdedRelu"


def test_errors_of_runs_tell_who_refused():
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = model_of(reshape)
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [2], [7, 3]))
    error = stock_error(model, {"x": np.zeros(4, np.float32)})
    assert private.node_refused(error)
    assert all(mark in str(error) for mark in private.BEFORE_REASON)


def test_session_options_lie_in_memory_as_known():
    assert private.options_pointer(onnxruntime.SessionOptions())
    assert private.options_pointer(object()) is None


# Nodes without attributes: of a whole number, of text, of numbers, and one that opgrad refuses if it is there.
BARE = [
    one_node("SoftmaxGrad_13", [("dy", "float32"), ("y", "float32")], [("dx", "float32")]),
    one_node(
        "SoftmaxCrossEntropyLossGrad",
        [("dy", "float32"), ("log_prob", "float32"), ("labels", "int64")],
        [("dx", "float32")],
    ),
    one_node("ConvGrad", [("dy", "float32"), ("x", "float32"), ("w", "float32")], [("dx", "float32")]),
    one_node("QuickGeluGrad", [("dy", "float32"), ("x", "float32")], [("dx", "float32")]),
]


@pytest.mark.parametrize("model", BARE, ids=["int", "text", "ints", "float"])
def test_a_missing_attribute_has_the_known_text(monkeypatch, model):
    monkeypatch.setattr(private, "NOBODYS", None)  # which cannot be asked for
    InferenceSession(model)


@pytest.mark.parametrize("model", BARE, ids=["int", "text", "ints", "float"])
def test_a_missing_attribute_is_found_without_the_text(monkeypatch, model):
    monkeypatch.setattr(private, "NO_ATTRIBUTE", "other words")
    InferenceSession(model)


def test_what_is_no_missing_attribute_stays_an_error():
    def read(name):
        raise RuntimeError(f"no {name}")

    assert private.is_missing(RuntimeError("no axis"), "axis", read)
    assert not private.is_missing(RuntimeError("axis is of type FLOAT"), "axis", read)
