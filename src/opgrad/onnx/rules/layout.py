"""Shapes, the order and place of elements, indexing, and sequences of tensors."""

import re

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Body, Value
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.graph.nodes import call_of
from opgrad.onnx.graph.sizes import known
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, formula, gradient, reshape_like, zero_tensors

SPLIT_SIZES_ARE_INPUT = 13  # opset
AXES_OF_PAD = 3  # the index of this input
PADDING = re.compile(r"aten\.embedding\.default]\(args = \([^,]+, [^,]+, (\d+)")
REDUCTIONS = ("none", "add", "mul", "max", "min")  # of Scatter


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
    lengths = node.body.concat(*(part.shape(axis, None if axis == -1 else axis + 1) for part in parts))
    if node.opset >= SPLIT_SIZES_ARE_INPUT:
        return node.body.nodes_of("Split", count, node.dy, lengths, axis=axis)
    numbers = known([None if part.sizes is None else part.sizes[axis] for part in parts])
    if numbers is not None:
        return node.body.nodes_of("Split", count, node.dy, axis=axis, split=numbers)
    return node.results("SplitTraining", count, node.dy, lengths, axis=axis)


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
    # Each axis becomes two: the number of the copy, and the index inside a copy.
    split = node.dy.in_shape(body.concat(*columns, axis=1).reshape([-1]))
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
    pads, axes, value, body = node.constant(1), node.input(AXES_OF_PAD), node.input(2), node.body
    if pads is None or min(pads, default=0) < 0:
        dx = body.node("Pad", node.dy, -node.required(1), None, axes)
    elif not any(pads):
        dx = node.dy
    else:
        count = len(pads) // 2
        ends = [-end if end else LAST for end in pads[count:].tolist()]
        dx = body.node("Slice", node.dy, body.ints(pads[:count].tolist()), body.ints(ends), axes)
    if value is None or 2 not in node.needed:
        return [dx]
    outside = node.dy.sum(keepdims=False) - dx.sum(keepdims=False)
    return [dx, None, reshape_like(outside, value)]


@gradient("DepthToSpace", integers=True)
def depth_to_space(node: Node) -> Value:
    """dx = dy, its blocks as channels again."""
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "DCR":
        return node.body.node("SpaceToDepth", node.dy, blocksize=block)
    size, blocks = node.x.shape, node.body.ints([block])
    shape = node.body.concat(size(0, 1), node.dy.shape(1, 2), size(2, 3), blocks, size(3, 4), blocks)
    return reshape_like(node.dy.in_shape(shape).transpose(0, 1, 3, 5, 2, 4), node.x)


@gradient("SpaceToDepth", integers=True)
def space_to_depth(node: Node) -> Value:
    """dx = dy, its channels as blocks again."""
    return node.body.node("DepthToSpace", node.dy, blocksize=node.get("blocksize"), **node.given("mode"))


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


@gradient("Gather", constant=(1,), integers=True)
def gather(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy, but for the row by which an Embedding of PyTorch pads."""
    dy, index = node.dy, node.required(1)
    if padding := PADDING.search(call_of(node.proto)):
        dy = node.where(index.equals(int(padding[1])).unsqueeze(-1), 0, dy)
    return node.microsoft("GatherGrad", node.x.shape(), index, dy, axis=node.get("axis", 0))


@gradient("GatherElements", constant=(1,), integers=True)
def gather_elements(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy, element by element."""
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), node.required(1), axis=node.get("axis", 0))


@gradient("GatherND", constant=(1,), integers=True)
def gather_nd(node: Node) -> Value:
    """dx = 0; dx[index] += dy."""
    batch_dims = node.get("batch_dims", 0)
    return node.microsoft("GatherNDGrad", node.x.shape(), node.required(1), node.dy, batch_dims=batch_dims)


@gradient("TopK", constant=(1,), integers=True)
def top_k(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] = dy, with the indices that the operator found."""
    indices = node.output(1, "_indices", TensorProto.INT64)
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), indices, axis=node.get("axis", -1))


@gradient("OneHot", constant=(0, 1))
def one_hot(node: Node) -> Gradients:
    """dvalues = the sums of dy where the index is not and where it is."""
    dtype = node.required(2).element_type
    mask = node.same(node.x, node.required(1), node.body.ints([0, 1]).cast(dtype or TensorProto.FLOAT))
    on = (node.dy * mask).sum(keepdims=False)
    off = node.dy.sum(keepdims=False) - on
    return [None, None, node.body.concat(off.reshape([1]), on.reshape([1]))]


@gradient("Scatter", "ScatterElements", "ScatterND", constant=(1,), integers=True)
def scatter(node: Node) -> Gradients:
    """ddata = dy where nothing was written, or also there, if it was combined; dupdates = dy at the places."""
    if node.proto.op_type == "Scatter":
        node.become("ScatterElements", "", **node.attributes)
    reduction = node.get("reduction", "none")
    if reduction not in REDUCTIONS:
        raise NoGradient(f"its reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if reduction in ("add", "mul") and node.x.element_type not in (None, *FLOATS):
        raise NoGradient("it computes with integers of a quantized tensor, expected DequantizeLinear before it")
    node = node if reduction in ("none", "add") else node.wide()
    data, index, updates, dy = node.x, node.required(1), node.required(2), node.dy
    ending = "ND" if node.proto.op_type == "ScatterND" else "Elements"
    axis = {} if ending == "ND" else {"axis": node.get("axis", 0)}

    def read(values: Value) -> Value:
        return node.body.node(f"Gather{ending}", values, index, **axis)

    def write(values: Value, updates: Value, **mode: str) -> Value:
        return node.body.node(f"Scatter{ending}", values, index, updates, **axis, **mode)

    if reduction == "none":
        return [write(dy, updates.filled(0, dy)), None, read(dy)]
    if reduction == "add":
        return [dy, None, read(dy)]
    if reduction == "mul":  # the product of all other factors, which is not y / update where an update is 0
        zero = updates.equals(0)
        zeros = read(write(data.filled(0), zero.like(updates), reduction="add"))
        factors = write(data.filled(1), updates, reduction="mul")
        filled = node.where(zero, 1, updates)
        rest = read(write(data, filled, reduction="mul"))
        others = node.where(zero, node.where(zeros.equals(1), rest, 0), node.where(zeros.equals(0), rest / filled, 0))
        return [dy * factors, None, read(dy) * others]
    kept = data.equals(node.y).like(dy)  # dy is shared by what is equal to the result
    won = updates.equals(read(node.y)).like(dy)
    share = dy / write(kept, won, reduction="add")
    return [share * kept, None, read(share) * won]


@gradient("SequenceConstruct")
def construct(node: Node) -> Gradients:
    """dx = the tensor of dy at the place of x."""
    return [node.dy.apply("SequenceAt", node.body.ints([index]).scalar()) for index in range(len(node.inputs))]


@gradient("Optional", "OptionalGetElement", integers=True)
def optional(node: Node) -> Value:
    """dx = dy."""
    if any(map(node.forward.sequence, (node.proto.input[0], node.proto.output[0]))):
        raise NoGradient("it holds a sequence")
    return node.dy


@gradient("SequenceAt", constant=(1,))
def at(node: Node) -> Value:
    """dx = zeros, but dy at the place."""
    zeros, index = zero_tensors(node.x), _from_the_start(node.required(1), node.x)
    return zeros.apply("SequenceErase", index).apply("SequenceInsert", node.dy, index)


@gradient("SequenceInsert", constant=(2,))
def insert(node: Node) -> Gradients:
    """dx = dy without the tensor at the place, which is the gradient of what was inserted."""
    index = node.input(2)
    if index is None:
        return [node.dy.apply("SequenceErase", None), node.dy.apply("SequenceAt", node.body.ints([-1]).scalar())]
    # A place counted from the end is one of the shorter sequence, as it was before.
    index = node.where(index < 0, index - 1, index)
    return [node.dy.apply("SequenceErase", index), node.dy.apply("SequenceAt", index)]


@gradient("SequenceErase", constant=(1,))
def erase(node: Node) -> Value:
    """dx = dy, with zeros at the place."""
    index = node.input(1)
    index = node.body.ints([-1]).scalar() if index is None else index
    gone = node.x.apply("SequenceAt", index)
    zeros = gone.apply("Shape").apply("ConstantOfShape").like(gone)
    return node.dy.apply("SequenceInsert", zeros, _from_the_start(index, node.x))


@gradient("SplitToSequence", constant=(1,))
def split_to_sequence(node: Node) -> Value:
    """dx = the tensors of dy behind each other."""
    dropped = node.input(1) is None and not node.get("keepdims", 1)
    return node.body.node("ConcatFromSequence", node.dy, axis=node.get("axis", 0), new_axis=int(dropped))


@gradient("ConcatFromSequence")
def concat_from_sequence(node: Node) -> Value:
    """dx = the parts of dy that the tensors of x are."""
    axis, body = node.get("axis"), node.body
    if node.get("new_axis", 0):
        return body.node("SplitToSequence", node.dy, axis=axis, keepdims=0)

    def step(inner: Body, rest: Value, lengths: Value) -> list[Value]:
        first = inner.ints([0]).scalar()
        length = inner.node("Gather", inner.node("SequenceAt", rest, first).apply("Shape"), inner.ints([axis]))
        return [inner.node("SequenceErase", rest, first), inner.concat(lengths, length)]

    count = body.node("SequenceLength", node.x)
    _, lengths = body.loop(count, [node.x, body.ints([])], step)
    return body.node("SplitToSequence", node.dy, lengths, axis=axis)


def _from_the_start(index: Value, value: Value) -> Value:
    """A place in a sequence, counted from its start."""
    length = value.body.node("SequenceLength", value).like(index)
    return value.body.where(index < 0, index + length, index)
