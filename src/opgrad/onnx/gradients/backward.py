"""Reverse-mode differentiation of a graph: it turns the gradients of some values into those of earlier values."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
from onnx import TensorProto

from opgrad.onnx.gradients.advice import hint
from opgrad.onnx.gradients.reach import cut_off, depending, differentiable_inputs, paths, quantized, rule_of
from opgrad.onnx.gradients.recomputation import formula
from opgrad.onnx.graph.body import GraphBody
from opgrad.onnx.graph.declarations import naming
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.graph.nodes import outside, title
from opgrad.onnx.rules import lists
from opgrad.onnx.rules.errors import Instead
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Declared, Gradients, NoGradient

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
        self._reserved: dict[str, str] = {}

    def run(self, seeds: Mapping[str, Value]) -> dict[str, Value | None]:
        """The gradients of the wanted values; None for a value that no differentiated value depends on.

        seeds: the gradients of the values that are differentiated.
        Raises NotImplementedError, which names all nodes without gradient.
        """
        # The bodies of loops are differentiated first, and must not take the names of the wanted gradients.
        self._reserved = {name: name + SUFFIX for name in self.wanted if name + SUFFIX not in self.body.taken}
        self.body.taken.update(self._reserved.values())
        self.walk(seeds)
        if self.problems:
            raise NotImplementedError(problem_text(self.problems))
        found = {name: self.gradient(name) for name in self.wanted}
        self._name()
        return {name: self._sums.get(name) if found[name] is not None else None for name in self.wanted}

    def walk(self, seeds: Mapping[str, Value]) -> None:
        """Differentiate each node, from the last to the first, and collect the problems of all of them."""
        for name, value in seeds.items():
            self._add(name, value)
        for node in reversed(self.nodes):
            self._node(node)
        self.problems += [f"{title(node)}: {CUTS}" for node in cut_off(self.forward, seeds, self.reached)]
        self.problems.reverse()

    def gradient(self, name: str) -> Value | None:
        """The gradient of a value: the sum of the gradients from all nodes that read it; None if there is none."""
        if name not in self._sums and name in self._parts:
            parts = self._parts[name]
            self._sums[name] = parts[0] if len(parts) == 1 else self._sum(name, parts)
        return self._sums.get(name)

    def _sum(self, name: str, parts: Sequence[Value]) -> Value:
        self.body.scope(f"AccumulateGrad_{name}{SUFFIX}")
        if self.forward.sequence(name):
            return functools.reduce(lists.added, parts)
        total = self.body.node("Sum", *parts)
        return self.body.declare(total, parts[0].element_type or TensorProto.FLOAT, self.forward.sizes(name))

    def _add(self, name: str, value: Value) -> None:
        self._parts.setdefault(name, []).append(value)

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
            self._add(names[index], value)

    def _gradients(self, declared: Declared, node: Node) -> list[tuple[int, Value]]:
        """The gradients of the needed inputs, by their places."""
        try:
            read = quantized(self.forward).intersection(node.names[index] for index in node.needed)
            if read and not declared.integers:
                raise NoGradient(COMPUTES)
            with naming(node.proto):
                given = self._given(declared, node)
            if given is None or isinstance(given, Value):
                given = [given]
            found = [(index, given[index]) for index in sorted(node.needed) if index < len(given)]
            return [(index, node.declared(value, index)) for index, value in found if value is not None]
        except Instead as other:
            self._replace(node.proto, other.nodes)
            return []
        except NoGradient as reason:
            self.problems.append(f"{title(node.proto)}: {reason}{hint(self.forward, node.proto)}")
            # The inputs stand in for their gradients, so that the walk goes on and also finds the problems of earlier
            # nodes. `run` raises afterwards, so that no such value is ever used.
            return [(index, node.required(index)) for index in sorted(node.needed)]

    def _given(self, declared: Declared, node: Node) -> Gradients:
        """What the rule gives."""
        if declared.direct and node.needed.issubset(declared.direct[0]):
            found = declared.direct[1](node)
            if found is not None:
                return found
        return self._recomputed(declared, node) if declared.recomputes else declared.rule(node)

    def _replace(self, node: onnx.NodeProto, others: Sequence[onnx.NodeProto]) -> None:
        """Differentiate other nodes in the place of a node."""
        self.forward.substitute(node, others)
        self.reached.update(name for each in others for name in each.output)
        for each in reversed(others):
            self._node(each)

    def _recomputed(self, declared: Declared, node: Node) -> list[Value | None]:
        """The gradients of all inputs, through the formula of the node, which is computed once more."""
        again, results = formula(declared, node, self.forward, self.body)
        seeds = {name: self._seed(again, name, node.gradient(place)) for place, name in results.items()}
        wanted = dict.fromkeys(node.proto.input[place] for place in sorted(node.needed))
        inner = Backward(again, self.body, seeds, wanted)
        before = len(self.body.nodes)
        inner.walk(seeds)
        if inner.problems:
            raise NoGradient(f"of what it is made of, {'; '.join(inner.problems)}")
        again.write_nodes()
        self.body.nodes[before:before] = again.graph.node
        self.body.initializers.extend(again.graph.initializer)
        names = node.proto.input
        first = {name: place for place, name in reversed(list(enumerate(names)))}
        return [inner.gradient(name) if first[name] == place else None for place, name in enumerate(names)]

    def _seed(self, again: Graph, name: str, dy: Value) -> Value:
        """The gradient of a result in the type in which the formula gives it, which integers do not tell."""
        kind = again.element_type(name)
        return dy.cast(kind) if kind in FLOATS and kind != dy.element_type else dy

    def _name(self) -> None:
        """Name each gradient after its value: `<value>_grad`."""
        made = {name for node in self.body.nodes for name in node.output}
        names: dict[str, str] = {}
        for source, value in self._sums.items():
            if value.name in made and value.name not in names:
                names[value.name] = self._reserved.pop(source, "") or self.body.free(source + SUFFIX)
        self.body.taken.difference_update(self._reserved.values())
        self.body.rename(names)
        for source, value in self._sums.items():
            value.name = names.get(value.name, value.name)
            self._sums[source] = value


def _differentiate(
    forward: Graph, body: GraphBody, seeds: Mapping[str, Value], wanted: Sequence[str]
) -> dict[str, Value | None]:
    """The gradients of values of a body; see `Differentiate`. Raises NoGradient, which names the nodes without one."""
    backward = Backward(forward, body, seeds, wanted)
    try:
        return backward.run(seeds)
    except NotImplementedError:
        raise NoGradient(f"in its body, {'; '.join(backward.problems)}") from None


def problem_text(problems: Collection[str]) -> str:
    """One message for all nodes without gradient."""
    count = "one node has" if len(problems) == 1 else f"{len(problems)} nodes have"
    return f"gradients: {count} no gradient: {'; '.join(problems)}"
