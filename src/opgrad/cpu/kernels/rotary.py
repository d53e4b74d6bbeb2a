"""Rotary position embedding: each head of a token is a row, whose pairs are turned by the token's angles."""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.gather import named
from opgrad.cpu.kernels.loops.map import mapped_to_each, write_same


class HeadRows(NamedTuple):
    """How rows follow each other: `inner` of them lie within one step of the axis before; `tokens_inside`: they are
    tokens, and otherwise heads. A row has `size` elements, of which 2 * `half` are turned."""

    tokens: int
    heads: int
    tokens_inside: int
    size: int
    half: int


class Angles(NamedTuple):
    """Where a token's angles stand: `batch_step` rows from one sequence to the next, or the row that `positions` names.

    count: the rows of the tables if positions are given, else 0.
    """

    batch_step: int
    count: int


@inline
def _angle_row(row: int, heads, angles, positions) -> int:
    """The row of the tables that has the angles of a row of x."""
    per_sequence = heads.tokens * heads.heads
    batch, rest = row // per_sequence, row % per_sequence
    token = rest % heads.tokens if heads.tokens_inside else rest // heads.heads
    if angles.count:
        return int(named(positions, batch * heads.tokens + token, angles.count))  # float where there are no positions
    return batch * angles.batch_step + token


def _turn(a: Vector, b: Vector, cos: Vector, sin: Vector, sign) -> tuple[Vector, Vector]:
    s = sin * sign
    return a * cos - b * s, b * cos + a * s


turn_halves = mapped_to_each(_turn)  # pairs are x[i] and x[half + i]


@inline
def _turn_neighbours(x, y, cos, sin, half: int, sign) -> None:
    """Pairs are x[2 * i] and x[2 * i + 1]."""
    for i in range(half):
        c, s = v.load_one(cos, i), v.load_one(sin, i) * sign
        a, b = v.load_one(x, 2 * i), v.load_one(x, 2 * i + 1)
        v.store_one(y, 2 * i, a * c - b * s)
        v.store_one(y, 2 * i + 1, b * c + a * s)


@kernel
def turn(
    rows: Units, heads: HeadRows, angles: Angles, interleaved, sign: Float, x: Pointer, cos: Pointer, sin: Pointer,
    positions: Pointer, y: Pointer,
):  # fmt: skip
    """Turn rows by their angles times `sign`, 1 or -1. y may be x."""
    s = v.number(y, sign)
    for row in rows:
        place = _angle_row(row, heads, angles, positions) * heads.half
        source, target = x + row * heads.size, y + row * heads.size
        if interleaved:
            _turn_neighbours(source, target, cos + place, sin + place, heads.half, s)
        else:
            given = source, source + heads.half, cos + place, sin + place
            turn_halves((target, target + heads.half), 0, heads.half, given, (s,))
        write_same(target, 2 * heads.half, heads.size, 0, (source,), ())
