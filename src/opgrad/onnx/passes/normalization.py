"""Recognition of layer normalization and RMS normalization in the forms that exporters write."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.passes.patterns import at_each, is_near, mean_axes, plus, power

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
