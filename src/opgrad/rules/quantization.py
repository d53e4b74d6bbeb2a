"""Quantization and its reverse: the gradient goes straight through the rounding, as quantization-aware training does.

Between the two operators there are integers; their gradient is the gradient of the floats that they stand for.
"""

from collections.abc import Iterator

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
    TensorProto.UINT2: (0, 3),
    TensorProto.INT2: (-2, 1),
}
# The largest numbers of the small floats, whose rounding saturates.
LARGEST: dict[int, float] = {
    TensorProto.FLOAT8E4M3FN: 448,
    TensorProto.FLOAT8E4M3FNUZ: 240,
    TensorProto.FLOAT8E5M2: 57344,
    TensorProto.FLOAT8E5M2FNUZ: 57344,
    TensorProto.FLOAT4E2M1: 6,
}
# Operators whose results are sums of products of integers, which stand for themselves.
SUMS = ("MatMulInteger", "MatMulInteger16", "ConvInteger")
# The places of the scales of results.
SCALES = {
    "QuantizeLinear": 1,
    "QLinearConcat": 0,
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), 6),
    **dict.fromkeys(("QGemm", "QLinearWhere"), 7),
    **{f"QLinear{op}": 3 for op in ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool")},
}
EIGHT_BITS = {(0, 255): TensorProto.UINT8, (-128, 127): TensorProto.INT8}


@gradient("QuantizeLinear", constant=(1, 2))
@gradient("QuantizeLinear", domain=MICROSOFT, constant=(1, 2))
def quantize(node: Node) -> Value:
    """dx = dy where x lies within what the integers reach."""
    kind = node.y.element_type or 0
    largest, limits = LARGEST.get(kind), LIMITS.get(kind)
    if largest is None and limits is None:
        raise NoGradient("its integers are not of 2, 4, 8 or 16 bits")
    x, scale, zero = node.x, _column(node, node.required(1)), node.input(2)
    if limits is None:  # a small float, whose zero point is 0
        return node.where((x / scale.like(x)).apply("Abs") > (largest or 0), 0, node.dy)
    offset = None if zero is None else _column(node, zero.cast(x.element_type or TensorProto.FLOAT))
    low, high = ((limit - offset if offset is not None else limit) for limit in limits)
    number = (x / scale.like(x)).apply("Round")
    return node.where((number < low) | (number > high), 0, node.dy)


def _column(node: Node, values: Value) -> Value:
    """Scales or zero points along the axis, in a shape that broadcasts to x."""
    if values.sizes is not None and len(values.sizes) == 0:
        return values
    if node.get("block_size", 0):
        return _stretched(node, values)
    known = node.required(1).sizes
    if known is None or len(known) != 1 or known[0] == 1:
        return values.reshape([]) if known is not None and list(known) == [1] else values
    axis = node.get("axis", 1) % node.rank()
    return values.reshape([-1 if index == axis else 1 for index in range(node.rank())])


def _stretched(node: Node, blocks: Value) -> Value:
    """What each block along the axis has, for each of its numbers."""
    axis = node.get("axis", 1) % node.rank()
    places = node.body.range(node.x.shape(axis, axis + 1).squeeze(0)) / node.get("block_size", 0)
    return node.body.node("Gather", blocks, places, axis=axis)


@gradient("DynamicQuantizeLinear")
def dynamic_quantize(node: Node) -> Value | None:
    """dx = dy; the scale, which x reaches from end to end, counts as a constant."""
    return node.dys[0]


@gradient("DequantizeLinear", constant=(1, 2), integers=True)
@gradient("DequantizeLinear", domain=MICROSOFT, constant=(1, 2), integers=True)
def dequantize(node: Node) -> Gradients:
    """The gradient of the numbers that the integers stand for: dy."""
    return node.dy


def scale_of(node: Node, place: int) -> Value | None:
    """How much larger the floats are than the integers of an input that stand for them; None if they are the integers.

    It is found where the integers were made. Raises NoGradient where that is not known, or there are several scales.
    """
    found = set(_scales(node, node.proto.input[place]))
    if len(found) != 1:
        raise NoGradient(f"the integers of its input {place} have {len(found) or 'no known'} scales, expected one")
    (name,) = found
    scale = None if name is None else node.value(name)
    if scale is not None and (scale.sizes is None or list(scale.sizes) not in ([], [1])):
        raise NoGradient(f"the integers of its input {place} have a scale for each place along an axis, expected one")
    return None if scale is None else scale.scalar()


def _scales(node: Node, name: str) -> Iterator[str | None]:
    """The names of the scales of integers, None for integers that are the floats."""
    maker = node.maker(name)
    if maker is None:
        return
    if maker.op_type in SUMS:
        yield None
    elif maker.op_type == "DynamicQuantizeLinear":
        yield maker.output[1]
    elif maker.op_type in SCALES:
        yield maker.input[SCALES[maker.op_type]]
    else:  # it moves or chooses integers
        for each in maker.input:
            yield from _scales(node, each)


@decomposition("FakeQuant", domain=MICROSOFT)
def fake_quant(node: Node) -> Value:
    """y = dequantize(quantize(x))."""
    kind = EIGHT_BITS.get((node.get("quant_min", 0), node.get("quant_max", 255)))
    if kind is None:
        raise NoGradient("its limits are not those of 8 bits")
    given = node.required(1), node.required(2).cast(kind)
    return node.body.node("DequantizeLinear", node.body.node("QuantizeLinear", node.x, *given), *given)
