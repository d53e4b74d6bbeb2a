"""The regimes of operators that reduce rows: which kernel runs, and how many elements a program takes.

A tile is ROWS rows of BLOCK elements, held in the registers of one program.

    short rows    a tile holds several whole rows, so that a program has enough bytes in flight
    one row       a tile holds one whole row
    columns       the reduced axis is not the last in memory: neighbours in memory belong to different rows, and a
                  tile takes 64 bytes or more of them
    long rows,    a program goes over its rows in steps, twice; the second time from the end, where the steps
    long columns  are still in the L2 cache. Some steps are on their way to shared memory meanwhile, or none, whatever
                  was fastest (LOOPS). Elements that are read in fewer than 4 bytes at a time go to registers:
                  cp.async copies no fewer
    few rows,     there are fewer tiles than the device can work on at a time: each row is shared out to several
    few columns   programs, which first leave what they found in their part, then all put the parts together
    cluster       a row too long for one thread block is held by the blocks of a cluster, so that it is read once
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import triton

from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem
from opgrad.cuda import ALIGNMENT
from opgrad.cuda.execute import device

WIDE = 1 << 31  # offsets from here on need 64 bits
ALIGNED = 16  # Triton knows of sizes and strides whether they are multiples of this number


@dataclass(frozen=True)
class RegisterLimits:
    """Elements in float32, for one array kept in registers; two arrays, float64 or scattered elements halve them.

    row: most elements of a tile. 32,768 fit 16 warps without spilling on sm_90, twice as many do not. Half as many with
        clusters, which longer rows go to, since Triton 3.9 needs a few registers more; and in float64, whose functions
        do.
    tile: elements of a tile of short rows or narrow columns. 16 KiB; a multiprocessor needs about 32 KiB in flight.
    step: elements of a step in a loop over long rows.
    ahead: bytes of the steps that are on their way to shared memory, which holds 227 KiB on sm_90.
    peel: shortest row whose unaligned ends are taken apart so that the rest can be read in whole vectors.
    rows: most rows of a tile; a row needs registers for its address and its sums. Half as many with labels.
    column_bytes: the fewest bytes of neighbouring columns in a tile that are read at a good speed.
    share: the fewest elements of a row worth a program of their own.
    """

    row: int = 32768
    tile: int = 4096
    step: int = 8192
    ahead: int = 128 << 10
    peel: int = 256
    rows: int = 1024
    column_bytes: int = 64
    share: int = 4096


LIMITS = RegisterLimits()
CLUSTERS_SINCE = (3, 9)  # the first Triton whose compiler reduces a [1, N] tile across a cluster
MOST_CTAS = 16
LONG_WARPS = 16
# Of loops over rows, by arrays and bytes of an element: how many times the step of LIMITS, steps under way (0: as
# registers have room). The fastest on an H100: two thread blocks fit a multiprocessor, or one with 128 KiB under way.
LOOPS = {(1, 2): (2, 0), (1, 4): (1, 3), (2, 2): (2, 4), (2, 4): (4, 0)}
MOST_AHEAD = 8  # steps: the code for each of them stands before the loop
STAGES_WITHOUT_BUFFER = 2  # Triton keeps two steps fewer in shared memory than a loop has stages


@dataclass(frozen=True)
class Regime:
    """The choice for one problem.

    parts: programs that share a row, with per_part elements each. stages: steps under way in a loop. ctas: of a
    cluster.
    """

    name: str
    rows: int
    block: int
    warps: int
    parts: int = 1
    per_part: int = 0
    stages: int = 1
    ctas: int = 1


def power_of_2(n: int) -> int:
    """The least power of 2 that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def choose(
    problem: Problem,
    operands: Sequence[Operand],
    streams: int,
    labelled: bool = False,
    alone: bool = False,
    functions: bool = False,
) -> Regime:
    """The regime for a problem whose kernel keeps `streams` arrays of a tile in registers.

    operands: those that have an entry for each element. labelled: rows have labels, whose classes, weights and
    factors take registers too; in columns and in scattered rows, of which a thread has a part of many, as many as
    the elements: these are spread over more threads.
    alone: no row is shared out to several programs or to the blocks of a cluster. functions: what is computed of an
    element needs registers on the way, as much as to hold it; not in a loop's steps, which are small.
    """
    samples, block = problem.outer * problem.inner, power_of_2(problem.n)
    kind = "rows" if problem.inner == 1 else "columns"
    in_clusters = kind == "rows" and not alone and clusters()
    double, scattering = _has_double(operands), _scattering(problem, operands)
    stored = streams * (2 if double else 1) * scattering  # numbers in registers for an element
    computed = stored * (2 if functions else 1)
    most, tile, step = LIMITS.row // computed, max(LIMITS.tile // computed, 1), max(LIMITS.step // stored, 1)
    if labelled or vectors(problem, operands).peel:
        tile //= 2  # so do the ends of a tile's rows, as many as the rest
    if double or (labelled and problem.inner > 1) or in_clusters:
        most //= 2
    rows = _rows(problem, operands, tile // block, LIMITS.rows // (2 if labelled else 1))
    numbers = computed * (2 if labelled and problem.inner > 1 else 1)
    numbers *= min(scattering, 2) if labelled and rows > 1 else 1
    programs = -(-samples // rows)
    parts = min(2 * device().multiprocessors // max(programs, 1), problem.n * rows // LIMITS.share)
    if 2 * programs <= device().multiprocessors and parts > 1 and not alone:
        block = max(min(step, LIMITS.share) // rows, 1)
        per_part = -(-problem.n // (parts * block)) * block
        return Regime(f"few {kind}", rows, block, _warps(rows * block * numbers), -(-problem.n // per_part), per_part)
    if rows * block <= most:
        name = "columns" if kind == "columns" else "one row" if rows == 1 else "short rows"
        return Regime(name, rows, block, _warps(rows * block * numbers, least=2 if labelled else 4))
    if in_clusters and block // most <= MOST_CTAS:
        return Regime("cluster", 1, block, 16, ctas=block // most)
    warps, item = LONG_WARPS, max(DTYPES[operand.dtype].itemsize for operand in operands)
    ahead = min(max(min(LIMITS.ahead, device().shared_memory // 2) // (step * streams * item), 1), MOST_AHEAD)
    if kind == "rows" and not functions:
        longer, ahead = LOOPS.get((streams, item), (1, ahead))
        step *= longer
        if labelled and item == 2 and vectors(problem, operands).peel:  # the ends' labels need registers, too
            step, warps, ahead = step // 4, warps // 2, 2
    stages = ahead + STAGES_WITHOUT_BUFFER if ahead else 1
    return Regime(f"long {kind}", rows, max(step // rows, 1), warps, stages=stages)


def _has_double(operands: Sequence[Operand]) -> bool:
    return any(operand.dtype == "float64" for operand in operands)


def pointwise(problem: Problem, operands: Sequence[Operand]) -> Regime:
    """The tiles for a problem whose elements need nothing of each other."""
    share = (
        (2 if _has_double(operands) else 1) * (2 if problem.inner > 1 else 1) * min(_scattering(problem, operands), 2)
    )
    tile = max(LIMITS.tile // share, 1)
    block = min(power_of_2(problem.n), tile)
    rows = _rows(problem, operands, tile // block, LIMITS.rows // 2)
    return Regime("pointwise", rows, min(block, max(tile // rows, 1)), 8)


def _rows(problem: Problem, operands: Sequence[Operand], fitting: int, most: int) -> int:
    """The rows of a tile that has room for `fitting`; of columns no fewer than are read at a good speed."""
    least = 1
    if problem.inner > 1:
        smallest = min(DTYPES[operand.dtype].itemsize for operand in operands)
        least = min(LIMITS.column_bytes // smallest, power_of_2(problem.inner))
    return min(max(least, fitting), most, power_of_2(problem.outer * problem.inner))


def _scattering(problem: Problem, operands: Sequence[Operand]) -> int:
    """How many times the registers an element takes because its address needs some of its own.

    It does where offsets need 64 bits, where elements are no neighbours in memory, or where the compiler cannot see
    that neighbours begin at aligned addresses; in columns twice as many, since a thread has several.
    """
    if problem.inner == 1:
        return 2 if wide(problem, operands) or vectors(problem, operands).width == 1 else 1
    steps = [problem.inner, *(step for operand in operands for step in (operand.outer, operand.n))]
    apart = any(operand.inner not in (0, 1) for operand in operands) or any(step % ALIGNED for step in steps)
    return 4 if apart or wide(problem, operands) else 1


def _warps(elements: int, least: int = 4) -> int:
    """Warps for a tile: 32 numbers a thread, at most 16 warps. 32 warps leave too few registers to each."""
    return min(max(power_of_2(elements) // 1024, least), 16)


def clusters() -> bool:
    """Whether this Triton reduces across a cluster, and the current device has clusters."""
    return _release() >= CLUSTERS_SINCE and device().architecture >= 90


@cache
def _release() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))


@dataclass(frozen=True)
class Vectors:
    """How the elements of a row can be read: `width` at a time, after peeling off unaligned ends or not."""

    width: int
    peel: bool


def vectors(problem: Problem, operands: Sequence[Operand]) -> Vectors:
    """The widest vectors that all operands allow.

    Triton sees by itself whether sizes are multiples of 16 elements. Here they are multiples of less, or of
    nothing: then the rows of all operands must at least begin at the same distance from an aligned address.
    """
    if problem.inner > 1 or any(operand.n != 1 for operand in operands):
        return Vectors(1, peel=False)
    widest = max(ALIGNMENT // DTYPES[operand.dtype].itemsize for operand in operands)
    outers = [operand.outer for operand in operands] if problem.outer > 1 else [0]
    common = math.gcd(widest, problem.n, *outers)
    together = len({outer % widest for outer in outers}) == 1
    if common < widest and together and problem.n >= LIMITS.peel:
        return Vectors(widest, peel=True)
    return Vectors(common, peel=False)


def wide(problem: Problem, operands: Sequence[Operand]) -> bool:
    """Whether offsets inside a row need 64 bits."""
    return any(abs(operand.n) * problem.n >= WIDE for operand in operands)
