"""The modules of PyTorch that a model's nodes were exported from, of which onnxruntime's optimizer keeps nothing."""

from collections.abc import Iterator

import onnx

from opgrad.onnx.graph.modules import SCOPES, module_path
from opgrad.onnx.graph.nodes import reads_values
from opgrad.training.make.shared_tensors import is_handed_on


def paths_of(model: onnx.ModelProto) -> dict[str, list[str]]:
    """By the name of an initializer, the paths of the modules that read it, in the order of the nodes."""
    found: dict[str, list[str]] = {}
    for node, names in _reads(model.graph):
        if (path := module_path(node)) is not None:
            for name in names:
                found.setdefault(name, []).append(path)
    return found


def keep_paths(model: onnx.ModelProto, paths: dict[str, list[str]]) -> None:
    """Write the paths of modules beside the nodes that read the initializers, in place.

    paths: those of the model that this was made of. An initializer that several modules read is left out where another
    number of nodes reads it now.
    """
    reads = [(node, name) for node, names in _reads(model.graph) for name in names if name in paths]
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node, name in reads:
        readers.setdefault(name, []).append(node)
    for name, nodes in readers.items():
        told = paths[name] if len(paths[name]) == len(nodes) else [*dict.fromkeys(paths[name])] * len(nodes)
        for node, path in zip(nodes, told if len(told) == len(nodes) else (), strict=False):
            others = [each for each in node.metadata_props if each.key != SCOPES]
            del node.metadata_props[:]
            node.metadata_props.extend(others)
            node.metadata_props.add(key=SCOPES, value=repr(["", path, node.name]))


def _reads(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """The nodes that read initializers, directly or reshaped, cast or rounded, with the names of these."""
    origins = {each.name: each.name for each in graph.initializer}
    for node in filter(reads_values, graph.node):
        if node.input and is_handed_on(node, 0):
            if node.input[0] in origins:
                origins[node.output[0]] = origins[node.input[0]]
        elif names := [origins[name] for name in node.input if name in origins]:
            yield node, names
