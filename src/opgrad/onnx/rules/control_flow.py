"""If: the gradient takes the branch that the forward pass took."""

import onnx
from onnx import helper

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.nodes import subgraphs
from opgrad.onnx.rules.bodies import BodyGradient
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient


@gradient("If", constant=(0,))
def choice(node: Node) -> Gradients:
    """dx = that of the branch which was taken; 0 where it does not read x."""
    insides = [BodyGradient(node, body) for body in subgraphs(node.proto)]
    places = sorted(node.needed)
    found = [_branch(node, inside, [node.names[place] for place in places]) for inside in insides]
    reached = [index for index in range(len(places)) if any(each[index] is not None for each in found)]
    if not reached:
        return None
    results = [
        [given[index] or _zeros(node, inside, places[index]) for index in reached]
        for inside, given in zip(insides, found, strict=True)
    ]
    for inside, given in zip(insides, results, strict=True):
        _keep(inside, inside.read_values(given), [each for each in insides if each is not inside])
    for inside in insides:
        inside.restore()
    graphs = [inside.gradient_body([], given) for inside, given in zip(insides, results, strict=True)]
    branches = {each.name: graph for each, graph in zip(_branches(node.proto), graphs, strict=True)}
    values = node.body.nodes_of("If", len(reached), node.required(0), **branches)
    gradients: list[Value | None] = [None] * len(node.names)
    for index, value, like in zip(reached, values, results[0], strict=True):
        gradients[places[index]] = Value(node.body, value.name, like.element_type)
    return gradients


def _branches(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return [each for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]


def _branch(node: Node, inside: BodyGradient, names: list[str]) -> list[Value | None]:
    """The gradients of values from outside by one branch; None for a value without one."""
    seeds = {
        name: Value(inside.body, dy.name, dy.element_type, dy.sizes)
        for name, dy in zip(inside.outputs, node.dys, strict=False)
        if dy is not None
    }
    wanted = [name for name in names if name in inside.outside]
    found = inside.differentiate(seeds, wanted)
    return [found.get(name) for name in names]


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
        for other in others:
            _stand_in(other, inside, name)
        inside.give(name)
    inside.rename(given)


def _stand_in(other: BodyGradient, inside: BodyGradient, name: str) -> None:
    """Let a branch give an empty value where the other branch gives one that its gradient reads."""
    dtype, sizes = inside.element_type(name), inside.forward.sizes(name)
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
