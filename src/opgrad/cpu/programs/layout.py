"""Chooses the layout of a shape, and cuts its loops into units of work.

rows        vectors run along the reduced axis, which is contiguous
columns     vectors run along the axes behind the reduced one: strip by strip, or in panels of neighbouring strips
transposed  rows too short for vectors: as many rows as a vector has lanes are transposed into columns
interleaved columns with few elements behind the reduced axis: together they are a row that is transposed
periodic    the same where that row is long: vectors run along it, and repeat the columns in their lanes
groups      short rows: as many at a time as a vector has lanes, so that the work for each row is done in one vector
split       few long rows: the blocks of a row are reduced by different threads, combined, and written by threads again

Layouts add up in different orders, so they give different last digits. The choice depends on shape, dtype and vector
width alone, and for few columns on gaps between their lines, so that results depend neither on the number of threads
nor on the size of a cache. The machine's cache only decides what is written past it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from opgrad.contract.signature import Operand, Problem
from opgrad.cpu.compiler.decorators import Kernel, interface_of, line_lanes, vector_bytes, vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows, Strips
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.runtime.plan import Step, ceil_div, shared_out, streams

SETS_BYTES: Final = 4096  # bytes between lines that share a set of a first-level cache of 64 sets
CROWDED: Final = 64  # lines of a column in one set of it, from which on strips fetch the same lines again and again
KEEP: Final = 1 << 17  # numbers, 512 KiB; the exponentials of a longer strip of columns are computed twice, not kept
# Elements of the longest row that is not split. One thread reduces and writes it, and the second time reads it from the
# last-level cache; a split row is read from memory. For 131,072 elements softmax took 0.23 ns an element unsplit and
# 0.31 split, softmax_grad 0.30 and 0.51.
LONGEST_ROW: Final = 1 << 18
SPLIT_FROM: Final = 1 << 17  # elements from which on two threads are faster than one
FEWEST_ROWS: Final = 8  # rows that are worth transposing or grouping
# Softmax, log-softmax and gradients of columns write past the last-level cache if their arrays are larger than the
# cache divided by this number. Other data lie in the cache, too, and a line that is fetched to be written displaces a
# line of the argument. With arrays of 16 MiB and a cache of 32, rows of 1,000 float32 took 0.13 ns an element instead
# of 0.16, rows of 128 took 0.21 instead of 0.27; with 8 MiB there was no difference. Rows of 16-bit elements gain
# nothing.
CACHE_PARTS: Final = 2
# Bytes of arrays from which on softmax and log-softmax choose the layout that is faster beyond the last-level cache. It
# is a constant and not the machine's cache size, since the layout decides the last digits.
LARGE: Final = 32 << 20
# Bytes of the longest row that is written through the cache. Its lines are fetched while the next row is computed. With
# non-temporal stores, a line that two rows share would be written twice. Rows of 1,000 bfloat16 took 0.11 ns an element
# through the cache, 0.12 past it, and 0.15 past it by way of a buffer; rows of 513 float32 took 0.15 and 0.21, but rows
# of 1,000 float32 0.21 and 0.17.
PLAIN_ROW: Final = 3072


@dataclass(frozen=True)
class Limits:
    """The row lengths, in elements, up to which rows are transposed, and up to which they are grouped."""

    transposed: int = 0
    grouped: int = 0


PERIODIC: Final = 2  # vectors of columns from which on strips are better than periods
PERIODS: Final = 4  # of the shortest columns that are computed in periods
LOSS: Final = Limits(transposed=64)
LOSS_ALONE: Final = Limits(transposed=96)  # more than LOSS, since no result is transposed back


def forward_limits(width: int, sixteen_bits: bool, large: bool, logarithm: bool) -> Limits:
    """The limits of softmax or log-softmax. large: whether the arrays are taken to lie in memory, not in a cache.

    In the cache, transposed rows of any length take 0.3 ns an element, grouped rows of 49 take 0.44 and of 128 0.26.
    Beyond it, on two threads and with registers of 64 bytes, transposed rows of 112 take 0.17 ns and of 150 0.19, in
    log-softmax 0.18; single rows take 0.19 and 0.15, in log-softmax 0.21.

    Groups save the work that is done once for each row. That work is a larger share where elements have 16 bits, whose
    arithmetic is short, and in log-softmax, which takes a logarithm. In the cache, log-softmax of rows of 256 float32
    took 0.25 ns an element grouped and 0.3 as rows, but softmax 0.25 and 0.23. Beyond the cache, groups gain less,
    since a group is not written while the next is computed, as transposed and single rows are. With registers of 32
    bytes, where arithmetic takes longer than memory, softmax of rows of 49 took 0.23 ns an element transposed and 0.34
    grouped, of 100 0.22 and 0.25, but of 128 0.45 as rows and 0.53 grouped (Zen 3); log-softmax of rows of 64 took 0.25
    transposed and 0.26 grouped, of 100 0.24 either way, of 128 0.60 as rows and 0.57 grouped, of 256 0.50 and 0.54.
    """
    if large and not sixteen_bits:
        if vector_bytes() == 64:
            return Limits(5 * width if logarithm else 7 * width // 2)
        return Limits(6 * width, 10 * width) if logarithm else Limits(7 * width)
    most = 5 if vector_bytes() == 64 else 8
    softmax, log_softmax = (24 if sixteen_bits else most, 24) if not large else (7, 12)
    return Limits(7 * width // 2, width * (log_softmax if logarithm else softmax))


def gradient_layout(problem: Problem, kernels: Mapping[str, Any]) -> str:
    """The layout of the gradients of softmax and log-softmax."""
    if problem.inner > 1:
        width = vector_lanes(precision(problem))
        return columns_layout(problem, *((8, 2048) if is_sixteen_bits(problem["y"]) else (width // 4, 16 * width)))
    return layout_of(problem, kernels, gradient_limits(problem))


def gradient_limits(problem: Problem) -> Limits:
    """The limits of gradients, in which little work is done once for each row.

    In the cache, rows of 17 float32 took 0.32 ns an element transposed and 0.33 as rows, rows of 24 took 0.25 and 0.22.
    Beyond it, rows of 24 took 0.26 and 0.30 with registers of 64 bytes, 0.29 and 0.28 with those of 32.
    """
    large = problem.bytes > LARGE
    return Limits(transposed=31 if is_sixteen_bits(problem["y"]) else 24 if large else 17)


def forward_layout(problem: Problem, kernels: Mapping[str, Any], logarithm: bool) -> str:
    """The layout of softmax, or log-softmax."""
    if problem.inner > 1:
        return columns_layout(problem, 8, 4096)
    large = weight(problem) > LARGE
    limits = forward_limits(vector_lanes(precision(problem)), is_sixteen_bits(problem["x"]), large, logarithm)
    return layout_of(problem, kernels, limits)


def weight(problem: Problem) -> int:
    """The bytes of softmax's arrays, times CACHE_PARTS for elements of more than 16 bits."""
    return problem.bytes * (1 if is_sixteen_bits(problem["x"]) else CACHE_PARTS)


def row_streams(problem: Problem, layout: str, result: str) -> bool:
    """Whether a result may be written past the cache.

    In the layout "rows" a row must be longer than PLAIN_ROW. Other layouts write several rows together.
    """
    return layout != "rows" or problem.n * problem.specs[result].dtype.itemsize > PLAIN_ROW


def gradient_streams(problem: Problem) -> bool:
    """Whether gradients write past the cache: columns from the same size of arrays on as softmax, rows from a larger
    one.

    A line of a column's result is visited for several strips. With non-temporal stores, 1000 x 4096 bfloat16 along axis
    0 took 0.18 ns an element instead of 0.39. Rows get slower by them, rows of 128 up to arrays of 30 MiB.
    """
    return streams(problem.bytes * (CACHE_PARTS if problem.inner > 1 else 1))


def is_sixteen_bits(operand: Operand) -> bool:
    return operand.dtype in ("float16", "bfloat16")


def precision(problem: Any) -> str:
    """The dtype in which the problem is computed."""
    dtypes = {operand.dtype for operand in problem.operands.values() if operand is not None}
    return "float64" if "float64" in dtypes else "float32"


def layout_of(problem: Problem, kernels: Collection[str], limits: Limits = Limits()) -> str:
    """The layout for the shape, among those that `kernels` names."""
    if problem.inner > 1:
        return "columns"
    if "split" in kernels and few(problem.outer, problem.n):
        return "split"
    many = problem.outer >= FEWEST_ROWS
    if many and problem.n <= limits.transposed:
        return "transposed"
    return "groups" if many and "groups" in kernels and problem.n <= limits.grouped else "rows"


def columns_layout(problem: Problem, columns: int, longest: int) -> str:
    """The layout of columns. Those without gaps are interleaved if there are at most `columns`, and make up rows of at
    most `longest` elements; else long ones are periodic, unless their lines are whole lines of the cache, which strips
    write past it. kernels/softmax/columns.py has the times behind these limits."""
    operands = {name: each for name, each in problem.operands.items() if each is not None}
    if any(each.n != problem.inner for each in operands.values()):
        return "columns"
    if problem.outer >= FEWEST_ROWS and problem.inner <= columns and problem.n * problem.inner <= longest:
        return "interleaved"
    width, items = vector_lanes(precision(problem)), {problem.specs[name].dtype.itemsize for name in operands}
    are_lines = all(problem.inner * item % CACHE_LINE == 0 for item in items)
    few_columns = problem.inner < PERIODIC * width and not are_lines
    return "periodic" if few_columns and problem.n >= PERIODS * width else "columns"


def few(rows: int, n: int) -> bool:
    """Whether rows are so few and long that each is split over threads. This depends on the shape alone."""
    return n > LONGEST_ROW or (rows < 8 and rows * n >= SPLIT_FROM)


@dataclass(frozen=True)
class Loops:
    """The units of work of a layout, and the arguments of all its kernels: sizes, and operands with their strides.

    lanes: the elements of the kernels' vectors, and the interface for which kernels are compiled.
    """

    units: int
    unit_bytes: float
    arguments: Mapping[str, Any]
    lanes: int
    interface: str

    def step(self, kernel: Kernel, **more: Any) -> Step:
        """The step that runs a kernel over all units."""
        return shared_out(kernel, self.units, self.unit_bytes, {**self.arguments, **more}, self.interface)


def loops_of(
    problem: Problem, layout: str, result: str = "", stream: bool | None = None, lanes: int = 0, **operands: Operand
) -> Loops:
    """The loops over a problem in this layout.

    result: that of which strips of columns are to be whole cache lines; such strips may begin before the first column.
    stream: whether the kernels write past the cache; by default, if the call's arrays do not fit into it.
    lanes: the elements of the kernels' vectors, if not the usual number.
    """
    stream = streams(problem.bytes) if stream is None else stream
    if not lanes:
        lanes = column_lanes(problem, result) if layout == "columns" and result else vector_lanes(precision(problem))
    units, sizes = units_of(problem, layout, lanes, spare_columns(problem, result, stream) if result else 0)
    if layout == "columns":
        strided: Any = {name: Columns(each, each.outer, each.n) for name, each in operands.items()}
    else:
        strided = {name: Rows(each, each.outer) for name, each in operands.items()}
    arguments = {"n": problem.n, "stream": stream, **sizes, **strided}
    return Loops(units, problem.bytes / max(units, 1), arguments, lanes, interface_of(lanes, precision(problem)))


def units_of(problem: Problem, layout: str, width: int, spare: int) -> tuple[int, dict[str, Any]]:
    """How many units there are, and the sizes that kernels need besides n. width: the lanes of a vector."""
    if layout == "columns":
        strips = ceil_div(problem.inner + spare, width)
        return problem.outer * strips, {"strips": Strips(strips, problem.inner)}
    if layout == "split":
        blocks = ceil_div(problem.n, BLOCK)
        return problem.outer * blocks, {"blocks": blocks}
    if layout in ("transposed", "groups", "interleaved"):
        return ceil_div(problem.outer, width), {"count": problem.outer, "inner": problem.inner}
    return problem.outer, {"inner": problem.inner}


def spare_columns(problem: Problem, result: str, stream: bool) -> int:
    """How many columns before the first one strips may begin, so that each strip of a result starts a cache line.

    stream: whether the kernels write past the cache, which alone makes them begin there.
    """
    return 2 * CACHE_LINE // problem.specs[result].dtype.itemsize - 1 if stream else 0


def column_lanes(problem: Problem, result: str) -> int:
    """The elements of the vectors in which columns are computed: a whole line of the result if arrays are large, or if
    its strips are lines.

    With registers of 32 bytes, softmax of 16 x 1000 x 56 x 56 along axis 1 took 12 ms instead of 44 in float16; in the
    cache softmax of 64 x 4096 bfloat16 along axis 0 took 0.15 ms instead of 0.25, softmax_grad 0.12 instead of 0.19,
    but of 64 x 100 x 33 along axis 1, whose strips share lines, 0.31 instead of 0.19.
    """
    dtype, itemsize = precision(problem), problem.specs[result].dtype.itemsize
    whole = problem[result].n * itemsize % CACHE_LINE == 0 or problem.bytes * CACHE_PARTS > LARGE
    return line_lanes(dtype, itemsize) if whole else vector_lanes(dtype)


def gradient_lanes(problem: Problem, layout: str) -> int:
    """The elements of the vectors in which gradients of rows are computed: those of one register if rows are short.

    The end of a row, which is loaded and stored by masks, is then shorter, and so is the sum over a vector's lanes:
    rows of 24 float32 took 0.21 ns an element instead of 0.26, with registers of 64 bytes rows of 100 took 0.13 instead
    of 0.16. Long rows are faster in two registers: 0.16 instead of 0.19.
    """
    usual = vector_lanes(precision(problem))
    return usual // 2 if layout == "rows" and problem.n < 8 * usual else 0


def is_crowded(problem: Problem, width: int) -> bool:
    """Whether a column's lines share so few sets of a cache that they do not stay in it, though a panel's buffer does.

    Softmax of 1000 x 4096 bfloat16 along axis 0 took 0.34 ns an element in panels, 0.60 in strips; of float32 0.37 and
    0.48, with registers of 32 bytes 0.5 and 0.64. There strips of bfloat16 are widened to whole lines: on Zen 3 these
    took 0.8 ns, panels 1.8. Where x came from memory, panels took 0.65 to 0.9 of the time. 8 x 128 x 32 x 32
    float32 along axis 1 took 0.38 and 0.57, but columns of 21 elements 1.2 times as long in panels. So did arrays
    beyond the cache with registers of 64 bytes: strips write one while they read the next.
    """
    itemsize = problem.specs["x"].dtype.itemsize
    crowded = problem.n * math.gcd(problem["x"].n * itemsize, SETS_BYTES) >= CROWDED * SETS_BYTES
    strip = line_lanes(precision(problem), itemsize)
    is_widened = strip > vector_lanes(precision(problem)) and strip * itemsize >= CACHE_LINE
    return crowded and not is_widened and keeps_column(problem.n, width) and not streams(problem.bytes)


def keeps_column(n: int, width: int) -> bool:
    """Whether the exponentials of a strip of columns are kept between its two passes."""
    return n * width <= KEEP
