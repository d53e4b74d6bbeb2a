"""Slices and Gathers that together take all of a value become one Split, whose gradient is one Concat."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.passes.sizes import Shapes, slice_limits

SIZES_ARE_INPUT = 13  # the first opset whose Split and Squeeze have them as an input


@dataclass(frozen=True)
class AxisPart:
    """The elements from start to before end along an axis, which a node takes. squeezed: the result lacks the axis."""

    node: onnx.NodeProto
    axis: int
    start: int
    end: int
    squeezed: bool = False


def split_parts(graph: Graph) -> bool:
    """Replace the Slices and Gathers that together take every element of a value once by one Split."""
    changed, shapes = False, Shapes(graph)
    for name in list(graph.readers):
        parts = [part for node in graph.readers[name] if (part := _part(graph, shapes, node, name)) is not None]
        for axis in sorted({part.axis for part in parts}):
            chosen = sorted((part for part in parts if part.axis == axis), key=lambda part: part.start)
            if len(chosen) > 1 and _is_whole(graph, name, chosen):
                _write(graph, name, chosen)
                changed = True
                break
    return changed


def _part(graph: Graph, shapes: Shapes, node: onnx.NodeProto, name: str) -> AxisPart | None:
    sizes = graph.sizes(name)
    if domain_of(node) or sizes is None or node.op_type not in ("Slice", "Gather") or node.input[0] != name:
        return None
    axis, start, end = _place(graph, shapes, node) or (0, None, None)
    size = sizes[axis] if -len(sizes) <= axis < len(sizes) else None
    if start is None or end is None or not isinstance(size, int):
        return None
    if node.op_type == "Gather":
        start = start % size if -size <= start < size else size
        return AxisPart(node, axis % len(sizes), start, start + 1, squeezed=True)
    start, end = (min(max(each + size if each < 0 else each, 0), size) for each in (start, end))
    return AxisPart(node, axis % len(sizes), start, end)


def _place(graph: Graph, shapes: Shapes, node: onnx.NodeProto) -> tuple[int, int, int] | None:
    """The axis, start and end of the part that a node takes, as the node gives them: they may be negative."""
    if node.op_type == "Gather":
        index = graph.constant(node.input[1])
        place = None if index is None or index.ndim else int(index)
        return None if place is None else (attributes_of(node).get("axis", 0), place, place + 1)
    limits = slice_limits(shapes, node)
    if limits is None or len(limits) != 1:
        return None
    axis, *terms = limits[0]
    numbers = [term.number for term in terms if term is not None]
    if len(numbers) < 3 or None in numbers or numbers[2] != 1:
        return None
    return axis, numbers[0] or 0, numbers[1] or 0


def _is_whole(graph: Graph, name: str, parts: list[AxisPart]) -> bool:
    """Whether sorted parts cover a value, each element once."""
    size = (graph.sizes(name) or [])[parts[0].axis]
    ends = [0, *(part.end for part in parts)]
    starts = [*(part.start for part in parts), size]
    return ends == starts and all(part.start < part.end for part in parts)


def _write(graph: Graph, name: str, parts: list[AxisPart]) -> None:
    order = {id(node): place for place, node in enumerate(graph.nodes())}
    first = min((part.node for part in parts), key=lambda node: order[id(node)])
    outputs = [graph.free(f"{name}/part") if part.squeezed else part.node.output[0] for part in parts]
    sizes = np.array([part.end - part.start for part in parts])
    lengths = [graph.add_constant(sizes, f"{name}/split")] if graph.opset >= SIZES_ARE_INPUT else []
    attributes = {} if lengths else {"split": sizes.tolist()}
    split = graph.node("Split", [name, *lengths], outputs, axis=parts[0].axis, **attributes)
    pairs = list(zip(parts, outputs, strict=True))
    for part, _ in pairs:
        if part.node is not first:
            graph.substitute(part.node, [])
    squeezes = list(_squeezes(graph, [pair for pair in pairs if pair[0].squeezed], name))
    graph.substitute(first, [split, *squeezes])


def _squeezes(graph: Graph, pairs: list[tuple[AxisPart, str]], whole: str) -> Iterator[onnx.NodeProto]:
    """The nodes that remove the axis of the Split's results, of size 1, for parts that lack it."""
    for part, name in pairs:
        sizes = list(graph.sizes(whole) or [])
        sizes[part.axis] = 1
        graph.declare(name, graph.element_type(whole) or onnx.TensorProto.FLOAT, sizes)
        if graph.opset >= SIZES_ARE_INPUT:
            axes = graph.add_constant(np.array([part.axis]), f"{name}/axes")
            yield graph.node("Squeeze", [name, axes], part.node.output)
        else:
            yield graph.node("Squeeze", [name], part.node.output, axes=[part.axis])
