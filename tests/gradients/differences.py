"""Gradients of a model in float64, against central differences of the model itself."""

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from opgrad.gradients import gradients

STEP = 1e-6
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LOSS = "the_loss"
MOST_ELEMENTS = 24  # that are moved one by one; larger arrays are moved along directions
DIRECTIONS = 6

class Erf(OpRun):
    """Erf in float64, which the reference evaluator rounds to float32."""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """Gelu, likewise."""

    def _run(self, x, approximate="none"):
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))),)


def reference(model):
    """What evaluates a model in NumPy."""
    return ReferenceEvaluator(model, new_ops=[Erf, Gelu])


def in_float64(model):
    """The same model with float64 in place of every other float type."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for value in (*double.graph.input, *double.graph.output, *double.graph.value_info):
        _widen_type(value.type)
    for tensor in double.graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(double.graph.node)
    for function in double.functions:
        _widen_nodes(function.node)
    return double


def _widen_type(kind):
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in FLOATS:
        kind.tensor_type.elem_type = TensorProto.DOUBLE


def _widen_tensor(tensor):
    if tensor.data_type in FLOATS:
        wide = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        tensor.CopyFrom(wide)


def _widen_nodes(nodes):
    for node in nodes:
        for attribute in list(node.attribute):
            if attribute.name in ("to", "dtype", "stash_type", "softmax_precision") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                array = np.array(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
            for graph in (attribute.g, *attribute.graphs):
                _widen_nodes(graph.node)
                for value in (*graph.input, *graph.output, *graph.value_info):
                    _widen_type(value.type)
                for tensor in graph.initializer:
                    _widen_tensor(tensor)


def with_loss(model, feeds, outputs=None):
    """The model with one more output: the sum of all float results, or of these, times fixed random numbers."""
    random = np.random.default_rng(1)
    results = run(model, feeds)
    names = [value.name for value in model.graph.output]
    terms = []
    for name, result in zip(names, results, strict=True):
        if result.dtype != np.float64 or (outputs is not None and name not in outputs):
            continue
        factor = numpy_helper.from_array(random.normal(size=result.shape), f"{name}_factor")
        model.graph.initializer.append(factor)
        model.graph.node.append(helper.make_node("Mul", [name, factor.name], [f"{name}_weighted"]))
        model.graph.node.append(helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_term"], keepdims=0))
        terms.append(f"{name}_term")
    model.graph.node.append(helper.make_node("Sum", terms, [LOSS]))
    model.graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, []))
    return model


def run(model, feeds, evaluator=None):
    """The results of a model in NumPy."""
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in (evaluator or reference(model)).run(None, feeds)]


def with_constants(model, feeds, wanted):
    """The model with all its inputs but the wanted ones as initializers, and what is still fed."""
    for value in list(model.graph.input):
        if value.name in feeds and value.name not in wanted:
            model.graph.initializer.append(numpy_helper.from_array(feeds[value.name], value.name))
            model.graph.input.remove(value)
    return {name: feeds[name] for name in wanted}


def float_inputs(model, feeds):
    """The names of what can be differentiated with respect to."""
    return [each.name for each in model.graph.input if each.name in feeds and feeds[each.name].dtype == np.float64]


def check(model, feeds, wanted=None, outputs=None, tolerance=1e-6, own_forward=False, constant=True):
    """Compare the gradients of a model with central differences.

    wanted: the inputs to differentiate with respect to; None: all of float type.
    constant: the other inputs are constants of the model; otherwise they are inputs as before.
    own_forward: the differences are those of the model with gradients, whose forward part stands for operators that
        the reference computes in float32; it must agree with the reference as closely as that allows.
    """
    feeds = {
        name: each.astype(np.float64) if np.issubdtype(each.dtype, np.floating) else each for name, each in feeds.items()
    }
    random = np.random.default_rng(3)
    wanted = list(wanted or float_inputs(model, feeds))
    for name in wanted:  # away from ties and corners
        feeds[name] = feeds[name] + 1e-3 * random.uniform(0.1, 1, feeds[name].shape)
    wide = with_loss(in_float64(model), feeds, outputs)
    feeds = with_constants(wide, feeds, wanted) if constant else feeds
    graph = gradients(wide, LOSS, wanted, plain=True)
    found = run(graph, feeds)
    loss, results = found[-len(wanted) - 1], found[-len(wanted) :]
    if own_forward:
        np.testing.assert_allclose(loss, run(wide, feeds)[-1], rtol=1e-4, atol=1e-4)
    evaluator = reference(graph if own_forward else wide)
    place = len(wide.graph.output) - 1
    for name, gradient in zip(wanted, results, strict=True):
        assert gradient.shape == feeds[name].shape, (name, gradient.shape)
        compare(evaluator, place, feeds, name, gradient, tolerance)


def compare(evaluator, place, feeds, name, gradient, tolerance):
    """Move an input a little, one element or direction after the other, and compare how the loss changes."""
    random = np.random.default_rng(2)
    value = feeds[name]
    if value.size <= MOST_ELEMENTS:
        directions = np.eye(value.size).reshape(-1, *value.shape) if value.size else []
    else:
        directions = random.normal(size=(DIRECTIONS, *value.shape))
    for direction in directions:
        ends = [run(None, {**feeds, name: value + sign * STEP * direction}, evaluator)[place] for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * STEP)
        actual = (gradient * direction).sum()
        scale = np.abs(gradient * direction).sum() + np.abs(ends[0]) + 1
        assert np.abs(expected - actual) <= tolerance * scale, (name, float(expected), float(actual))
