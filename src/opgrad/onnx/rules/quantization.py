"""Quantization and its reverse: the gradient goes straight through the rounding, as quantization-aware training does.

Between the two operators there are integers; their gradient is the gradient of the floats that they stand for.
"""

from collections.abc import Collection, Iterator

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node, numbers_of
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, gradient

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
QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")
# Operators whose results are sums of products of integers, which stand for themselves.
SUMS = ("MatMulInteger", "ConvInteger")
EIGHT_BITS = {(0, 255): TensorProto.UINT8, (-128, 127): TensorProto.INT8}


@gradient("QuantizeLinear", constant=(2,))
@gradient("QuantizeLinear", domain=MICROSOFT, constant=(2,))
def quantize(node: Node) -> Gradients:
    """dx = dy where x lies within what the integers reach; dscale = -sum(dy * x / scale) over these."""
    dtype = node.y.element_type or 0
    largest, limits = LARGEST.get(dtype), LIMITS.get(dtype)
    if largest is None and limits is None:
        raise NoGradient("its integers are not of 2, 4, 8 or 16 bits")
    x, scale, zero = node.x, _column(node, node.required(1)), node.input(2)
    if limits is None:  # a small float, whose zero point is 0
        return node.where((x / scale.like(x)).apply("Abs") > (largest or 0), 0, node.dy)
    offset = None if zero is None else _column(node, zero.cast(x.element_type or TensorProto.FLOAT))
    low, high = ((limit - offset if offset is not None else limit) for limit in limits)
    number = (x / scale.like(x)).apply("Round")
    dx = node.where((number < low) | (number > high), 0, node.dy)
    return [dx, -_to_scale(node, dx * x / scale.like(x)) if _is_learned(node, node.proto.input[0]) else None]


def _is_learned(node: Node, quantized: str) -> bool:
    """Whether the scale's gradient is asked for; a scale that is measured of what is quantized counts as a constant."""
    return 1 in node.needed and quantized not in set(_origins(node, node.proto.input[1]))


def _origins(node: Node, name: str, ends: Collection[str] = ()) -> Iterator[str]:
    """The names of the values of which a value is computed, and its own; not those that operators in `ends` read."""
    seen, waiting = {name}, [name]
    while waiting:
        yield (found := waiting.pop())
        maker = node.maker(found)
        new = set() if maker is None or maker.op_type in ends else set(maker.input).difference(seen, {""})
        seen |= new
        waiting += sorted(new)


def _to_scale(node: Node, terms: Value) -> Value:
    """The sums of an array over what has one scale, in the shape of the scales."""
    scale, terms, rank = node.required(1), widened(terms), node.rank()
    several = scale.sizes is None or (len(scale.sizes) > 0 and list(scale.sizes) != [1])
    axis, block = node.get("axis", 1) % max(rank, 1), node.get("block_size", 0)
    if not several or rank == 0:
        total = terms.sum(keepdims=False).reshape(scale.shape())
    elif not block:
        total = terms.sum([each for each in range(rank) if each != axis], keepdims=False)
    else:
        (size,) = numbers_of(node.x, axis)
        ends = [0] * rank * 2
        ends[rank + axis] = -size % block
        whole = node.body.node("Pad", terms, node.body.ints(ends)) if size % block else terms
        blocks = node.body.concat(node.x.shape(0, axis), node.body.ints([-1, block]), node.x.shape(axis + 1))
        total = whole.reshape(blocks).sum([axis + 1], keepdims=False)
    return total.like(scale)


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


@gradient("DequantizeLinear", constant=(2,), integers=True)
@gradient("DequantizeLinear", domain=MICROSOFT, constant=(2,), integers=True)
def dequantize(node: Node) -> Gradients:
    """The gradient of the numbers that the integers stand for: dy; dscale = sum(dy * (x - zero_point))."""
    if 1 not in node.needed:
        return node.dy
    makers = (node.maker(name) for name in _origins(node, node.proto.input[0], QUANTIZING))
    if not all(_is_learned(node, each.input[0]) for each in makers if each is not None and each.op_type in QUANTIZING):
        return node.dy
    numbers, zero = node.x.like(node.dy), node.input(2)
    numbers = numbers if zero is None else numbers - _column(node, zero.like(node.dy))
    return [node.dy, _to_scale(node, node.dy * numbers)]


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
    elif maker.op_type == "QuantizeLinear":
        yield maker.input[1]
    else:  # it moves or chooses integers
        for each in maker.input:
            yield from _scales(node, each)


@decomposition("FakeQuant", domain=MICROSOFT)
def fake_quant(node: Node) -> Value:
    """y = dequantize(quantize(x))."""
    dtype = EIGHT_BITS.get((node.get("quant_min", 0), node.get("quant_max", 255)))
    if dtype is None:
        raise NoGradient("its limits are not those of 8 bits")
    given = node.required(1), node.required(2).cast(dtype)
    return node.body.node("DequantizeLinear", node.body.node("QuantizeLinear", node.x, *given), *given)
