"""A graph in a few lines: its stages, each of which begins with a node that has weights."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import reads_values
from opgrad.training.make.selection import SCALES

SILENT = ("Identity", "Cast", "Unsqueeze", "Squeeze")  # operators that are left out of a sketch


@dataclass(frozen=True)
class Stage:
    """The nodes from one that has weights to the next one.

    operators: the names of the operators, in order. weights: the number of elements of the weights. shape: that of the
    last node's result; None if it is not known. times: how many equal stages follow each other in the graph.
    """

    operators: str
    weights: int
    shape: tuple[int | str, ...] | None
    times: int = 1


def stages(forward: Graph, weights: Mapping[str, int]) -> list[Stage]:
    """The stages of a graph, in its order. weights: by name, the number of elements."""
    found, counted = list[Stage](), set[str]()
    origins = {name: {name} for name in weights}
    for nodes in _parts(_carrying(forward, origins), origins):
        own = {each for node in nodes for name in node.input for each in origins.get(name, ())} - counted
        count = sum(weights[name] for name in own)
        counted |= own
        shown = [node.op_type for node in nodes if domain_of(node) or node.op_type not in SILENT]
        runs = [(name, len(list(run))) for name, run in groupby(shown)]
        operators = ", ".join(name if times == 1 else f"{times} {name}" for name, times in runs)
        sizes = forward.sizes(nodes[-1].output[0]) if nodes[-1].output else None
        shape = None if sizes is None else tuple("?" if size is None else size for size in sizes)
        if found and found[-1].operators == operators:
            before = found.pop()
            found.append(Stage(operators, before.weights + count, shape, before.times + 1))
        elif operators:
            found.append(Stage(operators, count, shape))
    return found


def _carrying(forward: Graph, origins: dict[str, set[str]]) -> list[onnx.NodeProto]:
    """The nodes that depend on the values of the graph's inputs, and not only on their shapes or types.

    origins: for each value the weights that it is computed from; values of nodes that only read weights are added.
    """
    reached, nodes = {each.name for each in forward.graph.input}, []
    for node in forward.graph.node:
        if not reads_values(node):
            continue
        inputs = node.input[:1] if node.op_type == "CastLike" else node.input
        if reached.intersection(inputs):
            reached.update(filter(None, node.output))
            nodes.append(node)
        elif held := {each for name in inputs for each in origins.get(name, ())}:
            origins.update((name, held) for name in node.output)
    return nodes


def _parts(nodes: Iterable[onnx.NodeProto], weights: Collection[str]) -> list[list[onnx.NodeProto]]:
    """The nodes, a list for each stage; a weight that is added or multiplied begins none."""
    parts: list[list[onnx.NodeProto]] = []
    for node in nodes:
        begins = any(name in weights for name in node.input) and node.op_type not in SCALES
        if begins or not parts:
            parts.append([])
        parts[-1].append(node)
    return parts
