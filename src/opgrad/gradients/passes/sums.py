"""Sums of several gradients become additions, which runtimes do in place."""

import onnx

from opgrad.gradients.passes.graph import Graph
from opgrad.onnxruntime.messages import domain_of


def chain_sums(graph: Graph) -> bool:
    """A Sum of values of one shape becomes additions in its order.

    Sum of onnxruntime needs memory for its result while all of its inputs are there; an addition writes into the first
    one, and each of the others is free once it was added.
    """
    changed = False
    for node in list(graph.nodes()):
        if not domain_of(node) and node.op_type == "Sum" and len(node.input) > 1 and _same_shapes(graph, node):
            graph.substitute(node, _additions(graph, node))
            changed = True
    return changed


def _same_shapes(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the sizes of the result are those of each input, as far as the graph tells; nothing is broadcast."""
    sizes = graph.sizes(node.output[0])
    if len(node.input) == 2:
        return True  # an addition broadcasts as a sum does
    return sizes is not None and all(graph.sizes(name) in (None, sizes) for name in node.input)


def _additions(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    total, additions = node.input[0], []
    for name in node.input[1:-1]:
        part = graph.free(f"{node.output[0]}/part")
        graph.declare_like(part, node.output[0])
        additions.append(graph.node("Add", [total, name], [part]))
        total = part
    last = onnx.helper.make_node("Add", [total, node.input[-1]], node.output, node.name)
    return [*additions, last]
