"""Sequences of tensors as gradients: the gradient of a sequence is one of as many tensors, of the same shapes."""

import numpy as np
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import Body, Value


def zeros_like(value: Value) -> Value:
    """A sequence of zeros in the shapes of the tensors of another sequence."""
    zero = helper.make_tensor("", value.element_type or TensorProto.FLOAT, [1], [0])

    def step(inner: Body, tensor: Value) -> list[Value]:
        return [tensor.apply("Shape").apply("ConstantOfShape", value=zero)]

    return _like(value.body.each([value], step)[0], value)


def added(one: Value, other: Value) -> Value:
    """The sums of the tensors of two sequences."""
    return _like(one.body.each([one, other], lambda inner, a, b: [a + b])[0], one)


def appended(value: Value, more: Value) -> Value:
    """A sequence with the tensors of another one behind its own."""
    first = np.array(0)

    def step(inner: Body, result: Value, rest: Value) -> list[Value]:
        tensor = inner.node("SequenceAt", rest, inner.constant(first))
        return [inner.node("SequenceInsert", result, tensor), inner.node("SequenceErase", rest, inner.constant(first))]

    body = value.body
    return _like(body.loop(body.node("SequenceLength", more), [value, more], step)[0], value)


def part(value: Value, start: Value, count: Value) -> Value:
    """So many tensors of a sequence, from the place `start` on."""
    body = value.body

    def step(inner: Body, result: Value, place: Value) -> list[Value]:
        tensor = inner.node("SequenceAt", inner.outer(value), place)
        return [inner.node("SequenceInsert", result, tensor), place + 1]

    return _like(body.loop(count, [empty(body, value.element_type), start], step)[0], value)


def empty(body: Body, element_type: int | None) -> Value:
    """A sequence without tensors."""
    dtype = element_type or TensorProto.FLOAT
    return Value(body, body.node("SequenceEmpty", dtype=dtype).name, dtype)


def _like(value: Value, other: Value) -> Value:
    return Value(value.body, value.name, other.element_type)
