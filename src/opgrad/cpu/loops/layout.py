"""Which layout a shape asks for, and how its loops are cut into units of work.

rows        vectors run along the reduced axis, which is contiguous
columns     vectors run along the axes behind the reduced one
transposed  rows too short for vectors: as many rows as a vector has lanes are transposed into columns
groups      short rows: as many at a time as a vector has lanes, so that what each takes is done for all at once
split       few long rows: blocks of a row are reduced apart, combined, and written apart

The choice depends on shape, dtype and vector width alone: layouts add up in different orders, and results depend
neither on the number of threads nor on the size of a cache. The machine's cache decides what is written past it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opgrad.contract.problem import Operand, Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows, Strips
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.program import Step, shared_out

KEEP: Final = 1 << 17  # numbers, 512 KiB: the exponentials of a longer strip of columns are computed twice, not kept
# Elements of a row that one thread reduces and writes: from the last-level cache it reads them a second time faster
# than a split row from memory. 131,072 took 0.23 ns an element instead of 0.31, softmax_grad 0.30 instead of 0.51.
LONGEST_ROW: Final = 1 << 18
SPLIT_FROM: Final = 1 << 17  # elements: two threads gain from here on
BLOCK: Final = 1 << 14  # elements of a long row that are added up in vectors: a unit where rows are split
FEWEST_ROWS: Final = 8  # rows that are worth transposing or grouping
# Softmax and log-softmax, and gradients of columns, write past the last-level cache where their arrays take more than
# one part in this many of it: others keep data there, too, and a line that is fetched to be written pushes out one of
# the argument. With 16 MiB of 32, rows of 1,000 float32 took 0.13 ns an element instead of 0.16, of 128 0.21 instead of
# 0.27; with 8 MiB as much either way. Rows of 16 bits gain nothing.
CACHE_PARTS: Final = 2
# Bytes of arrays from which on softmax and log-softmax choose the layout that is faster beyond the last-level cache;
# a constant, since the layout decides the last digits.
LARGE: Final = 32 << 20
# Bytes of a row up to which it is written through the cache, whose lines are then fetched first, while the next is
# computed: past the cache the line that two rows share is written twice. Rows of 1,000 bfloat16 took 0.11 ns an element
# instead of 0.12, or 0.15 by way of a buffer, of 513 float32 0.15 instead of 0.21; of 1,000 0.21 instead of 0.17.
PLAIN_ROW: Final = 3072


@dataclass(frozen=True)
class Limits:
    """The row lengths, in elements, up to which rows are transposed, and up to which they are grouped."""

    transposed: int = 0
    grouped: int = 0


LOSS: Final = Limits(transposed=64)
LOSS_ALONE: Final = Limits(transposed=96)  # nothing is transposed back


# Vectors of the longest row of softmax and of log-softmax that is grouped, by whether elements have 16 bits and whether
# the problem is large. The arithmetic of 16-bit rows is short, and a row's logarithm long, so what is done once
# for a row counts more: in the cache log-softmax of 256 float32 took 0.25 ns an element instead of 0.3, softmax 0.25
# instead of 0.23. Beyond it transposed rows and single ones are written while the next are computed, groups are not.
GROUPED: Final[Mapping[tuple[bool, bool], tuple[int, int]]] = {
    (False, False): (5, 24),
    (False, True): (0, 0),
    (True, False): (24, 24),
    (True, True): (7, 12),
}


def forward_limits(width: int, sixteen_bits: bool, large: bool, logarithm: bool) -> Limits:
    """Those of softmax, or log-softmax; `large`: the arrays are laid out as for memory, not for a cache.

    In the cache transposed rows of any length take 0.3 ns an element, grouped ones of 49 0.44, of 128 0.26. Beyond it,
    on two threads, 0.17 to 0.22; rows of 129 took 0.24 by themselves, and of 196 less than transposed, 0.21 for 0.23.
    """
    transposed = 5 * width if large and not sixteen_bits else 7 * width // 2
    return Limits(transposed, GROUPED[sixteen_bits, large][logarithm] * width)


def gradient_limits(sixteen_bits: bool) -> Limits:
    """Those of their gradients, where what each row takes is little.

    Rows of 20 float32 took 0.3 ns an element transposed and 0.4 as rows where their arrays were in the cache, and 0.58
    and 0.35 where they were not.
    """
    return Limits(transposed=31 if sixteen_bits else 16)


def forward_layout(problem: Problem, kernels: Mapping[str, Any], logarithm: bool) -> str:
    """The layout of softmax, or log-softmax."""
    large = _weight(problem) > LARGE
    limits = forward_limits(vector_lanes(precision(problem)), is_sixteen_bits(problem["x"]), large, logarithm)
    return layout_of(problem, kernels, limits)


def forward_streams(problem: Problem) -> bool:
    """Whether softmax and log-softmax write past the cache."""
    return partition.streams(_weight(problem))


def _weight(problem: Problem) -> int:
    """The bytes of softmax's arrays, times the part of a cache that they may take."""
    return problem.bytes * (1 if is_sixteen_bits(problem["x"]) else CACHE_PARTS)


def row_streams(problem: Problem, layout: str, result: str) -> bool:
    """Whether rows of a result are written past the cache that would not be written together."""
    return layout != "rows" or problem.n * problem.specs[result].dtype.itemsize > PLAIN_ROW


def gradient_streams(problem: Problem) -> bool:
    """Whether gradients write past the cache: columns from the same size on, since their lines are visited anew.

    1000 x 4096, axis 0, bfloat16 took 0.18 ns an element instead of 0.39. Rows lose by it, those of 128 up to 30 MiB.
    """
    return partition.streams(problem.bytes * (CACHE_PARTS if problem.inner > 1 else 1))


def is_sixteen_bits(operand: Operand) -> bool:
    return operand.dtype in ("float16", "bfloat16")


def in_place_limits(width: int) -> Limits:
    """Those of kernels on a buffer, which holds numbers of 32 or 64 bits whatever the call's dtypes are."""
    return Limits(3 * width // 4, 2 * width)


def precision(problem: Any) -> str:
    """The dtype in which the problem is computed."""
    dtypes = {operand.dtype for operand in problem.operands.values() if operand is not None}
    return "float64" if "float64" in dtypes else "float32"


def layout_of(problem: Problem, kernels: Mapping[str, Any], limits: Limits = Limits()) -> str:
    """The layout that the shape asks for, among those that there are kernels for."""
    if problem.inner > 1:
        return "columns"
    if "split" in kernels and few(problem.outer, problem.n):
        return "split"
    many = problem.outer >= FEWEST_ROWS
    if many and problem.n <= limits.transposed:
        return "transposed"
    return "groups" if many and problem.n <= limits.grouped else "rows"


def few(rows: int, n: int) -> bool:
    """Whether rows are so few and long that each is worth splitting over threads; depends on the shape alone."""
    return n > LONGEST_ROW or (rows < 8 and rows * n >= SPLIT_FROM)


@dataclass(frozen=True)
class Loops:
    """The units of work of a layout, and what all its kernels are given: sizes, and operands with their strides."""

    units: int
    unit_bytes: float
    arguments: Mapping[str, Any]

    def step(self, kernel: Kernel, **more: Any) -> Step:
        """The step that runs a kernel over all units."""
        return shared_out(kernel, self.units, self.unit_bytes, {**self.arguments, **more})


def loops_of(problem: Problem, layout: str, spare: int = 0, stream: bool | None = None, **operands: Operand) -> Loops:
    """The loops over a problem in this layout; strips of columns may begin up to `spare` columns before the first.

    `stream`: whether they write past the cache; by default if the call's arrays do not fit into it.
    """
    units, sizes = _units(problem, layout, vector_lanes(precision(problem)), spare)
    if layout == "columns":
        strided: Any = {name: Columns(each, each.outer, each.n) for name, each in operands.items()}
    else:
        strided = {name: Rows(each, each.outer) for name, each in operands.items()}
    stream = partition.streams(problem.bytes) if stream is None else stream
    return Loops(units, problem.bytes / max(units, 1), {"n": problem.n, "stream": stream, **sizes, **strided})


def _units(problem: Problem, layout: str, width: int, spare: int) -> tuple[int, dict[str, Any]]:
    """How many units there are, and the sizes that kernels need beside n, with vectors of `width` lanes."""
    if layout == "columns":
        strips = partition.count(problem.inner + spare, width)
        return problem.outer * strips, {"strips": Strips(strips, problem.inner)}
    if layout == "split":
        blocks = partition.count(problem.n, BLOCK)
        return problem.outer * blocks, {"blocks": blocks}
    if layout in ("transposed", "groups"):
        return partition.count(problem.outer, width), {"count": problem.outer}
    return problem.outer, {}


def spare_columns(problem: Problem, result: str, stream: bool | None = None) -> int:
    """By how many columns strips may begin before the first, for a result whose strips shall start cache lines.

    `stream` as in `loops_of`.
    """
    if not (partition.streams(problem.bytes) if stream is None else stream):
        return 0
    return 2 * partition.CACHE_LINE // problem.specs[result].dtype.itemsize - 1


def keeps_column(n: int, width: int) -> bool:
    """Whether the exponentials of a strip of columns are kept."""
    return n * width <= KEEP
