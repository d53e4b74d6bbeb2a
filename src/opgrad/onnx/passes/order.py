"""The order of nodes, so that what runs the graph needs little memory.

onnxruntime orders a graph by a depth-first search from its ends, the nodes whose results no node reads. It begins with
the end that is last in the file and first runs everything that this end depends on; of several inputs it again takes
the one that is last in the file. If the gradient of the first layer's weights came last in the file, all gradients of
activations would be computed before the first gradient of weights, and every activation would stay in memory until
then. So the ends are put behind all other nodes, and the end that can be computed first is put last.
"""

import heapq
from collections.abc import Iterable, Mapping

import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import captured


def order_ends(graph: Graph) -> bool:
    """Put the nodes that lead to only one end behind all others; those that can be computed first come last."""
    nodes = list(graph.nodes())
    ends = _ends(graph, nodes)
    places = {name: place for place, node in enumerate(nodes) if id(node) not in ends for name in node.output if name}
    groups: dict[int, list[onnx.NodeProto]] = {}
    for node in nodes:
        if id(node) in ends:
            groups.setdefault(ends[id(node)], []).append(node)
    ready = {
        end: max((places.get(x, -1) for each in own for x in captured(each)), default=-1) for end, own in groups.items()
    }
    ordered = [node for node in nodes if id(node) not in ends]
    for end in sorted(groups, key=lambda end: (-ready[end], -end)):
        ordered += groups[end]
    graph.reorder(ordered)
    return ordered != nodes


def _ends(graph: Graph, nodes: list[onnx.NodeProto]) -> dict[int, int]:
    """For each node that leads to only one end, the place of that end, by the node's id."""
    ends: dict[int, int] = {}
    for place in reversed(range(len(nodes))):
        readers = [reader for name in nodes[place].output for reader in graph.readers.get(name, ())]
        found = {ends.get(id(reader), -1) for reader in readers} or {place}
        if len(found) == 1 and -1 not in found:
            ends[id(nodes[place])] = found.pop()
    return ends


def sorted_nodes(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes, sorted topologically (Kahn 1962); where several may come next, the given order decides."""
    listed = list(nodes)
    makers = {name: place for place, node in enumerate(listed) for name in node.output if name}
    waiting, followers = _edges(listed, makers)
    ready = [place for place, count in enumerate(waiting) if not count]
    ordered = []
    while ready:
        place = heapq.heappop(ready)
        ordered.append(listed[place])
        for follower in followers[place]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    return ordered


def _edges(nodes: list[onnx.NodeProto], makers: Mapping[str, int]) -> tuple[list[int], list[list[int]]]:
    """For each node the number of nodes that it depends on, and the places of the nodes that depend on it."""
    waiting = [0] * len(nodes)
    followers: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        before = {makers[name] for name in captured(node) if name in makers}
        waiting[place] = len(before)
        for each in before:
            followers[each].append(place)
    return waiting, followers
