"""Products of matrices, c (+)= a @ b: tiles of sums in registers, six or four rows by one or two vectors of columns.

For each number k of the sum, a tile multiplies a vector of b's row k with a number of each of a's rows. So that it
reads b without a gap, b is packed into panels: for as many columns as a tile has, those of row after row. A number of a
is `row` elements from that of the next row and `step` elements from the next of the sum, so a is read where it lies,
or packed in the order in which it is copied fastest. Either operand may be transposed: packing tells them apart.

Products are added up in chunks, which join the total in memory, so rounding errors grow with the number of chunks; the
order depends on sizes and instruction set alone. One thread takes as long as OpenBLAS does, packing included: 512 x 512
x 512 float32 102 billion operations a second against 98, 64 x 64 x 64 86 against 93, with AVX2 alone 78 and 66 against
83 and 60 (Zen 4, the best of 20 on a busy machine).
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, many_registers, vector_bytes
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.kernels.loops.map import write_same

# --- blocking: all of it follows from the registers ------------------------------------------------------------------

MANY_REGISTERS: Final = many_registers()
ROWS: Final = 6  # of a tile
VECTORS: Final = 2 if MANY_REGISTERS else 1  # of a tile's row, two registers each: 24 sums of 32, or 12 of 16
PANEL_BYTES: Final = 24 << 10  # of a chunk of a panel, which stays in the first-level cache beside six rows of a
# Numbers that are added up before they join the total: more of them round worse.
CHUNK: Final = min(128, PANEL_BYTES // (2 * VECTORS * vector_bytes()) // 32 * 32)
# Rows of a and panels of b whose chunks are multiplied at a time: both chunks stay in the second-level cache.
BLOCK_ROWS: Final = 120
BLOCK_PANELS: Final = 16
SPARE: Final = 16  # elements between packed lines, whose addresses would otherwise compete for places in the cache


class Matrix(NamedTuple):
    """A matrix: its first element, and the elements from a row, and from a column, to the next; one of them is 1."""

    data: Pointer
    row: int
    column: int


class ProductSizes(NamedTuple):
    """Rows and columns of c, and the length of the sums."""

    rows: int
    columns: int
    depth: int


# --- tiles -----------------------------------------------------------------------------------------------------------


@inline
def two(p, step: int, row: int, last: int):
    """Where two rows begin; the last row stands for those behind it, which then give and get the same."""
    return p + row * step, p + min(row + 1, last) * step


@inline
def four(p, step: int, row: int, last: int):
    """Where four rows begin, as `two` gives it for two."""
    return two(p, step, row, last) + two(p, step, min(row + 2, last), last)


@inline
def six(p, step: int, row: int, last: int):
    """Where six rows begin, as `two` gives it for two."""
    return four(p, step, row, last) + two(p, step, min(row + 4, last), last)


@inline
def put_vectors(rows, column: int, columns: int, sums, add: int) -> None:
    """Store a vector of each row, or add it to what stands there, in the first `columns` columns."""
    if columns >= v.lanes(rows[0]):
        if add:
            sums = v.add_each(v.load_each(rows, column), sums)
        v.store_each(rows, column, sums)
    else:
        mask = v.first(rows[0], columns)
        if add:
            sums = v.add_each(v.load_each_masked(rows, column, mask, 0.0), sums)
        v.store_each_masked(rows, column, sums, mask)


def tile_of(rows_of: Callable[..., Any]) -> Callable[..., None]:
    """The tile of some rows and one panel: c (+)= a @ b over [first, stop) of the sums, in the first columns."""

    @inline
    def tile(c, c_row: int, a, a_row: int, step: int, panel, row: int, last: int, columns: int, first, stop, add: int):
        w, rows, out = v.lanes(panel), rows_of(a, a_row, row, last), rows_of(c, c_row, row, last)
        left = right = v.full_each(rows, 0.0)
        for k in range(first, stop):
            numbers, at = v.load_one_each(rows, k * step), k * VECTORS * w
            left = v.add_products(left, numbers, v.load(panel, at))
            if VECTORS > 1:
                right = v.add_products(right, numbers, v.load(panel, at + w))
        put_vectors(out, 0, columns, left, add)
        if VECTORS > 1 and columns > w:
            put_vectors(out, w, columns - w, right, add)

    return tile


tile_of_six, tile_of_four = tile_of(six), tile_of(four)


@inline
def multiply_chunk(c, c_row: int, a, a_row: int, step: int, b, panel: int, columns: int, rows, first, stop, add: int):
    """These rows of c (+)= a @ b over [first, stop) of the sums; b is packed, `panel` elements from one to the next.

    Tiles have six rows, but four where six would leave more of them empty: 8 rows are four and four.
    """
    width, last = VECTORS * v.lanes(b), rows.stop - 1
    for j in range(0, columns, width):
        source, row = b + j // width * panel, rows.start
        while row <= last:
            left = last + 1 - row
            if left > 8 or left == 5 or left == 6:
                tile_of_six(c + j, c_row, a, a_row, step, source, row, last, columns - j, first, stop, add)
                row += ROWS
            else:
                tile_of_four(c + j, c_row, a, a_row, step, source, row, last, columns - j, first, stop, add)
                row += 4


@inline
def multiply(c, c_row: int, a, a_row: int, step: int, b, panel: int, depth: int, columns: int, rows, add: int) -> None:
    """These rows of c (+)= a @ b, for b packed as a whole."""
    for first in range(0, max(depth, 1), CHUNK):
        stop = min(first + CHUNK, depth)
        multiply_chunk(c, c_row, a, a_row, step, b, panel, columns, rows, first, stop, add or first > 0)


# --- packing ---------------------------------------------------------------------------------------------------------


@inline
def pack_panel(packed, x, x_row: int, rows: int, columns: int) -> None:
    """A panel of rows of x: its first columns, as many as a tile has, and zeros where there are fewer."""
    w = v.lanes(packed)
    for part in range(VECTORS):
        mask, source, target = v.first(packed, columns - part * w), x + part * w, packed + part * w
        for row in range(rows):
            if columns >= (part + 1) * w:
                v.store(target, row * VECTORS * w, v.load(source, row * x_row))
            else:
                v.store(target, row * VECTORS * w, v.load_masked(source, row * x_row, mask, 0.0))


@inline
def pack_panel_transposed(packed, x, x_row: int, rows: int, columns: int) -> None:
    """`pack_panel` of the transpose of x. `packed` has room for whole blocks of half a vector."""
    w = v.lanes(packed)
    block, pitch = w // 2, VECTORS * w
    for column in range(0, pitch, block):
        for row in range(0, rows, block):
            target, source = packed + (row * pitch + column), x + (column * x_row + row)
            v.transpose_block_in(target, pitch, source, x_row, columns - column, rows - row)


@inline
def pack_right(packed, b, first: int, stop: int, column: int, columns: int) -> None:
    """The panels of a chunk of b, of some columns."""
    width = VECTORS * v.lanes(packed)
    for j in range(0, columns, width):
        target, source = packed + j * CHUNK, b.data + (first * b.row + (column + j) * b.column)
        if b.column == 1:
            pack_panel(target, source, b.row, stop - first, columns - j)
        else:
            pack_panel_transposed(target, source, b.column, stop - first, columns - j)


@inline
def pack_left(packed, a, first: int, stop: int, row: int, rows: int) -> tuple[int, int]:
    """A chunk of some rows of a, copied line by line as they lie; the elements from one row and number to the next."""
    source = a.data + (first * a.column + row * a.row)
    lines, length, pitch = (rows, stop - first, a.row) if a.column == 1 else (stop - first, rows, a.column)
    line = (CHUNK if a.column == 1 else BLOCK_ROWS) + SPARE
    for i in range(lines):
        write_same(packed + i * line, 0, length, 0, (source + i * pitch,), ())
    return (line, 1) if a.column == 1 else (1, line)


# --- whole products --------------------------------------------------------------------------------------------------


def space(lanes: int) -> tuple[int, int]:
    """The numbers that packed chunks of a and of b take in `product`."""
    return max(BLOCK_ROWS * (CHUNK + SPARE), CHUNK * (BLOCK_ROWS + SPARE)), BLOCK_PANELS * VECTORS * lanes * CHUNK


def product_of(pack: Callable[..., None]) -> Callable[..., None]:
    """c (+)= a @ b for a `Matrix` a, and for b whatever `pack` packs as `pack_right` does, from a column of it on.

    `left` and `right` is memory for chunks of them, see `space`.
    """
    inline(pack)

    @inline
    def multiply_blocks(
        c, c_row: int, a: Any, b: Any, sizes: Any, add: int, left, right, column: int = 0
    ) -> None:  # fmt: skip
        block = BLOCK_PANELS * VECTORS * v.lanes(right)
        for first in range(0, max(sizes.depth, 1), CHUNK):
            stop = min(first + CHUNK, sizes.depth)
            for j in range(0, sizes.columns, block):
                columns = min(block, sizes.columns - j)
                pack(right, b, first, stop, column + j, columns)
                for i in range(0, sizes.rows, BLOCK_ROWS):
                    rows = range(min(BLOCK_ROWS, sizes.rows - i))
                    a_row, step = pack_left(left, a, first, stop, i, rows.stop)
                    out, panel, adds = c + (i * c_row + j), CHUNK * VECTORS * v.lanes(right), add or first > 0
                    multiply_chunk(out, c_row, left, a_row, step, right, panel, columns, rows, 0, stop - first, adds)

    return multiply_blocks


product = product_of(pack_right)
