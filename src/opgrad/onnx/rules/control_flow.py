"""The gradients of If, Loop and Scan, through their bodies.

That of If takes the branch that the forward pass took. That of Loop and Scan runs the gradient of the body in a Loop,
from the last iteration to the first. What the body reads from outside gets the sum of the gradients of all iterations.
Values of each iteration that the gradient reads, the forward pass keeps: one that has the same shape in each iteration
as an additional output with a row for each iteration; others in a sequence, which the forward Loop hands on; of a value
that is a sequence itself, the tensors of all iterations are in one sequence, and the index of the first and the number
of an iteration's tensors are rows of two more outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import LAST, Body, Value
from opgrad.onnx.graph.messages import FLOATS, HALVES, copied, keep
from opgrad.onnx.graph.nodes import attributes_of, captured, needed, read_by, rename, subgraphs
from opgrad.onnx.graph.subgraphs import (
    FIRST_STATE,
    LOOP,
    TURN_AND_CONDITION,
    Enclosed,
    declared_sizes,
    is_reversed,
    scan_axis,
    sequence_type,
    state_count,
)
from opgrad.onnx.passes.removal import is_repeatable
from opgrad.onnx.rules.node import (
    Gradients,
    Instead,
    Node,
    NoGradient,
    NotKept,
    added_tensors,
    appended_tensors,
    gradient,
    sizes_of,
    tensors_from,
    zero_tensors,
)

SIZES = ("Shape", "Size")  # operators whose small results are kept in place of what they read


class BodyGradient:
    """The gradient of one body of a node.

    forward: the body's graph, to which `give` adds outputs. outside: the names of what it reads from outside.
    body: where the gradients are written to, which becomes a body of the node's gradient. reads: what stands before
    them there: the nodes that read kept values.
    """

    def __init__(self, node: Node, body: onnx.GraphProto):
        self.node = node
        made, seen = {name for each in body.node for name in each.output}, set[str]()
        for output in body.output:  # a node of the body makes each of them, and each is another value
            if output.name in seen or output.name not in made:
                source, output.name = output.name, node.body.free(f"{output.name}_result")
                body.node.append(helper.make_node("Identity", [source], [output.name], f"{output.name}/Identity"))
            seen.add(output.name)
        self.enclosed = Enclosed(node.forward, node.proto, body)
        self.forward, self.outside = self.enclosed.graph, self.enclosed.outside
        self.body, self.reads = node.body.beside(), node.body.beside()
        self.body.scope(f"{node.proto.name or node.proto.op_type}_Grad/body")
        self.reads.scope(f"{node.proto.name or node.proto.op_type}_Grad/reads")
        self.outputs = [each.name for each in self.forward.graph.output]
        self.inputs = [each.name for each in body.input]
        self._results: Sequence[Value] = ()
        self._added: list[onnx.NodeProto] = []

    def value(self, name: str) -> Value:
        """A value of the forward body, as one that the gradient's body reads."""
        forward = self.forward
        return Value(self.body, name, forward.sequence(name) or forward.element_type(name), forward.sizes(name))

    def carries(self, name: str) -> bool:
        """Whether a value of the forward body can have a gradient."""
        return self.value(name).element_type in (None, *FLOATS)

    def differentiate(self, seeds: Mapping[str, Value], wanted: Sequence[str]) -> dict[str, Value | None]:
        """The gradients of the wanted values; see `Node.differentiate`."""
        differentiate = self.node.differentiate
        assert differentiate is not None
        return differentiate(self.forward, self.body, seeds, wanted) if seeds else dict.fromkeys(wanted)

    def zeros(self, value: Value, is_sequence: bool) -> Value:
        """Zeros in the shape of a value that is one of the forward body or comes from outside."""
        like = value.within(self.body)
        return zero_tensors(like) if is_sequence else like.filled(0)

    def input(self, what: str, like: str, element_type: int | None = None) -> Value:
        """A new input of the gradient's body, of the type of a value of the forward body or of another one."""
        value = self.value(like)
        return Value(self.body, self.body.free(f"{like}_{what}"), element_type or value.element_type, value.sizes)

    def read_values(self, results: Sequence[Value]) -> list[str]:
        """The values of the forward body that its gradient reads and that have to be kept for it.

        results: the gradients; nodes of which none depends are left out. Constants are not kept but copied, and of a
        value of which only the sizes are read, these are kept.
        """
        self._results = results
        self.body.keep([each.name for each in results])
        own = {*self.inputs, *(name for node in self._nodes() for name in node.output if name)}
        # The forward body computes the sizes of its own values, where the gradient reads nothing else of them.
        others = read_by(node for node in self.body.nodes if node.op_type not in SIZES)
        moved, stay = list[onnx.NodeProto](), list[onnx.NodeProto]()
        for node in self.body.nodes:
            is_moved = node.op_type in SIZES and node.input[0] in own and node.input[0] not in others
            (moved if is_moved else stay).append(node)
        for node in moved:
            sizes = self.forward.sizes(node.input[0])
            whole = node.op_type == "Shape" and not node.attribute
            rank = [] if node.op_type == "Size" else [len(sizes)] if whole and sizes is not None else None
            self.forward.declare(node.output[0], TensorProto.INT64, rank)
        self._added += moved
        self.body.nodes = stay
        read = [*dict.fromkeys(name for node in self.body.nodes for name in captured(node))]
        read += [each.name for each in results if each.name not in read]
        for name in read:
            if name in self.outside:
                continue
            if name in self.forward.initializers:
                self.rename({name: self.body.tensor(self.forward.initializers[name]).name})
            elif (constant := self.forward.constant(name)) is not None:
                self.rename({name: self.body.constant(constant).name})
        own.update(name for node in self._added for name in node.output)
        return [name for name in read if name in own and self.forward.constant(name) is None]

    def _nodes(self) -> list[onnx.NodeProto]:
        return [*self.forward.nodes(), *self._added]

    def hoist(self, names: Sequence[str]) -> list[str]:
        """Compute what depends on values from outside alone once before the gradient; returns the other names."""
        known, nodes = set(self.outside), []
        for node in self.forward.nodes():
            if is_repeatable(node) and all(
                name in known or name in self.forward.initializers for name in captured(node)
            ):
                known.update(node.output)
                nodes.append(node)
        hoisted = [name for name in names if name in known]
        outer, copies = self.node.body, [copied(node) for node in needed(nodes, hoisted)]
        names_there = {name: outer.free(name) for node in copies for name in node.output if name}
        for name in read_by(copies) & self.forward.initializers.keys() - self.outside:
            names_there[name] = outer.tensor(self.forward.initializers[name]).name
        for node in copies:
            rename(node, names_there)
        outer.nodes.extend(copies)
        self.rename(names_there)
        return [name for name in names if name not in known]

    def rename(self, names: dict[str, str]) -> None:
        """Let the gradient's body read other values; names: from old to new ones."""
        self.body.rename(names)
        for value in self._results:
            value.name = names.get(value.name, value.name)

    def add(self, node: onnx.NodeProto) -> None:
        """Append a node to the forward body."""
        self._added.append(node)

    def give(self, name: str) -> None:
        """Make a value of the forward body another output of it."""
        outputs = [each.name for each in self.forward.graph.output]
        if name in outputs or name in self.inputs:
            source, name = name, self.body.free(f"{name}_kept")
            self.add(helper.make_node("Identity", [source], [name], f"{name}/Identity"))
            value = self.value(source)
            if self.forward.sequence(source):
                self.forward.declare_sequence(name, self.element_type(source))
            else:
                self.forward.declare(name, self.element_type(source), value.sizes)
        self.forward.graph.output.append(self.declared(name))

    def element_type(self, name: str) -> int:
        """The type of a value's elements. Raises NoGradient if the graph does not tell it."""
        dtype = self.value(name).element_type
        if dtype is None:
            raise NoGradient(f"the type of {name!r}, which the gradient reads, is not known")
        return dtype

    def declared(self, name: str) -> onnx.ValueInfoProto:
        """A value of the forward body as an output, with those of its sizes that are numbers."""
        dtype = self.element_type(name)
        if self.forward.sequence(name):
            return helper.make_value_info(name, sequence_type(dtype))
        return helper.make_tensor_value_info(name, dtype, self._fixed_sizes(name))

    def _fixed_sizes(self, name: str) -> list[int | None] | None:
        sizes = self.forward.sizes(name)
        return None if sizes is None else [size if isinstance(size, int) else None for size in sizes]

    def named_result(self, name: str, stacked: bool = False, open_sizes: bool = False) -> str:
        """The name of a new result of the node, which has its type from a value of the body.

        stacked: it has a row for each iteration. open_sizes: only the rank is that of the value.
        """
        outer, dtype, sizes = self.node.forward, self.element_type(name), self._fixed_sizes(name)
        sizes = [None] * len(sizes) if open_sizes and sizes is not None else sizes
        new = self.body.free(f"{name}_kept")
        if self.forward.sequence(name):
            outer.declare_sequence(new, dtype)
        else:
            outer.declare(new, dtype, None if sizes is None else [*[None] * stacked, *sizes])
        return new

    def restore(self) -> None:
        """Write the forward body, with what was added, into the node."""
        self.forward.reorder(self._nodes())
        self.forward.write_nodes()
        self.enclosed.restore()

    def gradient_body(self, inputs: Sequence[Value], results: Sequence[Value]) -> onnx.GraphProto:
        """The body of the gradient, with these inputs and, as outputs, these results."""
        given = [_told(each.name, each) for each in inputs]
        names = [self.body.free(f"{each.name}_result") for each in results]
        copies = [
            helper.make_node("Identity", [each.name], [name], name) for each, name in zip(results, names, strict=True)
        ]
        outputs = [_told(name, each) for each, name in zip(results, names, strict=True)]
        nodes = needed([*self.reads.nodes, *self.body.nodes, *copies], names)
        made = {name for node in self.body.nodes for name in node.output}
        infos = [copied(info) for name, info in self.body.infos.items() if name in made]
        for size in declared_sizes(infos):
            if size.HasField("dim_param"):  # which may stand for another size in each iteration
                size.Clear()
        constants = [*self.reads.initializers, *self.body.initializers]
        return helper.make_graph(nodes, "gradient", given, outputs, constants, value_info=infos)


def _told(name: str, like: Value) -> onnx.ValueInfoProto:
    """A value as an input or output, with type and sizes if all sizes are numbers.

    onnxruntime needs them of what counts the iterations, and of what a loop gives that makes none.
    """
    if like.element_type is None or like.sizes is None or not all(isinstance(size, int) for size in like.sizes):
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, like.element_type, like.sizes)


@gradient("If", constant=(0,))
def choice(node: Node) -> Gradients:
    """dx = that of the branch which was taken; 0 where it does not read x."""
    insides = [BodyGradient(node, body) for body in subgraphs(node.proto)]
    indices = sorted(node.needed)
    found = []
    for inside in insides:
        dys = [each and each.within(inside.body) for each in node.dys]
        seeds = {name: dy for name, dy in zip(inside.outputs, dys, strict=False) if dy is not None}
        wanted = [node.names[index] for index in indices if node.names[index] in inside.outside]
        found.append(inside.differentiate(seeds, wanted))
    reached = [index for index in indices if any(each.get(node.names[index]) is not None for each in found)]
    if not reached:
        return None
    results = [
        [given.get(node.names[index]) or _zeros(node, inside, index) for index in reached]
        for inside, given in zip(insides, found, strict=True)
    ]
    for inside, given in zip(insides, results, strict=True):
        _keep(inside, inside.read_values(given), [each for each in insides if each is not inside])
    for inside in insides:
        inside.restore()
    graphs = [inside.gradient_body([], given) for inside, given in zip(insides, results, strict=True)]
    names = [each.name for each in node.proto.attribute if each.type == onnx.AttributeProto.GRAPH]
    branches = dict(zip(names, graphs, strict=True))
    values = node.body.nodes_of("If", len(reached), node.required(0), **branches)
    gradients: list[Value | None] = [None] * len(node.names)
    for index, value, like in zip(reached, values, results[0], strict=True):
        gradients[index] = Value(node.body, value.name, like.element_type)
    return gradients


def _zeros(node: Node, inside: BodyGradient, index: int) -> Value:
    """The gradient of a value from outside that a branch does not read."""
    value, body = node.required(index), inside.body
    if node.forward.sequence(value.name):
        return inside.zeros(value, is_sequence=True)
    shape = value.shape()  # outside of the branch, so that a loop around the If keeps the shape and not the value
    return Value(body, body.number(0, value).expand(Value(body, shape.name)).name, value.element_type, value.sizes)


def _keep(inside: BodyGradient, names: list[str], others: list[BodyGradient]) -> None:
    """Give values of a branch out of the node; the other branch gives empty ones of the same types instead."""
    given = {}
    for name in names:
        given[name] = inside.named_result(name, open_sizes=True)
        inside.node.proto.output.append(given[name])
        dtype, sizes = inside.element_type(name), inside.forward.sizes(name)
        for other in others:
            result = other.body.free(f"{name}_missing")
            if inside.forward.sequence(name):
                other.add(helper.make_node("SequenceEmpty", [], [result], result, dtype=dtype))
                other.forward.declare_sequence(result, dtype)
            else:
                shape = [0] if sizes is None else [0] * len(sizes)
                empty = helper.make_tensor("", dtype, shape, [] if shape else [0])
                other.add(helper.make_node("Constant", [], [result], result, value=empty))
                other.forward.declare(result, dtype, list(empty.dims))
            other.forward.graph.output.append(other.declared(result))
        inside.give(name)
    inside.rename(given)


SEQUENCE_STATES_FROM = 13  # the first opset whose Loop can hand sequences on


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
        raise Instead(_as_loop(node, given)) from None


@dataclass
class _Part:
    """What the body gets of a value in each iteration: a Scan's part of a sequence, or a row that a Loop gathers.

    index: that of the value among the names of the node. name: that of the part in the body. axis: of the iterations.
    is_reversed: whether the first iteration gets the last part.
    """

    index: int
    name: str
    axis: int
    is_reversed: bool = False


class _LoopGradient:
    """The gradient of a Loop or a Scan. States and rows are named by their indices.

    inside: its body. first, count: the index of the first state among the inputs, and how many there are.
    before, after: the names of the states in the body, before and after an iteration.
    elements, given: the names of what a Scan's body gets of its sequences, and of the rows that a body gives.
    sequences, stacks: the names of these sequences, and of the outputs with all rows.
    rows: those of what the body gives that have a gradient. active: the states that have one.
    parts: those of the values whose gradients are asked for.
    iterations: how many there are. step: the number of the gradient's iteration. iteration: that of the forward
    iteration which it differentiates: the last one first.
    """

    def __init__(self, node: Node):
        (body,) = subgraphs(node.proto)
        self.node, self.inside, self.is_loop = node, BodyGradient(node, body), node.proto.op_type == LOOP
        inside, proto = self.inside, node.proto
        self.first, self.count = FIRST_STATE[proto.op_type], state_count(proto)
        inputs, outputs = inside.inputs[self.first :], inside.outputs[self.first // 2 :]
        self.before, self.elements = inputs[: self.count], inputs[self.count :]
        self.after, self.given = outputs[: self.count], outputs[self.count :]
        self.dys = [*node.dys, *[None] * (len(outputs) - len(node.dys))]
        self.rows = [index for index in range(len(self.given)) if self.dys[self.count + index] is not None]
        for index, name in enumerate(outputs):
            if index == len(proto.output):
                proto.output.append("")
            if not proto.output[index]:
                proto.output[index] = inside.named_result(name, stacked=index >= self.count)
        node.outputs = [node.value(name) for name in proto.output]
        self.step = Value(
            inside.body, inside.body.free(f"{proto.name or proto.op_type}_Grad/step"), TensorProto.INT64, []
        )
        self.sequences, self.stacks = list(proto.input[self.count :]), list(proto.output[self.count :])
        if self.elements:
            whole, axis = node.required(self.count), self._axis(self.elements[0], "input", 0)
            self.iterations = whole.shape(axis, axis + 1).scalar()
        else:
            if not self.stacks:
                self.stacks.append(self._stack(inside.inputs[0]))
                self.given.append(inside.inputs[0])
            self.iterations = Value(node.body, self.stacks[0]).shape(0, 1).scalar()
        self.iteration = inside.reads.node("Sub", self.iterations - 1, self.step)
        self.parts = [
            _Part(at, name, self._axis(name, "input", index), is_reversed(proto, "input", index))
            for index, name in enumerate(self.elements)
            if (at := self.first + self.count + index) in node.needed
        ]
        if self.is_loop:
            self.parts = list(self._gathered_parts())
        self.active = self._active()

    def _axis(self, name: str, of: str, index: int) -> int:
        """The axis of the steps of an input or output; name: that of one step's part in the body."""
        axes = attributes_of(self.node.proto).get(f"scan_{of}_axes")
        rank = len(sizes_of(self.inside.value(name))) if axes and any(axes) else 0
        return scan_axis(self.node.proto, index, of, rank + 1)

    def _row(self, name: str, whole: str, of: str, index: int) -> Value:
        """The part of an input or output that belongs to an iteration. of: "input" or "output"."""
        value, reads = self.inside.value(name), self.inside.reads
        at = self.step if is_reversed(self.node.proto, of, index) else self.iteration
        found = reads.node("Gather", Value(reads, whole, value.element_type), at, axis=self._axis(name, of, index))
        return Value(self.inside.body, found.name, value.element_type, value.sizes)

    def _read(self, name: str) -> str:
        """What the gradient's body reads in place of a value of the forward body."""
        inside, forward = self.inside, self.inside.forward
        if self.is_loop and name == inside.inputs[0]:
            return self.iteration.name
        for own, wholes, of in ((self.elements, self.sequences, "input"), (self.given, self.stacks, "output")):
            if name in own:
                return self._row(name, wholes[own.index(name)], of, own.index(name)).name
        gather = forward.maker(name, "Gather") if self.is_loop else None
        if gather is not None and gather.input[0] in inside.outside and gather.input[1] == inside.inputs[0]:
            return self._gathered(gather.input[0], attributes_of(gather).get("axis", 0))  # read again instead of kept
        sizes, steady = forward.sizes(name), inside.enclosed.steady
        is_steady = sizes is not None and all(isinstance(size, int) or size in steady for size in sizes)
        return self._gathered(self._stack(name)) if is_steady and not forward.sequence(name) else self._listed(name)

    def _gathered(self, whole: str, axis: int = 0) -> str:
        reads = self.inside.reads
        return reads.node("Gather", Value(reads, whole), self.iteration, axis=axis).name

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
            return reads.node("SequenceAt", whole, self.iteration).name
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
        proto.output.insert(self.count, last)
        for name in (empty, last):
            self.node.forward.declare_sequence(name, dtype)
        value = helper.make_value_info(before, sequence_type(dtype))
        inside.enclosed.body.input.append(value)
        inputs = [copied(each) for each in inside.forward.graph.input]
        inputs.insert(len(inside.inputs), value)
        keep(inside.forward.graph.input, inputs)
        inside.inputs.append(before)
        outputs = list(inside.forward.graph.output)
        outputs.insert(1 + self.count, helper.make_value_info(after, sequence_type(dtype)))
        keep(inside.forward.graph.output, outputs)
        self.count += 1
        return last

    def _active(self) -> list[int]:
        """The states that depend on something asked for, and on which something depends that has a gradient."""
        node, forward = self.node, self.inside.forward
        depends = [forward.before(name) for name in self.after]
        states = [index for index, name in enumerate(self.before) if self.inside.carries(name)]
        read = {one: [other for other in states if self.before[other] in depends[one]] for one in states}
        read_by = {one: [other for other in states if one in read[other]] for one in states}
        wanted = {node.names[index] for index in node.needed if index >= len(node.proto.input)}
        wanted |= {part.name for part in self.parts}
        for_rows = {name for index in self.rows for name in forward.before(self.given[index])}
        changing = [one for one in states if self.first + one in node.needed or depends[one] & wanted]
        leading = [one for one in states if self.dys[one] is not None or self.before[one] in for_rows]
        return sorted(_reached(changing, read_by) & _reached(leading, read))

    def _gathered_parts(self) -> Iterable[_Part]:
        """The rows that a Loop's body gathers by the number of the iteration, and reads nothing else of the value.

        Their gradients are put together once; added to a gradient of the whole value, each row would cost as much as
        all of them.
        """
        node = self.node
        for index in sorted(node.needed):
            name = node.names[index]
            readers = self.inside.forward.readers.get(name, [])
            if index < len(node.proto.input) or len(readers) != 1 or readers[0].op_type != "Gather":
                continue
            gather, rank = readers[0], len(node.required(index).sizes or ())
            if list(gather.input) == [name, self.inside.inputs[0]] and rank:
                yield _Part(index, gather.output[0], attributes_of(gather).get("axis", 0) % rank)

    def gradients(self) -> Gradients:
        """The gradients of the node's inputs, and behind them those of what the body reads from outside."""
        if not self.active and not self.rows:
            return None
        node, inside, body = self.node, self.inside, self.inside.body
        states = [inside.input("grad", self.after[index]) for index in self.active]
        seeds = {self.after[index]: value for index, value in zip(self.active, states, strict=True)}
        for index in self.rows:
            dy = self.dys[self.count + index]
            assert dy is not None
            seeds[self.given[index]] = self._row(self.given[index], dy.name, "output", index)
        own_indices = {part.index for part in self.parts} | set(range(len(node.proto.input)))
        outside = {index: name for index, name in enumerate(node.names) if index in node.needed - own_indices}
        before, elements = [self.before[index] for index in self.active], [part.name for part in self.parts]
        found = inside.differentiate(seeds, [*before, *elements, *outside.values()])

        def results_of(names: list[str]) -> list[Value]:
            has_tensors = inside.forward.sequence
            return [found[name] or inside.zeros(inside.value(name), bool(has_tensors(name))) for name in names]

        results = results_of(before)
        initial = [node.gradient(index) for index in self.active]
        sums, summed = list[Value](), [index for index, name in outside.items() if found[name] is not None]
        for index in summed:
            value, more = node.required(index), found[node.names[index]]
            assert more is not None
            is_sequence = bool(node.forward.sequence(value.name))
            dtype = value.element_type
            if dtype is None or dtype not in FLOATS or (dtype in HALVES and not is_sequence):
                dtype = TensorProto.FLOAT  # in halves sums of all iterations are inexact
            total = Value(body, body.free(f"{value.name}_sum"), dtype, value.sizes)
            sums.append(total)
            results.append(added_tensors(total, more) if is_sequence else total + more.like(total))
            like = Value(node.body, "", dtype)
            initial.append(zero_tensors(value) if is_sequence else value.filled(0, like))
        results += results_of(elements)
        go_on = Value(body, body.free(f"{self.step.name}/go_on"), TensorProto.BOOL, [])
        # The forward pass keeps what the gradient reads, and the gradient reads it at its iteration.
        names = inside.hoist(inside.read_values(results))
        inside.rename({name: self._read(name) for name in names})
        graph = inside.gradient_body([self.step, go_on, *states, *sums], [go_on, *results])
        inside.restore()
        always = node.body.constant(np.array(True))
        made = node.body.nodes_of("Loop", len(results), self.iterations, always, *initial, body=graph)
        gradients: list[Value | None] = [None] * len(node.names)
        indices = [*(self.first + index for index in self.active), *summed]
        for index, value, like in zip(indices, made, initial, strict=False):
            if index in node.needed:
                gradients[index] = Value(node.body, value.name, like.element_type)
        for part, value in zip(self.parts, made[len(indices) :], strict=True):
            gradients[part.index] = self._whole(part, value)
        return gradients

    def _whole(self, part: _Part, value: Value) -> Value:
        """The gradient of a value, from those of its parts in each iteration, the last first."""
        whole, body = self.node.required(part.index), self.node.body
        sizes = [whole.shape(0, part.axis), whole.shape(part.axis + 1)]
        value = Value(body, value.name, whole.element_type)
        if not part.is_reversed:
            value = value.slice(-1, -LAST - 1, 0, -1)
        # Where no iteration is run, onnxruntime takes 0 for sizes that it does not know; this gives them back.
        value = value.in_shape(body.concat(self.iterations.reshape([1]), *sizes))
        if part.axis:
            rank = len(sizes_of(whole))
            value = value.transpose(*range(1, part.axis + 1), 0, *range(part.axis + 1, rank))
        if not self.is_loop:
            return value
        rest = whole.shape(part.axis, part.axis + 1) - self.iterations.reshape([1])
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


def _as_loop(node: Node, scan: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes that compute what a Scan does, by a Loop. scan: the node, as the graph has it."""
    title = node.body.free(f"{scan.name or scan.op_type}/loop")
    before, inner, behind = (Body(node.opset, f"{title}/{part}") for part in ("before", "body", "behind"))
    states, (body,) = state_count(scan), subgraphs(scan)
    sequences = [node.value(name) for name in scan.input[states:]]
    axes = [scan_axis(scan, index, "input", len(sizes_of(each))) for index, each in enumerate(sequences)]
    steps = Value(before, sequences[0].name).shape(axes[0], axes[0] + 1).scalar()
    last, always = steps - before.ints([1]).scalar(), before.constant(np.array(True))
    step, go_on = inner.input(), inner.input()
    elements = [each.name for each in body.input[states:]]
    for index, (name, whole, axis) in enumerate(zip(elements, sequences, axes, strict=True)):
        at = inner.outer(last) - step if is_reversed(scan, "input", index) else step
        inner.nodes.append(helper.make_node("Gather", [whole.name, at.name], [name], name, axis=axis))
    more = inner.node("Identity", go_on)
    rows = [_rows(node, scan, behind, index, name) for index, name in enumerate(scan.output[states:])]
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


def _rows(node: Node, scan: onnx.NodeProto, body: Body, index: int, name: str) -> str:
    """The name of an output of the Loop; nodes that reverse it, or move its axis, are appended to the body."""
    axes = attributes_of(scan).get("scan_output_axes")
    if not name or not (is_reversed(scan, "output", index) or (axes and axes[index])):
        return name
    rank = len(sizes_of(node.value(name)))
    axis, new = scan_axis(scan, index, "output", rank), node.body.free(f"{name}/rows")
    node.forward.declare(new, node.forward.element_type(name) or 0, [None] * rank)
    value = Value(body, new)
    if is_reversed(scan, "output", index):
        value = value.slice(-1, -LAST - 1, 0, -1)
    moved = value.transpose(*range(1, axis + 1), 0, *range(axis + 1, rank))
    body.nodes[-1].output[0] = name
    node.forward.declare_like(moved.name, name)
    return new
