"""Loop and Scan: the gradient of the body runs in a Loop, from the last turn to the first.

What it reads of a turn's values the forward pass keeps (`turns.py`). What the body reads from outside gets the sum of
the gradients of all turns.
"""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import FLOATS, HALVES, copied
from opgrad.onnx.graph.nodes import attributes_of, subgraphs
from opgrad.onnx.graph.subgraphs import FIRST_STATE, state_count
from opgrad.onnx.rules import lists, shaping
from opgrad.onnx.rules.errors import Instead, NotKept
from opgrad.onnx.rules.inside import Inside
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient
from opgrad.onnx.rules.scans import as_loop
from opgrad.onnx.rules.turns import SEQUENCE_STATES_FROM, Turns


@gradient("Loop", constant=(0, 1))
def loop(node: Node) -> Gradients:
    """That of the body, turn by turn, from the last to the first; 0 for what no turn reads."""
    return _Backward(node).gradients()


@gradient("Scan")
def scan(node: Node) -> Gradients:
    """That of the body, step by step, from the last to the first."""
    given = copied(node.proto)
    try:
        return _Backward(node).gradients()
    except NotKept:
        if node.opset < SEQUENCE_STATES_FROM:
            raise
        raise Instead(as_loop(node, given)) from None


@dataclass
class _TurnPart:
    """What the body gets of a value in each turn: for a Scan its part of a sequence, for a Loop a row that it gathers.

    place: of the value among the names of the node. name: that of the part in the body. axis: of the turns.
    is_reversed: whether the first turn gets the last part.
    """

    place: int
    name: str
    axis: int
    is_reversed: bool = False


class _Backward:
    """The gradient of a Loop or a Scan.

    inside: its body. turns: what the gradient reads of each turn.
    first, count: the place of the first state among the inputs, and how many there are.
    before, after: the names of the states in the body, before and after a turn.
    elements: the names of what a Scan's body gets of its sequences. given: those of what the body gives each turn.
    active: the places of the states that have gradients. rows: the places of what the body gives that has a gradient.
    parts: those of the values whose gradients are asked for.
    summed: the places of the other values from outside that have gradients.
    """

    def __init__(self, node: Node):
        (body,) = subgraphs(node.proto)
        self.node, self.inside = node, Inside(node, body)
        self.first, self.count = FIRST_STATE[node.proto.op_type], state_count(node.proto)
        inputs, outputs = self.inside.inputs[self.first :], self.inside.outputs[self.first // 2 :]
        self.before, self.elements = inputs[: self.count], inputs[self.count :]
        self.after, self.given = outputs[: self.count], outputs[self.count :]
        self.dys = [*node.dys, *[None] * (len(outputs) - len(node.dys))]
        self._name_outputs(outputs)
        self.turns = Turns(node, self.inside, self.elements, self.given, self.count)
        self.rows = [place for place in range(len(self.given)) if self.dys[self.count + place] is not None]
        self.parts = self._gathered() if self.turns.is_loop else self._scanned()
        self.active = self._active()
        self.summed: list[int] = []

    def _name_outputs(self, outputs: list[str]) -> None:
        """Give a name to each result of the node that has none."""
        node = self.node
        for place, name in enumerate(outputs):
            if place == len(node.proto.output):
                node.proto.output.append("")
            if not node.proto.output[place]:
                node.proto.output[place] = self.inside.named_result(name, stacked=place >= self.count)
        node.outputs = [node.value(name) for name in node.proto.output]

    def _active(self) -> list[int]:
        """The places of the states on whose gradients those that are asked for may depend."""
        node, forward = self.node, self.inside.forward
        before = [forward.before(name) for name in self.after]
        wanted = {node.names[place] for place in node.needed if place >= len(node.proto.input)}
        wanted |= {part.name for part in self.parts}
        carrying = [place for place in range(self.count) if self.inside.carries(self.before[place])]
        reached = {place for place in carrying if self.first + place in node.needed}
        leading = {place for place in carrying if self.dys[place] is not None}
        read = {name for place in self.rows for name in forward.before(self.given[place])}
        while True:
            wanted |= {self.before[place] for place in reached}
            read |= {name for place in leading for name in before[place]}
            more = {place for place in carrying if before[place] & wanted} - reached
            needing = {place for place in carrying if self.before[place] in read} - leading
            if not more and not needing:
                return sorted(reached & leading)
            reached |= more
            leading |= needing

    def _scanned(self) -> list[_TurnPart]:
        first, turns = self.first + self.count, self.turns
        needed = [place for place in range(len(self.elements)) if first + place in self.node.needed]
        names = [self.elements[place] for place in needed]
        axes = [turns.axis(name, "input", place) for name, place in zip(names, needed, strict=True)]
        ways = [turns.is_reversed("input", place) for place in needed]
        return [_TurnPart(first + place, *each) for place, *each in zip(needed, names, axes, ways, strict=True)]

    def _gathered(self) -> list[_TurnPart]:
        """The rows that a Loop's body gathers by the number of the turn, and reads nothing else of the value.

        Their gradients are put together once; added to a gradient of the whole value, each row would cost as much as
        all of them.
        """
        node, found = self.node, []
        for place in sorted(node.needed):
            name = node.names[place]
            readers = self.inside.forward.readers.get(name, [])
            if place < len(node.proto.input) or len(readers) != 1 or readers[0].op_type != "Gather":
                continue
            gather, rank = readers[0], len(node.required(place).sizes or ())
            if list(gather.input) == [name, self.inside.inputs[0]] and rank:
                found.append(_TurnPart(place, gather.output[0], attributes_of(gather).get("axis", 0) % rank))
        return found

    def gradients(self) -> Gradients:
        """The gradients of the node's inputs, and behind them those of what the body reads from outside."""
        if not self.active and not self.rows:
            return None
        body, turns = self.inside.body, self.turns
        states = [self.inside.input("grad", self.after[place]) for place in self.active]
        seeds = {self.after[place]: value for place, value in zip(self.active, states, strict=True)}
        for place in self.rows:
            dy = self.dys[self.count + place]
            assert dy is not None
            seeds[self.given[place]] = turns.row(self.given[place], dy.name, "output", place)
        sums, results = self._differentiated(seeds)
        go_on = Value(body, body.free(f"{self.turns.step.name}/go_on"), TensorProto.BOOL, [])
        turns.keep_what_is_read(results)
        graph = self.inside.gradient_body([turns.step, go_on, *states, *sums], [go_on, *results])
        self.inside.restore()
        return self._finished(graph, len(results))

    def _differentiated(self, seeds: dict[str, Value]) -> tuple[list[Value], list[Value]]:
        """The inputs of the gradient's body that hold sums, and the results of the body."""
        node, inside = self.node, self.inside
        outside = {place: name for place, name in enumerate(node.names) if place in node.needed}
        own_places = {part.place for part in self.parts} | set(range(len(node.proto.input)))
        outside = {place: name for place, name in outside.items() if place not in own_places}
        elements = [part.name for part in self.parts]
        states = [self.before[place] for place in self.active]
        found = inside.differentiate(seeds, [*states, *elements, *outside.values()])
        own = [found[name] or self._zeros(name) for name in states]
        self.summed = [place for place, name in outside.items() if found[name] is not None]
        sums, totals = [], []
        for place in self.summed:
            value, more = node.required(place), found[node.names[place]]
            assert more is not None
            kind = self._kind_of_sum(value)
            total = Value(inside.body, inside.body.free(f"{value.name}_sum"), kind, value.sizes)
            sums.append(total)
            totals.append(lists.added(total, more) if self._is_sequence(value) else total + more.like(total))
        return sums, [*own, *totals, *(found[name] or self._zeros(name) for name in elements)]

    def _zeros(self, name: str) -> Value:
        return self.inside.zeros(self.inside.value(name), bool(self.inside.forward.sequence(name)))

    def _is_sequence(self, value: Value) -> bool:
        return bool(self.node.forward.sequence(value.name))

    def _kind_of_sum(self, value: Value) -> int:
        """The type in which gradients of all turns are summed: float32 for half precision."""
        kind = value.element_type if value.element_type in FLOATS else TensorProto.FLOAT
        wide = kind in HALVES and not self._is_sequence(value)
        return TensorProto.FLOAT if wide or kind is None else kind

    def _finished(self, graph: onnx.GraphProto, count: int) -> Gradients:
        """The loop with the gradient's body, and the gradients that it gives."""
        node, body = self.node, self.node.body
        initial = [node.gradient(place) for place in self.active]
        for place in self.summed:
            value = node.required(place)
            like = Value(body, "", self._kind_of_sum(value))
            is_sequence = self._is_sequence(value)
            initial.append(lists.zeros_like(value) if is_sequence else shaping.filled_like(value, 0, like))
        always = body.constant(np.array(True))
        found = body.nodes_of("Loop", count, self.turns.count, always, *initial, body=graph)
        results: list[Value | None] = [None] * len(node.names)
        places = [*(self.first + place for place in self.active), *self.summed]
        for place, value, like in zip(places, found, initial, strict=False):
            if place in node.needed:
                results[place] = Value(body, value.name, like.element_type)
        for part, value in zip(self.parts, found[len(places) :], strict=True):
            results[part.place] = self._whole(part, value)
        return results

    def _whole(self, part: _TurnPart, value: Value) -> Value:
        """The gradient of a value, from those of its parts in each turn, the last turn first."""
        whole, body = self.node.required(part.place), self.node.body
        sizes = [whole.shape(0, part.axis), whole.shape(part.axis + 1)]
        value = Value(body, value.name, whole.element_type)
        if not part.is_reversed:
            value = value.slice(-1, -LAST - 1, 0, -1)
        # Where no turn is run, onnxruntime takes 0 for sizes that it does not know; this gives them back.
        zeros_as_sizes = {"allowzero": 1} if body.opset >= shaping.ZERO_AS_SIZE else {}
        value = body.node("Reshape", value, body.concat(self.turns.count.reshape([1]), *sizes), **zeros_as_sizes)
        if part.axis:
            rank = len(shaping.sizes_of(whole))
            value = value.transpose(*range(1, part.axis + 1), 0, *range(part.axis + 1, rank))
        if not self.turns.is_loop:
            return value
        rest = whole.shape(part.axis, part.axis + 1) - self.turns.count.reshape([1])
        zeros = body.number(0, whole).expand(body.concat(sizes[0], rest, sizes[1]))
        return body.concat(value, zeros, axis=part.axis)
