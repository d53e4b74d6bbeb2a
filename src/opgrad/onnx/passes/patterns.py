"""Recognition of Gelu, SiLU and Swish, of layer and RMS normalization, and of softmax cross-entropy."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import ONE_AXIS_FROM
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, declared_types, domain_of, import_microsoft
from opgrad.onnx.graph.nodes import FAILURES, attributes_of, refusal

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FAR, FAR_NARROW = 2e-5, 4e-3  # relative tolerances: for numbers written with few digits, and for 16-bit types


def is_near(graph: Graph, name: str, number: float) -> bool:
    """Whether a value is this number, or near one that has more digits than its type, within the type's tolerance."""
    found = graph.scalar(name)
    far = 0.0 if float(2 * number).is_integer() else FAR_NARROW if graph.element_type(name) in NARROW else FAR
    return found is not None and math.isclose(found, number, rel_tol=far)


def factors(graph: Graph, node: onnx.NodeProto) -> list[str]:
    """The factors of a product; a factor that is itself a product, which nothing else reads, is split up, too."""
    found: list[str] = []
    for name in node.input:
        maker = graph.part(name, "Mul")
        found += factors(graph, maker) if maker is not None and maker is not node else [name]
    return found


Pattern = str | float | list[Any] | tuple[Any, ...]
Bound = dict[str, str]


def matches(graph: Graph, name: str, pattern: Pattern, bound: Bound) -> Iterator[Bound]:
    """The ways in which a value fits a pattern, as the names of the values that the pattern's variables stand for.

    A pattern is a variable, a number that a constant is near, a list of patterns of which one fits, or an operator and
    the patterns of its operands, whose result nothing else reads.
    """
    if isinstance(pattern, str):
        if bound.get(pattern, name) == name:
            yield {**bound, pattern: name}
    elif isinstance(pattern, list):
        for each in pattern:
            yield from matches(graph, name, each, bound)
    elif isinstance(pattern, tuple):
        node = graph.part(name, pattern[0])
        if node is not None:
            yield from operands_match(graph, node, pattern[1:], bound)
    elif is_near(graph, name, pattern):
        yield bound


def operands_match(graph: Graph, node: onnx.NodeProto, patterns: Sequence[Pattern], bound: Bound) -> Iterator[Bound]:
    """The ways in which a node's operands fit patterns: those of Add, and all factors of Mul, in any order.

    Means are over the last axes, all of a pattern from the same one on, which "axis" stands for.
    """
    names = factors(graph, node) if node.op_type == "Mul" else list(node.input)
    if node.op_type == "ReduceMean":
        names, axis = names[:1], str(mean_axes(graph, node))
        if axis == "None" or bound.get("axis", axis) != axis:
            return
        bound = {**bound, "axis": axis}
    if len(names) != len(patterns):
        return
    for order in itertools.permutations(names) if node.op_type in ("Add", "Mul") else [tuple(names)]:
        found = [bound]
        for name, pattern in zip(order, patterns, strict=True):
            found = [more for each in found for more in matches(graph, name, pattern, each)]
        yield from found


def mean_axes(graph: Graph, node: onnx.NodeProto) -> int | None:
    """-k if the node is a mean over the last k axes that keeps these axes; else None."""
    given, sizes = attributes_of(node), graph.sizes(node.input[0])
    if not given.get("keepdims", 1) or sizes is None:
        return None
    axes = given.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        value = graph.constant(node.input[1])
        axes = None if value is None else value.reshape(-1).tolist()
    if not axes:
        return None
    places = sorted(axis - len(sizes) if axis >= 0 else axis for axis in axes)
    return places[0] if places == list(range(-len(places), 0)) else None


def same_shape(graph: Graph, name: str, other: str) -> bool:
    """Whether a result and an operand have the same rank as far as is known: scalars have not added an axis."""
    a, b = graph.sizes(name), graph.sizes(other)
    return a is None or b is None or len(a) == len(b)


Change = Callable[[Graph, onnx.NodeProto], bool]


def at_each(*operators: str) -> Callable[[Change], Callable[[Graph], bool]]:
    """Make a pass of a function that changes a graph at one node and tells whether it did.

    It is called for every node of these operators of ai.onnx, or of all, that the graph has when the pass begins.
    """

    chosen = frozenset(operators)

    def decorate(change: Change) -> Callable[[Graph], bool]:
        @functools.wraps(change)
        def run(graph: Graph) -> bool:
            asked = (each for each in graph.nodes() if not chosen or each.op_type in chosen)
            changed = False
            for node in [each for each in asked if not domain_of(each)]:  # without `naming`, which would take 0.7 µs
                try:
                    changed |= change(graph, node)
                except FAILURES as error:
                    raise refusal(node, error) from error
            return changed

        return run

    return decorate


GELU_FROM, SWISH_FROM = 20, 24  # the first opsets with Gelu and Swish
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # tanh(SLOPE * (x + CUBIC * x^3)) is nearly erf(x / sqrt(2))
CUBE = [("Mul", CUBIC, "x", "x", "x"), ("Mul", CUBIC, ("Pow", "x", 3.0))]
SQUARE = [("Mul", CUBIC, "x", "x"), ("Mul", CUBIC, ("Pow", "x", 2.0))]
ERF = ("Add", 1.0, ("Erf", [("Div", "x", math.sqrt(2)), ("Mul", "x", math.sqrt(0.5))]))
TANH = ("Add", 1.0, ("Tanh", [("Mul", SLOPE, ("Add", "x", CUBE)), ("Mul", SLOPE, "x", ("Add", 1.0, SQUARE))]))


@at_each("Mul")
def fuse_gelu(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * (1 + erf(x / sqrt(2))) / 2, or with tanh, becomes Gelu."""
    if graph.plain and graph.opset < GELU_FROM:
        return False
    for op, approximate, bracket in (("Gelu", "none", ERF), ("FastGelu", "tanh", TANH)):
        for x in [found["x"] for found in operands_match(graph, node, (0.5, "x", bracket), {})]:
            # float32 is the only type that onnxruntime has kernels for.
            if same_shape(graph, node.output[0], x) and graph.element_type(x) == TensorProto.FLOAT:
                if graph.plain:
                    gelu = graph.node("Gelu", [x], node.output, approximate=approximate)
                else:
                    gelu = graph.node(op, [x], node.output, MICROSOFT)
                graph.substitute(node, [gelu])
                return True
    return False


@at_each("Mul")
def fuse_swish(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * sigmoid(alpha * x) becomes QuickGelu, or Swish of ONNX."""
    if graph.plain and graph.opset < SWISH_FROM:
        return False
    for found in operands_match(graph, node, ("x", ("Sigmoid", ["x", ("Mul", "alpha", "x")])), {}):
        x, alpha = found["x"], graph.scalar(found["alpha"]) if "alpha" in found else 1.0
        if alpha is not None and graph.element_type(x) in FLOATS and same_shape(graph, node.output[0], x):
            op, domain = ("Swish", "") if graph.plain else ("QuickGelu", MICROSOFT)
            graph.substitute(node, [graph.node(op, [x], node.output, domain, alpha=alpha)])
            return True
    return False


LAYER_FROM, RMS_FROM = 17, 23  # the first opsets of ONNX with LayerNormalization and RMSNormalization
RAISED_FROM = 13  # onnxruntime has them in older opsets, too, but onnx cannot convert older models that have them
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)  # the types that are recognized; onnxruntime has kernels for them
UNDER_ROOT = ("Add", ("ReduceMean", [("Pow", "c", 2.0), ("Mul", "c", "c")]), "epsilon")
ROOT = [("Sqrt", UNDER_ROOT), ("Pow", UNDER_ROOT, 0.5)]
INVERSE_ROOT = [("Reciprocal", ROOT), ("Div", 1.0, ROOT), ("Pow", UNDER_ROOT, -0.5)]


@dataclass(frozen=True)
class NormalizedValue:
    """A recognized normalization: `name` is x, normalized over the axes from `axis` on.

    last: the node that makes `name`. scale, bias: the names of values in the shape of these axes; "" without them.
    """

    x: str
    name: str
    last: onnx.NodeProto
    axis: int
    epsilon: float
    scale: str = ""
    bias: str = ""


@at_each("Add", "Div", "Mul")
def fuse_normalization(graph: Graph, node: onnx.NodeProto) -> bool:
    """c / sqrt(mean(c * c) + epsilon) * scale becomes RMSNormalization or, for c = x - mean(x), LayerNormalization.

    The former is SimplifiedLayerNormalization, as onnxruntime names it, but in a plain graph.
    """
    if node.op_type == "Add":
        return _fuse_expanded(graph, node)
    for found in operands_match(graph, node, ("c", ROOT if node.op_type == "Div" else INVERSE_ROOT), {}):
        c, epsilon, means = found["c"], graph.scalar(found["epsilon"]), {"axis": found["axis"]}
        if epsilon is None:
            continue
        whole = NormalizedValue(c, node.output[0], node, int(found["axis"]), epsilon)
        off = graph.maker(c, "Sub") if graph.inner(c, 2) else None
        for centred in operands_match(graph, off, ("x", ("ReduceMean", "x")), means) if off is not None else ():
            if _write_layer(graph, _with_scale(graph, _with_casts(graph, replace(whole, x=centred["x"])))):
                return True
        if _may_have(graph, RMS_FROM) and _write(graph, _with_scale(graph, _with_casts(graph, whole)), "RMS"):
            return True
    return False


def _fuse_expanded(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * g + (bias - mean * g), g = scale / sqrt(variance + epsilon), as Keras has it, becomes LayerNormalization."""
    for outer in operands_match(graph, node, (("Mul", "x", "g"), ("Sub", "bias", ("Mul", "mean", "g"))), {}):
        x, bias, mean, g = (outer[each] for each in ("x", "bias", "mean", "g"))
        centre, scaled = (graph.maker(name, op) for name, op in ((mean, "ReduceMean"), (g, "Mul")))
        if centre is None or scaled is None or not graph.inner(mean, 2) or not graph.inner(g, 2):
            continue
        for means in operands_match(graph, centre, ("x",), {"x": x}):
            for found in operands_match(graph, scaled, (INVERSE_ROOT, "scale"), {"axis": means["axis"]}):
                epsilon, off = graph.scalar(found["epsilon"]), graph.part(found["c"], "Sub")
                if epsilon is None or off is None or list(off.input) != [x, mean]:
                    continue
                axis, scale = int(found["axis"]), found["scale"]
                whole = NormalizedValue(x, node.output[0], node, axis, epsilon, scale, bias)
                if _fits(graph, bias, whole) and _fits(graph, scale, whole) and _write_layer(graph, whole):
                    return True
    return False


def _may_have(graph: Graph, least: int) -> bool:
    """Whether a graph may have a normalization of its own; a plain graph from the opset `least` on."""
    return graph.opset >= (least if graph.plain else RAISED_FROM)


def _write_layer(graph: Graph, found: NormalizedValue) -> bool:
    """Write LayerNormalization, with the bias that is added behind a scale."""
    if not _may_have(graph, LAYER_FROM):
        return False
    addition = graph.reader(found.name, "Add") if found.scale and not found.bias else None
    if addition is not None and (bias := _other(graph, addition, found)):
        found = replace(found, bias=bias, last=addition, name=addition.output[0])
    return _write(graph, found, "Layer")


def _with_casts(graph: Graph, found: NormalizedValue) -> NormalizedValue:
    """The normalization without the casts of a float16 x to float32 and back: the fused node computes in float32."""
    before, after = graph.maker(found.x, "Cast"), graph.reader(found.name, "Cast")
    if before is None or after is None or graph.element_type(found.x) != TensorProto.FLOAT:
        return found
    dtype = graph.element_type(before.input[0])
    if dtype != TensorProto.FLOAT16 or attributes_of(after)["to"] != dtype:
        return found
    return replace(found, x=before.input[0], name=after.output[0], last=after)


def _with_scale(graph: Graph, found: NormalizedValue) -> NormalizedValue:
    node = graph.reader(found.name, "Mul")
    factor = _other(graph, node, found) if node is not None else ""
    return replace(found, scale=factor, last=node, name=node.output[0]) if node is not None and factor else found


def _other(graph: Graph, node: onnx.NodeProto, found: NormalizedValue) -> str:
    """The other operand of a node, if it has the shape and type that scale and bias have; else ''."""
    names = [name for name in node.input if name != found.name]
    return names[0] if len(names) == 1 and _fits(graph, names[0], found) else ""


def _fits(graph: Graph, name: str, found: NormalizedValue) -> bool:
    """Whether a value has the shape and type that scale and bias have."""
    return graph.known(name) == _widths(graph, found) and graph.element_type(name) == graph.element_type(found.x)


def _widths(graph: Graph, found: NormalizedValue) -> list[int] | None:
    """The sizes of the normalized axes, if they are known."""
    sizes = (graph.sizes(found.x) or [])[found.axis :]
    numbers = [size for size in sizes if isinstance(size, int)]
    return numbers if sizes and len(numbers) == -found.axis else None


def _write(graph: Graph, found: NormalizedValue, what: str) -> bool:
    dtype, widths = graph.element_type(found.x), _widths(graph, found)
    if dtype not in TYPES or widths is None:
        return False
    scale = found.scale or _ones(graph, found, widths)
    name = f"{what}Normalization"
    if what == "RMS" and not graph.plain:
        name = "SimplifiedLayerNormalization"
    inputs = [found.x, scale, *([found.bias] if found.bias else [])]
    attributes: dict[str, Any] = {"axis": found.axis, "epsilon": found.epsilon, "stash_type": int(TensorProto.FLOAT)}
    node = graph.node(name, inputs, [found.name], **attributes)
    graph.substitute(found.last, [node])
    return True


def _ones(graph: Graph, found: NormalizedValue, widths: list[int]) -> str:
    """A scale that changes nothing."""
    dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(found.x) or TensorProto.FLOAT)
    return graph.add_constant(np.ones(widths, dtype), f"{found.name}/ones")


CLASSES = 1  # the axis of the classes
LOSS, LOSS_GRADIENT = "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad"
LOSS_AND_GRADIENT = "SoftmaxCrossEntropyLossAndGrad"
DEFAULTS = {"reduction": "mean", "ignore_index": -1}  # opgrad's defaults for the loss and for its gradient


@at_each("NegativeLogLikelihoodLoss")
def fuse_cross_entropy(graph: Graph, node: onnx.NodeProto) -> bool:
    """Fuse LogSoftmax and NegativeLogLikelihoodLoss into SoftmaxCrossEntropyLoss.

    The result of LogSoftmax becomes the second result of the fused node.
    """
    softmax = graph.maker(node.input[0], "LogSoftmax")
    sizes = graph.sizes(softmax.input[0]) if softmax is not None else None
    if softmax is None or sizes is None or len(sizes) < 2 or len(graph.readers[softmax.output[0]]) > 1:
        return False  # another node reads the log-probabilities, too
    early = graph.opset < ONE_AXIS_FROM
    axis = attributes_of(softmax).get("axis", 1 if early else -1) % len(sizes)
    if axis != CLASSES or (early and len(sizes) != 2):
        return False
    inputs = [softmax.input[0], *list(node.input)[1:]]
    outputs = [node.output[0], softmax.output[0]]
    if softmax.output[0] not in graph.kept:
        outputs[1] = graph.free(f"{node.output[0]}_log_prob")
        graph.declare_like(outputs[1], softmax.output[0])
    else:
        graph.substitute(softmax, [])
    fused = helper.make_node(LOSS, inputs, outputs, node.name)
    fused.attribute.extend(node.attribute)
    graph.substitute(node, [fused])
    return True


def fuse_with_gradient(graph: Graph, node: onnx.NodeProto) -> bool:
    """Fuse SoftmaxCrossEntropyLoss and its gradient into one node, which reads the logits once; whether it may be.

    Only that gradient may read the log-probabilities, and the gradient of the loss itself has to be 1.
    """
    gradient = _gradient(graph, node)
    if gradient is None:
        return False
    outputs = [node.output[0], gradient.output[0]]
    fused = graph.node(LOSS_AND_GRADIENT, list(node.input), outputs, MICROSOFT, **DEFAULTS | attributes_of(node))
    graph.substitute(gradient, [])
    graph.substitute(node, [fused])
    return True


def _gradient(graph: Graph, loss: onnx.NodeProto) -> onnx.NodeProto | None:
    """The gradient node of a loss, if it is the only reader of the log-probabilities and its dy is 1; else None."""
    log_prob = loss.output[1] if len(loss.output) > 1 else ""
    if not log_prob or not graph.inner(log_prob):
        return None
    (node,) = graph.readers[log_prob]
    named = node.op_type == LOSS_GRADIENT and domain_of(node) == MICROSOFT
    if not named or node.input[1] != log_prob or list(node.input)[2:] != list(loss.input)[1:]:
        return None
    alike = DEFAULTS | attributes_of(node) == DEFAULTS | attributes_of(loss)
    return node if alike and graph.scalar(node.input[0]) == 1.0 else None


def use_internal_losses(model: onnx.ModelProto) -> None:
    """Replace SoftmaxCrossEntropyLoss by SoftmaxCrossEntropyLossInternal, for which opgrad has a kernel.

    onnxruntime expands the node into ten others. If the node has no `ignore_index`, these take a label of -1 for the
    last class, whereas the original kernels and opgrad's, which compute the gradient, ignore it.
    """
    graph, declared = model.graph, declared_types(model.graph)
    for node in graph.node:
        if node.op_type != LOSS or domain_of(node) or not node.output or node.output[0] not in declared:
            continue
        loss = node.output[0]
        if len(node.output) < 2 or not node.output[1]:
            del node.output[1:]
            node.output.append(f"{loss}.log_prob")
        if node.output[1] not in declared:
            dtype = declared[loss].tensor_type.elem_type
            graph.value_info.append(helper.make_tensor_value_info(node.output[1], dtype, None))
        for item in [each for each in node.attribute if each.name == "ignore_index"]:
            constant = helper.make_tensor(f"{loss}.ignore_index", onnx.TensorProto.INT64, (), [item.i])
            graph.initializer.append(constant)
            node.input.extend([""] * (3 - len(node.input)))
            node.input.append(constant.name)
            node.attribute.remove(item)
        node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", MICROSOFT
    import_microsoft(model)
