"""Where to cut a forward graph into segments for gradient checkpointing, see `recompute`."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import onnx
from onnx import helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.nodes import captured, needed, read_by

UNKNOWN_SIZE = 32  # the assumed length of an axis of unknown size, where bytes are compared
WHO = "checkpoint_segments"


class Segments:
    """A forward graph, cut into segments.

    forward: its nodes, in their order. backward: the other nodes of the graph.
    kept: the values that cross from one segment to a later one. spans: for each segment the place of its first node in
    `forward` and the place behind its last one.
    """

    def __init__(self, graph: Graph, forward: Sequence[str], wanted: int | Sequence[str]):
        nodes = list(graph.nodes())
        self.forward = needed(nodes, forward)
        before = {id(node) for node in self.forward}
        self.backward = [node for node in nodes if id(node) not in before]
        self._graph = graph
        self._last_uses = _last_uses(self.forward)
        saved = read_by(self.backward)
        self._bytes = [sum(size_of(graph, name) for name in node.output if name in saved) for node in self.forward]
        ends = self._balanced(wanted) if isinstance(wanted, int) else self._after(wanted)
        self.kept = frozenset(name for end in ends for name in self._crossing(end))
        limits = [0, *ends, len(self.forward)]
        self.spans = list(pairwise(limits))

    def _crossing(self, end: int) -> list[str]:
        """The values that are made before a place and read behind it."""
        made = (name for node in self.forward[:end] for name in node.output if name)
        return [name for name in made if self._last_uses.get(name, -1) >= end]

    def _after(self, names: Sequence[str]) -> list[int]:
        """The places behind the nodes that make these values."""
        places = {name: place for place, node in enumerate(self.forward, 1) for name in node.output if name}
        lost = [name for name in names if name not in places]
        if lost:
            raise ValueError(
                f"{WHO}: no node between inputs and loss makes {' or '.join(map(repr, lost))}, "
                "expected names of values inside the model"
            )
        return sorted({places[name] for name in names} - {len(self.forward)})

    def _balanced(self, count: int) -> list[int]:
        """The places of the cuts: they divide the bytes that the backward part reads into about equal parts.

        Each place minimizes its distance in bytes from the equal part plus the bytes of the values that cross it.
        """
        sums, crossing = [0, *accumulate(self._bytes)], self._crossing_bytes()
        targets = [sums[-1] * number / count for number in range(1, count)]
        places = range(1, len(self.forward))
        if not places:
            return []
        return sorted(
            {min(places, key=lambda place: crossing[place] + abs(sums[place] - target)) for target in targets}
        )

    def _crossing_bytes(self) -> list[int]:
        """For each place the bytes of the values that are made before it and read behind it."""
        changes = [0] * (len(self.forward) + 1)
        for place, node in enumerate(self.forward, 1):
            for name in filter(None, node.output):
                last = self._last_uses.get(name, -1)
                if last >= place:
                    size = size_of(self._graph, name)
                    changes[place] += size
                    changes[last + 1] -= size
        for place in range(1, len(changes)):
            changes[place] += changes[place - 1]
        return changes


def _last_uses(nodes: Sequence[onnx.NodeProto]) -> dict[str, int]:
    return {name: place for place, node in enumerate(nodes) for name in captured(node)}


def size_of(graph: Graph, name: str) -> int:
    """The bytes of a value; an estimate if sizes are unknown, and 0 if its type or rank is."""
    kind, sizes = graph.element_type(name), graph.sizes(name)
    if kind is None or sizes is None:
        return 0
    count = math.prod(size if isinstance(size, int) else UNKNOWN_SIZE for size in sizes)
    return count * helper.tensor_dtype_to_np_dtype(kind).itemsize
