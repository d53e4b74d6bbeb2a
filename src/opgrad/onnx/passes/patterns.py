"""Recognition of Gelu, SiLU and Swish, of layer and RMS normalization, and of softmax cross-entropy."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, declared_types, domain_of, import_microsoft
from opgrad.onnx.graph.nodes import FAILURES, attributes_of, refusal

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FAR, FAR_NARROW = 2e-5, 4e-3  # relative tolerances: for numbers written with few digits, and for 16-bit types


def is_near(graph: Graph, name: str, number: float) -> bool:
    """Whether a value is a constant near this number, within the tolerance of its type."""
    found = graph.scalar(name)
    far = FAR_NARROW if graph.element_type(name) in NARROW else FAR
    return found is not None and math.isclose(found, number, rel_tol=far)


def factors(graph: Graph, node: onnx.NodeProto) -> list[str]:
    """The factors of a product; a factor that is itself a product, which nothing else reads, is split up, too."""
    found: list[str] = []
    for name in node.input:
        maker = graph.maker(name, "Mul") if graph.inner(name) else None
        found += factors(graph, maker) if maker is not None and maker is not node else [name]
    return found


def without(names: Sequence[str], name: str) -> list[str]:
    """The names without the first occurrence of one of them."""
    rest = list(names)
    rest.remove(name)
    return rest


def power(graph: Graph, name: str, exponent: float) -> str | None:
    """x if the value is x ** exponent, as Pow or as a product of equal factors, and one node reads it; else None."""
    node = graph.maker(name, "Pow", "Mul") if graph.inner(name) else None
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.input[0] if is_near(graph, node.input[1], exponent) else None
    all_of = factors(graph, node)
    return all_of[0] if len(all_of) == exponent and len(set(all_of)) == 1 else None


def plus(graph: Graph, name: str) -> tuple[str, float] | None:
    """(x, number) if the value is x + number and one node reads it; else None."""
    node = graph.maker(name, "Add") if graph.inner(name) else None
    for a, b in [] if node is None else [tuple(node.input), tuple(node.input)[::-1]]:
        number = graph.scalar(b)
        if number is not None and graph.scalar(a) is None:
            return a, number
    return None


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


# --- passes that look at one node at a time ---------------------------------------------------------------------------


Change = Callable[[Graph, onnx.NodeProto], bool]


def at_each(*operators: str) -> Callable[[Change], Callable[[Graph], bool]]:
    """Make a pass of a function that changes a graph at one node and tells whether it did.

    It is called for every node of these operators of ai.onnx, or of all, that the graph has when the pass begins.
    """

    def decorate(change: Change) -> Callable[[Graph], bool]:
        @functools.wraps(change)
        def run(graph: Graph) -> bool:
            nodes = [each for each in graph.nodes() if not domain_of(each)]
            changed = False
            for node in nodes:  # without `naming`, which would take 0.7 µs for each
                if not operators or node.op_type in operators:
                    try:
                        changed |= change(graph, node)
                    except FAILURES as error:
                        raise refusal(node, error) from error
            return changed

        return run

    return decorate


GELU_FROM, SWISH_FROM = 20, 24  # the first opsets with Gelu and Swish
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # tanh(SLOPE * (x + CUBIC * x^3)) is nearly erf(x / sqrt(2))


@at_each("Mul")
def fuse_gelu(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * (1 + erf(x / sqrt(2))) / 2, or with tanh, becomes Gelu."""
    return _replace(graph, node, None if graph.plain and graph.opset < GELU_FROM else _gelu(graph, node))


@at_each("Mul")
def fuse_swish(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * sigmoid(alpha * x) becomes QuickGelu, or Swish of ONNX."""
    return _replace(graph, node, None if graph.plain and graph.opset < SWISH_FROM else _swish(graph, node))


def _replace(graph: Graph, node: onnx.NodeProto, by: onnx.NodeProto | None) -> bool:
    if by is not None:
        graph.substitute(node, [by])
    return by is not None


# --- Gelu ---


def _gelu(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    names = factors(graph, node)
    halves = [name for name in names if is_near(graph, name, 0.5)]
    if len(names) != 3 or len(halves) != 1:
        return None
    names = without(names, halves[0])
    for x, bracket in (names, names[::-1]):
        found = plus(graph, bracket)
        if found is None or not math.isclose(found[1], 1) or not same_shape(graph, node.output[0], x):
            continue
        if _is_erf(graph, found[0], x):
            return _gelu_node(graph, node, x, "Gelu")
        if _is_tanh(graph, found[0], x):
            return _gelu_node(graph, node, x, "FastGelu")
    return None


def _gelu_node(graph: Graph, node: onnx.NodeProto, x: str, op: str) -> onnx.NodeProto | None:
    if graph.element_type(x) != TensorProto.FLOAT:  # the only type that onnxruntime has kernels for
        return None
    if not graph.plain:
        return graph.node(op, [x], node.output, MICROSOFT)
    return graph.node("Gelu", [x], node.output, approximate="none" if op == "Gelu" else "tanh")


def _is_erf(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is erf(x / sqrt(2))."""
    erf = graph.maker(name, "Erf") if graph.inner(name) else None
    scaled = graph.maker(erf.input[0], "Div", "Mul") if erf is not None and graph.inner(erf.input[0]) else None
    if scaled is None:
        return False
    if scaled.op_type == "Div":
        return scaled.input[0] == x and is_near(graph, scaled.input[1], math.sqrt(2))
    names = list(scaled.input)
    return len(names) == 2 and x in names and is_near(graph, without(names, x)[0], math.sqrt(0.5))


def _is_tanh(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is tanh(SLOPE * (x + CUBIC * x^3))."""
    tanh = graph.maker(name, "Tanh") if graph.inner(name) else None
    product = graph.maker(tanh.input[0], "Mul") if tanh is not None and graph.inner(tanh.input[0]) else None
    if product is None:
        return False
    names = factors(graph, product)
    slopes = [each for each in names if is_near(graph, each, SLOPE)]
    rest = without(names, slopes[0]) if slopes else []
    if len(rest) == 1:
        return _is_cubic(graph, rest[0], x)
    return len(rest) == 2 and x in rest and _is_square_part(graph, without(rest, x)[0], x)


def _is_cubic(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is x + CUBIC * x^3."""
    total = graph.maker(name, "Add") if graph.inner(name) else None
    if total is None or x not in total.input or len(total.input) != 2:
        return False
    return _is_power(graph, without(total.input, x)[0], x, 3)


def _is_square_part(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is 1 + CUBIC * x^2."""
    found = plus(graph, name)
    return found is not None and math.isclose(found[1], 1) and _is_power(graph, found[0], x, 2)


def _is_power(graph: Graph, name: str, x: str, exponent: int) -> bool:
    """Whether a value is CUBIC * x^exponent."""
    product = graph.maker(name, "Mul") if graph.inner(name) else None
    if product is None:
        return False
    names = factors(graph, product)
    numbers = [each for each in names if is_near(graph, each, CUBIC)]
    rest = without(names, numbers[0]) if numbers else []
    return rest == [x] * exponent or (len(rest) == 1 and power(graph, rest[0], exponent) == x)


# --- Swish ---


def _swish(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    for x, name in (tuple(node.input), tuple(node.input)[::-1]):
        sigmoid = graph.maker(name, "Sigmoid") if graph.inner(name) and x != name else None
        alpha = _multiple(graph, sigmoid.input[0], x) if sigmoid is not None else None
        if alpha is not None and graph.element_type(x) in FLOATS and same_shape(graph, node.output[0], x):
            if graph.plain:
                return graph.node("Swish", [x], node.output, alpha=alpha)
            return graph.node("QuickGelu", [x], node.output, MICROSOFT, alpha=alpha)
    return None


def _multiple(graph: Graph, name: str, x: str) -> float | None:
    """alpha of alpha * x."""
    if name == x:
        return 1.0
    product = graph.maker(name, "Mul") if graph.inner(name) else None
    if product is None or x not in product.input:
        return None
    return graph.scalar(without(product.input, x)[0])


LAYER_FROM, RMS_FROM = 17, 23  # the first opsets of ONNX with LayerNormalization and RMSNormalization
RAISED_FROM = 13  # onnxruntime has them in older opsets, too, but onnx cannot convert older models that have them
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)  # the types that are recognized; onnxruntime has kernels for them


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


@at_each("Sub", "Add")
def fuse_layer_normalization(graph: Graph, node: onnx.NodeProto) -> bool:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias becomes LayerNormalization."""
    if not _may_have(graph, LAYER_FROM):
        return False
    if node.op_type == "Add":
        whole = _expanded_layer(graph, node)
    else:
        found = _layer(graph, node)
        whole = None if found is None else _with_bias(graph, _with_scale(graph, _with_casts(graph, found)))
    return whole is not None and _write(graph, whole, "Layer")


@at_each("ReduceMean")
def fuse_rms_normalization(graph: Graph, node: onnx.NodeProto) -> bool:
    """x / sqrt(mean(x * x) + epsilon) * scale becomes SimplifiedLayerNormalization, or RMSNormalization of ONNX."""
    found = _rms(graph, node) if _may_have(graph, RMS_FROM) else None
    return found is not None and _write(graph, _with_scale(graph, _with_casts(graph, found)), "RMS")


def _may_have(graph: Graph, least: int) -> bool:
    """Whether a graph may have a normalization of its own; a plain graph from the opset `least` on."""
    return graph.opset >= (least if graph.plain else RAISED_FROM)


# --- x by its deviation ---


def _layer(graph: Graph, node: onnx.NodeProto) -> NormalizedValue | None:
    """The layer normalization that begins with this node, which subtracts the mean; None if there is none."""
    mean = graph.maker(node.input[1], "ReduceMean") if graph.inner(node.input[1]) else None
    axis = mean_axes(graph, mean) if mean is not None and mean.input[0] == node.input[0] else None
    if axis is None or not graph.inner(node.output[0], 2):
        return None
    found = _divided(graph, node.output[0], axis)
    return None if found is None else replace(found, x=node.input[0])


def _rms(graph: Graph, node: onnx.NodeProto) -> NormalizedValue | None:
    """The RMS normalization that begins with this node, a mean of squares; None if there is none."""
    x, axis = power(graph, node.input[0], 2), mean_axes(graph, node)
    return _divided(graph, x, axis) if x is not None and axis is not None else None


def _divided(graph: Graph, x: str, axis: int) -> NormalizedValue | None:
    """x / sqrt(mean(x * x) + epsilon), if the graph computes it."""
    for reader in graph.readers.get(x, ()):
        found = None if domain_of(reader) else _root(graph, reader, x)
        if found is not None and _is_mean_of_squares(graph, found[0], x, axis):
            return NormalizedValue(x, reader.output[0], reader, axis, found[1])
    return None


def _root(graph: Graph, node: onnx.NodeProto, x: str) -> tuple[str, float] | None:
    """v and epsilon of a node that is x / sqrt(v + epsilon) or x * (1 / sqrt(v + epsilon))."""
    under = None
    if node.op_type == "Div" and node.input[0] == x:
        under = _under_root(graph, node.input[1])
    elif node.op_type == "Mul" and node.input[0] != node.input[1]:
        under = _under_inverse_root(graph, node.input[int(node.input[0] == x)])
    return plus(graph, under) if under is not None else None


def _under_root(graph: Graph, name: str) -> str | None:
    """v if the value is sqrt(v) and one node reads it."""
    node = graph.maker(name, "Sqrt", "Pow") if graph.inner(name) else None
    if node is None or (node.op_type == "Pow" and not is_near(graph, node.input[1], 0.5)):
        return None
    return node.input[0]


def _under_inverse_root(graph: Graph, name: str) -> str | None:
    """v if the value is 1 / sqrt(v) and one node reads it."""
    node = graph.maker(name, "Reciprocal", "Div", "Pow") if graph.inner(name) else None
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.input[0] if is_near(graph, node.input[1], -0.5) else None
    if node.op_type == "Div" and not is_near(graph, node.input[0], 1):
        return None
    return _under_root(graph, node.input[-1])


def _is_mean_of_squares(graph: Graph, name: str, x: str, axis: int) -> bool:
    node = graph.maker(name, "ReduceMean") if graph.inner(name) else None
    return node is not None and mean_axes(graph, node) == axis and power(graph, node.input[0], 2) == x


# --- scale and bias inside ---


def _expanded_layer(graph: Graph, node: onnx.NodeProto) -> NormalizedValue | None:
    """What a node makes that is x * g + (bias - mean * g), g = scale / sqrt(variance + epsilon), as Keras writes it."""
    for first, second in (tuple(node.input), tuple(node.input)[::-1]):
        product, moved = graph.maker(first, "Mul"), graph.maker(second, "Sub")
        shift = graph.maker(moved.input[1], "Mul") if moved is not None and graph.inner(moved.input[1]) else None
        if product is None or moved is None or shift is None or not (graph.inner(first) and graph.inner(second)):
            continue
        for g in [each for each in product.input if each in shift.input]:
            x, mean = (next(iter(set(each.input) - {g}), g) for each in (product, shift))
            found = _expanded(graph, x, mean, g, node)
            if found is not None and _fits(graph, moved.input[0], found) and _fits(graph, found.scale, found):
                return replace(found, bias=moved.input[0])
    return None


def _expanded(graph: Graph, x: str, mean: str, g: str, last: onnx.NodeProto) -> NormalizedValue | None:
    """x normalized, if g is scale / sqrt(variance + epsilon) of it."""
    centre = graph.maker(mean, "ReduceMean") if graph.inner(mean, 2) else None
    scaled = graph.maker(g, "Mul") if graph.inner(g, 2) else None
    axis = mean_axes(graph, centre) if centre is not None and centre.input[0] == x else None
    for root, scale in [] if scaled is None or axis is None else [tuple(scaled.input), tuple(scaled.input)[::-1]]:
        under = _under_inverse_root(graph, root)
        found = plus(graph, under) if under is not None else None
        if found is not None and axis is not None and _is_variance(graph, found[0], x, mean, axis):
            return NormalizedValue(x, last.output[0], last, axis, found[1], scale)
    return None


def _is_variance(graph: Graph, name: str, x: str, mean: str, axis: int) -> bool:
    node = graph.maker(name, "ReduceMean") if graph.inner(name) else None
    centred = power(graph, node.input[0], 2) if node is not None and mean_axes(graph, node) == axis else None
    off = graph.maker(centred, "Sub") if centred is not None and graph.inner(centred) else None
    return off is not None and list(off.input) == [x, mean]


# --- what is around it ---


def _with_casts(graph: Graph, found: NormalizedValue) -> NormalizedValue:
    """The normalization without the casts of a float16 x to float32 and back: the fused node computes in float32."""
    before, after = graph.maker(found.x, "Cast"), graph.reader(found.name, "Cast")
    if before is None or after is None or graph.element_type(found.x) != TensorProto.FLOAT:
        return found
    kind = graph.element_type(before.input[0])
    if kind != TensorProto.FLOAT16 or attributes_of(after)["to"] != kind:
        return found
    return replace(found, x=before.input[0], name=after.output[0], last=after)


def _with_scale(graph: Graph, found: NormalizedValue) -> NormalizedValue:
    node = graph.reader(found.name, "Mul")
    factor = _other(graph, node, found) if node is not None else ""
    return replace(found, scale=factor, last=node, name=node.output[0]) if node is not None and factor else found


def _with_bias(graph: Graph, found: NormalizedValue) -> NormalizedValue:
    node = graph.reader(found.name, "Add") if found.scale else None
    addend = _other(graph, node, found) if node is not None else ""
    return replace(found, bias=addend, last=node, name=node.output[0]) if node is not None and addend else found


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


# --- the node that stands for it ---


def _write(graph: Graph, found: NormalizedValue, what: str) -> bool:
    kind, widths = graph.element_type(found.x), _widths(graph, found)
    if kind not in TYPES or widths is None:
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
    kind = helper.tensor_dtype_to_np_dtype(graph.element_type(found.x) or TensorProto.FLOAT)
    return graph.add_constant(np.ones(widths, kind), f"{found.name}/ones")


ONE_AXIS_FROM = 13  # before this opset LogSoftmax takes all axes from `axis` on together as one row
CLASSES = 1  # the axis of the classes
LOSS, LOSS_GRADIENT = "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad"
LOSS_AND_GRADIENT = "SoftmaxCrossEntropyLossAndGrad"
DEFAULTS = {"reduction": "mean", "ignore_index": -1}  # opgrad's defaults for the loss and for its gradient


# --- before differentiation ---


@at_each("NegativeLogLikelihoodLoss")
def fuse_cross_entropy(graph: Graph, node: onnx.NodeProto) -> bool:
    """Fuse LogSoftmax and NegativeLogLikelihoodLoss into SoftmaxCrossEntropyLoss.

    The result of LogSoftmax becomes the second result of the fused node.
    """
    softmax = graph.maker(node.input[0], "LogSoftmax")
    if softmax is None or not _is_over_classes(graph, softmax) or len(graph.readers[softmax.output[0]]) > 1:
        return False  # of another axis, or another node reads the log-probabilities, too
    _write_loss(graph, softmax, node)
    return True


def _is_over_classes(graph: Graph, softmax: onnx.NodeProto) -> bool:
    sizes = graph.sizes(softmax.input[0])
    if sizes is None or len(sizes) < 2:
        return False
    early = graph.opset < ONE_AXIS_FROM
    axis = attributes_of(softmax).get("axis", 1 if early else -1) % len(sizes)
    return axis == CLASSES and (not early or len(sizes) == 2)


def _write_loss(graph: Graph, softmax: onnx.NodeProto, node: onnx.NodeProto) -> None:
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


# --- in training graphs ---


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
    declared = declared_types(model.graph)
    for node in model.graph.node:
        is_loss = node.op_type == LOSS and not domain_of(node)
        if is_loss and node.output and node.output[0] in declared:
            _make_internal(model.graph, node, declared)
    import_microsoft(model)


def _make_internal(graph: onnx.GraphProto, node: onnx.NodeProto, declared: dict[str, onnx.TypeProto]) -> None:
    loss = node.output[0]
    if len(node.output) < 2 or not node.output[1]:
        del node.output[1:]
        node.output.append(f"{loss}.log_prob")
    log_prob = node.output[1]
    if log_prob not in declared:
        kind = declared[loss].tensor_type.elem_type
        graph.value_info.append(helper.make_tensor_value_info(log_prob, kind, None))
    for item in list(node.attribute):
        if item.name == "ignore_index":
            constant = helper.make_tensor(f"{loss}.ignore_index", onnx.TensorProto.INT64, (), [item.i])
            graph.initializer.append(constant)
            node.input.extend([""] * (3 - len(node.input)))
            node.input.append(constant.name)
            node.attribute.remove(item)
    node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", MICROSOFT
