"""Bounds of what a model computes, whose few bytes can ask for any memory."""

import math
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper

from opgrad.base.limits import free_memory
from opgrad.onnx.graph.evaluation import AMPLIFIED
from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.large import size_of
from opgrad.onnx.graph.nodes import captured, subgraphs, title

LARGEST = 1 << 30  # the most bytes of a value that follows from constants, beside AMPLIFIED times what these have


def check_sizes(model: onnx.ModelProto, who: str) -> bool:
    """Raise ValueError, naming the node, for a value for which there is no memory, or not as much for constants.

    Returns whether there is for all constants together, which a runtime may compute ahead and keep; those inside of
    graphs of nodes and of functions have no known sizes. who: the caller, and the name of the model, for messages.
    """
    graph = Graph(model)
    try:
        graph.sizes("")
    except ValueError:  # its types contradict each other; whatever runs the model reports an error
        return False
    held = sum(size_of(each) * _width(each.data_type) for each in model.graph.initializer)
    held += sum(each.ByteSize() for each in graph.nodes() if each.op_type == "Constant")
    constants = set(graph.initializers) - overridable(model)
    called = {(each.domain, each.name) for each in model.functions}
    most, free = LARGEST + AMPLIFIED * held, free_memory() or math.inf
    room: float = most
    if any(_has_constants(each.node, set()) for each in model.functions):
        room = -math.inf
    for node in graph.nodes():
        fixed = constants.issuperset(captured(node))
        if (fixed and (node.domain, node.op_type) in called) or _has_inner_constants(node, constants):
            room = -math.inf
        for name in filter(None, node.output if node.op_type != "Constant" else ()):
            size, limit = _bytes(graph, name), most if fixed else free
            if size is not None and size > limit:
                of = " from constants" if fixed else ""
                raise ValueError(f"{who}: {title(node)} computes {size} bytes{of}, expected at most {int(limit)}")
            if fixed:
                room -= size if size is not None and _is_whole(graph, name) else math.inf
        constants.update(node.output if fixed else ())
    return room >= 0


def _has_constants(nodes: Iterable[onnx.NodeProto], constants: set[str]) -> bool:
    """Whether nodes compute something from constants alone. constants: those around them."""
    known = set(constants)
    for node in nodes:
        if node.op_type == "Constant":
            known.update(node.output)
        elif known.issuperset(captured(node)) or _has_inner_constants(node, known):
            return True
    return False


def _has_inner_constants(node: onnx.NodeProto, constants: set[str]) -> bool:
    """The same of the graphs of a node."""
    return any(
        _has_constants(each.node, constants | {tensor.name for tensor in each.initializer}) for each in subgraphs(node)
    )


def _width(kind: int) -> int:
    """The bytes of an element, of an unknown type 1."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind)).itemsize if kind else 1


def _bytes(graph: Graph, name: str) -> int | None:
    """The least bytes of a value; None if not even its rank is known."""
    sizes = graph.sizes(name)
    if sizes is None:
        return None
    return math.prod(size for size in sizes if isinstance(size, int)) * _width(graph.element_type(name) or 0)


def _is_whole(graph: Graph, name: str) -> bool:
    """Whether all sizes of a value are known."""
    return all(isinstance(size, int) for size in graph.sizes(name) or ())
