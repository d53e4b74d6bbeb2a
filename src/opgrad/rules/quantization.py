"""Quantization and its reverse: the gradient goes straight through the rounding, as quantization-aware training does.

Between the two operators there are integers; their gradient is the gradient of the floats that they stand for.
"""

from onnx import TensorProto

from opgrad.graph.formulas import Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.node import Node
from opgrad.rules.registry import Gradients, NoGradient, decomposition, gradient

LIMITS: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (-8, 7),
}
EIGHT_BITS = {(0, 255): TensorProto.UINT8, (-128, 127): TensorProto.INT8}


@gradient("QuantizeLinear", constant=(1, 2))
def quantize(node: Node) -> Value:
    """dx = dy where x lies within what the integers reach."""
    limits = LIMITS.get(node.y.element_type or 0)
    if limits is None:
        raise NoGradient("its integers are not of 4, 8 or 16 bits")
    if node.get("block_size", 0):
        raise NoGradient("it has a scale for each block")
    x, scale, zero = node.x, _column(node, node.required(1)), node.input(2)
    offset = None if zero is None else _column(node, zero.cast(x.element_type or TensorProto.FLOAT))
    low, high = ((limit - offset if offset is not None else limit) for limit in limits)
    number = (x / scale).apply("Round")
    return node.where((number < low) | (number > high), 0, node.dy)


def _column(node: Node, values: Value) -> Value:
    """Scales or zero points along the axis, in a shape that broadcasts to x."""
    if values.sizes is not None and len(values.sizes) == 0:
        return values
    known = node.required(1).sizes
    if known is None or len(known) != 1 or known[0] == 1:
        return values.reshape([]) if known is not None and list(known) == [1] else values
    axis = node.get("axis", 1) % node.rank()
    return values.reshape([-1 if index == axis else 1 for index in range(node.rank())])


@gradient("DynamicQuantizeLinear")
def dynamic_quantize(node: Node) -> Value | None:
    """dx = dy; the scale, which x reaches from end to end, counts as a constant."""
    return node.dys[0]


@gradient("DequantizeLinear", constant=(1, 2), integers=True)
def dequantize(node: Node) -> Gradients:
    """The gradient of the numbers that the integers stand for: dy."""
    return node.dy


@decomposition("FakeQuant", domain=MICROSOFT)
def fake_quant(node: Node) -> Value:
    """y = dequantize(quantize(x))."""
    kind = EIGHT_BITS.get((node.get("quant_min", 0), node.get("quant_max", 255)))
    if kind is None:
        raise NoGradient("its limits are not those of 8 bits")
    given = node.required(1), node.required(2).cast(kind)
    return node.body.node("DequantizeLinear", node.body.node("QuantizeLinear", node.x, *given), *given)
