"""Operations on vectors, of which kernels are made: `v.load`, `v.fma`, `v.select` (with this module imported as `v`).

A parameter of a kernel that is annotated as `Pointer` knows the dtype in memory. `load` converts elements to the
precision of the computation, which is float32, or float64 where an operand is float64. `store` rounds them once to the
dtype in memory. A vector has `lanes(pointer)` elements, which fill two registers of the host's CPU. Python's operators
work on two vectors, and on a vector and a number. The operators & | ^ work on integers and on masks; >> works on
integers, and brings in zeros. The modules of `opgrad.cpu.compiler.lowering` give every function here its meaning.

In memory there may be float64, float32, float16, bfloat16, float8_e5m2 and float8_e4m3fn, to which results are rounded
to nearest even. There may be int8, uint8 and int32_number: a result becomes the nearest integer, half to even, within
the limits of the type, and NaN becomes 0. A bool is a byte that is 0 or not. Elements of int64 and int32 stay integers,
and are only read as vectors.
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


def lanes(p: Any) -> int: ...  # how many elements a vector of this kernel has; a compile-time constant
def line(p: Any) -> int: ...  # how many elements a cache line has; a compile-time constant
# Whether elements have as many digits in memory as in the computation; a compile-time constant.
def is_fine(p: Any) -> bool: ...
def at_byte(p: Any, offset: int) -> Any: ...  # the pointer moved by `offset` bytes; `p + i` moves it by i elements
def address_of(p: Any) -> int: ...
# How many elements lie between i and the next start of a cache line, 0 if i starts one; -1 if no element starts one.
def to_line(p: Any, i: int) -> int: ...
def prefetch(p: Any, i: int) -> None: ...  # fetch the cache lines of the vector at element i
def prefetch_line(p: Any, i: int) -> None: ...  # fetch the cache line of element i
def each_row(operands: Any, row: int) -> Any: ...  # a tuple of pointers to this row of each `Rows` in a tuple


# --- loads and stores ----------------------------------------------------------------------------------------------


def load(p: Any, i: int) -> Vector: ...  # the vector of elements i, i+1, …
# The same where `mask` holds; elsewhere `fill`, and memory is not touched.
def load_masked(p: Any, i: int, mask: Mask, fill: float) -> Vector: ...
def load_each(pointers: Any, i: int) -> Any: ...  # a tuple: `load` of each pointer in a tuple
def load_each_masked(pointers: Any, i: int, mask: Mask, fill: float) -> Any: ...
def load_one(p: Any, i: int) -> Any: ...  # element i as a number
def load_one_each(pointers: Any, i: int) -> Any: ...  # a tuple: `load_one` of each pointer in a tuple
def store(p: Any, i: int, v: Vector) -> None: ...  # write the vector to elements i, i+1, …
def store_masked(p: Any, i: int, v: Vector, mask: Mask) -> None: ...  # write the lanes where `mask` holds
def store_each(pointers: Any, i: int, vectors: Any) -> None: ...  # `store` each vector to the pointer at its place
def store_each_masked(pointers: Any, i: int, vectors: Any, mask: Mask) -> None: ...
def store_streaming(p: Any, i: int, v: Vector) -> None: ...  # past the cache; element i must start a cache line
def store_one(p: Any, i: int, x: float) -> None: ...
# `store_one` each number to the pointer at its place.
def store_one_each(pointers: Any, i: int, numbers: Any) -> None: ...


# --- transposing a block of half as many rows and columns as a vector has lanes ------------------------------------


# tile[c * stride + r] = x[r * row + c]. Only the first `rows` and `columns` of x are read; the other elements become 0.
def transpose_block_in(tile: Any, stride: int, x: Any, row: int, rows: int, columns: int) -> None: ...
# y[r * row + c] = tile[c * stride + r] for the first `rows` and `columns`.
def transpose_block_out(y: Any, row: int, tile: Any, stride: int, rows: int, columns: int) -> None: ...


# --- vectors and masks from numbers --------------------------------------------------------------------------------


def full(p: Any, value: float) -> Vector: ...  # a vector with `value` in every lane
def full_each(pointers: Any, value: float) -> Any: ...  # a tuple: `full` for each pointer in a tuple
def like(v: Vector, value: float) -> Vector: ...  # the same for a vector of the type of `v`
def number(p: Any, value: float) -> Any: ...  # `value` in the precision of the kernel
# True in the first `count` lanes: in none if it is negative, in all if it is large.
def first(p: Any, count: int) -> Mask: ...
def index(p: Any, i: int) -> Vector: ...  # the integers i, i+1, …, as wide as the elements of vectors


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
def interleave(a: Vector, b: Vector) -> Any: ...  # a tuple of two vectors: a[0], b[0], a[1], b[1], …
def add_each(a: Any, b: Any) -> Any: ...  # a tuple: the sums of the vectors of two tuples
# A tuple: factors[r] * v + sums[r] for each r, rounded once; factors are numbers or vectors.
def add_products(sums: Any, factors: Any, v: Vector) -> Any: ...


# --- powers of two: v = m * 2**e with m in [sqrt(1/2), sqrt(2)) ----------------------------------------------------


# v * 2**n for whole n; denormal results are rounded, not flushed.
def scale_by_power(v: Vector, n: Vector) -> Vector: ...
def scales_at_once(v: Vector) -> bool: ...  # whether `scale_by_power` is one instruction; a compile-time constant
def exponent_of(v: Vector) -> Vector: ...  # e, for positive normal v
def mantissa_of(v: Vector) -> Vector: ...  # m, for positive normal v
# 2**n for v = 1.5 * 2**23 + 127 + n (float64: 1.5 * 2**52 + 1023 + n), inside the normal range.
def power_of(v: Vector) -> Vector: ...


# --- one number of all lanes ---------------------------------------------------------------------------------------


def first_lane(v: Vector) -> Any: ...  # the number in the first lane
def reduce_add(v: Vector) -> Any: ...  # the sum of the lanes, added pairwise
def reduce_add_each(vectors: Any) -> Any: ...  # a tuple: `reduce_add` of each vector in a tuple
def reduce_add_wide(v: Vector, w: Vector) -> float: ...  # the sum of the lanes of both, pairwise, in float64
def reduce_max(v: Vector) -> Any: ...  # the largest lane; lanes with NaN may or may not be ignored


# --- 64-bit integers, for random numbers ---------------------------------------------------------------------------


# start, start + step, …; a quarter as many as a vector has lanes.
def progression(p: Any, start: int, step: int) -> Vector: ...
def word_product(a: Vector, b: int) -> Vector: ...  # the 64-bit product of the lower 32 bits of both, unsigned
# The lower 32 bits of the lanes of each vector by turns: a[0], b[0], c[0], d[0], a[1], …
def interleave_words(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector: ...


only_compiled(globals())

# Operations on tuples, by what they do with each element, and with each pair of a pointer and a value.
ON_EACH = {
    "load": "load_each", "load_masked": "load_each_masked", "load_one": "load_one_each", "full": "full_each",
    "reduce_add": "reduce_add_each",
}  # fmt: skip
ON_PAIRS = {"store": "store_each", "store_masked": "store_each_masked", "store_one": "store_one_each"}
