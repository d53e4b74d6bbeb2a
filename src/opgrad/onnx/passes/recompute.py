"""Gradient checkpointing (Chen et al. 2016): the backward part computes activations inside segments again.

The recomputation of a segment has to wait for the gradient at the end of the segment. Otherwise a runtime would run it
at once, or onnxruntime, which joins common subexpressions, would keep the first results. So the values that a segment
reads pass through a Reshape to their own shape. It shares their memory and costs nothing. The shape that it is given
depends on that gradient, although it is always zeros, and a 0 in it keeps the size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.nodes import attributes_of, captured, read_by, rename_inputs
from opgrad.onnx.passes.order import sorted_nodes
from opgrad.onnx.passes.segments import Segments
from opgrad.onnx.passes.sharing import is_repeatable

SUFFIX = "_recompute"
STATISTICS = (3, 4)  # the results of BatchNormInternal with the batch's mean and 1 / deviation


def checkpoint(graph: Graph, forward: Sequence[str], segments: int | Sequence[str]) -> None:
    """Let the backward part compute the values again that it reads, except those kept.

    Values between segments and those of the last segment are kept.

    forward: what the model computed before it was differentiated: its loss and other outputs.
    segments: the number of segments, or the names of values with whose nodes a segment ends.
    """
    cut = Segments(graph, forward, segments)
    nodes = list(graph.nodes())
    backward = cut.backward
    for start, end in reversed(cut.spans[:-1]):
        inside = cut.forward[start:end]
        later = {name for node in cut.forward[end:] for name in node.output if name}
        segment = _Segment(graph, inside, backward, cut.kept | graph.kept)
        new = segment.recompute(later)
        nodes = sorted_nodes([*nodes, *new])
        graph.reorder(nodes)
        later_part = {id(node) for node in (*backward, *new)}
        backward = [node for node in nodes if id(node) in later_part]


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
        copied = self._copied()
        values = {name for node in copied for name in node.output if name and name not in self.kept}
        readers = [node for node in self.backward if values.intersection(captured(node))]
        token = _token(self.backward, readers, later)
        if token is None:
            return []
        for node in copied:
            self.new += _copier(node)(self, node)
        for node in readers:
            rename_inputs(node, self.again)
        _Gates(self.graph, token, self.new).close()
        return self.new

    def _copied(self) -> list[onnx.NodeProto]:
        """The nodes of the segment that have to run again."""
        needed = read_by(self.backward) - self.kept
        copied = []
        for node in reversed(self.inside):
            if needed.intersection(node.output) and (is_repeatable(node) or _copier(node) is not _plain_copy):
                stays = not is_repeatable(node) and node.output[0] not in needed
                if not stays:
                    copied.append(node)
                    needed |= set(captured(node)) - self.kept
        return copied[::-1]

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


# --- copies of nodes ---


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
    graph, (mean, inv_std) = segment.graph, (node.output[place] for place in STATISTICS)
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
COPIES: dict[tuple[str, str], Copier] = {
    ("", "Dropout"): _dropout,
    (MICROSOFT, "BatchNormInternal"): _batch_norm,
}


def _copier(node: onnx.NodeProto) -> Copier:
    """The function that makes the nodes which compute a node's results again."""
    return COPIES.get((domain_of(node), node.op_type), _plain_copy)


# --- waiting for a gradient ---


def _token(backward: Sequence[onnx.NodeProto], readers: Sequence[onnx.NodeProto], later: set[str]) -> str | None:
    """The value that the recomputation of a segment waits for; None if there is none.

    It is the last value of the backward part that does not depend on the segment, if possible one that depends on later
    segments.
    """
    after = _descendants(backward, readers)
    behind = _descendants(backward, [node for node in backward if later.intersection(captured(node))])
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


def _descendants(nodes: Sequence[onnx.NodeProto], first: Iterable[onnx.NodeProto]) -> set[int]:
    """The ids of the nodes in `first` and of all nodes that depend on them."""
    found, values = {id(node) for node in first}, set()  # type: tuple[set[int], set[str]]
    for node in nodes:
        if id(node) in found or values.intersection(captured(node)):
            found.add(id(node))
            values.update(filter(None, node.output))
    return found


class _Gates:
    """Lets nodes wait for a value.

    token: the value. nodes: those that shall wait, in their order; the nodes of the gates are added to this list.
    """

    def __init__(self, graph: Graph, token: str, nodes: list[onnx.NodeProto]):
        self._graph, self._token, self._nodes = graph, token, nodes
        self._zero = ""
        self._gates: dict[str, str] = {}
        self._added: list[onnx.NodeProto] = []

    def close(self) -> None:
        """Put a gate before each node that reads no result of the others; the others wait for these."""
        made = {name for node in self._nodes for name in node.output}
        for node in self._nodes:
            if not made.intersection(node.input):
                self._wait(node)
        self._nodes[:0] = self._added

    def _wait(self, node: onnx.NodeProto) -> None:
        """Put a gate before one input of known rank: the first that a node computes, or else the first of all."""
        names = [name for name in node.input if name and self._graph.sizes(name) is not None]
        activations = [name for name in names if name in self._graph.producers] or names
        if activations:
            rename_inputs(node, {activations[0]: self._gate(activations[0])})

    def _gate(self, name: str) -> str:
        if name not in self._gates:
            graph = self._graph
            gated, shape = graph.free(f"{name}_gated"), graph.free(f"{name}_gated/shape")
            graph.declare_like(gated, name)
            zeros = graph.add_constant(np.zeros(len(graph.sizes(name) or ()), np.int64), f"{gated}/zeros")
            zero = self._zero or self._open()
            self._added.append(graph.node("Add", [zeros, zero], [shape]))
            self._added.append(graph.node("Reshape", [name, shape], [gated]))
            self._gates[name] = gated
        return self._gates[name]

    def _open(self) -> str:
        """A zero that can only be computed from the token: the size of an empty slice of it."""
        graph, token = self._graph, self._token
        flat, nothing, self._zero = (graph.free(f"{token}_token/{what}") for what in ("flat", "nothing", "zero"))
        row = graph.add_constant(np.array([-1]), f"{flat}/row")
        first = graph.add_constant(np.array([0]), f"{nothing}/first")
        self._added.append(graph.node("Reshape", [token, row], [flat]))
        self._added.append(graph.node("Slice", [flat, first, first, first], [nothing]))
        self._added.append(graph.node("Size", [nothing], [self._zero]))
        return self._zero
