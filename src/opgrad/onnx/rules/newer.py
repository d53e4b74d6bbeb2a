"""Operators that newer opsets of ai.onnx have, or that few models have."""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node, reshape_like, transposed
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient


@gradient("CumProd", constant=(1,))
def cum_prod(node: Node) -> Value:
    """dx[i] = p[i] * s[i], p the product before i, s[i] = dy[i] + x[i + 1] * s[i + 1]; no division, for zeros."""
    axis = node.constant(1)
    if axis is None:
        raise NoGradient("its axis is known at run time alone")
    place, rank = int(axis.reshape(())) % node.rank(), node.rank()
    order = [place, *(each for each in range(rank) if each != place)]
    exclusive, reverse = node.get("exclusive", 0), node.get("reverse", 0)

    def step(_: Body, later: Value, x: Value, dy: Value) -> tuple[list[Value], list[Value]]:
        s = dy + later
        return [dy + x * later if exclusive else x * s], [later if exclusive else s]

    x, dy = node.x.transpose(*order), node.dy.transpose(*order)
    start = node.body.full(x.shape(1), 0, node.x)
    s = node.body.scan([start], [x, dy], step, backward=not reverse)[1]
    before = node.body.node("CumProd", node.x, node.required(1), exclusive=1, reverse=reverse)
    return before * s.transpose(*np.argsort(order).tolist())


@gradient("TensorScatter", constant=(2,))
def tensor_scatter(node: Node) -> Gradients:
    """dpast = dy, 0 where something was written; dupdate = dy at these places."""
    update, at, rank = node.required(1), node.input(2), node.rank()
    axis = node.get("axis", -2) % rank
    column = [each for each in range(rank) if each != axis]
    places = node.body.range(update.shape(axis, axis + 1).squeeze(0)).unsqueeze(*column)
    if at is not None:
        places = places + at.reshape([-1, *(1 for _ in range(rank - 1))])
    if node.get("mode", "linear") == "circular":
        places = node.body.node("Mod", places, node.x.shape(axis, axis + 1).squeeze(0))
    index = places.expand(update.shape())
    zeros = node.body.full(update.shape(), 0, node.dy)
    return [
        node.body.node("ScatterElements", node.dy, index, zeros, axis=axis),
        node.body.node("GatherElements", node.dy, index, axis=axis),
    ]


@gradient("Col2Im", constant=(1, 2))
def col2im(node: Node) -> Value:
    """dx = the blocks of dy: its convolution with filters that each pick one place of a block."""
    block, image = node.constant(2), node.required(1)
    if block is None:
        raise NoGradient("the size of its blocks is known at run time alone")
    count, body = int(block.prod()), node.body
    given = node.given("dilations", "pads", "strides")
    filters = body.constant(np.eye(count).reshape(count, 1, *block.tolist())).like(node.dy)
    channels = node.dy.reshape(body.concat(body.ints([-1, 1]), image))
    return reshape_like(body.node("Conv", channels, filters, **given), node.x)


@gradient("Det")
def determinant(node: Node) -> Value:
    """dx = dy * y * inverse(x).T."""
    rank = node.rank()
    return transposed(_inverse(node, node.x), rank) * (node.dy * node.y).unsqueeze(rank - 2, rank - 1)


@gradient("Inverse", domain=MICROSOFT)
def inverse(node: Node) -> Value:
    """dx = -y.T @ dy @ y.T."""
    y = transposed(node.y, node.rank())
    return -node.body.node("MatMul", node.body.node("MatMul", y, node.dy), y)


def _inverse(node: Node, x: Value) -> Value:
    if node.body.plain:
        raise NoGradient("ONNX has no inverse of a matrix, expected plain=False")
    return node.microsoft("Inverse", x)


@gradient("Unique")
def unique(node: Node) -> Value:
    """dx = 0; dx[index] = dy, at the first place of each."""
    indices, axis = node.output(1, "_indices", TensorProto.INT64), node.get("axis")
    if axis is not None:
        return node.microsoft("GatherGrad", node.x.shape(), indices, node.dy, axis=axis % node.rank())
    flat = node.microsoft("GatherGrad", node.x.size().reshape([1]), indices, node.dy, axis=0)
    return reshape_like(flat, node.x)


@gradient("MRotaryEmbedding", domain=MICROSOFT, constant=(1,))
def multimodal_rotary_embedding(node: Node) -> Value:
    """dx = dy, every pair turned back."""
    if node.needed - {0}:
        raise NoGradient("its cosines and sines are trained, and their gradients are not computed")
    positions, cos, sin = (node.required(place) for place in (1, 2, 3))
    return node.same(node.dy, positions, cos, -sin)
