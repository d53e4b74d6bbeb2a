"""How programs share slices: an array is pre x n slices of `post` elements that lie together.

A tile is PRES x ROWS slices of BLOCK elements each. All are powers of 2, so that a program finds its slices without
dividing by the sizes of the problem for each of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from opgrad.contract import DTYPES
from opgrad.contract.signature import Problem
from opgrad.cuda import ALIGNMENT
from opgrad.cuda.execute import Launch, device
from opgrad.cuda.regimes import power_of_2

SLICES = 512  # of a tile: for more, where they lie would need too many registers
LEAST = 512  # elements of a tile that is not divided further
WARPS = 4
SLICES_PER_WARP = 128


@dataclass(frozen=True)
class SliceSizes:
    """An operator on slices: an axis of `size`, indices that name `count` slices of it."""

    pre: int
    size: int
    count: int
    post: int


def sizes_of(problem: Problem, shape: tuple[int, ...]) -> SliceSizes:
    """The sizes of a problem whose axis is one of an array of this shape."""
    axis = problem.attributes["axis"].start
    pre, post = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return SliceSizes(pre, shape[axis], math.prod(problem.specs["indices"].shape), post)


@dataclass(frozen=True)
class SliceTile:
    """The tiles of an array: each has pres x rows slices of `block` elements, and a program of its own.

    groups: tiles along n. blocks: tiles along a slice.
    """

    pres: int
    rows: int
    block: int
    groups: int
    blocks: int
    programs: int

    @property
    def slices(self) -> int:
        return self.pres * self.rows

    def launch(self, kernel: Any, arguments: Mapping[str, Any], item: int) -> Launch:
        """A launch with a program for each tile; `item` is the size of an element in bytes."""
        own = {
            "groups": self.groups,
            "blocks": self.blocks,
            "REPEATS": self.programs > self.groups * self.blocks,
            "PRES": self.pres,
            "ROWS": self.rows,
            "BLOCK": self.block,
        }
        threads = max(self.slices * self.block * item // ALIGNMENT, self.slices * 32 // SLICES_PER_WARP)
        warps = min(max(power_of_2(threads) // 32, 1), WARPS)
        return Launch(kernel, (self.programs,), {**arguments, **own}, warps=warps)


def tile(pre: int, n: int, post: int, elements: int) -> SliceTile:
    """Tiles of so many elements, or of fewer where there would be too few tiles for the device."""
    while True:
        block = min(power_of_2(post), elements)
        rows = min(power_of_2(n), elements // block, SLICES)
        pres = min(power_of_2(pre), elements // (block * rows), SLICES // rows)
        groups, blocks = -(-n // rows), -(-post // block)
        programs = -(-pre // pres) * groups * blocks
        if programs >= 2 * device().multiprocessors or elements <= LEAST:
            return SliceTile(pres, rows, block, groups, blocks, programs)
        elements //= 2


def vectors(post: int, dtype: str) -> dict[str, int]:
    """The length of slices in the widest vectors that they are made of: so the compiler sees what is aligned."""
    width = math.gcd(post, ALIGNMENT // DTYPES[dtype].itemsize)
    return {"vectors": post // width, "VECTOR": width}


@triton.jit
def tile_of(groups, blocks, REPEATS: tl.constexpr):
    """Which tile this program has, counted along pre, along n and along a slice; REPEATS: the first is not always 0."""
    program = tl.program_id(0)
    group = program // blocks
    before = tl.zeros_like(program)
    if REPEATS:
        before, group = group // groups, group % groups
    return before.to(tl.int64), group.to(tl.int64), (program % blocks).to(tl.int64)


@triton.jit
def slices_of(
    groups, blocks, REPEATS: tl.constexpr, PRES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """This program's slices, as their numbers along pre and along n, and the first of its elements in each."""
    before, group, block = tile_of(groups, blocks, REPEATS)
    lane = tl.arange(0, PRES * ROWS)
    return before * PRES + lane // ROWS, group * ROWS + lane % ROWS, block * BLOCK
