"""Products of quantized tensors: the gradient is that of the product of the floats that the integers stand for.

The operators compute with integers, and stay as they are. The formula through which they are differentiated dequantizes
their operands and quantizes its result; the gradient goes straight through both roundings, and is 0 where a result
exceeds what its integers reach. Scales and zero points count as constants.
"""

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules import frozen_weights
from opgrad.onnx.rules.attention import attention
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantization import scale_of
from opgrad.onnx.rules.registry import Gradients, recomputed
from opgrad.onnx.rules.shaping import sizes_of

FIRST_OF_16_BITS = 21  # opset of DequantizeLinear
WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")  # attributes of a convolution


def dequantized(node: Node, index: int, scale: Value, zero: Value | None, axis: int = -1) -> Value:
    """The floats that an input's integers stand for. axis: along which there are several scales."""
    q = node.required(index)
    several = scale.sizes is None or list(scale.sizes) not in ([], [1])
    attributes = {"axis": axis % len(sizes_of(q))} if several else {}
    scalars = [each if several or each is None else each.scalar() for each in (scale, zero)]
    old = q.element_type in (TensorProto.INT16, TensorProto.UINT16) and node.opset < FIRST_OF_16_BITS
    value = node.body.node("DequantizeLinear", q, *scalars, domain=MICROSOFT if old else "", **attributes)
    return Value(node.body, value.name, scale.element_type, q.sizes)


def operand(node: Node, index: int, axis: int = -1) -> Value:
    """The floats of an input which is followed by its scale and its zero point."""
    return dequantized(node, index, node.required(index + 1), node.input(index + 2), axis)


def quantized(node: Node, y: Value, index: int) -> Value:
    """The integers for a result whose scale is the input at this index, and whose zero point follows."""
    zero = node.input(index + 1)
    if zero is None:
        zero = node.body.number(0, node.required(0))
    return node.body.node("QuantizeLinear", y, node.required(index).scalar(), zero.scalar())


def to_channels_last(value: Value, rank: int) -> Value:
    """[N, C, ..] as [N, .., C]."""
    return value.transpose(0, *range(2, rank), 1)


def to_channels_first(value: Value, rank: int) -> Value:
    """[N, .., C] as [N, C, ..]."""
    return value.transpose(0, rank - 1, *range(1, rank - 1))


@recomputed("QLinearConv", constant=(1, 2, 4, 5, 6, 7, 8), integers=True)
@recomputed("QLinearConv", domain=MICROSOFT, constant=(1, 2, 4, 5, 6, 7, 8), integers=True)
def qlinear_conv(node: Node) -> Value:
    """y = quantize(conv(x, w, b)) of the floats."""
    rank, last = node.rank(), node.get("channels_last", 0)
    x, w = operand(node, 0), operand(node, 3, axis=0)
    bias, attributes = node.input(8), {name: value for name, value in node.attributes.items() if name in WINDOW}
    scale = node.required(1).scalar() * node.required(4)
    b = None if bias is None else dequantized(node, 8, node.with_sizes(scale, node.required(4).sizes or ()), None, 0)
    y = node.body.node("Conv", to_channels_first(x, rank) if last else x, w, b, **attributes)
    return quantized(node, to_channels_last(y, rank) if last else y, 6)


@recomputed("QLinearMatMul", constant=(1, 2, 4, 5, 6, 7), integers=True)
def qlinear_matmul(node: Node) -> Value:
    """y = quantize(a @ b) of the floats."""
    return quantized(node, node.body.node("MatMul", operand(node, 0, -2), operand(node, 3)), 6)


@recomputed("QGemm", domain=MICROSOFT, constant=(1, 2, 4, 5, 6, 7, 8), integers=True)
def qgemm(node: Node) -> Value:
    """y = alpha * a @ b + c of the floats, either of them transposed; quantized where y has a scale."""
    flags = {name: node.get(name, 0) for name in ("transA", "transB")}
    a, b, alpha = operand(node, 0), operand(node, 3, axis=0 if flags["transB"] else 1), node.get("alpha", 1.0)
    c = node.input(6)
    if c is not None:
        scale = node.required(1).scalar() * node.required(4) * alpha
        c = dequantized(node, 6, node.with_sizes(scale, node.required(4).sizes or ()), None)
    y = node.body.node("Gemm", a, b, c, alpha=alpha, **flags)
    return y if node.input(7) is None else quantized(node, y, 7)


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
@recomputed("MatMulInteger16", domain=MICROSOFT, integers=True)
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


@recomputed("QAttention", domain=MICROSOFT, constant=(3, 4, 5, 6, 7), integers=True)
def qattention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head, q, k and v being parts of x @ weights + bias."""
    x = dequantized(node, 0, node.required(3), node.input(6))
    weights = dequantized(node, 1, node.required(4), node.input(7))
    return attention(node.on(x, weights, node.input(2), node.input(5), node.input(8)))


@recomputed("DynamicQuantizeLSTM", domain=MICROSOFT, constant=(1, 2, 8, 9, 10, 11))
def dynamic_quantize_lstm(node: Node) -> Gradients:
    """That of LSTM with the floats that the weights stand for; the gradient goes straight through other roundings."""
    given = [_gates(node, index, scale).transpose(0, 2, 1) for index, scale in ((1, 8), (2, 10))]
    return node.body.nodes_of("LSTM", 3, node.x, *given, *node.inputs[3:8], **node.attributes)


def _gates(node: Node, index: int, scale: int) -> Value:
    """The floats of weights [directions, in, gates], with a scale and zero point for each direction, or each gate."""
    shape = [0, 1, -1] if len(sizes_of(node.required(scale))) > 1 else [-1, 1, 1]
    columns = [node.required(each).reshape(shape).cast(TensorProto.FLOAT) for each in (scale, scale + 1)]
    return (node.required(index).cast(TensorProto.FLOAT) - columns[1]) * columns[0]
