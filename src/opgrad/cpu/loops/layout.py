"""Which layout a shape asks for, and how its loops are cut into parts.

rows     vectors run along the reduced axis, which is contiguous
columns  vectors run along the axes behind the reduced one
tiles    rows too short for vectors: as many rows as a vector has lanes are turned into columns
groups   short rows: as many at a time as a vector has lanes, so that what each takes is done for all at once
split    few long rows: blocks of a row are reduced apart, combined, and written apart

The choice depends on the shape alone, so results do not depend on the number of threads.
"""

from collections.abc import Mapping
from typing import Any, Final

from opgrad.cpu.compiler.native import vector_lanes
from opgrad.cpu.loops.transpose import group_size, tile_size
from opgrad.cpu.runtime import partition
from opgrad.problem import Operand, Problem

KEEP = 1 << 17  # numbers, 512 KiB: the exponentials of a longer strip of columns are computed twice, not kept


LONGEST_ROW = 1 << 16  # elements: such a row and its exponentials, 512 KiB, still fit the second-level cache


SPLIT_FROM = 1 << 17  # elements: two threads gain from here on


BLOCK: Final = 1 << 14  # elements of a split row that one part handles


def precision(problem: Any) -> str:
    """The dtype in which the problem is computed."""
    dtypes = {operand.dtype for operand in problem.operands.values() if operand is not None}
    return "float64" if "float64" in dtypes else "float32"


def layout_of(problem: Problem, kernels: Mapping[str, Any], short: int = 0, grouped: int = 0) -> str:
    """The layout that the shape asks for, among those that there are kernels for.

    `short` is the row length up to which turning rows into columns beats all else, `grouped` that up to which
    groups beat taking rows one by one.
    """
    if problem.inner > 1:
        return "columns"
    if "split" in kernels and few(problem.outer, problem.n):
        return "split"
    if problem.n <= short and problem.outer >= 8:
        return "tiles"
    return "groups" if problem.n <= grouped and problem.outer >= 8 else "rows"


def few(rows: int, n: int) -> bool:
    """Whether rows are so few and long that each is worth splitting over threads; depends on the shape alone."""
    return n > LONGEST_ROW or (rows < 8 and rows * n >= SPLIT_FROM)


def blocks_of(n: int) -> int:
    return partition.count(n, BLOCK)


def cut(problem: Problem, layout: str, **operands: Operand) -> tuple[dict[str, Any], int]:
    """All arguments but working space, and the number of parts."""
    width = vector_lanes(precision(problem))
    sizes = _units(problem, layout, width)
    per = partition.per_part(sizes["units"], problem.bytes / max(sizes["units"], 1))
    arguments = {"per_part": per, "n": problem.n, **sizes, **_operands(problem, layout, **operands)}
    return arguments, partition.count(sizes["units"], per)


def _units(problem: Problem, layout: str, width: int) -> dict[str, int]:
    """The loop sizes of a layout whose vectors have `width` lanes."""
    stream = partition.streams(problem.bytes)
    if layout == "columns":
        strips = partition.count(problem.inner, width)
        return {"units": problem.outer * strips, "strips": strips, "inner": problem.inner, "stream": stream}
    if layout == "split":
        blocks = blocks_of(problem.n)
        return {"units": problem.outer * blocks, "blocks": blocks, "stream": stream}
    if layout in ("tiles", "groups"):
        return {"units": partition.count(problem.outer, width), "count": problem.outer, "stream": stream}
    return {"units": problem.outer, "count": problem.outer, "stream": stream}


def _operands(problem: Problem, layout: str, **operands: Operand) -> dict[str, Any]:
    """The operands with their strides, as the kernels of a layout name them."""
    arguments: dict[str, Any] = {}
    for name, operand in operands.items():
        strides = (
            {f"{name}_outer": operand.outer, f"{name}_n": operand.n}
            if layout == "columns"
            else {f"{name}_row": operand.outer}
        )
        arguments |= {name: operand} | strides
    return arguments


def kept_numbers(n: int, layout: str, width: int) -> tuple[int, bool]:
    """The numbers that a part keeps at work on rows of length n, and whether the exponentials are among them."""
    if layout == "tiles":
        return tile_size(n, width), True
    if layout == "groups":
        return group_size(n, width), True
    if layout == "columns":
        keep = n * width <= KEEP
        return 2 * (n + 1) * width if keep else width, keep
    return 2 * (n + width), True  # this row and the one before, which is written meanwhile
