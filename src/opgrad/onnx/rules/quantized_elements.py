"""Quantized tensors, element by element, pooled or joined.

The gradient is that of the floats that the integers stand for, as in `quantized_products`.
"""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantized_products import of_operands, operand, quantized, to_channels_first, to_channels_last
from opgrad.onnx.rules.registry import recomputed

UNARY = (1, 2, 3, 4)  # places of the scales and zero points of an operand and of the result
BINARY = (1, 2, 4, 5, 6, 7)
ONE_AXIS_FROM = 13  # opset of Softmax


@recomputed("QLinearAdd", domain=MICROSOFT, constant=BINARY, integers=True)
def qlinear_add(node: Node) -> Value:
    """c = quantize(a + b) of the floats."""
    a, b = of_operands(node, (0, 3))
    return quantized(node, a + b, 6)


@recomputed("QLinearMul", domain=MICROSOFT, constant=BINARY, integers=True)
def qlinear_mul(node: Node) -> Value:
    """c = quantize(a * b) of the floats."""
    a, b = of_operands(node, (0, 3))
    return quantized(node, a * b, 6)


@recomputed("QLinearSigmoid", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_sigmoid(node: Node) -> Value:
    """y = quantize(sigmoid(x)) of the floats."""
    return quantized(node, operand(node, 0).apply("Sigmoid"), 3)


@recomputed("QLinearLeakyRelu", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_leaky_relu(node: Node) -> Value:
    """y = quantize(leaky_relu(x)) of the floats."""
    return quantized(node, operand(node, 0).apply("LeakyRelu", alpha=node.get("alpha", 0.01)), 3)


@recomputed("QLinearSoftmax", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_softmax(node: Node) -> Value:
    """y = quantize(softmax(x)) of the floats, over one axis or, as before opset 13, over all from `axis` on."""
    x, axis = operand(node, 0), node.get("axis", -1)
    if node.get("opset", ONE_AXIS_FROM) >= ONE_AXIS_FROM or axis in (-1, node.rank() - 1):
        return quantized(node, x.apply("Softmax", axis=axis), 3)
    return quantized(node, x.flatten(axis).apply("Softmax", axis=1).reshape(node.x.shape()), 3)


@recomputed("QLinearAveragePool", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_average_pool(node: Node) -> Value:
    """y = quantize(average_pool(x)) of the floats."""
    attributes = {name: value for name, value in node.attributes.items() if name != "channels_last"}
    return _pooled(node, "AveragePool", **attributes)


@recomputed("QLinearGlobalAveragePool", domain=MICROSOFT, constant=UNARY, integers=True)
def qlinear_global_average_pool(node: Node) -> Value:
    """y = quantize(global_average_pool(x)) of the floats."""
    return _pooled(node, "GlobalAveragePool")


def _pooled(node: Node, op: str, **attributes: object) -> Value:
    x, rank, last = operand(node, 0), node.rank(), node.get("channels_last", 0)
    y = (to_channels_first(x, rank) if last else x).apply(op, **attributes)
    return quantized(node, to_channels_last(y, rank) if last else y, 3)


@recomputed("QLinearConcat", domain=MICROSOFT, integers=True)
def qlinear_concat(node: Node) -> Value:
    """y = quantize(concat(x0, x1, ..)) of the floats."""
    parts = of_operands(node, range(2, len(node.inputs), 3))
    return quantized(node, node.body.concat(*parts, axis=node.get("axis", 0)), 0)


@recomputed("QLinearWhere", domain=MICROSOFT, constant=(0, 2, 3, 5, 6, 7, 8), integers=True)
def qlinear_where(node: Node) -> Value:
    """z = quantize(x where the condition holds, y elsewhere) of the floats."""
    x, y = of_operands(node, (1, 4))
    return node.body.node(
        "QuantizeLinear", node.where(node.x, x, y), node.required(7).scalar(), node.required(8).scalar()
    )


@recomputed("NhwcMaxPool", domain=MICROSOFT, integers=True)
def nhwc_max_pool(node: Node) -> Value:
    """y = max_pool(x), the channels last."""
    rank = node.rank()
    return to_channels_last(to_channels_first(node.x, rank).apply("MaxPool", **node.attributes), rank)
