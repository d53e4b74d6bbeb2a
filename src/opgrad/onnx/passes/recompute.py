"""Gradient checkpointing (Chen et al. 2016): the backward part computes activations inside segments again.

The recomputation of a segment has to wait for the gradient at the end of the segment. Otherwise a runtime would run it
at once, or onnxruntime, which joins common subexpressions, would keep the first results. So the values that a segment
reads pass through a Reshape to their own shape. It shares their memory and costs nothing. The shape that it is given
depends on that gradient, although it is always zeros, and a 0 in it keeps the size.

Nodes are ordered so that onnxruntime needs little memory. It orders a graph by a depth-first search from its ends, the
nodes whose results no node reads. It begins with the end that is last in the file and first runs everything that this
end depends on; of several inputs it again takes the one that is last in the file. If the gradient of the first layer's
weights came last, all gradients of activations would be computed before the first gradient of weights, and every
activation would stay in memory until then. So the ends are put behind all other nodes, the one that can be computed
first last.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.nodes import attributes_of, captured, needed, read_by, rename_inputs, sorted_nodes
from opgrad.onnx.passes.removal import is_repeatable

UNKNOWN_SIZE = 32  # the assumed length of an axis of unknown size, where bytes are compared
SEGMENTS = "checkpoint_segments"  # the argument of public functions


def size_of(graph: Graph, name: str) -> int:
    """The bytes of a value; an estimate if sizes are unknown, and 0 if its type or rank is."""
    dtype, sizes = graph.element_type(name), graph.sizes(name)
    if dtype is None or sizes is None:
        return 0
    count = math.prod(size if isinstance(size, int) else UNKNOWN_SIZE for size in sizes)
    return count * helper.tensor_dtype_to_np_dtype(dtype).itemsize


def order_ends(graph: Graph) -> bool:
    """Put the nodes that lead to only one end behind all others; those that can be computed first come last."""
    nodes = list(graph.nodes())
    ends = _ends(graph, nodes)
    places = {name: index for index, node in enumerate(nodes) if id(node) not in ends for name in node.output if name}
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


SUFFIX = "_recompute"
STATISTICS = (3, 4)  # the results of BatchNormInternal with the batch's mean and 1 / deviation


def checkpoint(graph: Graph, forward: Sequence[str], segments: int | Sequence[str]) -> None:
    """Let the backward part compute the values again that it reads, except those kept.

    Values between segments and those of the last segment are kept.

    forward: what the model computed before it was differentiated: its loss and other outputs.
    segments: the number of segments, or the names of values with whose nodes a segment ends.
    """
    nodes = list(graph.nodes())
    before = needed(nodes, forward)
    ids = {id(node) for node in before}
    backward = [node for node in nodes if id(node) not in ids]
    made = {name: place for place, node in enumerate(before, 1) for name in node.output if name}
    last_uses = {name: place for place, node in enumerate(before) for name in captured(node)}
    if isinstance(segments, int):
        saved = read_by(backward)
        weights = [sum(size_of(graph, name) for name in node.output if name in saved) for node in before]
        crossing = [0] * (len(before) + 1)  # what each place adds to the bytes of the values that cross it
        for name, place in made.items():
            last = last_uses.get(name, -1)
            if last >= place:
                size = size_of(graph, name)
                crossing[place] += size
                crossing[last + 1] -= size
        ends = _balanced(weights, list(accumulate(crossing)), segments)
    else:
        lost = [name for name in segments if name not in made]
        if lost:
            names = " or ".join(map(repr, lost))
            wrong = f"has {names}, which no node between inputs and loss makes, expected values inside the model"
            raise ArgumentError(SEGMENTS, wrong)
        ends = sorted({made[name] for name in segments} - {len(before)})
    kept = {name for end in ends for name, place in made.items() if place <= end <= last_uses.get(name, -1)}
    for start, end in reversed(list(pairwise([0, *ends]))):
        later = {name for node in before[end:] for name in node.output if name}
        new = _Segment(graph, before[start:end], backward, graph.kept | kept).recompute(later)
        nodes = sorted_nodes([*nodes, *new])
        graph.reorder(nodes)
        ids = {id(node) for node in (*backward, *new)}
        backward = [node for node in nodes if id(node) in ids]


def _balanced(weights: Sequence[int], crossing: Sequence[int], count: int) -> list[int]:
    """The places of the cuts: they divide the bytes that the backward part reads into about equal parts.

    Each place minimizes its distance in bytes from the equal part plus the bytes of the values that cross it.
    """
    sums, places = [0, *accumulate(weights)], range(1, len(weights))
    if not places:
        return []
    targets = [sums[-1] * number / count for number in range(1, count)]
    return sorted({min(places, key=lambda place: crossing[place] + abs(sums[place] - target)) for target in targets})


@dataclass
class _Segment:
    """One segment, whose values are computed again.

    inside: its nodes. backward: the nodes that may read its values. kept: the values that are not computed again.
    """

    graph: Graph
    inside: Sequence[onnx.NodeProto]
    backward: Sequence[onnx.NodeProto]
    kept: frozenset[str]
    again: dict[str, str] = field(default_factory=dict)  # from a value to the name of its recomputed copy
    new: list[onnx.NodeProto] = field(default_factory=list)

    def recompute(self, later: set[str]) -> list[onnx.NodeProto]:
        """The new nodes, not yet in the graph, whose results the backward part reads.

        later: the values that later segments make.
        """
        needed = read_by(self.backward) - self.kept
        copied = []
        for node in reversed(self.inside):
            is_special = _copier(node) is not _plain_copy and node.output[0] in needed
            if needed.intersection(node.output) and (is_repeatable(node) or is_special):
                copied.append(node)
                needed |= set(captured(node)) - self.kept
        copied.reverse()
        values = {name for node in copied for name in node.output if name and name not in self.kept}
        readers = [node for node in self.backward if values.intersection(captured(node))]
        token = _token(self.backward, readers, later)
        if token is None:
            return []
        for node in copied:
            self.new += _copier(node)(self, node)
        for node in readers:
            rename_inputs(node, self.again)
        _wait(self.graph, token, self.new)
        return self.new

    def name(self, name: str) -> str:
        """The name of a value's recomputed copy, or its own name if it is not computed again."""
        return self.again.get(name, name)

    def anew(self, name: str) -> str:
        """A new name for the recomputed copy of a value; "" for a missing output."""
        if not name or name in self.kept:
            return self.graph.free(f"{name}{SUFFIX}") if name else ""
        self.again[name] = self.graph.free(f"{name}{SUFFIX}")
        self.graph.declare_like(self.again[name], name)
        return self.again[name]


def _plain_copy(segment: _Segment, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    copy = copied(node)
    copy.name = segment.graph.free(f"{node.name or node.op_type}{SUFFIX}")
    copy.input[:] = [segment.name(name) for name in node.input]
    copy.output[:] = [segment.anew(name) for name in node.output]
    return [copy]


def _dropout(segment: _Segment, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The result of dropout from x and the mask of the first run; DropoutGrad computes the same function."""
    if len(node.output) < 2 or not node.output[1]:
        node.output[1:] = [segment.graph.free(f"{node.output[0]}_mask")]
        segment.graph.declare(node.output[1], TensorProto.BOOL, segment.graph.sizes(node.output[0]))
    inputs = [segment.name(node.input[0]), node.output[1], *node.input[1:]]
    return [segment.graph.node("DropoutGrad", inputs, [segment.anew(node.output[0])], MICROSOFT)]


def _batch_norm(segment: _Segment, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The result of batch normalization from the batch's statistics of the first run.

    The running statistics are not updated a second time.
    """
    graph, (mean, inv_std) = segment.graph, (node.output[index] for index in STATISTICS)
    epsilon = attributes_of(node).get("epsilon", 1e-5)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(graph.element_type(inv_std) or TensorProto.FLOAT)
    constant = graph.add_constant(np.array(epsilon, dtype), f"{node.output[0]}/epsilon")
    square, both, variance = (graph.free(f"{inv_std}{SUFFIX}_{what}") for what in ("square", "sum", "variance"))
    inputs = [segment.name(node.input[0]), *node.input[1:3], mean, variance]
    return [
        graph.node("Mul", [inv_std, inv_std], [square]),
        graph.node("Reciprocal", [square], [both]),
        graph.node("Sub", [both, constant], [variance]),
        graph.node("BatchNormalization", inputs, [segment.anew(node.output[0])], epsilon=epsilon),
    ]


Copier = Callable[[_Segment, onnx.NodeProto], list[onnx.NodeProto]]
COPIES: dict[tuple[str, str], Copier] = {("", "Dropout"): _dropout, (MICROSOFT, "BatchNormInternal"): _batch_norm}


def _copier(node: onnx.NodeProto) -> Copier:
    """The function that makes the nodes which compute a node's results again."""
    return COPIES.get((domain_of(node), node.op_type), _plain_copy)


def _token(backward: Sequence[onnx.NodeProto], readers: Sequence[onnx.NodeProto], later: set[str]) -> str | None:
    """The value that the recomputation of a segment waits for; None if there is none.

    It is the last value of the backward part that does not depend on the segment, if possible one that depends on later
    segments.
    """

    def descendants(first: Iterable[onnx.NodeProto]) -> set[int]:
        found, values = {id(node) for node in first}, set[str]()
        for node in backward:
            if id(node) in found or values.intersection(captured(node)):
                found.add(id(node))
                values.update(filter(None, node.output))
        return found

    after = descendants(readers)
    behind = descendants(node for node in backward if later.intersection(captured(node)))
    needed = read_by(node for node in backward if id(node) in after)
    made = [
        (name, id(node) in behind)
        for node in backward
        if id(node) not in after
        for name in node.output
        if name in needed
    ]
    late = [name for name, is_late in made if is_late] or [name for name, _ in made]
    return late[-1] if late else None


def _wait(graph: Graph, token: str, nodes: list[onnx.NodeProto]) -> None:
    """Let nodes wait for a value: those that read no result of the others get a gate, for which the others wait.

    token: the value. nodes: in their order; the nodes of the gates are added to this list.
    """
    made = {name for node in nodes for name in node.output}
    zero, gates, added = "", dict[str, str](), list[onnx.NodeProto]()
    for node in nodes:
        # One input of known rank gets the gate: the first that a node computes, or else the first of all.
        names = [name for name in node.input if name and graph.sizes(name) is not None]
        name = next((name for name in names if name in graph.producers), names[0] if names else "")
        if not name or not made.isdisjoint(node.input):
            continue
        if not zero:  # that can only be computed from the token: the size of an empty slice of it
            flat, nothing, zero = (graph.free(f"{token}_token/{what}") for what in ("flat", "nothing", "zero"))
            row = graph.add_constant(np.array([-1]), f"{flat}/row")
            first = graph.add_constant(np.array([0]), f"{nothing}/first")
            added.append(graph.node("Reshape", [token, row], [flat]))
            added.append(graph.node("Slice", [flat, first, first, first], [nothing]))
            added.append(graph.node("Size", [nothing], [zero]))
        if name not in gates:
            gated, shape = graph.free(f"{name}_gated"), graph.free(f"{name}_gated/shape")
            graph.declare_like(gated, name)
            zeros = graph.add_constant(np.zeros(len(graph.sizes(name) or ()), np.int64), f"{gated}/zeros")
            added.append(graph.node("Add", [zeros, zero], [shape]))
            added.append(graph.node("Reshape", [name, shape], [gated]))
            gates[name] = gated
        rename_inputs(node, {name: gates[name]})
    nodes[:0] = added
