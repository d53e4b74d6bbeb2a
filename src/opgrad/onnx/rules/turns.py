"""What the gradient of a Loop or a Scan reads of the values of each turn, and how the forward pass keeps it.

A value that has the same shape in each turn is an additional output with a row for each turn. Others are kept in a
sequence, which the forward Loop hands from turn to turn; of a value that is a sequence itself, the tensors of all turns
are in one sequence, and the place of the first and the number of a turn's tensors are rows of two more outputs.
"""

from onnx import TensorProto, helper

from opgrad.onnx.graph.body import GraphBody
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import keep
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.graph.subgraphs import LOOP, scan_axis, sequence_type
from opgrad.onnx.rules import lists, shaping
from opgrad.onnx.rules.errors import NotKept
from opgrad.onnx.rules.inside import Inside
from opgrad.onnx.rules.node import Node

SEQUENCE_STATES_FROM = 13  # the first opset whose Loop can hand sequences from turn to turn


class Turns:
    """The turns of a Loop or the steps of a Scan.

    elements: the names of what a Scan's body gets of its sequences. given: those of what the body gives each turn.
    states: the number of states.
    count: the number of turns. step, turn: counted by the gradient's loop, and by the forward one.
    """

    def __init__(self, node: Node, inside: Inside, elements: list[str], given: list[str], states: int):
        self.node, self.inside, self.elements, self.given, self._states = node, inside, elements, [*given], states
        self.is_loop = node.proto.op_type == LOOP
        body, title = inside.body, f"{node.proto.name or node.proto.op_type}_Grad"
        self.step = Value(body, body.free(f"{title}/step"), TensorProto.INT64, [])
        self.turn = Value(body, body.free(f"{title}/turn"), TensorProto.INT64, [])
        self._sequences = list(node.proto.input[states:]) if elements else []
        self._outputs = list(node.proto.output[states:])
        self.count = self._count()

    def _count(self) -> Value:
        """The number of turns, an int64 of shape ()."""
        if self.elements:
            whole, axis = self.node.required(self._states), self.axis(self.elements[0], "input", 0)
            return whole.shape(axis, axis + 1).scalar()
        if not self._outputs:
            counter = self.inside.inputs[0]
            self._outputs.append(self._stack(counter))
            self.given.append(counter)
        return Value(self.node.body, self._outputs[0]).shape(0, 1).scalar()

    # --- rows ---

    def is_reversed(self, of: str, place: int) -> bool:
        """Whether a Scan goes through an input, or writes an output, from the end; of: "input" or "output"."""
        directions = attributes_of(self.node.proto).get(f"scan_{of}_directions")
        return bool(directions and directions[place])

    def axis(self, name: str, of: str, place: int) -> int:
        """The axis of the steps of an input or output; name: that of one step's part in the body."""
        axes = attributes_of(self.node.proto).get(f"scan_{of}_axes")
        rank = len(shaping.sizes_of(self.inside.value(name))) if axes and any(axes) else 0
        return scan_axis(self.node.proto, place, of, rank + 1)

    def row(self, name: str, whole: str, of: str, place: int) -> Value:
        """The part of an input or output that belongs to a turn."""
        value, body = self.inside.value(name), self.inside.body
        index = self.step if self.is_reversed(of, place) else self.turn
        found = body.node("Gather", Value(body, whole, value.element_type), index, axis=self.axis(name, of, place))
        return Value(body, found.name, value.element_type, value.sizes)

    # --- what is kept ---

    def keep_what_is_read(self, results: list[Value]) -> None:
        """Keep the values of the forward body that its gradient reads, and let it read them at the turn's place."""
        inside, body = self.inside, self.inside.body
        names = inside.hoist(inside.kept(results))
        written = len(body.nodes)
        inside.rename({name: self._read(name) for name in names})
        last = self.count - 1
        turn = helper.make_node("Sub", [last.name, self.step.name], [self.turn.name], self.turn.name)
        body.nodes = [turn, *body.nodes[written:], *body.nodes[:written]]

    def _read(self, name: str) -> str:
        """What the gradient's body reads in the place of a value of the forward body."""
        if self.is_loop and name == self.inside.inputs[0]:
            return self.turn.name
        if name in self.elements:
            place = self.elements.index(name)
            return self.row(name, self._sequences[place], "input", place).name
        if name in self.given:
            place = self.given.index(name)
            return self.row(name, self._outputs[place], "output", place).name
        if (row := self._row_from_outside(name)) is not None:
            return row.name
        if self.inside.is_steady(name):
            return self._stacked(name)
        return self._listed(name)

    def _row_from_outside(self, name: str) -> Value | None:
        """The row of a value from outside that a Loop's body gathers, and that is read again instead of kept."""
        gather = self.inside.forward.maker(name, "Gather") if self.is_loop else None
        if gather is None or gather.input[0] not in self.inside.outside or gather.input[1] != self.inside.inputs[0]:
            return None
        whole, body = Value(self.inside.body, gather.input[0]), self.inside.body
        return body.node("Gather", whole, self.turn, axis=attributes_of(gather).get("axis", 0))

    def _stack(self, name: str) -> str:
        """Let the node give the values of all turns, stacked along a new first axis."""
        new = self.inside.named_result(name, stacked=True)
        self.node.proto.output.append(new)
        self.inside.give(name)
        for attribute in self.node.proto.attribute:
            if attribute.name in ("scan_output_directions", "scan_output_axes"):
                attribute.ints.append(0)
        return new

    def _stacked(self, name: str) -> str:
        body = self.inside.body
        return body.node("Gather", Value(body, self._stack(name)), self.turn, axis=0).name

    def _listed(self, name: str) -> str:
        """Keep the values of all turns in a sequence."""
        inside, body = self.inside, self.inside.body
        if not self.is_loop or self.node.opset < SEQUENCE_STATES_FROM:
            raise NotKept(
                f"the graph does not tell that {name!r} has the same shape in each turn, and only a Loop of opset "
                f"{SEQUENCE_STATES_FROM} or later can keep it"
            )
        kind = inside.element_type(name)
        before, after = (body.free(f"{name}_{when}") for when in ("before", "after"))
        whole = Value(body, self._sequence_state(before, after, kind), kind)
        inside.forward.declare_sequence(before, kind)
        inside.forward.declare_sequence(after, kind)
        if not inside.forward.sequence(name):
            inside.add(helper.make_node("SequenceInsert", [before, name], [after], after))
            return body.node("SequenceAt", whole, self.turn).name
        forward = GraphBody(inside.forward.opset, body.taken)
        forward.scope(after)
        values, more = Value(forward, before, kind), Value(forward, name, kind)
        start, count = (forward.node("SequenceLength", each) for each in (values, more))
        all_of = lists.appended(values, more)
        for node in (*forward.nodes, helper.make_node("Identity", [all_of.name], [after], after)):
            inside.add(node)
        inside.forward.graph.initializer.extend(forward.initializers)
        for each in (start, count):
            inside.forward.declare(each.name, TensorProto.INT64, [])
        rows = [Value(body, self._stacked(each.name), TensorProto.INT64, []) for each in (start, count)]
        return lists.part(whole, *rows).name

    def _sequence_state(self, before: str, after: str, kind: int) -> str:
        """Add a state to the Loop, a sequence that is empty at first; returns the name of the last one."""
        inside, proto = self.inside, self.node.proto
        empty, last = self.node.body.free(f"{before}_first"), self.node.body.free(f"{after}_last")
        self.node.forward.put_first(helper.make_node("SequenceEmpty", [], [empty], empty, dtype=kind))
        proto.input.append(empty)
        proto.output.insert(self._states, last)
        for name in (empty, last):
            self.node.forward.declare_sequence(name, kind)
        inside.add_input(helper.make_value_info(before, sequence_type(kind)))
        outputs = list(inside.forward.graph.output)
        outputs.insert(1 + self._states, helper.make_value_info(after, sequence_type(kind)))
        keep(inside.forward.graph.output, outputs)
        self._states += 1
        return last
