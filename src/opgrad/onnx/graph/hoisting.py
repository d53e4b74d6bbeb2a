"""Weights inside of branches and loop bodies, which some exporters write there, become initializers of the model."""

from collections import Counter
from collections.abc import Iterator

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.messages import FLOATS, domain_of, free_name, keep
from opgrad.onnx.graph.nodes import all_nodes, rename_inputs, subgraphs

INITIALIZERS_ALONE = 4  # the first version of ONNX's files in which an initializer need not be an input


def hoist(model: onnx.ModelProto) -> None:
    """Move float constants of several elements out of all subgraphs of the main graph, in place.

    Subgraphs read values from outside, so results stay the same, and the constants can be named, trained and exported.
    A name that several subgraphs use becomes one for each of them.
    """
    inner = [graph for node in all_nodes(model.graph.node) for graph in subgraphs(node)]
    if not inner or model.ir_version < INITIALIZERS_ALONE:
        return
    made = Counter(name for graph in (model.graph, *inner) for name in _made(graph))
    taken = set(made)
    for graph in reversed(inner):  # copies of nodes lose what is changed in their subgraphs later
        results = {each.name for each in graph.output}
        found = [(name, tensor) for name, tensor in _constants(graph) if name not in results]
        for name, tensor in found:
            moved = model.graph.initializer.add()
            moved.CopyFrom(tensor)
            moved.name = name if made[name] == 1 else free_name(name, taken)
            if moved.name != name:
                for node in graph.node:
                    rename_inputs(node, {name: moved.name})
        names = {name for name, _ in found}
        if names:
            keep(graph.node, [node for node in graph.node if names.isdisjoint(node.output)])
            keep(graph.initializer, [each for each in graph.initializer if each.name not in names])


def _made(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that a graph gives to values, without those of its subgraphs."""
    yield from (each.name for each in (*graph.input, *graph.initializer))
    yield from (name for node in graph.node for name in node.output if name)


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """The float constants of several elements that a graph has, by name."""
    for node in graph.node:
        given = node.attribute[0] if node.op_type == "Constant" and not domain_of(node) and node.attribute else None
        if given is not None and given.name == "value" and _is_weight(given.t):
            yield node.output[0], given.t
    inputs = {each.name for each in graph.input}
    yield from ((each.name, each) for each in graph.initializer if each.name not in inputs and _is_weight(each))


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in FLOATS and any(size > 1 for size in tensor.dims)
