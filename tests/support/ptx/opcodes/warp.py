"""What the lanes of a warp do together: shuffles, reductions, votes."""

import numpy as np

from ptx.machine import WARP
from ptx.opcodes import Effect, opcode
from ptx.opcodes.control import check_named
from ptx.operands import parts, reader, writer
from ptx.types import B32, PRED, U32

LANE = np.arange(WARP, dtype=np.int64)


@opcode("shfl")
def shuffle(m):
    """A value of another lane; of the own where that is outside of the segment."""
    m.one("sync")
    way = m.one("up", "down", "bfly", "idx")
    m.one("b32")
    result, value, step, clamp, named = m.instruction.operands
    write, *predicates = [writer(each, of) for each, of in zip(parts(result), (B32, PRED), strict=False)]
    read, read_step, read_clamp = reader(value, B32), reader(step, U32), reader(clamp, U32)
    read_named = reader(named, U32)

    def run(machine, instruction, mask):
        check_named(machine, instruction, mask, read_named(machine))
        both = (machine.spread(each(machine)) for each in (read_step, read_clamp))
        steps, clamps = (each.astype(np.int64).reshape(-1, WARP) for each in both)
        source, inside = sources(way, steps & 31, clamps & 31, clamps >> 8 & 31)
        values = machine.spread(read(machine)).reshape(-1, WARP)
        _check_sources(machine, instruction, mask, source)
        write(machine, np.take_along_axis(values, source, 1).ravel(), mask)
        for predicate in predicates:
            predicate(machine, inside.ravel(), mask)

    return Effect(run)


def sources(way, step, clamp, segment):
    """The lane that each lane reads, and whether it is inside of the segment."""
    last = (LANE & segment) | (clamp & ~segment)
    first = LANE & segment
    found = {"up": LANE - step, "down": LANE + step, "bfly": LANE ^ step, "idx": first | (step & ~segment)}[way]
    inside = found >= last if way == "up" else found <= last
    return np.where(inside, found, LANE) & 31, inside


def _check_sources(machine, instruction, mask, source):
    if mask is not None:
        here = mask.reshape(-1, WARP)
        wrong = (here & ~np.take_along_axis(here, source, 1)).ravel()
        detail = "it reads a lane that does not reach it"
        machine.sanitizer.report("lanes", machine, instruction, np.flatnonzero(wrong), detail)


@opcode("redux")
def reduce(m):
    """A sum, an extreme or a logical operation over the lanes that are named."""
    m.one("sync")
    name = m.one("add", "min", "max", "and", "or", "xor")
    absolute, propagates, of = m.take("abs"), m.take("NaN"), m.type()
    if of.bits != 32 or (of.kind == "f" and name not in ("min", "max")):
        raise m.unknown("no such reduction")
    fold = _fold(name, absolute, propagates) if of.kind == "f" else _integer(name)
    result, value, named = m.instruction.operands
    write, read, read_named = writer(result, of), reader(value, of), reader(named, U32)

    def run(machine, instruction, mask):
        names = machine.spread(read_named(machine))
        check_named(machine, instruction, mask, names)
        values = machine.spread(read(machine)).reshape(-1, WARP)
        taken = (names.reshape(-1, WARP).astype(np.int64) >> LANE & 1).astype(bool)
        found = fold(values, None if taken.all() else taken)
        write(machine, np.repeat(found.astype(of.dtype), WARP), mask)

    return Effect(run)


INTEGERS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
INTEGERS["xor"] = np.bitwise_xor


def _integer(name):
    def fold(values, taken):
        info = np.iinfo(values.dtype)
        neutral = {"min": info.max, "max": info.min, "and": ~values.dtype.type(0)}.get(name, 0)
        taken = True if taken is None else taken
        return INTEGERS[name].reduce(values, 1, dtype=values.dtype, initial=neutral, where=taken)

    return fold


def _fold(name, absolute, propagates):
    """Of floats: NaN counts only with .NaN, or where all are NaN; -0 is below +0."""
    sign = -1 if name == "min" else 1

    def fold(values, taken):
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
