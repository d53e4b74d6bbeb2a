"""Dropout with a seed that is an input of the step: the same seed drops the same elements in every runtime.

The hash of an element's number and the seed is a polynomial modulo a prime; no product of it overflows int64.
"""

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import domain_of, keep
from opgrad.training.export.packing import FLOAT, Packing

SEED = "seed"
RATIO = 0.5  # the ratio of a node that has none
PRIME = 2**31 - 1
STRIDE = 1_000_003  # the distance between the first numbers of two nodes
ROUNDS = ((16807, 12345), (48271, 1013904), (69621, 374761))  # each round computes h = h² + a·h + b


def seed_dropout(packing: Packing, types: Mapping[str, onnx.TypeProto]) -> None:
    """Replace every dropout that may drop something by nodes that hash the seed; add the seed as input if needed."""
    graph = packing.model.graph
    idle = {each.name for each in graph.initializer if not each.dims and not numpy_helper.to_array(each)}
    plain = (node for node in graph.node if node.op_type == "Dropout" and not domain_of(node))
    trained = (node for node in plain if len(node.input) > 2 and node.input[2])  # in training mode, by the third input
    dropping = [node for node in trained if not idle.intersection(node.input[1:])]
    if not dropping:
        return
    body = packing.body
    body.scope("dropout")
    start = _modulo(packing.scalar(SEED, TensorProto.INT64)) * ROUNDS[0][0]
    numbers = {node.output[0]: number for number, node in enumerate(dropping)}
    nodes = []
    for node in graph.node:
        if node.output and node.output[0] in numbers:
            _write(body, node, start + numbers[node.output[0]] * STRIDE, types)
            node_list, body.nodes = body.nodes, []
            nodes.extend(node_list)
        else:
            nodes.append(node)
    keep(graph.node, nodes)


def _write(body: Body, node: onnx.NodeProto, start: Value, types: Mapping[str, onnx.TypeProto]) -> None:
    """Append what computes a node's result and its mask."""
    declared = types.get(node.input[0])
    x = Value(body, node.input[0], declared.tensor_type.elem_type if declared is not None else None)
    ratio = Value(body, node.input[1]).cast(FLOAT).scalar() if node.input[1] else body.number(RATIO, start.cast(FLOAT))
    training = Value(body, node.input[2]).scalar()
    # A number from 0 to 1 for each element of x.
    number = _modulo(body.range(x.size()) + start)
    for factor, term in ROUNDS:
        number = _modulo(number * number + number * factor + term)
    kept = ~(number.cast(FLOAT) * (1 / PRIME) < ratio)
    mask = kept.reshape(x.shape()) | ~training
    dropped = body.where(mask, x / (1 - ratio).like(x), 0)
    results = body.where(training, dropped, x), mask
    for value, name in zip(results, node.output, strict=False):
        if name:
            body.nodes.append(helper.make_node("Identity", [value.name], [name]))


def _modulo(value: Value) -> Value:
    return value.body.node("Mod", value, value.body.number(PRIME, value))
