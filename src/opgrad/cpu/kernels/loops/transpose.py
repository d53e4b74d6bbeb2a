"""Transposes rows that are too short for vectors: as many rows as a vector has lanes become columns of a tile."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline


@inline
def transpose_in(tile, x, x_row: int, n: int, count: int) -> None:
    """tile[c, r] = x[r, c] for `count` rows; the other lanes become 0. A tile has room for whole blocks."""
    w = v.lanes(x)
    block = w // 2
    for r in range(0, w, block):
        for c in range(0, n, block):
            v.transpose_block_in(tile + (c * w + r), w, x + (r * x_row + c), x_row, count - r, n - c)


@inline
def transpose_out(y, y_row: int, tile, n: int, count: int) -> None:
    """y[r, c] = tile[c, r] for `count` rows."""
    w = v.lanes(y)
    block = w // 2
    for r in range(0, w, block):
        for c in range(0, n, block):
            v.transpose_block_out(y + (r * y_row + c), y_row, tile + (c * w + r), w, count - r, n - c)


def tile_size(n: int, width: int) -> int:
    """The numbers that a tile for rows of length n takes, rounded up to whole blocks."""
    block = width // 2
    return -(-n // block) * block * width


# The memory of a group: TILES tiles of width x width, then VECTORS vectors with a number for each row; the exponentials
# of the rows follow where a kernel keeps them.
TILES: Final = 3
VECTORS: Final = 4


def group_tiles(width: int) -> int:
    """The numbers that a group of as many rows as a vector has lanes takes besides its rows."""
    return (TILES * width + VECTORS) * width
