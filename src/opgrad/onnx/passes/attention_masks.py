"""The mask of attention in graphs: what of it is causal whatever the sizes are, and nodes that compute the rest."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.passes.masks import ALL, LOW, Condition, alignment, all_keys, conditions

ONE_AXIS_FROM = 13  # opset of Softmax with one axis, and of Squeeze and Unsqueeze whose axes are an input
AXES_GIVEN_FROM = 18  # opset of ReduceMax and ReduceMean whose axes are an input


class NotAttention(Exception):
    """The text says why a softmax between products is not replaced."""


def mask_of(
    graph: Graph, new: list[onnx.NodeProto], seen: Sequence[tuple[str, bool]], masks: Sequence[tuple[str, float]],
    q: str, softmax: str,
) -> tuple[str, str]:  # fmt: skip
    """How the mask is causal, and the name of the rest of it, or "".

    new: gets the nodes that compute it. seen: conditions, each with whether a query sees a key where it holds. masks:
    what is added to the scores, each with its factor. q, softmax: the queries and the probabilities.
    """
    aligned, parts, added = set[str](), list[str](), list[str]()
    for condition, holds in seen:
        for each in conditions(graph, condition) if holds else [Condition(condition)]:
            own = alignment(graph, each.name, hides=not holds)
            if own:
                aligned.add(own)
            else:
                part = _as_mask(graph, new, each)
                parts.append(part if holds else added_node(graph, new, "Not", [part], f"{part}/not"))
    for name, factor in masks:
        added += _split(graph, new, _stripped(graph, name), factor, aligned)
    aligned.discard(ALL)
    if len(aligned) > 1:
        raise NotAttention("two of its masks are causal in different ways")
    return "".join(aligned), _joined(graph, new, parts, added, q, softmax)


def some_key(graph: Graph, new: list[onnx.NodeProto], seen: Sequence[tuple[str, bool]], name: str) -> str:
    """Whether a query sees a key, broadcast to the scores with one key; "" if the conditions are causal alone.

    new, seen: as in `mask_of`. name: begins the names of new values.
    """
    if all(alignment(graph, condition, hides=not holds) for condition, holds in seen):
        return ""
    if not all(graph.sizes(condition) for condition, _ in seen):
        raise NotAttention("the graph does not tell the rank of its mask")
    parts = [each if holds else added_node(graph, new, "Not", [each], f"{each}/not") for each, holds in seen]
    whole = reduce(lambda a, b: added_node(graph, new, "And", [a, b], f"{name}/and"), parts)
    number = added_node(graph, new, "Cast", [whole], f"{name}/number", to=TensorProto.FLOAT)
    largest = reduced(graph, new, "ReduceMax", number, -1)
    return added_node(graph, new, "Cast", [largest], f"{name}/some", to=TensorProto.BOOL)


def _stripped(graph: Graph, name: str) -> str:
    """A mask before it is broadcast, which the node does itself."""
    node = graph.maker(name, "Expand")
    return _stripped(graph, node.input[0]) if node is not None else name


def _split(graph: Graph, new: list[onnx.NodeProto], name: str, factor: float, aligned: set[str]) -> list[str]:
    """An added mask without what of it is causal, which joins `aligned`; nothing if nothing is left."""
    own = alignment(graph, name) if factor > 0 else None
    if own:
        aligned.add(own)
        return []
    whole, ends = all_keys(graph, name)
    node = graph.maker(whole, "Where")
    low = graph.scalar(node.input[2]) if node is not None and graph.scalar(node.input[1]) == 0.0 else None
    if node is None or low is None or low > LOW or factor != 1:
        return [_times(graph, new, name, factor)]
    every = [(each, alignment(graph, each.name)) for each in conditions(graph, node.input[0])]
    # Of fewer keys, those that a query sees from the first on stay the same; counted from the last they do not.
    rest = [replace(each, ends=ends) for each, own in every if not own or (ends and own == "bottom_right")]
    if len(rest) == len(every):
        return [name]
    aligned.update(own for _, own in every if own and not (ends and own == "bottom_right"))
    if not rest:
        return []
    masks = [_as_mask(graph, new, each) for each in rest]
    seen = reduce(lambda a, b: added_node(graph, new, "And", [a, b], f"{name}/and"), masks)
    return [added_node(graph, new, "Where", [seen, *node.input[1:]], f"{name}/rest")]


def _as_mask(graph: Graph, new: list[onnx.NodeProto], condition: Condition) -> str:
    """A condition that is broadcast to the scores."""
    name = condition.name
    if condition.lacks_heads and len(graph.sizes(name) or ()) == 3:
        name = unsqueezed(graph, new, name, 1)
    if condition.ends and graph.sizes(name) != []:
        limits = [graph.add_constant(np.array([each]), f"{name}/keys") for each in (0, -1)]
        name = added_node(graph, new, "Slice", [name, limits[0], condition.ends, limits[1]], f"{name}/keys")
    return name


def _times(graph: Graph, new: list[onnx.NodeProto], name: str, factor: float) -> str:
    if factor == 1:
        return name
    kind = helper.tensor_dtype_to_np_dtype(graph.element_type(name) or TensorProto.FLOAT)
    return added_node(graph, new, "Mul", [name, graph.add_constant(np.array(factor, kind), f"{name}/factor")], name)


def _joined(graph: Graph, new: list[onnx.NodeProto], parts: list[str], added: list[str], q: str, softmax: str) -> str:
    """One mask of conditions and of added values."""
    kind = graph.element_type(q) or TensorProto.FLOAT
    seen = reduce(lambda a, b: added_node(graph, new, "And", [a, b], f"{softmax}/seen"), parts) if parts else ""
    total = reduce(lambda a, b: added_node(graph, new, "Add", [a, b], f"{softmax}/mask"), added) if added else ""
    if total and graph.element_type(total) not in (None, kind, TensorProto.FLOAT):
        total = added_node(graph, new, "Cast", [total], f"{softmax}/mask", to=kind)
    if seen and total:
        low = np.array(-np.inf, helper.tensor_dtype_to_np_dtype(graph.element_type(total) or kind))
        return added_node(
            graph, new, "Where", [seen, total, graph.add_constant(low, f"{softmax}/low")], f"{softmax}/mask"
        )
    return seen or total


# --- small nodes ---


def added_node(
    graph: Graph, new: list[onnx.NodeProto], op: str, inputs: list[str], name: str, **attributes: Any
) -> str:
    """The result of a new node."""
    result = graph.free(name)
    node = graph.node(op, inputs, [result], **attributes)
    new.append(node)
    kind: int | None = TensorProto.INT64 if attributes.get("to") == TensorProto.INT64 else None
    if op in ("Add", "Mul", "Where", "Transpose", "And", "Not", "Unsqueeze", "Slice"):
        kind = graph.element_type(inputs[1 if op == "Where" else 0])
    if kind is not None:
        graph.declare(result, kind, None)
    return result


def reduced(graph: Graph, new: list[onnx.NodeProto], op: str, name: str, axis: int) -> str:
    """The reduction of a value over one axis, which stays."""
    if graph.opset >= AXES_GIVEN_FROM:
        axes = graph.add_constant(np.array([axis]), f"{name}/axis")
        return added_node(graph, new, op, [name, axes], f"{name}/reduced")
    return added_node(graph, new, op, [name], f"{name}/reduced", axes=[axis])


def unsqueezed(graph: Graph, new: list[onnx.NodeProto], name: str, axis: int = 0) -> str:
    if graph.opset >= ONE_AXIS_FROM:
        axes = graph.add_constant(np.array([axis]), f"{name}/axes")
        return added_node(graph, new, "Unsqueeze", [name, axes], f"{name}/heads")
    return added_node(graph, new, "Unsqueeze", [name], f"{name}/heads", axes=[axis])
