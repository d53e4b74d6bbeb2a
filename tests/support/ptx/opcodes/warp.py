"""What the lanes of a warp do together: shuffles, reductions, votes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.machine import WARP
from ptx.opcodes import Effect, Modifiers, opcode
from ptx.opcodes.control import check_named
from ptx.operands import parts, reader, writer
from ptx.parser import Instruction
from ptx.types import B32, PRED, U32

if TYPE_CHECKING:
    from ptx.machine import Machine

LANE = np.arange(WARP, dtype=np.int64)


@opcode("shfl")
def shuffle(m: Modifiers) -> Effect:
    """A value of another lane; of the own where that is outside of the segment."""
    m.one("sync")
    way = m.one("up", "down", "bfly", "idx")
    m.one("b32")
    result, value, step, clamp, named = m.instruction.operands
    write, *predicates = [writer(each, of) for each, of in zip(parts(result), (B32, PRED), strict=False)]
    read, read_step, read_clamp = reader(value, B32), reader(step, U32), reader(clamp, U32)
    read_named = reader(named, U32)

    def run(machine: "Machine", instruction: Instruction, mask: np.ndarray | None) -> None:
        check_named(machine, instruction, mask, read_named(machine))
        steps, clamps = (machine.spread(each(machine)).astype(np.int64).reshape(-1, WARP)
                         for each in (read_step, read_clamp))  # fmt: skip
        source, inside = sources(way, steps & 31, clamps & 31, clamps >> 8 & 31)
        values = machine.spread(read(machine)).reshape(-1, WARP)
        _check_sources(machine, instruction, mask, source)
        write(machine, np.take_along_axis(values, source, 1).ravel(), mask)
        for predicate in predicates:
            predicate(machine, inside.ravel(), mask)

    return Effect(run)


def sources(way: str, step: np.ndarray, clamp: np.ndarray, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each lane reads, and whether it is inside of the segment."""
    last = (LANE & segment) | (clamp & ~segment)
    first = LANE & segment
    found = {"up": LANE - step, "down": LANE + step, "bfly": LANE ^ step, "idx": first | (step & ~segment)}[way]
    inside = found >= last if way == "up" else found <= last
    return np.where(inside, found, LANE) & 31, inside


def _check_sources(machine: "Machine", instruction: Instruction, mask: np.ndarray | None, source: np.ndarray) -> None:
    if mask is not None:
        here = mask.reshape(-1, WARP)
        wrong = (here & ~np.take_along_axis(here, source, 1)).ravel()
        if wrong.any():
            detail = "it reads a lane that does not reach it"
            machine.sanitizer.report("lanes", machine, instruction, np.flatnonzero(wrong), detail)


@opcode("redux")
def reduce(m: Modifiers) -> Effect:
    """A sum, an extreme or a logical operation over the lanes that are named."""
    m.one("sync")
    name = m.one("add", "min", "max", "and", "or", "xor")
    absolute, propagates, of = m.take("abs"), m.take("NaN"), m.type()
    if of.bits != 32 or (of.kind == "f" and name not in ("min", "max")):
        raise m.unknown("no such reduction")
    fold = _fold(name, absolute, propagates) if of.kind == "f" else INTEGERS[name]
    result, value, named = m.instruction.operands
    write, read, read_named = writer(result, of), reader(value, of), reader(named, U32)

    def run(machine: "Machine", instruction: Instruction, mask: np.ndarray | None) -> None:
        names = machine.spread(read_named(machine))
        check_named(machine, instruction, mask, names)
        values = machine.spread(read(machine)).reshape(-1, WARP)
        taken = (names.reshape(-1, WARP).astype(np.int64) >> LANE & 1).astype(bool)
        found = fold(values, None if taken.all() else taken)
        write(machine, np.repeat(found.astype(of.dtype), WARP), mask)

    return Effect(run)


def _integer(ufunc: np.ufunc, neutral: Callable[[np.dtype], int]) -> Callable:
    def fold(values: np.ndarray, taken: np.ndarray | None) -> np.ndarray:
        if taken is not None:
            values = np.where(taken, values, values.dtype.type(neutral(values.dtype)))
        return ufunc.reduce(values, 1, dtype=values.dtype)

    return fold


INTEGERS = {
    "add": _integer(np.add, lambda dtype: 0),
    "min": _integer(np.minimum, lambda dtype: np.iinfo(dtype).max),
    "max": _integer(np.maximum, lambda dtype: np.iinfo(dtype).min),
    "and": _integer(np.bitwise_and, lambda dtype: np.iinfo(dtype).max),
    "or": _integer(np.bitwise_or, lambda dtype: 0),
    "xor": _integer(np.bitwise_xor, lambda dtype: 0),
}


def _fold(name: str, absolute: bool, propagates: bool) -> Callable:
    """Of floats: NaN counts only with .NaN, or where all are NaN; -0 is below +0."""
    sign = -1 if name == "min" else 1

    def fold(values: np.ndarray, taken: np.ndarray | None) -> np.ndarray:
        values = np.abs(values) if absolute else values
        here = np.ones(values.shape, bool) if taken is None else taken
        nan = np.isnan(values) & here
        counts = here & ~nan
        order = np.where(counts, sign * values.astype(np.float64), -np.inf)
        ties = np.where(np.signbit(order), 0, 1) + 2 * counts
        best = np.lexsort((ties, order), axis=1)[:, -1]
        found = values[np.arange(len(values)), best]
        lost = nan.any(1) if propagates else ~counts.any(1)
        return np.where(lost, np.array(0x7FFFFFFF, np.uint32).view(np.float32), found)

    return fold
