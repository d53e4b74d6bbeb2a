"""What the gradient of a Loop or a Scan reads of the values of each iteration, and how the forward pass keeps it.

A value that has the same shape in each iteration is an additional output with a row for each iteration. Others are kept
in a sequence, which the forward Loop hands on; of a value that is a sequence itself, the tensors of all iterations are
in one sequence, and the index of the first and the number of an iteration's tensors are rows of two more outputs.
"""

from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import keep
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.graph.subgraphs import LOOP, is_reversed, scan_axis, sequence_type
from opgrad.onnx.rules.bodies import BodyGradient
from opgrad.onnx.rules.node import Node, NotKept, appended_tensors, sizes_of, tensors_from

SEQUENCE_STATES_FROM = 13  # the first opset whose Loop can hand sequences on


class Iterations:
    """The iterations of a Loop or a Scan.

    elements: the names of what a Scan's body gets of its sequences. rows: those of what the body gives each iteration.
    states: the number of states.
    count: the number of iterations. step: the number of the gradient's iteration. index: that of the forward iteration
    which it differentiates: the last one first.
    """

    def __init__(self, node: Node, inside: BodyGradient, elements: list[str], rows: list[str], states: int):
        self.node, self.inside, self.elements, self.rows, self._states = node, inside, elements, [*rows], states
        self.is_loop = node.proto.op_type == LOOP
        step = inside.body.free(f"{node.proto.name or node.proto.op_type}_Grad/step")
        self.step = Value(inside.body, step, TensorProto.INT64, [])
        self._sequences = list(node.proto.input[states:]) if elements else []
        self._outputs = list(node.proto.output[states:])
        self.count = self._count()
        self.index = inside.reads.node("Sub", self.count - 1, self.step)

    def _count(self) -> Value:
        """The number of iterations, an int64 of shape ()."""
        if self.elements:
            whole, axis = self.node.required(self._states), self.axis(self.elements[0], "input", 0)
            return whole.shape(axis, axis + 1).scalar()
        if not self._outputs:
            counter = self.inside.inputs[0]
            self._outputs.append(self._stack(counter))
            self.rows.append(counter)
        return Value(self.node.body, self._outputs[0]).shape(0, 1).scalar()

    # --- rows ---

    def axis(self, name: str, of: str, place: int) -> int:
        """The axis of the steps of an input or output; name: that of one step's part in the body."""
        axes = attributes_of(self.node.proto).get(f"scan_{of}_axes")
        rank = len(sizes_of(self.inside.value(name))) if axes and any(axes) else 0
        return scan_axis(self.node.proto, place, of, rank + 1)

    def row(self, name: str, whole: str, of: str, place: int) -> Value:
        """The part of an input or output that belongs to an iteration. of: "input" or "output"."""
        value, reads = self.inside.value(name), self.inside.reads
        index = self.step if is_reversed(self.node.proto, of, place) else self.index
        found = reads.node("Gather", Value(reads, whole, value.element_type), index, axis=self.axis(name, of, place))
        return Value(self.inside.body, found.name, value.element_type, value.sizes)

    # --- what is kept ---

    def keep_what_is_read(self, results: list[Value]) -> None:
        """Keep the values of the forward body that its gradient reads, and let it read them at its iteration."""
        names = self.inside.hoist(self.inside.read_values(results))
        self.inside.rename({name: self._read(name) for name in names})

    def _read(self, name: str) -> str:
        """What the gradient's body reads in the place of a value of the forward body."""
        if self.is_loop and name == self.inside.inputs[0]:
            return self.index.name
        if name in self.elements:
            place = self.elements.index(name)
            return self.row(name, self._sequences[place], "input", place).name
        if name in self.rows:
            place = self.rows.index(name)
            return self.row(name, self._outputs[place], "output", place).name
        if (row := self._row_from_outside(name)) is not None:
            return row
        return self._stacked(name) if self.inside.is_steady(name) else self._listed(name)

    def _row_from_outside(self, name: str) -> str | None:
        """The row of a value from outside that a Loop's body gathers, and that is read again instead of kept."""
        gather = self.inside.forward.maker(name, "Gather") if self.is_loop else None
        if gather is None or gather.input[0] not in self.inside.outside or gather.input[1] != self.inside.inputs[0]:
            return None
        return self._gathered(gather.input[0], attributes_of(gather).get("axis", 0))

    def _gathered(self, whole: str, axis: int = 0) -> str:
        reads = self.inside.reads
        return reads.node("Gather", Value(reads, whole), self.index, axis=axis).name

    def _stack(self, name: str) -> str:
        """Let the node give the values of all iterations, stacked along a new first axis."""
        new = self.inside.named_result(name, stacked=True)
        self.node.proto.output.append(new)
        self.inside.give(name)
        for attribute in self.node.proto.attribute:
            if attribute.name in ("scan_output_directions", "scan_output_axes"):
                attribute.ints.append(0)
        return new

    def _stacked(self, name: str) -> str:
        return self._gathered(self._stack(name))

    def _listed(self, name: str) -> str:
        """Keep the values of all iterations in a sequence."""
        inside, reads = self.inside, self.inside.reads
        if not self.is_loop or self.node.opset < SEQUENCE_STATES_FROM:
            raise NotKept(
                f"the graph does not tell that {name!r} has the same shape in each iteration, and only a Loop of opset "
                f"{SEQUENCE_STATES_FROM} or later can keep it"
            )
        dtype = inside.element_type(name)
        before, after = (reads.free(f"{name}_{when}") for when in ("before", "after"))
        whole = Value(reads, self._sequence_state(before, after, dtype), dtype)
        inside.forward.declare_sequence(before, dtype)
        inside.forward.declare_sequence(after, dtype)
        if not inside.forward.sequence(name):
            inside.add(helper.make_node("SequenceInsert", [before, name], [after], after))
            return reads.node("SequenceAt", whole, self.index).name
        forward = reads.beside()
        forward.scope(after)
        values, more = Value(forward, before, dtype), Value(forward, name, dtype)
        start, count = (forward.node("SequenceLength", each) for each in (values, more))
        all_of = appended_tensors(values, more)
        for node in (*forward.nodes, helper.make_node("Identity", [all_of.name], [after], after)):
            inside.add(node)
        inside.forward.graph.initializer.extend(forward.initializers)
        for each in (start, count):
            inside.forward.declare(each.name, TensorProto.INT64, [])
        first, several = (Value(reads, self._stacked(each.name), TensorProto.INT64, []) for each in (start, count))
        return tensors_from(whole, first, several).name

    def _sequence_state(self, before: str, after: str, dtype: int) -> str:
        """Add a state to the Loop, a sequence that is empty at first; returns the name of the last one."""
        inside, proto = self.inside, self.node.proto
        empty, last = self.node.body.free(f"{before}_first"), self.node.body.free(f"{after}_last")
        self.node.forward.put_first(helper.make_node("SequenceEmpty", [], [empty], empty, dtype=dtype))
        proto.input.append(empty)
        proto.output.insert(self._states, last)
        for name in (empty, last):
            self.node.forward.declare_sequence(name, dtype)
        inside.add_input(helper.make_value_info(before, sequence_type(dtype)))
        outputs = list(inside.forward.graph.output)
        outputs.insert(1 + self._states, helper.make_value_info(after, sequence_type(dtype)))
        keep(inside.forward.graph.output, outputs)
        self._states += 1
        return last
