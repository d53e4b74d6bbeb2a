"""Recurrent layers with the batch in front, which onnxruntime lacks: they become layers with time in front."""

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from opgrad.onnx.graph.messages import domain_of, free_name, keep
from opgrad.onnx.graph.nodes import all_nodes, model_nodes, names_in, subgraphs

LAYERS = ("RNN", "GRU", "LSTM")
X, STATES = 0, (5, 6)  # the places of inputs with a batch: x, and the initial states and cells
SWAPPED = [1, 0, 2]  # of x, of initial and of last states: the first two axes change places
BATCH_FIRST = [2, 0, 1, 3]  # all states, from [time, directions, batch, size] to [batch, time, directions, size]


def time_first(model: onnx.ModelProto) -> None:
    """Replace each layer with `layout` 1 by one with `layout` 0 between transpositions, in place."""
    if not any(map(_is_batch_first, model_nodes(model))):
        return
    taken = names_in(model.graph).union(*(set(node.input) | set(node.output) for node in model_nodes(model)))
    for nodes in reversed(list(_lists(model))):
        if any(map(_is_batch_first, nodes)):
            keep(nodes, [new for node in nodes for new in (_written(node, taken) if _is_batch_first(node) else [node])])


def _lists(model: onnx.ModelProto) -> Iterator[Any]:
    """The repeated fields with the nodes of a model, of its functions and of all subgraphs, outer ones first."""
    for owner in (model.graph, *model.functions):
        yield owner.node
        for node in all_nodes(owner.node):
            yield from (graph.node for graph in subgraphs(node))


def _is_batch_first(node: onnx.NodeProto) -> bool:
    if node.op_type not in LAYERS or domain_of(node):
        return False
    return any(each.name == "layout" and each.i for each in node.attribute)


def _written(node: onnx.NodeProto, taken: set[str]) -> list[onnx.NodeProto]:
    """The layer between transpositions of what it reads and of what it returns."""
    before, behind = [], []
    layer = onnx.NodeProto()
    layer.CopyFrom(node)
    keep(layer.attribute, [each for each in node.attribute if each.name != "layout"])
    for place, name in enumerate(node.input):
        if name and (place == X or place in STATES):
            layer.input[place] = free_name(f"{name}_time_first", taken)
            before.append(helper.make_node("Transpose", [name], [layer.input[place]], perm=SWAPPED))
    for place, name in enumerate(node.output):
        if name:
            layer.output[place] = free_name(f"{name}_time_first", taken)
            order = SWAPPED if place else BATCH_FIRST
            behind.append(helper.make_node("Transpose", [layer.output[place]], [name], perm=order))
    return [*before, layer, *behind]
