"""The largest and the smallest of values. What several of them reach in common, they share."""

from functools import reduce

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, gradient


@gradient("Max", "Min", integers=True)
def extremum(node: Node) -> Gradients:
    """dx = dy * (x == y) / number of inputs that are equal to y."""
    reached = [node.required(index).equals(node.y).like(node.dy) for index in range(len(node.inputs))]
    share = node.dy / reduce(Value.__add__, reached)
    return [node.unbroadcast(share * each, index) for index, each in enumerate(reached)]


@gradient("Clip", integers=True)
def clip(node: Node) -> Gradients:
    """dx = dy where y is x; the bounds get the rest. A low above high is not seen."""
    x, y, dy, low, high = node.x, node.y, node.dy, node.input(1), node.input(2)
    above = None if high is None else (x if low is None else node.body.node("Max", x, low)) > high
    below = None if low is None else (x < low if above is None else (x < low) & ~above)
    return [
        node.where(x.equals(y), dy, 0),
        None if below is None else node.unbroadcast(node.where(below, dy, 0), 1),
        None if above is None else node.unbroadcast(node.where(above, dy, 0), 2),
    ]


def extreme_share(node: Node, dy: Value, y: Value, axes: list[int] | Value | None) -> Value:
    """dy, shared by the elements along axes that are equal to y."""
    reached, wide = node.x.equals(y), widened(dy)
    share = wide / reached.cast(TensorProto.INT64).sum(axes).like(wide)
    return reached.like(dy) * share.like(dy)
