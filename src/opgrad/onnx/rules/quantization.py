"""Quantization: the gradient goes straight through the rounding, as quantization-aware training does.

Between QuantizeLinear and DequantizeLinear there are integers; their gradient is the gradient of the floats that they
stand for. Products of integers stay as they are; the formula through which they are differentiated dequantizes their
operands, whose scales and zero points count as constants. Weights of a few bits lie several to a byte, with a scale for
each block.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from opgrad.contract.quantized import BYTE
from opgrad.contract.quantized import quantized as sizes
from opgrad.onnx.graph.facts import NBITS
from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.graph.messages import MICROSOFT, domain_of, packed_bytes
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.graph.sizes import known
from opgrad.onnx.plain import quantized
from opgrad.onnx.rules.node import (
    Gradients,
    Node,
    NoGradient,
    decomposition,
    gradient,
    in_float32,
    numbers_of,
    recomputed,
    sizes_of,
)

Row = TypeVar("Row")


def _known(table: Mapping[str, Row]) -> dict[int, Row]:
    """A table by element types, of those that the installed onnx has: it got the types of two bits with 1.20."""
    return {getattr(TensorProto, name): row for name, row in table.items() if hasattr(TensorProto, name)}


WIDTHS = (2, 4, 8, 16)
LIMITS = _known(
    {f"UINT{bits}": (0, 2**bits - 1) for bits in WIDTHS}
    | {f"INT{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in WIDTHS}
)
# The bits of an integer of at most a byte and whether it has a sign, by its type.
INTEGERS = {
    dtype: ((high - low).bit_length(), low < 0) for dtype, (low, high) in LIMITS.items() if high - low < 1 << BYTE
}
# The largest numbers of the small floats, whose rounding saturates.
LARGEST = _known(
    {"FLOAT8E4M3FN": 448, "FLOAT8E4M3FNUZ": 240, "FLOAT8E5M2": 57344, "FLOAT8E5M2FNUZ": 57344, "FLOAT4E2M1": 6}
)
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
    if block := node.get("block_size", 0):  # what each block along the axis has, for each of its numbers
        axis = node.get("axis", 1) % node.rank()
        places = node.body.range(node.x.shape(axis, axis + 1).squeeze(0)) / block
        return node.body.node("Gather", values, places, axis=axis)
    known = node.required(1).sizes
    if known is None or len(known) != 1 or known[0] == 1:
        return values.reshape([]) if known is not None and list(known) == [1] else values
    axis = node.get("axis", 1) % node.rank()
    return values.reshape([-1 if index == axis else 1 for index in range(node.rank())])


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


def scale_of(node: Node, index: int) -> Value | None:
    """How much larger the floats are than the integers of an input that stand for them; None if they are the integers.

    It is found where the integers were made. Raises NoGradient where that is not known, or there are several scales.
    """
    found = set(_scales(node, node.proto.input[index]))
    if len(found) != 1:
        raise NoGradient(f"the integers of its input {index} have {len(found) or 'no known'} scales, expected one")
    (name,) = found
    scale = None if name is None else node.value(name)
    if scale is not None and (scale.sizes is None or list(scale.sizes) not in ([], [1])):
        raise NoGradient(f"the integers of its input {index} have a scale for each place along an axis, expected one")
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


COPIES = ("Identity", "Cast")
BYTES_SUFFIX = ".bytes"


def gradient_through(node: Node, dy: Value, transposed: bool = False) -> Value | None:
    """dy @ w.T for a product x @ w, whose w is the second input; None if no frozen integers are behind it.

    transposed: whether the product is x @ w.T.
    """
    if 1 in node.needed or len(node.required(0).sizes or ()) < 2:
        return None
    maker = node.maker(node.names[1])
    while maker is not None and maker.op_type in (*COPIES, "Transpose") and not domain_of(maker):
        if maker.op_type == "Transpose" and attributes_of(maker).get("perm", [1, 0]) != [1, 0]:
            return None
        transposed ^= maker.op_type == "Transpose"
        maker = node.maker(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear" or domain_of(maker) not in ("", MICROSOFT):
        return None
    if node.maker(maker.input[0]) is not None:
        return None  # weights that are rounded in each step are floats that are trained
    scales, given = node.value(maker.input[1]), attributes_of(maker)
    zeros = node.value(maker.input[2]) if len(maker.input) > 2 and maker.input[2] else None
    block = blocks(scales, given.get("axis", 1), given.get("block_size", 0))
    return None if block is None else _product(node, dy, maker.input[0], transposed, scales, zeros, block)


def _product(
    node: Node, dy: Value, name: str, transposed: bool, scales: Value, zeros: Value | None, block: tuple[int, int]
) -> Value | None:
    """dy @ w.T for a matrix of integers; None if its rows are no whole bytes, or its bytes are not known.

    transposed: whether the product reads it transposed. block: the rows and columns that share a scale, 0 for all.
    """
    given = node.value(name)
    sizes = known(given.sizes)
    if given.element_type not in INTEGERS or sizes is None or len(sizes) != 2:
        return None
    bits, signed = INTEGERS[given.element_type]
    (rows, columns), (row_block, column_block) = sizes, block
    if columns * bits % BYTE or (column_block > 1 and column_block * bits % BYTE):
        return None
    b = given if bits == BYTE else _bytes(node, name, rows * columns * bits // BYTE)
    if b is None:
        return None
    n, k = (rows, columns) if transposed else (columns, rows)
    zeros = None if zeros is None else zeros.cast(TensorProto.FLOAT).like(dy)
    attributes = {"N": n, "K": k, "bits": bits, "row_block": row_block, "column_block": column_block}
    flags = {"transB": int(transposed), "signed": int(signed)}
    return node.microsoft("QuantizedMatMulGrad", dy, b, scales.like(dy), zeros, **attributes, **flags)


def _bytes(node: Node, name: str, count: int) -> Value | None:
    """The bytes of an initializer of a few bits; None if it is none.

    Values that are apart from the model are so for its bytes, too, which are `BYTES_SUFFIX` behind the same name.
    """
    tensor = node.forward.initializers.get(name)
    if tensor is None:
        return None
    if uses_external_data(tensor):
        same = TensorProto(name=name + BYTES_SUFFIX, data_type=TensorProto.UINT8, dims=[count])
        same.data_location = tensor.data_location
        same.external_data.extend(tensor.external_data)
        if all(each.name != same.name for each in node.body.initializers):
            node.body.initializers.append(same)
        return Value(node.body, same.name, TensorProto.UINT8, [count])
    content = packed_bytes(tensor)
    return node.body.constant(content) if content.size == count else None


def blocks(scales: Value, axis: int, size: int = 0) -> tuple[int, int] | None:
    """The rows and columns of a matrix that share a scale, 0 for all; None if that is not known."""
    if scales.sizes is None:
        return None
    if list(scales.sizes) in ([], [1]):
        return 0, 0
    if axis % 2:
        return (1, size) if size else (0, 1)
    return (size, 1) if size else (1, 0)


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
    block = (0, 0) if zeros is None else blocks(zeros, 1)
    width = sizes_of(node.required(1))[-1]
    if block is None or not isinstance(width, int) or node.maker(node.names[1]) is not None:
        return None
    ones = node.body.constant(np.ones(width if block[1] else 1, np.float32))
    da, scale = _product(node, dy, node.names[1], False, ones, zeros, block), scale_of(node, 0)
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


# What the numbers of 4 bits stand for, by the type of quantization: bitsandbytes' fp4, and nf4 of the QLoRA paper.
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
TABLES = {
    0: np.concatenate([FP4, -FP4]),
    1: np.array(
        [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0,
         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32,
    ),
}  # fmt: skip


def unpacked(node: Node, bytes_: Value, bits: int) -> Value:
    """The numbers of so many bits in each byte; see `opgrad.onnx.plain.quantized.unpacked`."""
    if bits not in (1, 2, 4, BYTE):
        raise NoGradient(f"its weights have {bits} bits, expected 1, 2, 4 or 8")
    return quantized.unpacked(bytes_, len(sizes_of(bytes_)), bits)


def _gradient_of_a(node: Node) -> Gradients:
    """da = dy @ w, by the operator that unpacks tiles of w in the cache; db = dy, summed over all rows."""
    zeros = node.input(3)
    if zeros is not None and zeros.element_type != TensorProto.UINT8:
        zeros = zeros.like(node.dy)
    given = [node.dy, node.required(1), node.required(2).like(node.dy), zeros, node.input(4)]
    dx = node.microsoft("QuantizedMatMulGrad", *given, **_attributes(node))
    return [dx, None, None, None, None, None if node.input(5) is None else node.unbroadcast(node.dy, 5)]


def _attributes(node: Node) -> dict[str, Any]:
    """The attributes of MatMulNBits by the names of `quantized_matmul_grad`."""
    rows, depth, block, bits = (node.get(name, default) for name, default in NBITS.items())
    if bits not in (2, 4, BYTE):
        raise NoGradient(f"its weights have {bits} bits, expected 2, 4 or 8")
    if node.get("weight_prepacked", 0):
        raise NoGradient("its weights are in the order of a kernel; export it with weight_prepacked=0")
    zeros = node.input(3)
    if node.input(4) is not None and (bits != 4 or (zeros is not None and zeros.element_type == TensorProto.UINT8)):
        raise NoGradient("it has g_idx, which onnxruntime reads with 4 bits and without packed zero points alone")
    return {"N": rows, "K": depth, "bits": bits, "column_block": block, "zero_point": 2.0 ** (bits - 1)}


@recomputed("MatMulNBits", domain=MICROSOFT, constant=(1, 4), direct=((0, 5), _gradient_of_a))
@in_float32
def matmul_nbits(node: Node) -> Value:
    """y = a @ w.T + bias, w = (b - zero_points) * scales by blocks."""
    given = _attributes(node) | {"row_block": 1, "transB": 1}
    packed = node.input(3) is not None and node.required(3).element_type == TensorProto.UINT8
    operands = node.required(1), node.required(2), node.input(3), node.input(4)
    whole = quantized.QuantizedWeights(*operands, sizes({}, given), given["bits"], packed, False, given["zero_point"])
    y, bias = node.body.node("MatMul", node.x, whole.floats().transpose(1, 0)), node.input(5)
    return y if bias is None else y + bias


@recomputed("MatMulBnb4", domain=MICROSOFT, constant=(1,))
@in_float32
def matmul_bnb4(node: Node) -> Value:
    """y = a @ w.T, w = table[b] * absmax by blocks, the first of two numbers in a byte in its upper half."""
    rows, depth, block = (node.get(name) for name in ("N", "K", "block_size"))
    body, bytes_ = node.body, node.required(1)
    halves = [
        quantized.shifted(bytes_, 4, "RIGHT"),
        quantized.shifted(quantized.shifted(bytes_, 4, "LEFT"), 4, "RIGHT"),
    ]
    places = body.concat(*(each.unsqueeze(1) for each in halves), axis=1).reshape([-1]).slice(0, rows * depth)
    numbers = body.node("Gather", body.constant(TABLES[node.get("quant_type")]), places.cast(TensorProto.INT32))
    scales = body.node("Gather", node.required(2), body.constant(np.arange(rows * depth) // block))
    w = (numbers * scales).reshape([rows, depth])
    return body.node("MatMul", node.x, w.transpose(1, 0) if node.get("transB", 1) else w)


@recomputed("GatherBlockQuantized", domain=MICROSOFT, constant=(0, 1, 3))
@in_float32
def gather_block_quantized(node: Node) -> Value:
    """y = (data[index] - zero_points[index]) * scales[index], by blocks; only scales have a gradient."""
    data, scales, zeros, rank = node.x, node.required(2), node.input(3), node.rank()
    if node.get("gather_axis", 0) or node.get("quantize_axis", 1) % rank != rank - 1:
        raise NoGradient("it gathers along another axis than the first, or its blocks are not along the last")
    packed = data.element_type == TensorProto.UINT8
    bits = node.get("bits", 4) if packed else 4
    width = numbers_of(data, -1)[0] * (BYTE // bits if packed else 1)
    blocks = -(-width // node.get("block_size", 128))
    numbers = _rows(node, data, bits if packed else None, width).like(scales)
    scale = _rows(node, scales, None, blocks)
    offset: Value | float = 2.0 ** (bits - 1) if packed else 0.0
    if zeros is not None:
        offset = _for_each_number(node, _rows(node, zeros, bits if packed else None, blocks).like(scales), width)
    return (numbers - offset) * _for_each_number(node, scale, width)


def _rows(node: Node, table: Value, bits: int | None, width: int) -> Value:
    """The rows of a table that the indices choose, of so many numbers each; bits: of a number, None for no bytes."""
    rows, indices = node.body.node("Gather", table, node.required(1)), len(sizes_of(node.required(1)))
    if bits is None:
        return rows
    rank = indices + node.rank() - 1
    return unpacked(node, node.with_sizes(rows, [None] * rank), bits).slice(0, width, rank - 1)


def _for_each_number(node: Node, blocks: Value, width: int) -> Value:
    """What each block has, for each of its numbers."""
    places = node.body.constant(np.arange(width) // node.get("block_size", 128))
    return node.body.node("Gather", blocks, places, axis=len(sizes_of(node.required(1))) + node.rank() - 2)
