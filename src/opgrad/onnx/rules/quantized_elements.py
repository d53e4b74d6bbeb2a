"""Quantized tensors, element by element, pooled or joined.

The gradient is that of the floats that the integers stand for, as in `quantized_products`.
"""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantized_products import operand, quantized, to_channels_first, to_channels_last
from opgrad.onnx.rules.registry import recomputed

UNARY = (1, 2, 3, 4)  # indices of the scales and zero points of an operand and of the result
ONE_AXIS_FROM = 13  # opset of Softmax


@recomputed("QLinearAdd", "QLinearMul", domain=MICROSOFT, constant=(1, 2, 4, 5, 6, 7), integers=True)
def qlinear_binary(node: Node) -> Value:
    """c = quantize(a + b) or quantize(a * b) of the floats."""
    a, b = operand(node, 0), operand(node, 3)
    return quantized(node, a + b if node.proto.op_type == "QLinearAdd" else a * b, 6)


@recomputed("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_activation(node: Node) -> Value:
    """y = quantize(f(x)) of the floats."""
    return quantized(node, operand(node, 0).apply(node.proto.op_type.removeprefix("QLinear"), **node.attributes), 3)


@recomputed("QLinearSoftmax", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_softmax(node: Node) -> Value:
    """y = quantize(softmax(x)) of the floats, over one axis or, as before opset 13, over all from `axis` on."""
    x, axis = operand(node, 0), node.get("axis", -1)
    if node.get("opset", ONE_AXIS_FROM) >= ONE_AXIS_FROM or axis in (-1, node.rank() - 1):
        return quantized(node, x.apply("Softmax", axis=axis), 3)
    return quantized(node, x.flatten(axis).apply("Softmax", axis=1).reshape(node.x.shape()), 3)


@recomputed("QLinearAveragePool", "QLinearGlobalAveragePool", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_pool(node: Node) -> Value:
    """y = quantize(average_pool(x)) of the floats."""
    x, rank, op = operand(node, 0), node.rank(), node.proto.op_type.removeprefix("QLinear")
    attributes = dict(node.attributes)
    last = attributes.pop("channels_last", 0)
    y = (to_channels_first(x, rank) if last else x).apply(op, **attributes)
    return quantized(node, to_channels_last(y, rank) if last else y, 3)


@recomputed("QLinearConcat", domain=MICROSOFT, integers=True)
def qlinear_concat(node: Node) -> Value:
    """y = quantize(concat(x0, x1, ..)) of the floats."""
    parts = [operand(node, index) for index in range(2, len(node.inputs), 3)]
    return quantized(node, node.body.concat(*parts, axis=node.get("axis", 0)), 0)


@recomputed("QLinearWhere", domain=MICROSOFT, constant=(0, 2, 3, 5, 6, 7, 8), integers=True)
def qlinear_where(node: Node) -> Value:
    """z = quantize(x where the condition holds, y elsewhere) of the floats."""
    return quantized(node, node.where(node.x, operand(node, 1), operand(node, 4)), 7)


@recomputed("NhwcMaxPool", domain=MICROSOFT, integers=True)
def nhwc_max_pool(node: Node) -> Value:
    """y = max_pool(x), the channels last."""
    rank = node.rank()
    return to_channels_last(to_channels_first(node.x, rank).apply("MaxPool", **node.attributes), rank)
