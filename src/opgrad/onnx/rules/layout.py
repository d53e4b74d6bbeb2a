"""Shapes, and the order and place of elements."""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.rules.node import Node, reshape_like, reshape_to
from opgrad.onnx.rules.registry import Gradients, formula, gradient

SPLIT_SIZES_ARE_INPUT = 13  # opset
AXES_OF_PAD = 3  # the index of this input


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze", constant=(1,), integers=True)
def reshape(node: Node) -> Value:
    """dx = dy, in the shape of x."""
    return reshape_like(node.dy, node.x)


@gradient("Transpose", integers=True)
def transpose(node: Node) -> Value:
    """dx = dy, the axes in their order again."""
    order = node.get("perm") or list(range(node.rank()))[::-1]
    return node.dy.transpose(*np.argsort(order).tolist())


@gradient("Concat", integers=True)
def concat(node: Node) -> Gradients:
    """dx = the part of dy that x is."""
    axis, count = node.get("axis"), len(node.inputs)
    if count == 1:
        return [node.dy]
    parts = [node.required(index) for index in range(count)]
    if node.opset >= SPLIT_SIZES_ARE_INPUT:
        return node.body.nodes_of("Split", count, node.dy, _lengths(parts, axis), axis=axis)
    known = _known_lengths(parts, axis)
    if known is not None:
        return node.body.nodes_of("Split", count, node.dy, axis=axis, split=known)
    return node.results("SplitTraining", count, node.dy, _lengths(parts, axis), axis=axis)


def _lengths(parts: list[Value], axis: int) -> Value:
    """The size of each value along an axis."""
    known = _known_lengths(parts, axis)
    if known is not None:
        return parts[0].body.ints(known)
    return parts[0].body.concat(*(part.shape(axis, None if axis == -1 else axis + 1) for part in parts))


def _known_lengths(parts: list[Value], axis: int) -> list[int] | None:
    sizes = [None if part.sizes is None else part.sizes[axis] for part in parts]
    numbers = [size for size in sizes if isinstance(size, int)]
    return numbers if len(numbers) == len(sizes) else None


@gradient("Split", constant=(1,), integers=True)
def split(node: Node) -> Value:
    """dx = the gradients of all parts, behind each other; zeros for those that nothing depends on."""
    parts = [node.gradient(index) for index in range(len(node.outputs))]
    return node.body.concat(*parts, axis=node.get("axis", 0))


@gradient("Tile", constant=(1,), integers=True)
def tile(node: Node) -> Value:
    """dx = the sum of dy over all copies."""
    rank, body, repeats = node.rank(), node.body, node.required(1)
    columns = [each.reshape([-1, 1]) for each in (repeats.cast(TensorProto.INT64), node.x.shape())]
    # Each axis becomes two: the number of the copy, and the place inside a copy.
    split = reshape_to(node.dy, body.concat(*columns, axis=1).reshape([-1]))
    return split.sum(list(range(0, 2 * rank, 2)), keepdims=False)


@gradient("Slice", constant=(1, 2, 3, 4), integers=True)
def slice_(node: Node) -> Value:
    """dx = 0; dx[start:end:step] = dy."""
    return node.microsoft("SliceGrad", node.dy, node.x.shape(), *node.inputs[1:])


@gradient("Pad", constant=(1, 3), integers=True)
def pad(node: Node) -> Gradients:
    """dx = the part of dy that x is; for the modes that repeat elements, the sum over all of their copies."""
    if node.get("mode", "constant") != "constant":
        return [moved_back(node)]
    dx = _cut(node)
    value = node.input(2)
    if value is None or 2 not in node.needed:
        return [dx]
    outside = node.dy.sum(keepdims=False) - dx.sum(keepdims=False)
    return [dx, None, reshape_like(outside, value)]


def _cut(node: Node) -> Value:
    """dy without the padding."""
    pads, axes = node.constant(1), node.input(AXES_OF_PAD)
    if pads is None or min(pads, default=0) < 0:
        return node.body.node("Pad", node.dy, -node.required(1), None, axes)
    count, body = len(pads) // 2, node.body
    ends = [-end if end else LAST for end in pads[count:].tolist()]
    if not any(pads):
        return node.dy
    return body.node("Slice", node.dy, body.ints(pads[:count].tolist()), body.ints(ends), axes)


@gradient("DepthToSpace", integers=True)
def depth_to_space(node: Node) -> Value:
    """dx = dy, its blocks as channels again."""
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "DCR":
        return node.body.node("SpaceToDepth", node.dy, blocksize=block)
    body, size = node.body, node.x.shape
    blocks = body.ints([block])
    shape = body.concat(size(0, 1), node.dy.shape(1, 2), size(2, 3), blocks, size(3, 4), blocks)
    split = reshape_to(node.dy, shape)
    return reshape_like(split.transpose(0, 1, 3, 5, 2, 4), node.x)


@gradient("SpaceToDepth", integers=True)
def space_to_depth(node: Node) -> Value:
    """dx = dy, its channels as blocks again."""
    mode = {"mode": node.get("mode")} if "mode" in node.attributes else {}
    return node.body.node("DepthToSpace", node.dy, blocksize=node.get("blocksize"), **mode)


formula("Trilu", "dx = the same triangle of dy.", lambda n: n.same(n.dy, *n.inputs[1:]), constant=(1,), integers=True)
formula(
    "ReverseSequence", "dx = dy, reversed again.", lambda n: n.same(n.dy, n.required(1)), constant=(1,), integers=True
)
formula("Compress", "dx = 0; dx[where the condition held] = dy.", lambda n: moved_back(n), constant=(1,), integers=True)


def moved_back(node: Node) -> Value:
    """The gradient of an operator that copies elements.

    The operator is applied to the numbers of the elements, which tells from where each element was copied.
    """
    body, x = node.body, node.x
    count = x.size()
    numbers = body.range(count).reshape(x.shape())
    filler = [None if index == 2 else each for index, each in enumerate(node.inputs[1:], 1)]
    places = node.same(numbers, *filler).reshape([-1])
    dx = node.microsoft("GatherGrad", count.reshape([1]), places, node.dy.reshape([-1]), axis=0)
    return dx.reshape(x.shape())
