"""Reverse-mode differentiation of a graph: it turns the gradients of some values into those of earlier values."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.gradients.expansion import cut_off, depending, differentiable_inputs, expand, paths, quantized, rule_of
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, copied, domain_of
from opgrad.onnx.graph.nodes import captured, naming, outside, read_by, reads_values, title
from opgrad.onnx.passes.sizes import Shapes
from opgrad.onnx.rules.node import Declared, Instead, Node, NoGradient, added_tensors

SUFFIX = "_grad"
COMPUTES = (
    "it computes with integers of a quantized tensor, whose gradient only operators carry that move or choose them; "
    "expected DequantizeLinear before it"
)
CUTS = "it casts floats to integers of a quantized tensor, which no gradient passes; expected QuantizeLinear"


class Backward:
    """One differentiation of a graph.

    forward: the graph. body: where gradients are written to.
    of: the values that are differentiated. wanted: the values whose gradients are asked for.

    problems: one line for each node that has no gradient, with the reason, in the graph's order.
    """

    def __init__(self, forward: Graph, body: GraphBody, of: Iterable[str], wanted: Iterable[str]):
        self.forward, self.body = forward, body
        self.wanted = list(wanted)
        self.nodes = paths(forward, of, self.wanted)
        self.reached = depending(forward, self.wanted)
        self.problems: list[str] = []
        self._parts: dict[str, list[Value]] = {}
        self._sums: dict[str, Value] = {}

    def run(self, seeds: Mapping[str, Value]) -> dict[str, Value | None]:
        """The gradients of the wanted values, named `<value>_grad`; None where no differentiated value depends on one.

        seeds: the gradients of the values that are differentiated.
        Raises NotImplementedError, which names all nodes without gradient.
        """
        # The bodies of loops are differentiated first, and must not take the names of the wanted gradients.
        taken = self.body.taken
        reserved = {name: name + SUFFIX for name in self.wanted if name + SUFFIX not in taken}
        taken.update(reserved.values())
        self.walk(seeds)
        if self.problems:
            count = "one node has" if len(self.problems) == 1 else f"{len(self.problems)} nodes have"
            raise NotImplementedError(f"{count} no gradient: {'; '.join(self.problems)}")
        found = {name: self.gradient(name) for name in self.wanted}
        made = {name for node in self.body.nodes for name in node.output}
        names: dict[str, str] = {}
        for source, value in self._sums.items():
            if value.name in made and value.name not in names:
                names[value.name] = reserved.pop(source, "") or self.body.free(source + SUFFIX)
        taken.difference_update(reserved.values())
        self.body.rename(names)
        for value in self._sums.values():
            value.name = names.get(value.name, value.name)
        return {name: self._sums.get(name) if found[name] is not None else None for name in self.wanted}

    def walk(self, seeds: Mapping[str, Value]) -> None:
        """Differentiate each node, from the last to the first, and collect the problems of all of them."""
        for name, value in seeds.items():
            self._parts.setdefault(name, []).append(value)
        for node in reversed(self.nodes):
            self._node(node)
        self.problems += [f"{title(node)}: {CUTS}" for node in cut_off(self.forward, seeds, self.reached)]
        self.problems.reverse()

    def gradient(self, name: str) -> Value | None:
        """The gradient of a value: the sum of the gradients from all nodes that read it; None if there is none."""
        parts = self._parts.get(name, [])
        if name in self._sums or not parts:
            return self._sums.get(name)
        total = parts[0]
        if len(parts) > 1:
            self.body.scope(f"AccumulateGrad_{name}{SUFFIX}")
            if self.forward.sequence(name):
                total = functools.reduce(added_tensors, parts)
            else:
                dtype = parts[0].element_type or TensorProto.FLOAT
                total = self.body.declare(self.body.node("Sum", *parts), dtype, self.forward.sizes(name))
        self._sums[name] = total
        return total

    def _node(self, proto: onnx.NodeProto) -> None:
        dys = [self.gradient(name) if name else None for name in proto.output]
        if all(dy is None for dy in dys):
            return
        declared = rule_of(proto)
        carrying = set(differentiable_inputs(self.forward, proto)) & self.reached
        names = [*proto.input, *outside(proto)]
        places = [index for index, name in enumerate(names) if name in carrying and index not in declared.constant]
        self.body.scope(f"{proto.name or proto.op_type}_Grad")
        node = Node(proto, self.forward, self.body, dys, places, _differentiate)
        for index, value in self._gradients(declared, node):
            self._parts.setdefault(names[index], []).append(value)

    def _gradients(self, declared: Declared, node: Node) -> list[tuple[int, Value]]:
        """The gradients of the needed inputs, by their places."""
        try:
            read = quantized(self.forward).intersection(node.names[index] for index in node.needed)
            if read and not declared.integers:
                raise NoGradient(COMPUTES)
            with naming(node.proto):
                direct, given = declared.direct, None
                if direct and node.needed.issubset(direct[0]):
                    given = direct[1](node)
                if given is None:
                    given = self._recomputed(declared, node) if declared.recomputes else declared.rule(node)
            if given is None or isinstance(given, Value):
                given = [given]
            found = [(index, given[index]) for index in sorted(node.needed) if index < len(given)]
            return [(index, node.declared(value, index)) for index, value in found if value is not None]
        except Instead as other:
            self.forward.substitute(node.proto, other.nodes)
            self.reached.update(name for each in other.nodes for name in each.output)
            for each in reversed(other.nodes):
                self._node(each)
            return []
        except NoGradient as reason:
            self.problems.append(f"{title(node.proto)}: {reason}{hint(self.forward, node.proto)}")
            # The inputs stand in for their gradients, so that the walk goes on and also finds the problems of earlier
            # nodes. `run` raises afterwards, so that no such value is ever used.
            return [(index, node.required(index)) for index in sorted(node.needed)]

    def _recomputed(self, declared: Declared, node: Node) -> list[Value | None]:
        """The gradients of all inputs, through the formula of the node, which is computed once more."""
        again, results = formula(declared, node, self.forward, self.body)
        inside = self.body.beside()
        seeds = {name: node.gradient(place).within(inside) for place, name in results.items()}
        for name, dy in seeds.items():  # in the type in which the formula gives the result, which integers do not tell
            dtype = again.element_type(name)
            if dtype in FLOATS and dtype != dy.element_type:
                seeds[name] = dy.cast(dtype)
        wanted = dict.fromkeys(node.proto.input[place] for place in sorted(node.needed))
        inner = Backward(again, inside, seeds, wanted)
        inner.walk(seeds)
        if inner.problems:
            raise NoGradient(f"of what it is made of, {'; '.join(inner.problems)}")
        found = {name: inner.gradient(name) for name in wanted}  # the first place of a name gets it
        again.write_nodes()
        self.body.nodes += [*again.graph.node, *inside.nodes]
        self.body.initializers += [*again.graph.initializer, *inside.initializers]
        self.body.infos |= inside.infos
        return [value and value.within(self.body) for value in (found.pop(name, None) for name in node.proto.input)]


def _differentiate(
    forward: Graph, body: GraphBody, seeds: Mapping[str, Value], wanted: Sequence[str]
) -> dict[str, Value | None]:
    """The gradients of values of a body; see `Differentiate`. Raises NoGradient, which names the nodes without one."""
    backward = Backward(forward, body, seeds, wanted)
    try:
        return backward.run(seeds)
    except NotImplementedError:
        raise NoGradient(f"in its body, {'; '.join(backward.problems)}") from None


def formula(declared: Declared, node: Node, forward: Graph, body: GraphBody) -> tuple[Graph, dict[int, str]]:
    """The formula of a node as a graph of its own, and the names of the results that have gradients, by their places.

    The graph's inputs have the names of the node's inputs; all its other names are new ones of `body`.
    """
    inner = body.beside()
    inner.scope(f"{node.proto.name or node.proto.op_type}_Again")
    given = declared.rule(Node(copied(node.proto), forward, inner, [], list(node.needed)))
    values = [given] if isinstance(given, Value) else list(given or [])
    results: dict[int, str] = {}
    for place, dy in enumerate(node.dys):
        if dy is not None:
            value = values[place] if place < len(values) else None
            if value is None:
                raise NoGradient(f"what is differentiated depends on its output {place}, which has no gradient")
            results[place] = value.apply("Identity").name
    inner.keep(results.values())
    own = {name for each in inner.nodes for name in each.output}
    inputs = []
    for name in sorted(read_by(inner.nodes) - own - {each.name for each in inner.initializers}):
        dtype = forward.element_type(name)
        if dtype is None:
            raise NoGradient(f"the graph does not tell the type of {name!r}; declare it in the graph's value_info")
        inputs.append(helper.make_tensor_value_info(name, dtype, forward.sizes(name)))
    graph = helper.make_graph(inner.nodes, "formula", inputs, [], inner.initializers)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in results.values())
    model = helper.make_model(graph, opset_imports=forward.model.opset_import)
    wanted = {node.proto.input[place] for place in node.needed}
    return expand(Graph(model, wanted, taken=body.taken), results.values(), wanted), results


FIXING = "python -m onnxruntime.tools.make_dynamic_shape_fixed does it"


def hint(forward: Graph, node: onnx.NodeProto) -> str:
    """The text that a message adds to the reason why a node has no gradient; "" if the graph gives no clue.

    It names the open sizes of the model's inputs that the condition of an If depends on.
    """
    if node.op_type != "If" or domain_of(node):
        return ""
    deciding = _deciding(forward, node.input[0])
    found = [
        f"axis {axis}{f' ({size.dim_param})' if size.dim_param else ''} of {value.name!r}"
        for value in forward.graph.input
        for axis, size in enumerate(value.type.tensor_type.shape.dim)
        if not size.HasField("dim_value") and not deciding.isdisjoint((size.dim_param, ""))
    ]
    return f"; that depends on the size of the input's {', '.join(found)}: fix it, {FIXING}" if found else ""


def _deciding(forward: Graph, name: str) -> set[str]:
    """The names of the sizes on which a value depends, "" for one without a name."""
    shapes, found, seen, waiting = Shapes(forward), set[str](), {name}, [name]
    while waiting:
        value = waiting.pop()
        terms, node = shapes(value), forward.producers.get(value)
        if terms is not None and None not in terms:
            found.update(each for term in terms if term is not None for each in term.names)
        elif node is not None and not reads_values(node):
            found.add("")
        elif node is not None:
            new = set(captured(node)) - seen
            seen |= new
            waiting += new
    return found
