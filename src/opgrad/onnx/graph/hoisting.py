"""Weights inside of branches, loop bodies and functions, where some exporters write them, become initializers."""

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.evaluation import constant_tensor
from opgrad.onnx.graph.large import size_of
from opgrad.onnx.graph.messages import FLOATS, domain_of, free_name, keep
from opgrad.onnx.graph.nodes import all_nodes, names_in, rename_inputs, subgraphs

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


# --- weights inside of functions --------------------------------------------------------------------------------------


Key = tuple[str, str, str]  # domain, name and overload of a function


def hoist_constants(model: onnx.ModelProto, kept: Iterable[tuple[str, str]]) -> None:
    """Make float constants of functions, of more than one element, initializers that calls hand over, in place.

    kept: domains and names of functions that stay as they are.
    """
    functions = {_key(each): each for each in model.functions if (each.domain, each.name) not in kept}
    own = {key: list(_constant_nodes(each)) for key, each in functions.items()}
    if not any(own.values()):
        return
    taken = names_in(model.graph).union(*({*each.input, *_made_inside(each)} for each in functions.values()))
    needs: dict[Key, dict[str, None]] = {}
    for key, nodes in own.items():
        for node in nodes:
            tensor, name = constant_tensor(node), free_name(f"{functions[key].name}.{node.output[0]}", taken)
            assert tensor is not None
            model.graph.initializer.add().CopyFrom(tensor)
            model.graph.initializer[-1].name = name
            node.op_type, node.input[:] = "Identity", [name]
            del node.attribute[:]
            needs.setdefault(key, {})[name] = None
    counts, calls = {key: len(each.input) for key, each in functions.items()}, dict[Key, list[onnx.NodeProto]]()
    for key, function in functions.items():
        calls[key] = [each for each in all_nodes(function.node) if _called(each) in functions]
    before = None
    while before != (before := sum(map(len, needs.values()))):
        for key, nodes in calls.items():
            for node in nodes:
                needs.setdefault(key, {}).update(needs.get(_called(node), {}))
    for key, names in needs.items():
        functions[key].input.extend(names)
    inside = (node for nodes in calls.values() for node in nodes)
    for node in (*all_nodes(model.graph.node), *inside):
        if names := needs.get(_called(node), {}):
            node.input[:] = [*node.input, *[""] * (counts[_called(node)] - len(node.input)), *names]


def _constant_nodes(function: onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    for node in function.node:
        if node.op_type != "Constant" or domain_of(node) or any(each.ref_attr_name for each in node.attribute):
            continue
        tensor = constant_tensor(node)
        if tensor is not None and tensor.data_type in FLOATS and size_of(tensor) > 1:
            yield node


def _made_inside(function: onnx.FunctionProto) -> Iterator[str]:
    return (name for node in all_nodes(function.node) for name in node.output)


def _key(function: onnx.FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _called(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload
