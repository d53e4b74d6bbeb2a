"""Reverse-mode differentiation of a graph: it turns the gradients of some values into those of earlier values."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx
from onnx import TensorProto

from opgrad.gradients.advice import hint
from opgrad.graph.body import GraphBody
from opgrad.graph.formulas import Value
from opgrad.graph.graph import Graph, title
from opgrad.graph.messages import FLOATS, domain_of
from opgrad.graph.nodes import captured, subgraphs
from opgrad.rules.node import Node
from opgrad.rules.registry import RULES, Declared, Gradients, NoGradient

SUFFIX = "_grad"
NO_RULE = "there is no rule for it; opgrad.gradients.register_gradient adds one"
REASONS = {
    "If": "which branch it takes is not known before it runs; give it a constant condition",
    "Loop": "how often it runs is not known before; unroll it",
    "Scan": "its steps have no gradient; unroll it",
}
# The integers that these operators write or read carry gradients, too: the gradient passes straight through the
# rounding and is that of the floats which the integers stand for (straight-through estimator).
QUANTIZING, DEQUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear"), "DequantizeLinear"
COMPUTES = (
    "it computes with integers of a quantized tensor, whose gradient only operators carry that move or choose them; "
    "expected DequantizeLinear before it"
)


def paths(forward: Graph, of: Iterable[str], wanted: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes between the values `wanted` and the values `of`, in the graph's order."""
    reached, between = depending(forward, wanted), set(of)
    nodes = []
    for node in reversed(forward.graph.node):
        if between.intersection(node.output) and reached.intersection(node.output):
            carried = [name for name in differentiable_inputs(forward, node) if name in reached]
            if carried:
                nodes.append(node)
                between.update(carried)
    return nodes[::-1]


def depending(forward: Graph, wanted: Iterable[str]) -> set[str]:
    """The wanted values and all values that can be differentiated with respect to one of them."""
    reached = set(wanted)
    for node in forward.graph.node:
        if reached.intersection(differentiable_inputs(forward, node)):
            reached.update(name for name in node.output if name and _carries(forward, name))
    return reached


def _carries(forward: Graph, name: str) -> bool:
    """Whether a value can have a gradient."""
    return forward.element_type(name) in (None, *FLOATS) or name in quantized(forward)


def quantized(forward: Graph) -> set[str]:
    """The names of all integer values that stand for floats.

    They are what the graph quantizes floats to, and what it copies, selects or computes from such integers.
    """
    if forward.quantized is None:
        forward.quantized = found = set[str]()
        for node in forward.graph.node:
            if node.op_type in QUANTIZING and not domain_of(node):
                found.add(node.output[0])
            elif node.op_type != DEQUANTIZING and (read := found.intersection(_differentiable(node))):
                found.update(name for name in node.output if name and _is_quantized(forward, node, name, read))
    return forward.quantized


def _is_quantized(forward: Graph, node: onnx.NodeProto, name: str, read: Collection[str]) -> bool:
    """Whether a result of a node that reads quantized integers stands for floats, too.

    A float, a condition or an index does not.
    """
    kind = forward.element_type(name)
    moved = _rule(node).integers and node.op_type not in ("Cast", "CastLike")
    return kind in map(forward.element_type, read) if moved else kind not in (None, TensorProto.BOOL, *FLOATS)


def _differentiable(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads at places that have a gradient."""
    if any(subgraphs(node)):
        return captured(node)
    skipped = _rule(node).constant
    return (name for index, name in enumerate(node.input) if name and index not in skipped)


def differentiable_inputs(forward: Graph, node: onnx.NodeProto) -> list[str]:
    """The names that a node reads and that have a gradient if its results have one."""
    return [name for name in _differentiable(node) if _carries(forward, name)]


def _rule(node: onnx.NodeProto) -> Declared:
    """The rule of a node; an operator without a rule gets one that raises NoGradient with the reason."""
    return RULES.get((domain_of(node), node.op_type)) or Declared(node.op_type, node.domain, _no_rule)


def _no_rule(node: Node) -> Gradients:
    raise NoGradient(REASONS.get(node.proto.op_type, NO_RULE))


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
        """The gradients of the wanted values; None for a value that no differentiated value depends on.

        seeds: the gradients of the values that are differentiated.
        Raises NotImplementedError, which names all nodes without gradient.
        """
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
        self.problems.reverse()

    def gradient(self, name: str) -> Value | None:
        """The gradient of a value: the sum of the gradients from all nodes that read it; None if there is none."""
        if name not in self._sums and name in self._parts:
            parts = self._parts[name]
            self._sums[name] = parts[0] if len(parts) == 1 else self._sum(name, parts)
        return self._sums.get(name)

    def _sum(self, name: str, parts: Sequence[Value]) -> Value:
        self.body.scope(f"AccumulateGrad_{name}{SUFFIX}")
        total = self.body.node("Sum", *parts)
        return self.body.declare(total, parts[0].element_type or TensorProto.FLOAT, self.forward.sizes(name))

    def _add(self, name: str, value: Value) -> None:
        self._parts.setdefault(name, []).append(value)

    def _node(self, proto: onnx.NodeProto) -> None:
        dys = [self.gradient(name) if name else None for name in proto.output]
        if all(dy is None for dy in dys):
            return
        declared = _rule(proto)
        carrying = set(differentiable_inputs(self.forward, proto)) & self.reached
        places = [
            index for index, name in enumerate(proto.input) if name in carrying and index not in declared.constant
        ]
        self.body.scope(f"{proto.name or proto.op_type}_Grad")
        node = Node(proto, self.forward, self.body, dys, places)
        for index, value in self._gradients(declared, node):
            self._add(proto.input[index], value)

    def _gradients(self, declared: Declared, node: Node) -> list[tuple[int, Value]]:
        """The gradients of the needed inputs, by their places."""
        try:
            read = quantized(self.forward).intersection(node.proto.input[index] for index in node.needed)
            if read and not declared.integers:
                raise NoGradient(COMPUTES)
            given = declared.rule(node)
            if given is None or isinstance(given, Value):
                given = [given]
            found = [(index, given[index]) for index in sorted(node.needed) if index < len(given)]
            return [(index, node.declared(value, index)) for index, value in found if value is not None]
        except NoGradient as reason:
            self.problems.append(f"{title(node.proto)}: {reason}{hint(self.forward, node.proto)}")
            # The inputs stand in for their gradients, so that the walk goes on and also finds the problems of earlier
            # nodes. `run` raises afterwards, so that no such value is ever used.
            for name in set(differentiable_inputs(self.forward, node.proto)) - set(node.proto.input):
                self._add(name, Value(self.body, name, self.forward.element_type(name), self.forward.sizes(name)))
            return [(index, node.required(index)) for index in sorted(node.needed)]

    def _name(self) -> None:
        """Name each gradient after its value: `<value>_grad`."""
        made = {name for node in self.body.nodes for name in node.output}
        names: dict[str, str] = {}
        for source, value in self._sums.items():
            if value.name in made and value.name not in names:
                names[value.name] = self.body.free(source + SUFFIX)
        self.body.rename(names)
        for source, value in self._sums.items():
            value.name = names.get(value.name, value.name)
            self._sums[source] = value


def problem_text(problems: Collection[str]) -> str:
    """One message for all nodes without gradient."""
    count = "one node has" if len(problems) == 1 else f"{len(problems)} nodes have"
    return f"gradients: {count} no gradient: {'; '.join(problems)}"
