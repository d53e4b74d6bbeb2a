"""Loop and Scan: the gradient of the body runs in a Loop, from the last iteration to the first.

What the body reads from outside gets the sum of the gradients of all iterations. Values of each iteration that the
gradient reads, the forward pass keeps: one that has the same shape in each iteration as an additional output with a row
for each iteration; others in a sequence, which the forward Loop hands on; of a value that is a sequence itself, the
tensors of all iterations are in one sequence, and the index of the first and the number of an iteration's tensors are
rows of two more outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import LAST, Body, Value
from opgrad.onnx.graph.messages import FLOATS, HALVES, copied, keep
from opgrad.onnx.graph.nodes import attributes_of, subgraphs
from opgrad.onnx.graph.subgraphs import (
    FIRST_STATE,
    LOOP,
    TURN_AND_CONDITION,
    is_reversed,
    scan_axis,
    sequence_type,
    state_count,
)
from opgrad.onnx.rules.control_flow import BodyGradient
from opgrad.onnx.rules.node import (
    ZERO_AS_SIZE,
    Gradients,
    Instead,
    Node,
    NotKept,
    added_tensors,
    appended_tensors,
    filled_like,
    gradient,
    sizes_of,
    tensors_from,
    zero_tensors,
)

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
        if elements:
            whole, axis = node.required(states), self.axis(elements[0], "input", 0)
            self.count = whole.shape(axis, axis + 1).scalar()
        else:
            if not self._outputs:
                self._outputs.append(self._stack(inside.inputs[0]))
                self.rows.append(inside.inputs[0])
            self.count = Value(node.body, self._outputs[0]).shape(0, 1).scalar()
        self.index = inside.reads.node("Sub", self.count - 1, self.step)

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

    def read(self, name: str) -> str:
        """What the gradient's body reads in the place of a value of the forward body."""
        if self.is_loop and name == self.inside.inputs[0]:
            return self.index.name
        if name in self.elements:
            place = self.elements.index(name)
            return self.row(name, self._sequences[place], "input", place).name
        if name in self.rows:
            place = self.rows.index(name)
            return self.row(name, self._outputs[place], "output", place).name
        gather = self.inside.forward.maker(name, "Gather") if self.is_loop else None
        if gather is not None and gather.input[0] in self.inside.outside and gather.input[1] == self.inside.inputs[0]:
            return self._gathered(gather.input[0], attributes_of(gather).get("axis", 0))  # read again instead of kept
        sizes, steady = self.inside.forward.sizes(name), self.inside.enclosed.steady
        is_steady = sizes is not None and all(isinstance(size, int) or size in steady for size in sizes)
        is_tensor = not self.inside.forward.sequence(name)
        return self._gathered(self._stack(name)) if is_steady and is_tensor else self._listed(name)

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
        first, several = (
            Value(reads, self._gathered(self._stack(each.name)), TensorProto.INT64, []) for each in (start, count)
        )
        return tensors_from(whole, first, several).name

    def _sequence_state(self, before: str, after: str, dtype: int) -> str:
        """Add a state to the Loop, a sequence that is empty at first; returns the name of the last one."""
        inside, proto = self.inside, self.node.proto
        empty, last = self.node.body.free(f"{before}_first"), self.node.body.free(f"{after}_last")
        first = helper.make_node("SequenceEmpty", [], [empty], empty, dtype=dtype)
        self.node.forward.reorder([first, *self.node.forward.nodes()])
        proto.input.append(empty)
        proto.output.insert(self._states, last)
        for name in (empty, last):
            self.node.forward.declare_sequence(name, dtype)
        value = helper.make_value_info(before, sequence_type(dtype))
        inside.enclosed.body.input.append(value)
        inputs = [copied(each) for each in inside.forward.graph.input]
        inputs.insert(len(inside.inputs), value)
        keep(inside.forward.graph.input, inputs)
        inside.inputs.append(before)
        outputs = list(inside.forward.graph.output)
        outputs.insert(1 + self._states, helper.make_value_info(after, sequence_type(dtype)))
        keep(inside.forward.graph.output, outputs)
        self._states += 1
        return last


@gradient("Loop", constant=(0, 1))
def loop(node: Node) -> Gradients:
    """That of the body, one iteration after the other, from the last to the first; 0 for what none reads."""
    return _LoopGradient(node).gradients()


@gradient("Scan")
def scan(node: Node) -> Gradients:
    """That of the body, step by step, from the last to the first."""
    given = copied(node.proto)
    try:
        return _LoopGradient(node).gradients()
    except NotKept:
        if node.opset < SEQUENCE_STATES_FROM:
            raise
        raise Instead(as_loop(node, given)) from None


@dataclass
class _Part:
    """What the body gets of a value in each iteration: a Scan's part of a sequence, or a row that a Loop gathers.

    place: the index of the value among the names of the node. name: that of the part in the body. axis: of the
    iterations. is_reversed: whether the first iteration gets the last part.
    """

    place: int
    name: str
    axis: int
    is_reversed: bool = False


class _LoopGradient:
    """The gradient of a Loop or a Scan. States and rows are named by their indices.

    inside: its body. iterations: what the gradient reads of each iteration.
    first, count: the index of the first state among the inputs, and how many there are.
    before, after: the names of the states in the body, before and after an iteration.
    elements: the names of what a Scan's body gets of its sequences. given: those of the rows that the body gives.
    rows: those of what the body gives that have a gradient. active: the states that have one.
    parts: those of the values whose gradients are asked for.
    """

    def __init__(self, node: Node):
        (body,) = subgraphs(node.proto)
        self.node, self.inside = node, BodyGradient(node, body)
        self.first, self.count = FIRST_STATE[node.proto.op_type], state_count(node.proto)
        inputs, outputs = self.inside.inputs[self.first :], self.inside.outputs[self.first // 2 :]
        self.before, self.elements = inputs[: self.count], inputs[self.count :]
        self.after, self.given = outputs[: self.count], outputs[self.count :]
        self.dys = [*node.dys, *[None] * (len(outputs) - len(node.dys))]
        for place, name in enumerate(outputs):
            if place == len(node.proto.output):
                node.proto.output.append("")
            if not node.proto.output[place]:
                node.proto.output[place] = self.inside.named_result(name, stacked=place >= self.count)
        node.outputs = [node.value(name) for name in node.proto.output]
        self.iterations = Iterations(node, self.inside, self.elements, self.given, self.count)
        self.rows = [index for index in range(len(self.given)) if self.dys[self.count + index] is not None]
        self.parts = [
            _Part(place, name, self.iterations.axis(name, "input", index), is_reversed(node.proto, "input", index))
            for index, name in enumerate(self.elements)
            if (place := self.first + self.count + index) in node.needed
        ]
        if self.iterations.is_loop:
            self.parts = list(self._gathered())
        self.active = self._active()

    def _active(self) -> list[int]:
        """The states that depend on something asked for, and on which something depends that has a gradient."""
        node, forward = self.node, self.inside.forward
        depends = [forward.before(name) for name in self.after]
        states = [index for index, name in enumerate(self.before) if self.inside.carries(name)]
        read = {one: [other for other in states if self.before[other] in depends[one]] for one in states}
        read_by = {one: [other for other in states if one in read[other]] for one in states}
        wanted = {node.names[place] for place in node.needed if place >= len(node.proto.input)}
        wanted |= {part.name for part in self.parts}
        for_rows = {name for index in self.rows for name in forward.before(self.given[index])}
        changing = [one for one in states if self.first + one in node.needed or depends[one] & wanted]
        leading = [one for one in states if self.dys[one] is not None or self.before[one] in for_rows]
        return sorted(_reached(changing, read_by) & _reached(leading, read))

    def _gathered(self) -> Iterable[_Part]:
        """The rows that a Loop's body gathers by the number of the iteration, and reads nothing else of the value.

        Their gradients are put together once; added to a gradient of the whole value, each row would cost as much as
        all of them.
        """
        node = self.node
        for place in sorted(node.needed):
            name = node.names[place]
            readers = self.inside.forward.readers.get(name, [])
            if place < len(node.proto.input) or len(readers) != 1 or readers[0].op_type != "Gather":
                continue
            gather, rank = readers[0], len(node.required(place).sizes or ())
            if list(gather.input) == [name, self.inside.inputs[0]] and rank:
                yield _Part(place, gather.output[0], attributes_of(gather).get("axis", 0) % rank)

    def gradients(self) -> Gradients:
        """The gradients of the node's inputs, and behind them those of what the body reads from outside."""
        if not self.active and not self.rows:
            return None
        node, inside, body, iterations = self.node, self.inside, self.inside.body, self.iterations
        states = [inside.input("grad", self.after[place]) for place in self.active]
        seeds = {self.after[place]: value for place, value in zip(self.active, states, strict=True)}
        for index in self.rows:
            dy = self.dys[self.count + index]
            assert dy is not None
            seeds[self.given[index]] = iterations.row(self.given[index], dy.name, "output", index)
        own_places = {part.place for part in self.parts} | set(range(len(node.proto.input)))
        outside = {place: name for place, name in enumerate(node.names) if place in node.needed - own_places}
        before, elements = [self.before[place] for place in self.active], [part.name for part in self.parts]
        found = inside.differentiate(seeds, [*before, *elements, *outside.values()])

        def results_of(names: list[str]) -> list[Value]:
            has_tensors = inside.forward.sequence
            return [found[name] or inside.zeros(inside.value(name), bool(has_tensors(name))) for name in names]

        results = results_of(before)
        initial = [node.gradient(place) for place in self.active]
        sums, summed = list[Value](), [place for place, name in outside.items() if found[name] is not None]
        for place in summed:
            value, more = node.required(place), found[node.names[place]]
            assert more is not None
            is_sequence = bool(node.forward.sequence(value.name))
            dtype = value.element_type if value.element_type in FLOATS else TensorProto.FLOAT
            if dtype is None or (dtype in HALVES and not is_sequence):  # in which sums of all iterations are inexact
                dtype = TensorProto.FLOAT
            total = Value(body, body.free(f"{value.name}_sum"), dtype, value.sizes)
            sums.append(total)
            results.append(added_tensors(total, more) if is_sequence else total + more.like(total))
            like = Value(node.body, "", dtype)
            initial.append(zero_tensors(value) if is_sequence else filled_like(value, 0, like))
        results += results_of(elements)
        go_on = Value(body, body.free(f"{iterations.step.name}/go_on"), TensorProto.BOOL, [])
        # The forward pass keeps what the gradient reads, and the gradient reads it at its iteration.
        names = inside.hoist(inside.read_values(results))
        inside.rename({name: iterations.read(name) for name in names})
        graph = inside.gradient_body([iterations.step, go_on, *states, *sums], [go_on, *results])
        inside.restore()
        always = node.body.constant(np.array(True))
        made = node.body.nodes_of("Loop", len(results), iterations.count, always, *initial, body=graph)
        gradients: list[Value | None] = [None] * len(node.names)
        places = [*(self.first + place for place in self.active), *summed]
        for place, value, like in zip(places, made, initial, strict=False):
            if place in node.needed:
                gradients[place] = Value(node.body, value.name, like.element_type)
        for part, value in zip(self.parts, made[len(places) :], strict=True):
            gradients[part.place] = self._whole(part, value)
        return gradients

    def _whole(self, part: _Part, value: Value) -> Value:
        """The gradient of a value, from those of its parts in each iteration, the last first."""
        whole, body = self.node.required(part.place), self.node.body
        sizes = [whole.shape(0, part.axis), whole.shape(part.axis + 1)]
        value = Value(body, value.name, whole.element_type)
        if not part.is_reversed:
            value = value.slice(-1, -LAST - 1, 0, -1)
        # Where no iteration is run, onnxruntime takes 0 for sizes that it does not know; this gives them back.
        zeros_as_sizes = {"allowzero": 1} if body.opset >= ZERO_AS_SIZE else {}
        value = body.node("Reshape", value, body.concat(self.iterations.count.reshape([1]), *sizes), **zeros_as_sizes)
        if part.axis:
            rank = len(sizes_of(whole))
            value = value.transpose(*range(1, part.axis + 1), 0, *range(part.axis + 1, rank))
        if not self.iterations.is_loop:
            return value
        rest = whole.shape(part.axis, part.axis + 1) - self.iterations.count.reshape([1])
        zeros = body.number(0, whole).expand(body.concat(sizes[0], rest, sizes[1]))
        return body.concat(value, zeros, axis=part.axis)


def _reached(first: Sequence[int], following: Mapping[int, Sequence[int]]) -> set[int]:
    """The first ones, those that follow on them, and so on."""
    found, waiting = set(first), list(first)
    while waiting:
        more = set(following[waiting.pop()]) - found
        found |= more
        waiting += more
    return found


def as_loop(node: Node, scan: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes that compute what a Scan does, by a Loop. scan: the node, as the graph has it."""
    title = node.body.free(f"{scan.name or scan.op_type}/loop")
    before, inner, behind = (Body(node.opset, f"{title}/{part}") for part in ("before", "body", "behind"))
    states, (body,) = state_count(scan), subgraphs(scan)
    sequences = [node.value(name) for name in scan.input[states:]]
    axes = [scan_axis(scan, place, "input", len(sizes_of(each))) for place, each in enumerate(sequences)]
    steps = Value(before, sequences[0].name).shape(axes[0], axes[0] + 1).scalar()
    last, always = steps - before.ints([1]).scalar(), before.constant(np.array(True))
    step, go_on = inner.input(), inner.input()
    elements = [each.name for each in body.input[states:]]
    for place, (name, whole, axis) in enumerate(zip(elements, sequences, axes, strict=True)):
        index = inner.outer(last) - step if is_reversed(scan, "input", place) else step
        inner.nodes.append(helper.make_node("Gather", [whole.name, index.name], [name], name, axis=axis))
    more = inner.node("Identity", go_on)
    rows = [_row(node, scan, behind, states, place, name) for place, name in enumerate(scan.output[states:])]
    given = [
        helper.make_value_info(each.name, kind) for each, kind in zip((step, go_on), TURN_AND_CONDITION, strict=True)
    ]
    loop_body = helper.make_graph(
        [*inner.nodes, *(copied(each) for each in body.node)], "body", [*given, *map(copied, body.input[:states])],
        [onnx.ValueInfoProto(name=more.name), *map(copied, body.output)], body.initializer, value_info=body.value_info,
    )  # fmt: skip
    inputs = [steps.name, always.name, *scan.input[:states]]
    loop = helper.make_node("Loop", inputs, [*scan.output[:states], *rows], scan.name or title, body=loop_body)
    return [*before.nodes, loop, *behind.nodes]


def _row(node: Node, scan: onnx.NodeProto, body: Body, states: int, place: int, name: str) -> str:
    """The name of an output of the Loop; nodes that turn it, or move its axis, are appended to the body."""
    axes = attributes_of(scan).get("scan_output_axes")
    if not name or not (is_reversed(scan, "output", place) or (axes and axes[place])):
        return name
    rank = len(sizes_of(node.value(name)))
    axis, new = scan_axis(scan, place, "output", rank), node.body.free(f"{name}/rows")
    node.forward.declare(new, node.forward.element_type(name) or 0, [None] * rank)
    value = Value(body, new)
    if is_reversed(scan, "output", place):
        value = value.slice(-1, -LAST - 1, 0, -1)
    moved = value.transpose(*range(1, axis + 1), 0, *range(axis + 1, rank))
    body.nodes[-1].output[0] = name
    node.forward.declare_like(moved.name, name)
    return new
