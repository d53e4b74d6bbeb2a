"""Dead code elimination: it removes nodes, optional results and initializers that no output depends on."""

import onnx

from opgrad.graph.body import OPTIONAL_RESULTS
from opgrad.graph.opset import captured
from opgrad.graph.passes.graph import Graph

WRITES = ("InPlaceAccumulatorV2", "InPlaceAccumulator")  # operators that write into an input


def remove_dead(graph: Graph) -> bool:
    """Remove the nodes that no output and no kept value depends on."""
    needed, changed = set(graph.kept), False
    for node in reversed(list(graph.nodes())):
        if needed.intersection(node.output) or node.op_type in WRITES:
            needed.update(captured(node))
            changed |= _trim(node, needed)
        else:
            graph.substitute(node, [])
            changed = True
    return _remove_initializers(graph, needed) or changed


def _trim(node: onnx.NodeProto, needed: set[str]) -> bool:
    """Remove the optional results that nothing reads, of operators that then do not compute them."""
    before = len(node.output)
    first = OPTIONAL_RESULTS.get(node.op_type, before)
    for index in range(first, before):
        if node.output[index] not in needed:
            node.output[index] = ""
    while len(node.output) > 1 and not node.output[-1]:
        node.output.pop()
    return len(node.output) < before


def _remove_initializers(graph: Graph, needed: set[str]) -> bool:
    tensors, changed = graph.graph.initializer, False
    for index in reversed(range(len(tensors))):
        if tensors[index].name not in needed:
            del graph.initializers[tensors[index].name], tensors[index]
            changed = True
    return changed
