"""Sequences of tensors, and optional values, whose gradient is that of what they hold."""

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.rules.node import Node, zero_tensors
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient


@gradient("SequenceConstruct")
def construct(node: Node) -> Gradients:
    """dx = the tensor of dy at the place of x."""
    return [_at(node.dy, node.body.ints([index]).scalar()) for index in range(len(node.inputs))]


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
    return _insert(_erase(zeros, index), node.dy, index)


@gradient("SequenceInsert", constant=(2,))
def insert(node: Node) -> Gradients:
    """dx = dy without the tensor at the place, which is the gradient of what was inserted."""
    index = node.input(2)
    if index is None:
        return [_erase(node.dy, None), _at(node.dy, node.body.ints([-1]).scalar())]
    # A place counted from the end is one of the shorter sequence, as it was before.
    index = node.where(index < 0, index - 1, index)
    return [_erase(node.dy, index), _at(node.dy, index)]


@gradient("SequenceErase", constant=(1,))
def erase(node: Node) -> Value:
    """dx = dy, with zeros at the place."""
    index = node.input(1)
    index = node.body.ints([-1]).scalar() if index is None else index
    zeros = node.body.node("ConstantOfShape", _at(node.x, index).apply("Shape"))
    return _insert(node.dy, zeros.like(_at(node.x, index)), _from_the_start(index, node.x))


@gradient("SplitToSequence", constant=(1,))
def split(node: Node) -> Value:
    """dx = the tensors of dy behind each other."""
    dropped = node.input(1) is None and not node.get("keepdims", 1)
    return node.body.node("ConcatFromSequence", node.dy, axis=node.get("axis", 0), new_axis=int(dropped))


@gradient("ConcatFromSequence")
def concat(node: Node) -> Value:
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


def _at(value: Value, index: Value) -> Value:
    return value.body.node("SequenceAt", value, index)


def _insert(value: Value, tensor: Value, index: Value) -> Value:
    return value.body.node("SequenceInsert", value, tensor, index)


def _erase(value: Value, index: Value | None) -> Value:
    return value.body.node("SequenceErase", value, index)


def _from_the_start(index: Value, value: Value) -> Value:
    """A place in a sequence, counted from its start."""
    length = value.body.node("SequenceLength", value).like(index)
    return value.body.where(index < 0, index + length, index)
