"""Dead code elimination: it removes nodes, optional results and initializers that no output depends on."""

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import leave_out_results, needed, read_by


def remove_dead(graph: Graph) -> bool:
    """Remove the nodes that no output and no kept value depends on."""
    nodes = list(graph.nodes())
    kept = needed(nodes, graph.kept)
    read, places = read_by(kept).union(graph.kept), {id(node) for node in kept}
    dead = [node for node in nodes if id(node) not in places]
    for node in dead:
        graph.substitute(node, [])
    trimmed = [leave_out_results(node, read) for node in kept]
    return _remove_initializers(graph, read) or bool(dead) or any(trimmed)


def _remove_initializers(graph: Graph, read: set[str]) -> bool:
    tensors, changed = graph.graph.initializer, False
    for index in reversed(range(len(tensors))):
        if tensors[index].name not in read:
            del graph.initializers[tensors[index].name], tensors[index]
            changed = True
    return changed
