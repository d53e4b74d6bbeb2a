"""Advice for a node that has no gradient, found in the graph around it."""

from collections.abc import Iterator

import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import captured, reads_values

FIXING = "python -m onnxruntime.tools.make_dynamic_shape_fixed does it"
Axis = tuple[str, int, str]  # an input of the graph, an axis of it, and the name of its size


def hint(forward: Graph, node: onnx.NodeProto) -> str:
    """The text that a message adds to the reason why a node has no gradient; "" if the graph gives no clue.

    It names the open sizes of the model's inputs that the condition of an If depends on.
    """
    if node.op_type != "If" or domain_of(node):
        return ""
    found = list(dict.fromkeys(_deciding(forward, node.input[0])))
    if not found:
        return ""
    told = ", ".join(f"axis {axis}{f' ({size})' if size else ''} of {name!r}" for name, axis, size in found)
    return f"; that depends on the size of the input's {told}: fix it, {FIXING}"


def _deciding(forward: Graph, name: str) -> Iterator[Axis]:
    """The open sizes of the graph's inputs on which a value depends."""
    seen, waiting = {name}, [name]
    while waiting:
        value = waiting.pop()
        node = forward.producers.get(value)
        if node is None:
            continue
        if not reads_values(node):
            yield from _open(forward, node.input[0], _asked(forward, value))
            continue
        for each in captured(node):
            if each not in seen:
                seen.add(each)
                waiting.append(each)


def _asked(forward: Graph, shape: str) -> set[int] | None:
    """The axes whose sizes Gather nodes pick from a shape; None if all axes are read or the axes are not constant."""
    readers = [node for node in forward.graph.node if shape in node.input]
    indices = [forward.constant(node.input[1]) for node in readers if node.op_type == "Gather"]
    if len(indices) < len(readers) or any(each is None for each in indices):
        return None
    return {int(index) for each in indices if each is not None for index in each.ravel()}


def _open(forward: Graph, name: str, asked: set[int] | None) -> Iterator[Axis]:
    """The axes of the graph's inputs that the open sizes of a value come from. asked: its axes that matter, or None."""
    inputs = {each.name: each for each in forward.graph.input}
    sizes = forward.sizes(name)
    rank = len(sizes) if sizes is not None else 0
    axes = {axis % rank if rank else axis for axis in asked} if asked is not None else None
    if name in inputs:
        yield from _of_input(inputs[name], axes)
        return
    symbols = {
        size for axis, size in enumerate(sizes or ()) if isinstance(size, str) and (axes is None or axis in axes)
    }
    known = [each for value in inputs.values() for each in _of_input(value, None)]
    named = [each for each in known if each[2] in symbols]
    yield from named or known


def _of_input(value: onnx.ValueInfoProto, axes: set[int] | None) -> Iterator[Axis]:
    for axis, size in enumerate(value.type.tensor_type.shape.dim):
        if not size.HasField("dim_value") and (axes is None or axis in axes):
            yield value.name, axis, size.dim_param
