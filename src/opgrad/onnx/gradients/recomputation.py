"""Operators that stay in the forward graph, and are differentiated through a formula that the backward part computes.

The forward result is that of the operator's own kernel. What the formula needs in between is not kept until then.
"""

import onnx
from onnx import helper

from opgrad.onnx.gradients.expansion import expand
from opgrad.onnx.graph.body import GraphBody
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.nodes import read_by, rename
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Declared, NoGradient


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
    graph = helper.make_graph(inner.nodes, "formula", _inputs(inner, forward), [], inner.initializers)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in results.values())
    model = helper.make_model(graph, opset_imports=forward.model.opset_import)
    wanted = {node.proto.input[place] for place in node.needed}
    expanded = expand(Graph(model, wanted), results.values(), wanted)
    return _with_names_of(body, expanded, {name for each in inner.nodes for name in each.output}, wanted), results


def _inputs(inner: GraphBody, forward: Graph) -> list[onnx.ValueInfoProto]:
    """What the formula reads of the graph around it, as the inputs of its own graph."""
    own = {name for node in inner.nodes for name in node.output} | {each.name for each in inner.initializers}
    return [_declared(forward, name) for name in sorted(read_by(inner.nodes) - own)]


def _declared(forward: Graph, name: str) -> onnx.ValueInfoProto:
    kind = forward.element_type(name)
    if kind is None:
        raise NoGradient(f"the graph does not tell the type of {name!r}; declare it in the graph's value_info")
    return helper.make_tensor_value_info(name, kind, forward.sizes(name))


def _with_names_of(body: GraphBody, forward: Graph, known: set[str], wanted: set[str]) -> Graph:
    """The same graph, in which the names that the expansion of functions made are new in `body`, too."""
    model = forward.model
    made = [name for node in model.graph.node for name in node.output if name and name not in known]
    names = {name: body.free(name) for name in made}
    if not names:
        return forward
    for node in model.graph.node:
        rename(node, names)
    del model.graph.value_info[:]
    return Graph(model, wanted)
