"""Loop and Scan: the gradient of the body runs in a Loop, from the last iteration to the first.

What it reads of an iteration's values the forward pass keeps (`iterations.py`). What the body reads from outside gets
the sum of the gradients of all iterations.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import LAST, Body, Value
from opgrad.onnx.graph.messages import FLOATS, HALVES, copied
from opgrad.onnx.graph.nodes import attributes_of, subgraphs
from opgrad.onnx.graph.subgraphs import FIRST_STATE, TURN_AND_CONDITION, is_reversed, scan_axis, state_count
from opgrad.onnx.rules.bodies import BodyGradient
from opgrad.onnx.rules.iterations import SEQUENCE_STATES_FROM, Iterations
from opgrad.onnx.rules.node import (
    ZERO_AS_SIZE,
    Instead,
    Node,
    NotKept,
    added_tensors,
    filled_like,
    sizes_of,
    zero_tensors,
)
from opgrad.onnx.rules.registry import Gradients, gradient


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
    summed: the indices of the other values from outside that have gradients.
    """

    def __init__(self, node: Node):
        (body,) = subgraphs(node.proto)
        self.node, self.inside = node, BodyGradient(node, body)
        self.first, self.count = FIRST_STATE[node.proto.op_type], state_count(node.proto)
        inputs, outputs = self.inside.inputs[self.first :], self.inside.outputs[self.first // 2 :]
        self.before, self.elements = inputs[: self.count], inputs[self.count :]
        self.after, self.given = outputs[: self.count], outputs[self.count :]
        self.dys = [*node.dys, *[None] * (len(outputs) - len(node.dys))]
        self._name_outputs(outputs)
        self.iterations = Iterations(node, self.inside, self.elements, self.given, self.count)
        self.rows = [index for index in range(len(self.given)) if self.dys[self.count + index] is not None]
        self.parts = list(self._gathered() if self.iterations.is_loop else self._scanned())
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

    def _scanned(self) -> Iterable[_Part]:
        first, proto = self.first + self.count, self.node.proto
        for index, name in enumerate(self.elements):
            if first + index in self.node.needed:
                axis = self.iterations.axis(name, "input", index)
                yield _Part(first + index, name, axis, is_reversed(proto, "input", index))

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
        body, iterations = self.inside.body, self.iterations
        states = [self.inside.input("grad", self.after[place]) for place in self.active]
        seeds = {self.after[place]: value for place, value in zip(self.active, states, strict=True)}
        for index in self.rows:
            dy = self.dys[self.count + index]
            assert dy is not None
            seeds[self.given[index]] = iterations.row(self.given[index], dy.name, "output", index)
        sums, results = self._differentiated(seeds)
        go_on = Value(body, body.free(f"{iterations.step.name}/go_on"), TensorProto.BOOL, [])
        iterations.keep_what_is_read(results)
        graph = self.inside.gradient_body([iterations.step, go_on, *states, *sums], [go_on, *results])
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
            dtype = self._dtype_of_sum(value)
            total = Value(inside.body, inside.body.free(f"{value.name}_sum"), dtype, value.sizes)
            sums.append(total)
            totals.append(added_tensors(total, more) if self._is_sequence(value) else total + more.like(total))
        return sums, [*own, *totals, *(found[name] or self._zeros(name) for name in elements)]

    def _zeros(self, name: str) -> Value:
        return self.inside.zeros(self.inside.value(name), bool(self.inside.forward.sequence(name)))

    def _is_sequence(self, value: Value) -> bool:
        return bool(self.node.forward.sequence(value.name))

    def _dtype_of_sum(self, value: Value) -> int:
        """The type in which gradients of all iterations are summed: float32 for half precision."""
        dtype = value.element_type if value.element_type in FLOATS else TensorProto.FLOAT
        wide = dtype in HALVES and not self._is_sequence(value)
        return TensorProto.FLOAT if wide or dtype is None else dtype

    def _finished(self, graph: onnx.GraphProto, count: int) -> Gradients:
        """The loop with the gradient's body, and the gradients that it gives."""
        node, body = self.node, self.node.body
        initial = [node.gradient(place) for place in self.active]
        for place in self.summed:
            value = node.required(place)
            like = Value(body, "", self._dtype_of_sum(value))
            is_sequence = self._is_sequence(value)
            initial.append(zero_tensors(value) if is_sequence else filled_like(value, 0, like))
        always = body.constant(np.array(True))
        found = body.nodes_of("Loop", count, self.iterations.count, always, *initial, body=graph)
        results: list[Value | None] = [None] * len(node.names)
        places = [*(self.first + place for place in self.active), *self.summed]
        for place, value, like in zip(places, found, initial, strict=False):
            if place in node.needed:
                results[place] = Value(body, value.name, like.element_type)
        for part, value in zip(self.parts, found[len(places) :], strict=True):
            results[part.place] = self._whole(part, value)
        return results

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


# --- a Scan as a Loop ---


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
