"""Sums of several gradients become additions, which runtimes do in place."""

import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.sizes import Sizes, are_equal
from opgrad.onnx.passes.single_nodes import at_each


@at_each("Sum")
def chain_sums(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace a Sum of values of one shape by additions in its order.

    onnxruntime's Sum needs memory for its result while all of its inputs are in memory. An addition writes into its
    first input, and the memory of each other input is free as soon as it was added.
    """
    if len(node.input) < 2 or _broadcasts(graph, node):
        return False
    graph.substitute(node, _additions(graph, node))
    return True


def _broadcasts(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether one of more than two inputs is known to be broadcast; of two inputs an addition broadcasts as well."""
    whole = graph.sizes(node.output[0])
    sizes = [graph.sizes(name) for name in node.input]
    return len(sizes) > 2 and (whole is None or any(each is not None and _differ(each, whole) for each in sizes))


def _differ(one: Sizes, other: Sizes) -> bool:
    """Whether two shapes are known to differ."""
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a != b and None not in (a, b) for a, b in pairs)


def _additions(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    total, additions = node.input[0], []
    equal = all(are_equal(graph.sizes(name), graph.sizes(node.output[0])) for name in node.input)
    for name in node.input[1:-1]:
        part = graph.free(f"{node.output[0]}/part")
        if equal:
            graph.declare_like(part, node.output[0])
        additions.append(graph.node("Add", [total, name], [part]))
        total = part
    last = onnx.helper.make_node("Add", [total, node.input[-1]], node.output, node.name)
    return [*additions, last]
