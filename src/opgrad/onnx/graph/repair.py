"""Corrects what only one of ONNX, its inliner and onnxruntime understands."""

from collections.abc import Iterator
from typing import Any

import onnx

from opgrad.onnx.graph.messages import domain_of, keep
from opgrad.onnx.graph.nodes import all_nodes, captured, model_nodes, subgraphs


def mend(model: onnx.ModelProto) -> None:
    """Sort the nodes topologically, turn sizes below 0 into unknown ones, and complete calls of functions, in place."""
    _complete_calls(model)
    for graph in _graphs(model.graph):
        _sort(graph)
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_value < 0:
                    size.Clear()


def _complete_calls(model: onnx.ModelProto) -> None:
    """Write default values of functions' attributes into the calls, as onnx's inliner knows none."""
    defaults = {(each.domain, each.name, each.overload): each.attribute_proto for each in model.functions}
    for node in model_nodes(model) if any(defaults.values()) else ():
        given = {each.name for each in node.attribute}
        found = defaults.get((domain_of(node), node.op_type, node.overload), ())
        node.attribute.extend(each for each in found if each.name not in given)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in all_nodes(graph.node):
        yield from subgraphs(node)


def _sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically; if they form a circle, leave the order as it is."""
    made = {name for node in graph.node for name in node.output if name}
    waiting: list[tuple[onnx.NodeProto, set[str]]] = [(node, made.intersection(captured(node))) for node in graph.node]
    known = set[str]()
    ordered: list[Any] = []
    in_order = True
    while waiting:
        later = []
        for node, needed in waiting:
            if needed <= known:
                ordered.append(node)
                known.update(node.output)
            else:
                later.append((node, needed))
                in_order = False
        if len(later) == len(waiting):
            return
        waiting = later
    if not in_order:
        keep(graph.node, ordered)
