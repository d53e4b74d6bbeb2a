"""Products of quantized tensors: the gradient is that of the product of the floats that the integers stand for.

The operators compute with integers, and stay as they are. The formula through which they are differentiated dequantizes
their operands; the gradient goes straight through the rounding. Scales and zero points count as constants.
"""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules import frozen_weights
from opgrad.onnx.rules.node import Node, sizes_of
from opgrad.onnx.rules.quantization import scale_of
from opgrad.onnx.rules.registry import Gradients, recomputed


def dequantized(node: Node, index: int, scale: Value, zero: Value | None) -> Value:
    """The floats that an input's integers stand for; several scales are those of columns."""
    q = node.required(index)
    several = scale.sizes is None or list(scale.sizes) not in ([], [1])
    attributes = {"axis": len(sizes_of(q)) - 1} if several else {}
    scalars = [each if several or each is None else each.scalar() for each in (scale, zero)]
    value = node.body.node("DequantizeLinear", q, *scalars, **attributes)
    return Value(node.body, value.name, scale.element_type, q.sizes)


@recomputed("MatMulIntegerToFloat", domain=MICROSOFT, constant=(2, 3, 4, 5), integers=True)
def matmul_integer_to_float(node: Node) -> Value:
    """y = a @ b + bias of the floats."""
    a = dequantized(node, 0, node.required(2), node.input(4))
    y = node.body.node("MatMul", a, dequantized(node, 1, node.required(3), node.input(5)))
    bias = node.input(6)
    return y if bias is None else y + bias


@recomputed("DynamicQuantizeMatMul", domain=MICROSOFT, constant=(2, 3), integers=True)
def dynamic_quantize_matmul(node: Node) -> Value:
    """y = a @ b + bias, b of the floats; the gradient goes straight through the rounding of a."""
    y, bias = node.body.node("MatMul", node.x, dequantized(node, 1, node.required(2), node.input(3))), node.input(4)
    return y if bias is None else y + bias


def _gradient_of_integers(node: Node) -> Gradients:
    """da = dy @ (b - b_zero_point).T, tiles of b in the cache, by the scale of what a's integers stand for."""
    zeros, dy = node.input(3), node.dy
    blocks = (0, 0) if zeros is None else frozen_weights.blocks(zeros, 1)
    width = sizes_of(node.required(1))[-1]
    if blocks is None or not isinstance(width, int) or node.maker(node.names[1]) is not None:
        return None
    ones = node.body.constant(np.ones(width if blocks[1] else 1, np.float32))
    stored = frozen_weights.Stored(node.names[1], False, ones, zeros, blocks)
    da, scale = frozen_weights.product(node, dy, stored), scale_of(node, 0)
    return da if da is None or scale is None else da / scale


@recomputed("MatMulInteger", constant=(2, 3), integers=True, direct=((0,), _gradient_of_integers))
def matmul_integer(node: Node) -> Value:
    """y = (a - a_zero_point) @ (b - b_zero_point)."""
    return node.body.node("MatMul", _difference(node, 0, 2, -2), _difference(node, 1, 3, -1))


@recomputed("ConvInteger", constant=(2, 3), integers=True)
def conv_integer(node: Node) -> Value:
    """y = conv(x - x_zero_point, w - w_zero_point)."""
    return node.body.node("Conv", _difference(node, 0, 2), _difference(node, 1, 3, 0), **node.attributes)


def _difference(node: Node, index: int, zero: int, axis: int = -1) -> Value:
    """An input minus its zero point, as floats; axis: along which there are several zero points.

    Of integers that stand for floats with gradients it is a function of the floats, which are divided by the scale.
    """
    q, offset = node.required(index), node.input(zero)
    if index in node.needed and (scale := scale_of(node, index)) is not None:
        value = dequantized(node, index, scale, None) / scale
    else:
        value = q.cast(TensorProto.FLOAT)
    if offset is None:
        return value
    axis, rank = axis % len(sizes_of(q)), len(sizes_of(q))
    several = offset.sizes is None or list(offset.sizes) not in ([], [1])
    column = offset.reshape([-1 if each == axis else 1 for each in range(rank)]) if several else offset.scalar()
    return value - column.cast(TensorProto.FLOAT)
