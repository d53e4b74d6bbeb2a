"""Where the elements of a tile lie in operands of any strides, and how they are read and written.

Rows lie anywhere: an operand has loops of its own for the axes before, on and behind the reduced ones, as few as its
strides allow. A loop's size and stride are numbers that the kernel is given; how many there are it is compiled for.
An operand that does not move along one of the three is read once for all elements that differ in that alone.

Functions in kernels take the call, whose first items are the pointers and the numbers of its operands, the elements of
a tile (`at`), an operand's slot, and the constants of the kernel (`opgrad.cuda.fused.Constants`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import triton
import triton.language as tl

from opgrad.contract import Spec, arrangement
from opgrad.contract.signature import Operand, Problem
from opgrad.cuda import numbers as formats
from opgrad.cuda.numbers import decoded, encoded
from opgrad.cuda.regimes import WIDE
from opgrad.cuda.rows import columns_from, samples_of

# An operand's view: its format, then where its loops are among the numbers, and how many.
FORMAT, OUTER, OUTER_LOOPS, ALONG, ALONG_LOOPS, INNER, INNER_LOOPS = map(tl.constexpr, range(7))
ABSENT = (-1, 0, 0, 0, 0, 0, 0)

FORMATS = {
    "bool": formats.BOOL.value,
    "float8_e5m2": formats.FLOAT8_E5M2.value,
    "float8_e4m3fn": formats.FLOAT8_E4M3FN.value,
}


# --- in kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of(first, samples, inner, C: tl.constexpr):
    """The rows of a tile, each [rows, 1]: their indices before and behind the reduced axes, and whether they exist."""
    sample, exists = samples_of(first, samples, C.rows)
    return (sample // inner)[:, None], (sample % inner)[:, None], exists[:, None]


@triton.jit
def tile(rows, start, n, C: tl.constexpr):
    """The elements of a tile: its rows' indices, its columns, which of both exist, and the first column, `start`."""
    k = columns_from(start, C.block, C.index)
    return rows[0], rows[1], k, rows[2], k < n // C.vector * C.vector, tl.full([1, 1], start, C.index)


@triton.jit
def strided(index, numbers, FIRST: tl.constexpr, LOOPS: tl.constexpr):
    """How far from the first element one lies whose index in these loops this is."""
    distance = tl.zeros_like(index)
    for loop in tl.static_range(LOOPS - 1, -1, -1):
        if loop > 0:
            size = numbers[FIRST + 2 * loop]
            rest = index // size
            distance += (index - rest * size) * numbers[FIRST + 2 * loop + 1]
            index = rest
        else:
            distance += index * numbers[FIRST + 1]
    return distance


@triton.jit
def offset_of_rows(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Where an operand's rows of a tile begin, in elements; [1, 1] if that is the same for all."""
    offset = tl.zeros([1, 1], tl.int64)
    if C.views[SLOT][OUTER_LOOPS] > 0:
        offset = offset + strided(at[0], call[1], C.views[SLOT][OUTER], C.views[SLOT][OUTER_LOOPS])
    if C.views[SLOT][INNER_LOOPS] > 0:
        offset = offset + strided(at[1], call[1], C.views[SLOT][INNER], C.views[SLOT][INNER_LOOPS])
    return offset


@triton.jit
def offset_of(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Where an operand's elements of a tile lie."""
    offset = offset_of_rows(call, at, SLOT, C)
    if C.views[SLOT][ALONG_LOOPS] > 0:
        offset = offset + strided(at[2], call[1], C.views[SLOT][ALONG], C.views[SLOT][ALONG_LOOPS])
    return offset


@triton.jit
def pointers_of(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Pointers to an operand's elements of a tile, and which of them exist."""
    row = offset_of_rows(call, at, SLOT, C)
    exists = tl.full([1, 1], 1, tl.int1)
    if C.views[SLOT][OUTER_LOOPS] + C.views[SLOT][INNER_LOOPS] > 0:
        exists = exists & at[3]
    if C.views[SLOT][ALONG_LOOPS] > 0:
        # By this division the compiler sees that rows begin at whole vectors.
        column = strided(at[2], call[1], C.views[SLOT][ALONG], C.views[SLOT][ALONG_LOOPS])
        found = call[0][SLOT] + row // C.vector * C.vector + column
        exists = exists & at[4]
    else:
        found = call[0][SLOT] + row
    return found, exists


@triton.jit
def read(call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """An operand's elements of a tile as float32 or float64, 0 where none exist."""
    found, exists = pointers_of(call, at, SLOT, C)
    return decoded(tl.load(found, mask=exists, other=0), C.views[SLOT][FORMAT], C.number)


@triton.jit
def write(values, call, at, SLOT: tl.constexpr, C: tl.constexpr):
    """Store a result's elements of a tile, rounded to its dtype."""
    found, exists = pointers_of(call, at, SLOT, C)
    tl.store(found, encoded(values, C.views[SLOT][FORMAT], found.dtype.element_ty), mask=exists)


# --- for kernel functions --------------------------------------------------------------------------------------------


@dataclass
class Views:
    """The operands of a kernel by slot: pointers, the numbers of their loops, their views.

    The loops follow the memory order of the operand `first`.
    """

    problem: Problem
    first: str
    numbers: list[int] = field(default_factory=list)
    pointers: list[Operand] = field(default_factory=list)
    views: list[tuple[int, ...]] = field(default_factory=list)
    aligned: int = 16  # elements; rows of all operands that move along them begin at multiples of it
    wide: bool = False  # whether offsets inside a row need 64 bits

    def __post_init__(self) -> None:
        if self.problem.inner > 1:
            self.aligned = 1
        self.aligned = math.gcd(self.aligned, self.problem.n)

    def add(self, name: str) -> int:
        """The slot of an operand, which may not have been given."""
        spec = self.problem.specs.get(name)
        if spec is None:
            self.pointers.append(self.pointers[0])  # as it is added: older devices know no float8, not even by name
            self.views.append(ABSENT)
        else:
            self._add(name, spec.shape, _strides(spec, self.problem.orders[name]))
        return len(self.views) - 1

    def add_offsets(self, name: str) -> int:
        """The slot of an operand that is itself not read; its offsets are the elements' in C order."""
        shape = self.problem.specs[self.first].shape
        self._add(name, shape, arrangement.contiguous(shape, tuple(range(len(shape))), 1))
        return len(self.views) - 1

    def _add(self, name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        operand = self.problem[name]
        number = FORMATS.get(operand.dtype, formats.PLAIN.value)
        self.pointers.append(replace(operand, dtype="uint8") if number else operand)
        loops = [_moving(arrangement.steps(shape, axes, strides)) for axes in self._groups()]
        view = [number]
        for group in loops:
            view += [len(self.numbers), len(group)]
            self.numbers += [each for loop in group for each in loop]
        self.views.append(tuple(view))
        outer, along, _ = loops
        if along:
            self.aligned = math.gcd(self.aligned, *(stride for _, stride in outer))
            self.wide |= sum(abs(size * stride) for size, stride in along) >= WIDE

    def are_neighbours(self, slot: int) -> bool:
        """Whether rows lie in steps of 1, and begin at multiples of 4 and have as many elements."""
        _, outer, outers, along, alongs, _, inners = self.views[slot]
        strides = self.numbers[outer + 1 : outer + 2 * outers : 2]
        in_steps = alongs == 1 and self.numbers[along + 1] == 1 and not inners
        return in_steps and not any(each % 4 for each in (self.problem.n, *strides))

    def _groups(self) -> list[tuple[int, ...]]:
        """The axes before, on and behind the reduced ones."""
        order, reduced = self.problem.orders[self.first], self.problem.attributes["axis"]
        start = min(place for place, axis in enumerate(order) if axis in reduced)
        stop = start + len(reduced)
        return [order[:start], order[start:stop], order[stop:]]


def _moving(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The loops, or none if no loop moves (all strides are 0) and there is an element."""
    return loops if any(stride or not size for size, stride in loops) else []


def _strides(spec: Spec, order: tuple[int, ...]) -> tuple[int, ...]:
    """In elements; of the copy that is made of an operand whose elements do not lie whole elements apart."""
    size, strides = spec.dtype.itemsize, spec.strides
    assert strides is not None
    if any(stride % size for length, stride in zip(spec.shape, strides, strict=True) if length > 1):
        return arrangement.contiguous(spec.shape, order, 1)
    return tuple(stride // size for stride in strides)
