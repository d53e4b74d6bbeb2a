"""Vectors for kernels: the words in which the formulas of `opgrad.cpu` are written.

A `Pointer` parameter of a kernel knows the dtype in memory; `load` widens to the precision of the
computation (float32, or float64 where an operand is float64) and `store` rounds once. A vector has
`lanes(pointer)` elements: two native registers of the host's CPU. The usual operators work on vectors,
and on a vector and a number: & | ^ on integers and on masks, >> on integers, where it brings in zeros.
`opgrad.cpu.compiler.lowering` gives every name here its meaning.

In memory there may be float64, float32, float16, bfloat16, float8_e5m2 and float8_e4m3fn, which are written rounded to
nearest even; int8, uint8 and int32_number, written as the nearest integer, half to even, within the type's limits, 0
for NaN; and bool, a byte that is 0 or not. Elements of int64 and int32 stay integers and are only read as vectors.
"""

from typing import Any, TypeAlias

from opgrad.cpu.compiler.memory import _compiled_only
from opgrad.cpu.compiler.parameters import Float as Float
from opgrad.cpu.compiler.parameters import Pointer as Pointer
from opgrad.cpu.compiler.parameters import Private as Private
from opgrad.cpu.compiler.parameters import Units as Units

Vector: TypeAlias = Any
Mask: TypeAlias = Any


def at_byte(p: Any, offset: int) -> Any:
    """The pointer moved by `offset` bytes; `p + i` moves it by i elements."""
    _compiled_only()


def lanes(p: Any) -> int:
    """The number of elements in a vector of this pointer's kernel; a compile-time constant."""
    _compiled_only()


def load(p: Any, i: int) -> Vector:
    """Elements i, i+1, … as a vector."""
    _compiled_only()


def load_masked(p: Any, i: int, mask: Mask, fill: float) -> Vector:
    """The same where `mask` holds, without touching memory elsewhere; `fill` elsewhere."""
    _compiled_only()


def load_each(pointers: Any, i: int) -> Any:
    """`load` of each pointer in a tuple, as a tuple."""
    _compiled_only()


def load_each_masked(pointers: Any, i: int, mask: Mask, fill: float) -> Any:
    """`load_masked` of each pointer in a tuple, as a tuple."""
    _compiled_only()


def add_each(a: Any, b: Any) -> Any:
    """The sums of the vectors of two tuples, as a tuple."""
    _compiled_only()


def each_row(operands: Any, row: int) -> Any:
    """Where this row of each operand in a tuple of `Rows` begins, as a tuple."""
    _compiled_only()


def load_one(p: Any, i: int) -> Any:
    """Element i as a number."""
    _compiled_only()


def store(p: Any, i: int, v: Vector) -> None:
    """Write a vector to elements i, i+1, …"""
    _compiled_only()


def store_masked(p: Any, i: int, v: Vector, mask: Mask) -> None:
    """Write the lanes where `mask` holds."""
    _compiled_only()


def store_streaming(p: Any, i: int, v: Vector) -> None:
    """Write past the cache; element i must be aligned to a cache line."""
    _compiled_only()


def store_one(p: Any, i: int, x: float) -> None:
    """Write one number to element i."""
    _compiled_only()


def to_line(p: Any, i: int) -> int:
    """How many elements from i on to the next cache line, 0 if i starts one; -1 if no element does."""
    _compiled_only()


def transpose_block_in(tile: Any, stride: int, x: Any, row: int, rows: int, columns: int) -> None:
    """tile[c * stride + r] = x[r * row + c] for a block of half as many rows and columns as a vector has lanes.

    Only the first `rows` and `columns` of x are read; what has no source in the tile becomes 0.
    """
    _compiled_only()


def transpose_block_out(y: Any, row: int, tile: Any, stride: int, rows: int, columns: int) -> None:
    """y[r * row + c] = tile[c * stride + r] for the first `rows` and `columns` of such a block."""
    _compiled_only()


def address_of(p: Any) -> int:
    """The address that the pointer holds."""
    _compiled_only()


def prefetch(p: Any, i: int) -> None:
    """Ask for the cache lines of the vector at element i."""
    _compiled_only()


def full(p: Any, value: float) -> Vector:
    """A vector with `value` in every lane."""
    _compiled_only()


def like(v: Vector, value: float) -> Vector:
    """A vector like `v` with `value` in every lane."""
    _compiled_only()


def number(p: Any, value: float) -> Any:
    """`value` in the precision of the kernel."""
    _compiled_only()


def first(p: Any, count: int) -> Mask:
    """The mask of the first `count` lanes; none if it is negative, all if it is large."""
    _compiled_only()


def index(p: Any, i: int) -> Vector:
    """Integers i, i+1, … as wide as the vectors' elements."""
    _compiled_only()


def select(mask: Mask, a: Vector, b: Vector) -> Vector:
    """`a` where the mask holds, else `b`."""
    _compiled_only()


def maximum(a: Vector, b: Vector) -> Vector:
    """The larger of each pair; `b` where either is NaN."""
    _compiled_only()


def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """a * b + c, rounded once."""
    _compiled_only()


def round_even(v: Vector) -> Vector:
    """The nearest integer, ties to even."""
    _compiled_only()


def absolute(v: Vector) -> Vector:
    """|v|"""
    _compiled_only()


def sqrt(v: Vector) -> Vector:
    """The square root, rounded once."""
    _compiled_only()


def copy_sign(v: Vector, sign: Vector) -> Vector:
    """v with the sign of `sign`."""
    _compiled_only()


def scale_by_power(v: Vector, n: Vector) -> Vector:
    """v * 2**n for whole n; results below the normal range are rounded to denormals, not flushed."""
    _compiled_only()


def exponent_of(v: Vector) -> Vector:
    """e of v = m * 2**e with m in [sqrt(1/2), sqrt(2)), for positive normal v."""
    _compiled_only()


def mantissa_of(v: Vector) -> Vector:
    """m of v = m * 2**e with m in [sqrt(1/2), sqrt(2)), for positive normal v."""
    _compiled_only()


def progression(p: Any, start: int, step: int) -> Vector:
    """start, start + step, … as int64, a quarter as many as a vector of this pointer's kernel has lanes."""
    _compiled_only()


def word_product(a: Vector, b: int) -> Vector:
    """The 64-bit product of the lower 32 bits of each int64 of `a` and those of `b`, unsigned."""
    _compiled_only()


def interleave_words(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """The lower 32 bits of int64 vectors in turn: a[0], b[0], c[0], d[0], a[1], …"""
    _compiled_only()


def reduce_add(v: Vector) -> Any:
    """The sum of the lanes, pairwise."""
    _compiled_only()


def reduce_max(v: Vector) -> Any:
    """The largest lane; NaN lanes may or may not be ignored."""
    _compiled_only()


def power_of(v: Vector) -> Vector:
    """2**n for v = 1.5 * 2**23 + 127 + n (float64: 1.5 * 2**52 + 1023 + n), inside the normal range."""
    _compiled_only()


def reduce_add_wide(v: Vector, w: Vector) -> float:
    """The sum of the lanes of both, pairwise, in float64."""
    _compiled_only()


def first_lane(v: Vector) -> Any:
    """The number in the first lane."""
    _compiled_only()


def is_fine(p: Any) -> bool:
    """Whether elements have as many digits in memory as the precision of the kernel; a compile-time constant."""
    _compiled_only()
