"""Rows too short for vectors: as many as a vector has lanes are turned into columns."""

from typing import Any

from opgrad.cpu.native import inline
from opgrad.cpu.simd import lanes, load_one, store_one


@inline
def turn_in(tile: Any, x: Any, x_row: int, n: int, count: int) -> None:
    """tile[c, r] = x[r, c] for `count` rows; the other lanes are left as they are."""
    w = lanes(x)
    for r in range(count):
        for c in range(n):
            store_one(tile, c * w + r, load_one(x, r * x_row + c))


@inline
def turn_out(y: Any, y_row: int, tile: Any, n: int, count: int) -> None:
    w = lanes(y)
    for r in range(count):
        for c in range(n):
            store_one(y, r * y_row + c, load_one(tile, c * w + r))
