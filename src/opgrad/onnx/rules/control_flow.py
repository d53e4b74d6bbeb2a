"""The gradient of a body of If, Loop or Scan; that of If takes the branch that the forward pass took."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import FLOATS, copied
from opgrad.onnx.graph.nodes import captured, needed, read_by, rename, subgraphs
from opgrad.onnx.graph.subgraphs import Enclosed, declared_sizes, sequence_type
from opgrad.onnx.passes.removal import is_repeatable
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, filled_like, gradient, zero_tensors

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
        like = Value(self.body, value.name, value.element_type, value.sizes)
        return zero_tensors(like) if is_sequence else filled_like(like, 0)

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
                self.rename({name: self.body.tensor(_unnamed(self.forward.initializers[name])).name})
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
            names_there[name] = outer.tensor(_unnamed(self.forward.initializers[name])).name
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


def _unnamed(tensor: TensorProto) -> TensorProto:
    """A tensor without its name, so that equal ones are alike."""
    copy = copied(tensor)
    copy.name = ""
    return copy


@gradient("If", constant=(0,))
def choice(node: Node) -> Gradients:
    """dx = that of the branch which was taken; 0 where it does not read x."""
    insides = [BodyGradient(node, body) for body in subgraphs(node.proto)]
    places = sorted(node.needed)
    found = []
    for inside in insides:
        dys = [each and Value(inside.body, each.name, each.element_type, each.sizes) for each in node.dys]
        seeds = {name: dy for name, dy in zip(inside.outputs, dys, strict=False) if dy is not None}
        wanted = [node.names[place] for place in places if node.names[place] in inside.outside]
        found.append(inside.differentiate(seeds, wanted))
    reached = [place for place in places if any(each.get(node.names[place]) is not None for each in found)]
    if not reached:
        return None
    results = [
        [given.get(node.names[place]) or _zeros(node, inside, place) for place in reached]
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
    for place, value, like in zip(reached, values, results[0], strict=True):
        gradients[place] = Value(node.body, value.name, like.element_type)
    return gradients


def _zeros(node: Node, inside: BodyGradient, place: int) -> Value:
    """The gradient of a value from outside that a branch does not read."""
    value, body = node.required(place), inside.body
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
