"""Products with quantized weights w = (q - zero) * scale: panels of w are unpacked in the cache and multiplied.

The integers q lie row by row, several to a byte, the first in the lowest bits. A vector of bytes is taken apart as
numbers: of a byte b = 16 * upper + lower, `upper` is b / 16 rounded down, and `lower` what is left. Scales belong to
blocks of rows and columns, or to the group that each column names.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels.gemm import Matrix, ProductSizes
from opgrad.cpu.kernels.loops.map import mapped, write_same

BYTE: Final = 8  # bits
NO_ZEROS, WHOLE_ZEROS, PACKED_ZEROS = range(3)  # kinds of zero points


class Scales(NamedTuple):
    """Scales by blocks: the scales of a row of blocks, and the rows and columns of a block."""

    data: Pointer
    row: int
    rows: int
    columns: int


class Zeros(NamedTuple):
    """Zero points, laid out as the scales are; packed ones of so many bits, `row` bytes from a row to the next.

    value: what they all are where there are none.
    """

    data: Pointer
    kind: int
    row: int
    bits: int
    value: Float


class Weights(NamedTuple):
    """Quantized weights, and memory for some of their rows, unpacked.

    data, row: the bytes of the packed integers, and how many a row has. bits: of an integer. limit: of those from here
    on, 2 * limit is taken away: integers with a sign. groups: the block of columns that each column belongs to, if
    `has_groups`; a negative one counts from the last.
    """

    data: Pointer
    row: int
    bits: int
    limit: int
    scales: Scales
    zeros: Zeros
    groups: Pointer
    has_groups: int
    lines: Private


# --- rows of weights -------------------------------------------------------------------------------------------------


@inline
def digits(x: Vector, base: float) -> tuple[Vector, Vector]:
    """The upper and the lower digit to a base of whole numbers below its square."""
    upper = v.round_even(v.fma(x, v.like(x, 1.0 / base), v.like(x, 0.5 / base - 0.5)))
    return upper, v.fma(upper, v.like(x, -base), x)


@inline
def with_sign(x: Vector, limit: float) -> Vector:
    """Integers of two's complement as what they stand for."""
    return v.select(x < v.like(x, limit), x, x - v.like(x, 2.0 * limit))


@inline
def unpack(line, p, count: int, bits: int, limit: float) -> None:
    """The integers in the first `count` bytes at p; up to a vector of bytes more of the line may be written."""
    w = v.lanes(line)
    for i in range(0, count, w):
        byte, to = v.load_masked(p, i, v.first(p, count - i), 0.0), line + i * BYTE // bits
        if bits == BYTE:
            v.store(to, 0, with_sign(byte, limit))
        else:
            upper, lower = digits(byte, 16.0)
            if bits == 4:
                first, second = v.interleave(with_sign(lower, limit), with_sign(upper, limit))
                v.store(to, 0, first)
                v.store(to, w, second)
            else:
                c, a = digits(lower, 4.0)
                d, b = digits(upper, 4.0)
                even = v.interleave(with_sign(a, limit), with_sign(b, limit))
                odd = v.interleave(with_sign(c, limit), with_sign(d, limit))
                for half in range(2):
                    first, second = v.interleave(even[half], odd[half])
                    v.store(to, 2 * half * w, first)
                    v.store(to, (2 * half + 1) * w, second)


@inline
def scaled(q: Vector, scale: Vector, zero: Vector) -> Vector:
    return (q - zero) * scale


write_scaled = mapped(scaled)


@inline
def zero_at(zeros, row: int, block: int):
    """The zero point of a block of columns, in a row of blocks."""
    if zeros.kind == NO_ZEROS:
        return v.number(zeros.data, zeros.value)
    if zeros.kind == WHOLE_ZEROS:
        return v.load_one(zeros.data, row * zeros.row + block)
    byte = int(v.load_one(zeros.data, row * zeros.row + block * zeros.bits // BYTE))
    return v.number(zeros.data, (byte >> block * zeros.bits % BYTE) & ((1 << zeros.bits) - 1))


@inline
def scale_by_groups(line, w, row: int, column: int, columns: int) -> None:
    """Turn a line of integers into weights whose blocks are those that the columns name."""
    for each in range(columns):
        group = v.load_one(w.groups, column + each)
        block = group if group >= 0 else group + w.scales.row
        scale = v.load_one(w.scales.data, row * w.scales.row + block)
        v.store_one(line, each, (v.load_one(line, each) - zero_at(w.zeros, row, block)) * scale)


@inline
def scale_each(line, w, row: int, column: int, columns: int) -> None:
    """Turn a line of integers into weights, each of which has a scale of its own."""
    scales = w.scales.data + (row * w.scales.row + column)
    if w.zeros.kind == WHOLE_ZEROS:
        write_scaled(line, 0, columns, 0, (line, scales, w.zeros.data + (row * w.zeros.row + column)), ())
    else:
        write_scaled(line, 0, columns, 0, (line, scales), (v.number(line, w.zeros.value),))


@inline
def scale_blocks(line, w, row: int, column: int, columns: int) -> None:
    """Turn a line of integers into weights, block by block."""
    size, last = w.scales.columns, column + columns
    for block in range(column // size, (last - 1) // size + 1):
        begin, end = max(block * size, column), min((block + 1) * size, last)
        numbers = v.load_one(w.scales.data, row * w.scales.row + block), zero_at(w.zeros, row, block)
        write_scaled(line, begin - column, end - column, 0, (line,), numbers)


@inline
def unpack_line(line, w, row: int, column: int, columns: int) -> None:
    """Some columns of a row of the weights; their first integer begins a byte."""
    unpack(line, w.data + (row * w.row + column * w.bits // BYTE), -(-columns * w.bits // BYTE), w.bits, w.limit)
    block = row // w.scales.rows
    if w.has_groups:
        scale_by_groups(line, w, block, column, columns)
    elif w.scales.columns == 1:
        scale_each(line, w, block, column, columns)
    else:
        scale_blocks(line, w, block, column, columns)


# --- panels of weights -----------------------------------------------------------------------------------------------


def space(lanes: int) -> int:
    """The numbers of memory for unpacked rows, with those that `unpack` may write behind one."""
    width, line = gemm.VECTORS * lanes, -(-gemm.CHUNK // (4 * lanes)) * 4 * lanes + gemm.SPARE
    return max(gemm.BLOCK_PANELS * width + 4 * lanes, width * line)


@inline
def pack_rows(packed, w, first: int, stop: int, column: int, columns: int) -> None:
    """The panels of a chunk of the weights, whose rows are those of the product's right operand."""
    lanes, line = v.lanes(packed), w.lines
    width = gemm.VECTORS * lanes
    for row in range(first, stop):
        unpack_line(line, w, row, column, columns)
        for j in range(0, columns, lanes):
            v.store(packed, j // width * width * gemm.CHUNK + (row - first) * width + j % width, v.load(line, j))


@inline
def pack_columns(packed, w, first: int, stop: int, column: int, columns: int) -> None:
    """The panels of a chunk of the transpose of the weights."""
    lanes = v.lanes(packed)
    width, pitch = gemm.VECTORS * lanes, -(-gemm.CHUNK // (4 * lanes)) * 4 * lanes + gemm.SPARE
    for j in range(0, columns, width):
        for each in range(min(width, columns - j)):
            unpack_line(w.lines + each * pitch, w, column + j + each, first, stop - first)
        gemm.pack_panel_transposed(packed + j * gemm.CHUNK, w.lines, pitch, stop - first, columns - j)


# --- products --------------------------------------------------------------------------------------------------------


def products_of(pack: Callable[..., None], right: Any, name: str) -> Kernel:
    """The kernel of products with a right operand that `pack` packs; right: its annotation."""
    product = gemm.product_of(pack)

    @kernel
    def multiply(
        units: Units, sizes: ProductSizes, across, block_rows, block_columns, first_a, first_c, a: Matrix, b: right,
        c: Rows, left: Private, right_panels: Private, sums: Private, pitch,
    ):  # fmt: skip
        """c = a @ b, from rows first_a and first_c on; a unit is a block of c, of which `across` are side by side.

        left, right_panels: packed chunks of both operands. sums: of a block, `pitch` numbers from a row to the next.
        """
        for unit in units:
            i, j = unit // across * block_rows, unit % across * block_columns
            own = ProductSizes(min(block_rows, sizes.rows - i), min(block_columns, sizes.columns - j), sizes.depth)
            own_a = Matrix(a.data + (first_a + i) * a.row, a.row, a.column)
            product(sums, pitch, own_a, b, own, 0, left, right_panels, j)
            for row in range(own.rows):
                to = c.data + ((first_c + i + row) * c.step + j)
                write_same(to, 0, own.columns, 0, (sums + row * pitch,), ())

    multiply.__name__ = name
    return multiply


multiply_rows = products_of(pack_rows, Weights, "multiply_rows")
multiply_columns = products_of(pack_columns, Weights, "multiply_columns")
multiply_floats = products_of(gemm.pack_right, Matrix, "multiply_floats")
