"""Sample inputs for every overload of the ONNX operators, and the comparison with the float64 reference."""

import numpy as np
from onnx_models import one_node, outside, run

from opgrad.contract import DTYPES, FLOATS
from opgrad.onnxruntime.abi import ANY
from opgrad.onnxruntime.overloads import VALUE, overloads
from opgrad.ops import operators

# Those of the operators that every front end has; test_onnx_graph_ops has the others.
OVERLOADS = [overload for overload in overloads() if overload.operator.name in operators()]
# Those whose result type is not mixed; `test_output_type` has the others.
UNMIXED = [o for o in OVERLOADS if len({port.dtype for port in o.inputs if port.parameter in ("dy", "bias")}) < 2]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def softmaxed(logits):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def samples(operator):
    """float64 arguments for an operator, by parameter name; values for its attributes that are inputs too."""
    r = np.random.default_rng(7)
    if operator in ("softmax_cross_entropy_loss", "softmax_cross_entropy_loss_and_grad"):
        arrays = {"logits": r.normal(size=(6, 5)), "labels": np.array([4, 2, 0, 2, 1, 3])}
        return arrays | {"weight": r.uniform(0.5, 2, 5), "ignore_index": 2}
    if operator == "softmax_cross_entropy_loss_grad":
        log_prob = np.log(softmaxed(r.normal(size=(6, 5))))
        arrays = {"dy": np.array(1.5), "log_prob": log_prob, "labels": np.array([4, 2, 0, 2, 1, 3])}
        return arrays | {"weight": r.uniform(0.5, 2, 5), "bias": r.normal(size=(6, 5)), "ignore_index": 2}
    if operator == "gather_grad":
        return {"shape": (4, 3), "indices": np.array([[0, -1], [3, 0]]), "dy": r.normal(size=(2, 2, 3))}
    if operator == "in_place_accumulator":
        return {"buffer": r.normal(size=(3, 4)), "value": r.normal(size=(3, 4)), "overwrite": False}
    if operator == "scale":
        return {"x": r.normal(size=(3, 4)), "factor": np.array(3)}
    names = operators()[operator].arrays
    return {name: r.normal(size=(3, 4, 5)) for name in names}


def arguments(overload, given):
    """The sample in the dtypes of the overload: (feeds, float64 arguments of the reference)."""
    feeds, exact = {}, {}
    for port in overload.inputs:
        value = given.get(port.parameter)
        if value is None:
            continue
        feeds[port.parameter] = np.asarray(value).astype(DTYPES[port.dtype])
        kept = feeds[port.parameter]
        exact[port.parameter] = kept.astype("float64") if port.dtype in FLOATS else kept
        if port.operand == VALUE:
            exact[port.parameter] = value
    return feeds, exact


def ports(overload, names, out_dtype=None):
    inputs = [(port.parameter, port.dtype) if port.parameter in names else None for port in overload.inputs]
    while inputs[-1] is None:
        inputs.pop()
    like = next(port.dtype for port in overload.inputs if port.operand != VALUE)
    outputs = [(port.parameter, out_dtype or like if port.dtype == ANY else port.dtype) for port in overload.outputs]
    return inputs, outputs


def check(overload, given, attributes=None, reference_attributes=None, out_dtype=None):
    """Run a one-node model and compare it with the operator's reference."""
    feeds, exact = arguments(overload, given)
    inputs, outputs = ports(overload, feeds, out_dtype)
    if "buffer" in feeds:
        feeds["buffer"] = outside(feeds)["buffer"].copy()
    found = run(one_node(overload.onnx.name, inputs, outputs, **(attributes or {})), feeds)
    expected = overload.operator.reference(**exact, **(reference_attributes or {}))
    expected = dict(
        zip(overload.operator.results, expected if isinstance(expected, tuple) else (expected,), strict=True)
    )
    for (name, dtype), array in zip(outputs, found, strict=True):
        if name == "updated":
            assert array.tolist() == [True]
            continue
        scale = max(1.0, np.abs(expected[name]).max(initial=0))
        np.testing.assert_allclose(array.astype("float64"), expected[name], rtol=0, atol=TOLERANCE[dtype] * scale)
    return found


def find(name, *dtypes):
    """The overload of this ONNX name whose first inputs have these dtypes."""
    chosen = (o for o in OVERLOADS if o.onnx.name == name)
    return next(o for o in chosen if tuple(port.dtype for port in o.inputs)[: len(dtypes)] == dtypes)


def reference_defaults(overload):
    """What the reference needs to hear of the ONNX defaults."""
    attributes = {k: v for k, v in overload.onnx.attributes.items() if k != "output_type"}
    if overload.onnx.until_13:
        attributes["axis"] = (1, 2)
    return attributes


def identify(overload):
    return "-".join([overload.onnx.name, *(port.dtype for port in overload.inputs if port.operand != VALUE)])
