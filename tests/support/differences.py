"""Gradients of a model in float64, against central differences of the model itself."""

import math

import numpy as np
import onnx
import onnxruntime
from loop_reference import Loop, Scan
from onnx import TensorProto, helper, inliner, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from recurrent_reference import GRU, LSTM, RNN

from opgrad.contract.declaration import reference as opgrad_reference
from opgrad.gradients import gradients
from opgrad.onnxruntime import InferenceSession, lower

STEP = 1e-6
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LOSS = "the_loss"
DIRECTIONS = 2  # along which an array is moved at random; one with fewer elements is moved by each of them
TOLERANCE = 1e-6  # of differences of float64 over steps of 1e-6, where the loss is of the size of 1


def in_its_type(compute):
    """The same method, computed in float64 and rounded once to the type of x."""

    def _run(self, x, *others, **attributes):
        given = (each if each is None or each.dtype.kind in "iub" else each.astype(np.float64) for each in (x, *others))
        return tuple(each.astype(x.dtype) for each in compute(self, *given, **attributes))

    return _run


class Erf(OpRun):
    """Erf in float64, which the reference evaluator rounds to float32."""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """Gelu, likewise."""

    @in_its_type
    def _run(self, x, approximate="none"):
        return (_fast_gelu(x) if approximate == "tanh" else _gelu(x),)


class GroupNormalization(OpRun):
    """Group normalization, likewise."""

    @in_its_type
    def _run(self, x, scale, bias, num_groups=None, epsilon=1e-5, stash_type=None):
        groups = x.reshape(len(x), num_groups, -1)
        n = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + epsilon)
        factor, offset = (np.repeat(each, x.shape[1] // len(each)) for each in (scale, bias))
        column = (-1, *(1 for _ in x.shape[2:]))
        return (n.reshape(x.shape) * factor.reshape(column) + offset.reshape(column),)


class LpNormalization(OpRun):
    """Normalization by a norm, of which the reference evaluator takes sums without absolute values."""

    @in_its_type
    def _run(self, x, axis=-1, p=2):
        return (x / (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p),)


class LRN(OpRun):
    """Normalization by neighbouring channels, whose windows the reference evaluator cuts."""

    @in_its_type
    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=None):
        channels = x.shape[1]
        sums = [
            (x[:, max(0, c - (size - 1) // 2) : min(channels, c + size // 2 + 1)] ** 2).sum(1) for c in range(channels)
        ]
        return (x / (bias + alpha / size * np.stack(sums, 1)) ** beta,)


class AffineGrid(OpRun):
    """The places of a grid, likewise."""

    def _run(self, theta, size, align_corners=0):
        spans = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:]]
        places = np.stack([*np.meshgrid(*spans, indexing="ij")[::-1], np.ones(size[2:])], axis=-1)
        return (np.einsum("...j,nij->n...i", places, theta).astype(theta.dtype),)


class MeanVarianceNormalization(OpRun):
    """Normalization over axes, which the reference evaluator has for float32."""

    @in_its_type
    def _run(self, x, axes=(0, 2, 3)):
        over = tuple(axes)
        return ((x - x.mean(over, keepdims=True)) / (x.std(over, keepdims=True) + 1e-9),)


def _microsoft(name, function):
    """An operator of com.microsoft."""

    @in_its_type
    def _run(self, *inputs, **attributes):
        return (function(*inputs, **{key: value for key, value in attributes.items() if value is not None}),)

    return type(name, (OpRun,), {"op_domain": "com.microsoft", "_run": _run})


def _gelu(x, bias=0.0, **_):
    return 0.5 * (x + bias) * (1 + np.vectorize(math.erf, otypes=[float])((x + bias) / math.sqrt(2)))


def _fast_gelu(x, bias=0.0):
    z = x + bias
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _quick_gelu(x, alpha=1.702):
    return x / (1 + np.exp(-alpha * x))


def _rotary_embedding(x, positions, cos, sin, **_):
    """Heads in front of tokens; one position is that of the first token."""
    places = np.arange(x.shape[2])[None] + positions if positions.ndim == 1 else positions
    places = np.broadcast_to(places, (x.shape[0], x.shape[2])).astype(int)  # which have become floats with the others
    return opgrad_reference("rotary_embedding")(x, cos, sin, places)


class SimplifiedLayerNormalization(OpRun):
    """Layer normalization without mean, which onnxruntime has in the domain of ai.onnx."""

    @in_its_type
    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=1):
        inv_std = 1 / np.sqrt((x * x).mean(axis, keepdims=True) + epsilon)
        return x * inv_std * scale, inv_std


ROTARY = {
    "RotaryEmbedding": _rotary_embedding,
    "RotaryEmbeddingTraining": lambda x, *tables, **_: opgrad_reference("rotary_embedding")(x, *tables),
}
MICROSOFT = ROTARY | {"Gelu": _gelu, "BiasGelu": _gelu, "FastGelu": _fast_gelu, "QuickGelu": _quick_gelu}
OTHERS = (SimplifiedLayerNormalization, *(_microsoft(name, function) for name, function in MICROSOFT.items()))
OWN = (AffineGrid, Erf, Gelu, GroupNormalization, LpNormalization, LRN, MeanVarianceNormalization, RNN, GRU, LSTM)


def reference(model):
    """What evaluates a model in NumPy; its functions are written out, as it knows no `new_ops` inside of them."""
    model = inliner.inline_local_functions(model) if model.functions else model
    return ReferenceEvaluator(model, new_ops=[*OWN, *OTHERS, Loop, Scan])


def build(text, opset=17, constants=(), domains='"com.microsoft": 1, "my": 1'):
    """A model from the text of its graph and its functions, with initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, {domains}]> {text}')
    held = dict(constants).items()
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in held)
    return model


def computed(model, feeds, plain=True):
    """The results of a model in stock onnxruntime, or in a session of opgrad."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    kind = onnxruntime.InferenceSession if plain else InferenceSession
    return kind(model.SerializeToString(), options).run(None, feeds)


def in_float32(model):
    """The same model with float32 in place of every other float type."""
    return in_float64(model, TensorProto.FLOAT)


def in_float64(model, kind=TensorProto.DOUBLE):
    """The same model with float64 in place of every other float type."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for value in (*double.graph.input, *double.graph.output, *double.graph.value_info):
        _widen_type(value.type, kind)
    for tensor in double.graph.initializer:
        _widen_tensor(tensor, kind)
    _widen_nodes(double.graph.node, kind)
    for function in double.functions:
        _widen_nodes(function.node, kind)
    return double


def _widen_type(declared, kind):
    if declared.HasField("tensor_type") and declared.tensor_type.elem_type in FLOATS:
        declared.tensor_type.elem_type = kind


def _widen_tensor(tensor, kind):
    if tensor.data_type in FLOATS:
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        wide = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name)
        tensor.CopyFrom(wide)


def _widen_nodes(nodes, kind):
    for node in nodes:
        for attribute in list(node.attribute):
            if attribute.name in ("to", "dtype", "stash_type", "softmax_precision") and attribute.i in FLOATS:
                attribute.i = kind
            if attribute.HasField("t"):
                _widen_tensor(attribute.t, kind)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                array = np.array(helper.get_attribute_value(attribute), helper.tensor_dtype_to_np_dtype(kind))
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
            for graph in (attribute.g, *attribute.graphs):
                _widen_nodes(graph.node, kind)
                for value in (*graph.input, *graph.output, *graph.value_info):
                    _widen_type(value.type, kind)
                for tensor in graph.initializer:
                    _widen_tensor(tensor, kind)


def with_loss(model, shapes):
    """The model with one more output: the sum of these results, by their names, times fixed random numbers."""
    random = np.random.default_rng(1)
    terms = []
    for name, shape in shapes.items():
        factor = numpy_helper.from_array(random.normal(size=shape), f"{name}_factor")
        model.graph.initializer.append(factor)
        model.graph.node.append(helper.make_node("Mul", [name, factor.name], [f"{name}_weighted"]))
        model.graph.node.append(helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_term"], keepdims=0))
        terms.append(f"{name}_term")
    model.graph.node.append(helper.make_node("Sum", terms, [LOSS]))
    model.graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, []))
    return model


def float_results(model, results, outputs):
    """The shapes of a model's float results, or of these of them, by name."""
    named = zip([value.name for value in model.graph.output], results, strict=True)
    chosen = {name: result for name, result in named if outputs is None or name in outputs}
    return {name: result.shape for name, result in chosen.items() if np.issubdtype(result.dtype, np.floating)}


def in_onnxruntime(model, feeds):
    """The results of the model in float32, in stock onnxruntime."""
    given = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in feeds.items()}
    return computed(with_types(lower(in_float32(model))), given)


def slope_in_onnxruntime(model, name, direction, step, run, factor):
    """How the sum of a result times factors changes along a direction of an initializer, of a model in float32.

    run: what gives the result of a model, by onnxruntime's own kernels. Losses of float32 need wide steps.
    """
    ends = []
    for sign in (1, -1):
        moved = onnx.ModelProto.FromString(model.SerializeToString())
        tensor = next(each for each in moved.graph.initializer if each.name == name)
        value = numpy_helper.to_array(tensor) + sign * step * direction
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
        ends.append((run(moved).astype(np.float64) * factor).sum())
    return (ends[0] - ends[1]) / (2 * step)


def with_types(model):
    """The model, whose results have the type float where it tells none, which the reference evaluator does without."""
    for value in model.graph.output:
        if not value.type.WhichOneof("value"):
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None))
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


def check(model, feeds, wanted=None, outputs=None, own_forward=False, plain=False):
    """Compare the gradients of a model, whose floats are float64, with central differences.

    wanted: the inputs to differentiate with respect to, None for all of float type; the others become constants.
    outputs: the results that are differentiated, None for all of float type.
    own_forward: the differences are those of the forward part of the model with gradients, which must give what
        onnxruntime gives in float32: for operators that the reference lacks, or has wrong in this opset.
    plain: the gradients are asked for in plain operators, and are not lowered afterwards.
    """
    random = np.random.default_rng(3)
    wanted = list(wanted or float_inputs(model, feeds))
    for name in wanted:  # away from ties and corners
        feeds = {**feeds, name: feeds[name] + 1e-3 * random.uniform(0.1, 1, feeds[name].shape)}
    results = in_onnxruntime(model, feeds) if own_forward else run(model, feeds)
    shapes = float_results(model, results, outputs)
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    whole = with_loss(whole, shapes)
    feeds = with_constants(whole, feeds, wanted)
    graph = gradients(whole, LOSS, wanted, plain=plain)
    graph = graph if plain else lower(graph)
    found = run(graph, feeds)
    if own_forward:
        for mine, other in zip(found, results, strict=False):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    evaluator = reference(up_to_loss(graph) if own_forward else whole)
    place = len(whole.graph.output) - 1
    for name, gradient in zip(wanted, found[-len(wanted) :], strict=True):
        assert gradient.shape == feeds[name].shape, (name, gradient.shape)
        compare(evaluator, place, feeds, name, gradient)


def up_to_loss(model):
    """The model without what the loss, and what comes before it, does not need."""
    short = onnx.ModelProto()
    short.CopyFrom(model)
    needed, kept = {value.name for value in model.graph.output if not value.name.endswith("_grad")}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    del short.graph.node[:]
    short.graph.node.extend(kept[::-1])
    outputs = [value for value in model.graph.output if not value.name.endswith("_grad")]
    del short.graph.output[:]
    short.graph.output.extend(outputs)
    return short


def compare(evaluator, place, feeds, name, gradient):
    """Move an input a little, one element or direction after the other, and compare how the loss changes."""
    random = np.random.default_rng(2)
    value = feeds[name]
    if value.size <= DIRECTIONS:
        directions = np.eye(value.size).reshape(-1, *value.shape) if value.size else []
    else:
        directions = random.normal(size=(DIRECTIONS, *value.shape))
    for direction in directions:
        ends = [run(None, {**feeds, name: value + sign * STEP * direction}, evaluator)[place] for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * STEP)
        actual = (gradient * direction).sum()
        scale = np.abs(gradient * direction).sum() + np.abs(ends[0]) + 1
        assert np.abs(expected - actual) <= TOLERANCE * scale, (name, float(expected), float(actual))
