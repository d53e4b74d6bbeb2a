"""The training operators in stock onnxruntime, against the float64 references."""

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_cases import OVERLOADS, UNMIXED, arguments, check, find, identify, ports, reference_defaults, samples
from onnx_models import one_node, run, run_node

from opgrad.contract import FLOATS
from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.abi import ELEMENT_TYPES
from opgrad.onnxruntime.overloads import VALUE

LOSS = "SoftmaxCrossEntropyLoss"
ONNX_NAMES = {f"{name}{end}" for name in ("SoftmaxGrad", "LogSoftmaxGrad") for end in ("", "_13")}
ONNX_NAMES |= {f"{LOSS}{end}" for end in ("AndGrad", "Grad", "Internal", "InternalGrad")}
ONNX_NAMES |= {f"{name}Grad" for name in ("Gather", "Relu", "Sigmoid", "Tanh", "QuickGelu", "LeakyRelu")}
ONNX_NAMES |= {"QuickGelu", "InPlaceAccumulatorV2", "Scale"}


def test_every_name_is_registered_in_every_dtype():
    assert {o.onnx.name for o in OVERLOADS} == ONNX_NAMES
    for name in sorted(ONNX_NAMES):
        floats = {port.dtype for o in OVERLOADS if o.onnx.name == name for port in o.inputs} & set(FLOATS)
        integers = {port.dtype for o in OVERLOADS if o.onnx.name == name for port in o.inputs if port.operand != VALUE}
        assert floats == set(FLOATS)
        if "CrossEntropy" in name or "Gather" in name:
            assert {"int32", "int64"} <= integers


def each_overload(wanted):
    """Of the overloads that are wanted each name and each dtype, where levels are taken, with all types of integers."""
    chosen = [each for each in UNMIXED if wanted(each)]
    dtypes = [next(port.dtype for port in each.inputs if port.dtype in FLOATS) for each in chosen]
    cases = [(each.onnx.name, dtype, each) for each, dtype in zip(chosen, dtypes, strict=True)]
    return pytest.mark.parametrize(("name", "dtype", "overload"), cases, ids=map(identify, chosen))


@each_overload(lambda overload: True)
def test_against_the_reference_with_all_inputs(name, dtype, overload):
    given = samples(overload.operator.name)
    check(overload, given, reference_attributes=reference_defaults(overload))


@each_overload(lambda overload: any(port.optional for port in overload.inputs))
def test_against_the_reference_without_optional_inputs(name, dtype, overload):
    given = samples(overload.operator.name)
    for port in overload.inputs:
        if port.optional:
            del given[port.parameter]
    defaults = reference_defaults(overload)
    if "labels" in given:
        given["labels"][1] = -1
        defaults["ignore_index"] = -1
    check(overload, given, reference_attributes=defaults)


@pytest.mark.parametrize(
    ("name", "attributes", "reference"),
    [
        ("SoftmaxGrad", {"axis": 0}, {"axis": (0, 1, 2)}),
        ("SoftmaxGrad", {"axis": -1}, {"axis": 2}),
        ("LogSoftmaxGrad", {"axis": 2}, {"axis": 2}),
        ("SoftmaxGrad_13", {"axis": 1}, {"axis": 1}),
        ("LogSoftmaxGrad_13", {"axis": 0}, {"axis": 0}),
        ("QuickGelu", {"alpha": -0.5}, {"alpha": -0.5}),
        ("QuickGeluGrad", {"alpha": 1.0}, {"alpha": 1.0}),
        ("LeakyReluGrad", {"alpha": 0.25}, {"alpha": 0.25}),
        ("Scale", {"scale_down": 1}, {"scale_down": True}),
        ("SoftmaxCrossEntropyLossInternal", {"reduction": "none"}, {"reduction": "none"}),
        ("SoftmaxCrossEntropyLossInternal", {"reduction": "sum"}, {"reduction": "sum"}),
        ("SoftmaxCrossEntropyLossInternalGrad", {"reduction": "sum"}, {"reduction": "sum"}),
        ("SoftmaxCrossEntropyLossGrad", {"ignore_index": 3}, {"ignore_index": 3}),
    ],
)
def test_attributes(name, attributes, reference):
    overload = find(name, "float32")
    given = samples(overload.operator.name)
    check(overload, given, attributes, reference_defaults(overload) | reference)


def test_gather_grad_along_the_last_axis():
    given = {"shape": (3, 4), "indices": np.array([3, 0, -1]), "dy": np.arange(9.0).reshape(3, 3)}
    check(find("GatherGrad", "int64", "int64", "float32"), given, {"axis": -1}, {"axis": -1})


@pytest.mark.parametrize("output", FLOATS)
@pytest.mark.parametrize("inner", FLOATS)
@pytest.mark.one_in(2)
def test_output_type(inner, output):
    """Any type of result from any type of argument; the graph declares it and output_type says it."""
    number = {"output_type": ELEMENT_TYPES[output]}
    loss = find("SoftmaxCrossEntropyLossInternal", inner, "int64", inner, "int64")
    check(loss, samples(loss.operator.name), number, reference_defaults(loss), output)
    grad = find("SoftmaxCrossEntropyLossInternalGrad", inner, inner, "int32", inner, "int64", output)
    check(grad, samples(grad.operator.name), number, reference_defaults(grad), output)


def test_ignore_index_may_have_one_dimension():
    overload = find("SoftmaxCrossEntropyLossInternal", "float32")
    given = samples(overload.operator.name)
    feeds, exact = arguments(overload, given)
    feeds["ignore_index"] = feeds["ignore_index"].reshape(1)
    loss, _ = run(one_node(overload.onnx.name, *ports(overload, feeds)), feeds)
    np.testing.assert_allclose(loss, overload.operator.reference(**exact)[0], rtol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), [((0, 3), 0), ((2, 0), 0), ((2, 0, 3), 1), ((2, 0, 3), -1)])
def test_empty_arrays(shape, axis):
    empty = np.zeros(shape, "f4")
    assert run_node("SoftmaxGrad_13", {"dy": empty, "y": empty}, axis=axis)[0].shape == shape


# --- in place -------------------------------------------------------------------------------------

FLAGGED = [("buffer", "float32"), ("value", "float32"), ("overwrite", "bool")]


def test_accumulator_writes_into_the_callers_buffer():
    session = InferenceSession(one_node("InPlaceAccumulatorV2", FLAGGED, [("updated", "bool"), ("sum", "float32")]))
    buffer, value = np.arange(5, dtype="f4"), np.ones(5, "f4")
    for overwrite, expected in ((False, [1, 2, 3, 4, 5]), (False, [2, 3, 4, 5, 6]), (True, [1, 1, 1, 1, 1])):
        updated, total = session.run(None, {"buffer": buffer, "value": value, "overwrite": np.array([overwrite])})
        assert updated.tolist() == [True]
        assert total.tolist() == expected
        assert buffer.tolist() == expected


def test_accumulator_without_flag_and_sum():
    session = InferenceSession(one_node("InPlaceAccumulatorV2", FLAGGED[:2], [("updated", "bool")]))
    buffer = np.arange(5, dtype="f4")
    session.run(None, {"buffer": buffer, "value": np.ones(5, "f4")})
    assert buffer.tolist() == [1, 2, 3, 4, 5]


# --- errors ---------------------------------------------------------------------------------------


def pair(dy, y=None):
    return {"dy": np.ones(dy, "f4"), "y": np.ones(dy if y is None else y, "f4")}


def loss_grad(*labels):
    return {"dy": np.ones((), "f4"), "log_prob": np.zeros((2, 3), "f4"), "labels": np.array(labels)}


def gather(shape, indices, dy):
    return {"shape": np.array(shape), "indices": np.array(indices), "dy": np.ones(dy, "f4")}


REFUSED = {  # what is said of a node's inputs
    "softmax_grad: y has shape (3, 3), expected (3, 4), the shape of dy":
        ("SoftmaxGrad_13", pair((3, 4), (3, 3)), {}),
    "softmax_grad: axis is 1, expected -1 to 0": ("SoftmaxGrad", pair(4), {}),
    "softmax_grad: dy has 0 dimensions, expected at least 1": ("SoftmaxGrad_13", pair(()), {}),
    "softmax_cross_entropy_loss_grad: labels[1] is 77, expected 0 to 2": (f"{LOSS}Grad", loss_grad(1, 77), {}),
    "reduction is 'median', expected one of none, mean, sum":
        (f"{LOSS}Grad", loss_grad(1, 0), {"reduction": "median"}),
    "gather_grad: indices[1] is 77, expected -4 to 3": ("GatherGrad", gather([4, 2], [1, 77], (2, 2)), {}),
    "gather_grad: shape is an array of shape (1, 2), expected one dimension":
        ("GatherGrad", gather([[4, 2]], [1], (1, 2)), {}),
    "gather_grad: shape has 65 elements, expected at most 64": ("GatherGrad", gather([1] * 65, [0], 1), {}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused_inputs(message):
    name, feeds, attributes = REFUSED[message]
    inputs = [(each, array.dtype.name) for each, array in feeds.items()]
    session = InferenceSession(one_node(name, inputs, [("dx", "float32")], **attributes))
    invalid = onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument
    for _ in range(2):
        with pytest.raises(invalid, match=re.escape(message)):
            session.run(None, feeds)


def internal_loss(dtype="float16", count=2, **attributes):
    outputs = [("loss", dtype), ("log_prob", dtype)][:count]
    return one_node(f"{LOSS}Internal", [("logits", "float16"), ("labels", "int64")], outputs, **attributes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_type": 1}, "loss is declared as float16, expected float32"),
        ({"dtype": "float32"}, "loss is declared as float32, expected float16"),
        ({"count": 1}, "the node has 1 outputs, expected 2"),
        ({"output_type": 7}, "output_type is 7, expected one of 1"),
        ({"reduction": 3}, "attribute reduction"),
    ],
)
def test_refused_nodes(given, message):
    with pytest.raises(Exception, match=f"{LOSS}Internal: {message}"):
        InferenceSession(internal_loss(**given))


def test_undeclared_type_says_what_to_do():
    model = onnx.load_from_string(internal_loss())
    del model.graph.output[1]
    with pytest.raises(Exception, match="type inference failed") as raised:
        InferenceSession(model.SerializeToString())
    assert "add a value_info entry" in raised.value.__notes__[0]
