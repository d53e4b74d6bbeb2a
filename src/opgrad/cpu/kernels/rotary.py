"""Rotary position embedding: each head of a token is a row, whose pairs are turned by the token's angles."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.indexing import named
from opgrad.cpu.kernels.loops.map import mapped_to_each, write_same


@mapped_to_each
def turn_halves(a: Vector, b: Vector, cos: Vector, sin: Vector, sign) -> tuple[Vector, Vector]:
    s = sin * sign
    return a * cos - b * s, b * cos + a * s


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
    rows: Units, tokens, heads, tokens_inside, size, half, batch_step, count, interleaved, sign: Float,
    x: Pointer, cos: Pointer, sin: Pointer, positions: Pointer, y: Pointer,
):  # fmt: skip
    """Turn rows by their angles times `sign`, 1 or -1. y may be x.

    tokens_inside: whether rows that follow each other are tokens, and otherwise heads. Of a row's `size` elements
    2 * half are turned. count: the rows of the tables if positions are given, else 0; then sequences begin `batch_step`
    rows apart.
    """
    s = v.number(y, sign)
    for row in rows:
        batch, rest = row // (tokens * heads), row % (tokens * heads)
        token = rest % tokens if tokens_inside else rest // heads
        angle = batch * batch_step + token
        if count:
            angle = int(named(positions, batch * tokens + token, count))  # float where there are no positions
        place = angle * half
        source, target = x + row * size, y + row * size
        if interleaved:
            _turn_neighbours(source, target, cos + place, sin + place, half, s)
        else:
            given = source, source + half, cos + place, sin + place
            turn_halves((target, target + half), 0, half, given, (s,))
        write_same(target, 2 * half, size, 0, (source,), ())
