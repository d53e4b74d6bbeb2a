"""Vectors for kernels: the words in which the formulas of `opgrad.cpu` are written, as `v.load`, `v.fma`, `v.select`.

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

from opgrad.cpu.compiler import only_compiled
from opgrad.cpu.compiler.parameters import Float as Float
from opgrad.cpu.compiler.parameters import Pointer as Pointer
from opgrad.cpu.compiler.parameters import Private as Private
from opgrad.cpu.compiler.parameters import Units as Units

Vector: TypeAlias = Any
Mask: TypeAlias = Any

# --- pointers ------------------------------------------------------------------------------------------------------


def lanes(p: Any) -> int: ...  # the elements of a vector of this pointer's kernel; a compile-time constant
def line(p: Any) -> int: ...  # the elements of a cache line; a compile-time constant
def is_fine(p: Any) -> bool: ...  # elements have as many digits in memory as in the computation; compile-time constant
def at_byte(p: Any, offset: int) -> Any: ...  # moved by `offset` bytes; `p + i` moves by i elements
def address_of(p: Any) -> int: ...
def to_line(p: Any, i: int) -> int: ...  # elements from i to the next cache line, 0 if i starts one; -1 if none does
def prefetch(p: Any, i: int) -> None: ...  # asks for the cache lines of the vector at element i
def prefetch_line(p: Any, i: int) -> None: ...  # asks for the cache line of element i
def each_row(operands: Any, row: int) -> Any: ...  # where this row of each `Rows` in a tuple begins, as a tuple


# --- loads and stores ----------------------------------------------------------------------------------------------


def load(p: Any, i: int) -> Vector: ...  # elements i, i+1, …
# The same where `mask` holds, without touching memory elsewhere; `fill` elsewhere.
def load_masked(p: Any, i: int, mask: Mask, fill: float) -> Vector: ...
def load_each(pointers: Any, i: int) -> Any: ...  # `load` of each pointer in a tuple, as a tuple
def load_each_masked(pointers: Any, i: int, mask: Mask, fill: float) -> Any: ...
def load_one(p: Any, i: int) -> Any: ...  # element i as a number
def load_one_each(pointers: Any, i: int) -> Any: ...  # `load_one` of each pointer in a tuple, as a tuple
def store(p: Any, i: int, v: Vector) -> None: ...  # to elements i, i+1, …
def store_masked(p: Any, i: int, v: Vector, mask: Mask) -> None: ...  # the lanes where `mask` holds
def store_each(pointers: Any, i: int, vectors: Any) -> None: ...  # `store` of each vector to the pointer of its place
def store_each_masked(pointers: Any, i: int, vectors: Any, mask: Mask) -> None: ...
def store_streaming(p: Any, i: int, v: Vector) -> None: ...  # past the cache; element i must be aligned to a cache line
def store_one(p: Any, i: int, x: float) -> None: ...
def store_one_each(pointers: Any, i: int, numbers: Any) -> None: ...  # each number to the pointer of its place


# --- transposing a block of half as many rows and columns as a vector has lanes ------------------------------------


# tile[c * stride + r] = x[r * row + c]; only the first `rows` and `columns` of x are read, the others become 0.
def transpose_block_in(tile: Any, stride: int, x: Any, row: int, rows: int, columns: int) -> None: ...
# y[r * row + c] = tile[c * stride + r] for the first `rows` and `columns`.
def transpose_block_out(y: Any, row: int, tile: Any, stride: int, rows: int, columns: int) -> None: ...


# --- vectors and masks from numbers --------------------------------------------------------------------------------


def full(p: Any, value: float) -> Vector: ...  # `value` in every lane
def full_each(pointers: Any, value: float) -> Any: ...  # `full` for each pointer in a tuple, as a tuple
def like(v: Vector, value: float) -> Vector: ...  # the same for a vector like `v`
def number(p: Any, value: float) -> Any: ...  # `value` in the precision of the kernel
def first(p: Any, count: int) -> Mask: ...  # the first `count` lanes; none if it is negative, all if it is large
def index(p: Any, i: int) -> Vector: ...  # integers i, i+1, … as wide as the vectors' elements


# --- arithmetic ----------------------------------------------------------------------------------------------------


def select(mask: Mask, a: Vector, b: Vector) -> Vector: ...  # `a` where the mask holds, else `b`
def maximum(a: Vector, b: Vector) -> Vector: ...  # `b` where either is NaN
def fma(a: Vector, b: Vector, c: Vector) -> Vector: ...  # a * b + c, rounded once
# The polynomial with these coefficients, of the highest power first, by Horner's scheme: an fma for each.
def polynomial(v: Vector, coefficients: tuple[float, ...]) -> Vector: ...
def round_even(v: Vector) -> Vector: ...  # the nearest integer, ties to even
def absolute(v: Vector) -> Vector: ...
def sqrt(v: Vector) -> Vector: ...  # rounded once
def copy_sign(v: Vector, sign: Vector) -> Vector: ...  # v with the sign of `sign`
def add_each(a: Any, b: Any) -> Any: ...  # the sums of the vectors of two tuples, as a tuple
# factors[r] * v + sums[r] for each r, rounded once, as a tuple; factors are numbers or vectors.
def add_products(sums: Any, factors: Any, v: Vector) -> Any: ...


# --- powers of two: v = m * 2**e with m in [sqrt(1/2), sqrt(2)) ----------------------------------------------------


def scale_by_power(
    v: Vector, n: Vector
) -> Vector: ...  # v * 2**n for whole n; denormal results are rounded, not flushed
def scales_at_once(v: Vector) -> bool: ...  # whether that is one instruction; a compile-time constant
def exponent_of(v: Vector) -> Vector: ...  # e, for positive normal v
def mantissa_of(v: Vector) -> Vector: ...  # m, for positive normal v
# 2**n for v = 1.5 * 2**23 + 127 + n (float64: 1.5 * 2**52 + 1023 + n), inside the normal range.
def power_of(v: Vector) -> Vector: ...


# --- one number of all lanes ---------------------------------------------------------------------------------------


def first_lane(v: Vector) -> Any: ...
def reduce_add(v: Vector) -> Any: ...  # the sum, pairwise
def reduce_add_each(vectors: Any) -> Any: ...  # `reduce_add` of each vector in a tuple, as a tuple
def reduce_add_wide(v: Vector, w: Vector) -> float: ...  # the sum of the lanes of both, pairwise, in float64
def reduce_max(v: Vector) -> Any: ...  # NaN lanes may or may not be ignored


# --- 64-bit integers, for random numbers ---------------------------------------------------------------------------


def progression(p: Any, start: int, step: int) -> Vector: ...  # start, start + step, …: a quarter as many as lanes
def word_product(a: Vector, b: int) -> Vector: ...  # the 64-bit product of the lower 32 bits of both, unsigned
# The lower 32 bits of each by turns: a[0], b[0], c[0], d[0], a[1], …
def interleave_words(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector: ...


only_compiled(globals())
