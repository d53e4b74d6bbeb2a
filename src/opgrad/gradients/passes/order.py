"""The order of nodes, so that what runs the graph needs little memory.

onnxruntime goes through a graph from its ends, the last one in the file first, and runs before each what it depends
on, of several inputs again the one that comes last in the file. If the gradient of the first layer's weights came
last, all gradients of activations would be computed before the first gradient of weights, and no activation would be
free until then. So the ends stand behind everything else, those that can be computed first at the very end.
"""

import heapq
from collections.abc import Iterable, Mapping

import onnx

from opgrad.gradients.passes.graph import Graph
from opgrad.onnxruntime.opset import captured


def order_ends(graph: Graph) -> bool:
    """Put the nodes whose results no other one reads behind all others, the earliest last."""
    nodes = list(graph.nodes())
    ends = [node for node in nodes if not any(graph.readers.get(name) for name in node.output if name)]
    last = {id(node) for node in ends}
    ordered = [*(node for node in nodes if id(node) not in last), *ends[::-1]]
    graph.reorder(ordered)
    return ordered != nodes


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
