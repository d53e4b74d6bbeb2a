"""Weights that are constants inside of a model's own functions: they become initializers, one for all calls."""

from collections.abc import Iterable, Iterator

import onnx

from opgrad.onnx.graph.evaluation import constant_tensor
from opgrad.onnx.graph.large import size_of
from opgrad.onnx.graph.messages import FLOATS, domain_of, free_name
from opgrad.onnx.graph.nodes import all_nodes, names_in

Key = tuple[str, str, str]  # domain, name and overload of a function


def hoist_constants(model: onnx.ModelProto, kept: Iterable[tuple[str, str]]) -> None:
    """Make float constants of functions, of more than one element, initializers that calls hand over, in place.

    kept: domains and names of functions that stay as they are.
    """
    functions = {_key(each): each for each in model.functions if (each.domain, each.name) not in kept}
    own = {key: list(_constants(each)) for key, each in functions.items()}
    if not any(own.values()):
        return
    taken = names_in(model.graph).union(*({*each.input, *_made(each)} for each in functions.values()))
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


def _constants(function: onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    for node in function.node:
        if node.op_type != "Constant" or domain_of(node) or any(each.ref_attr_name for each in node.attribute):
            continue
        tensor = constant_tensor(node)
        if tensor is not None and tensor.data_type in FLOATS and size_of(tensor) > 1:
            yield node


def _made(function: onnx.FunctionProto) -> Iterator[str]:
    return (name for node in all_nodes(function.node) for name in node.output)


def _key(function: onnx.FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _called(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload
