"""Fourier transforms: the gradient of a transform is the one the other way, of as many numbers.

Complex numbers are pairs along the last axis.
"""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node, numbers_of, sizes_of
from opgrad.onnx.rules.registry import NoGradient, gradient, recomputed

AXIS_IS_INPUT = 20  # opset of DFT
LENGTH, AXIS = 1, 2  # indices of DFT's inputs


def _transform(x: Value, axis: int, length: Value | None = None, **attributes: int) -> Value:
    """DFT in the form of the opset."""
    if x.body.opset >= AXIS_IS_INPUT:
        return x.body.node("DFT", x, length, x.body.constant(np.array(axis)), **attributes)
    return x.body.node("DFT", x, length, axis=axis, **attributes)


def _axis(node: Node) -> int:
    if node.opset < AXIS_IS_INPUT:
        return int(node.get("axis", 1)) % node.rank()
    axis = node.constant(AXIS)
    if node.input(AXIS) is not None and axis is None:
        raise NoGradient("its axis is known at run time alone")
    return (-2 if axis is None else int(axis.reshape(()))) % node.rank()


@gradient("DFT", constant=(LENGTH, AXIS))
def dft(node: Node) -> Value:
    """dx = n * inverse(dy), of the inverse transform dx = transform(dy) / n; the part of it that x is.

    Of an inverse of one side, numbers that stand for two, themselves and their conjugates, count twice.
    """
    axis, inverse, onesided, last = _axis(node), node.get("inverse", 0), node.get("onesided", 0), node.rank() - 1
    own, given = node.x.shape(axis, axis + 1), node.input(LENGTH)
    if inverse and onesided:
        _check_one_side(node, axis)
    length = node.y.shape(axis, axis + 1) if inverse else own if given is None else given.reshape([1])
    dy = _filled(node.dy, axis, length) if onesided and not inverse else node.dy
    count = length.squeeze(0).cast(node.dy.element_type or TensorProto.FLOAT)
    back = _transform(dy, axis, inverse=1 - inverse, onesided=inverse & onesided)
    back = back / count if inverse else back * count
    if inverse and onesided:
        back = back * _numbers_for_one(length.squeeze(0), back).reshape([-1, *[1] * (last - axis)])
    back = back if given is None else _filled(back, axis, own)
    return back.slice(0, 1, last) if numbers_of(node.x, last) == [1] else back


def _check_one_side(node: Node, axis: int) -> None:
    """Raise NoGradient where onnxruntime is known to compute something else than ONNX's reference."""
    given, size = node.constant(LENGTH), sizes_of(node.x)[axis]
    if given is not None and isinstance(size, int) and size != (own := int(given.reshape(())) // 2 + 1):
        raise NoGradient(
            f"it is an inverse of one side with {size} numbers, expected {own} of a length of {given.reshape(())}: of "
            "others onnxruntime computes something else than ONNX says"
        )


def _numbers_for_one(length: Value, like: Value) -> Value:
    """For each place of one side, how many numbers of the whole it stands for: 1 or 2."""
    body = length.body
    # The first stands for itself alone, and of an even length the last.
    alone = body.node("Mod", body.range(length / 2 + 1) * 2, length).equals(0)
    return body.where(alone, body.number(1, like), 2)


def _filled(value: Value, axis: int, length: Value) -> Value:
    """The first numbers along an axis, with zeros behind them where there are not enough."""
    body = value.body
    behind = body.concat(value.shape(0, axis), length, value.shape(axis + 1))
    return body.concat(value, body.full(behind, 0, value), axis=axis).slice(body.ints([0]), length, axis)


@recomputed("STFT", constant=(1, 3))
def stft(node: Node) -> Value:
    """y = the transforms of frames of the signal, each times the window."""
    body, window, size = node.body, node.input(2), node.input(3)
    if size is None and window is None:
        raise NoGradient("it has neither a window nor a length of frames")
    width = window.shape(0, 1).squeeze(0) if size is None and window is not None else node.required(3).scalar()
    width, step = width.cast(TensorProto.INT64), node.required(1).scalar().cast(TensorProto.INT64)
    end = node.x.shape(1, 2).squeeze(0) - width + 1
    starts = body.node("Range", body.constant(np.array(0)), end, step)
    frames = body.node("Gather", node.x, starts.unsqueeze(1) + body.range(width), axis=1)
    weighted = frames if window is None else frames * window.unsqueeze(1)
    return _transform(weighted, 2, onesided=node.get("onesided", 1))
