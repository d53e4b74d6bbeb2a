"""The order of nodes, so that what runs the graph needs little memory.

onnxruntime goes through a graph from its ends, the last one in the file first, and runs before each what it depends
on, of several inputs again the one that comes last in the file. If the gradient of the first layer's weights came
last, all gradients of activations would be computed before the first gradient of weights, and no activation would be
free until then. So the ends stand behind everything else, those that can be computed first at the very end.
"""

import heapq
from collections.abc import Iterable, Mapping

import onnx

from opgrad.gradients.passes.dead import WRITES
from opgrad.gradients.passes.graph import Graph
from opgrad.onnxruntime.opset import captured


def order_ends(graph: Graph) -> bool:
    """Put what leads to one result alone behind everything else, what can be computed first at the very end."""
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
    ordered = writes_last(graph, ordered, nodes)
    graph.reorder(ordered)
    return ordered != nodes


def writes_last(
    graph: Graph, nodes: Iterable[onnx.NodeProto], before: Iterable[onnx.NodeProto]
) -> list[onnx.NodeProto]:
    """Nodes with those that add to buffers behind all others, in the order that they had before.

    It is that of the parameters, which readers of training graphs rely on.
    """
    writes = [node for node in before if node.op_type in WRITES and not any(map(graph.readers.get, node.output))]
    last = {id(node) for node in writes}
    return [*(node for node in nodes if id(node) not in last), *writes]


def _ends(graph: Graph, nodes: list[onnx.NodeProto]) -> dict[int, int]:
    """The place of the end that a node leads to, by the node's id, for those that lead to one alone."""
    ends: dict[int, int] = {}
    for place in reversed(range(len(nodes))):
        readers = [reader for name in nodes[place].output for reader in graph.readers.get(name, ())]
        found = {ends.get(id(reader), -1) for reader in readers} or {place}
        if len(found) == 1 and -1 not in found:
            ends[id(nodes[place])] = found.pop()
    return ends


def sorted_nodes(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes in an order in which each comes behind what it reads, and otherwise as they are (Kahn 1962)."""
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
    """How many nodes each one waits for, and which wait for it."""
    waiting = [0] * len(nodes)
    followers: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        before = {makers[name] for name in captured(node) if name in makers}
        waiting[place] = len(before)
        for each in before:
            followers[each].append(place)
    return waiting, followers
