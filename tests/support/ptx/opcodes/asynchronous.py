"""Copies from global to shared memory that go on while other instructions run.

What is copied is there once its group was waited for. Until then its place in shared memory counts as not written, and
as being written by the thread that copies.
"""

from collections import namedtuple

import numpy as np

from ptx.memory import WORDS
from ptx.opcodes import Effect, opcode
from ptx.opcodes.memory import fetch_global, shared_places
from ptx.operands import address_of, reader
from ptx.parser import Immediate
from ptx.types import U32, U64

# Values on their way: of which lanes, in which of their groups, to where.
Copy = namedtuple("Copy", "instruction lanes groups places values")


@opcode("cp")
def copy(m):
    m.one("async")
    if m.take("commit_group"):
        return Effect(lambda machine, instruction, mask: np.add.at(machine.committed, machine.active(mask), 1))
    if m.take("wait_all"):
        return Effect(lambda machine, instruction, mask: complete(machine, mask, 0, uncommitted=True))
    if m.take("wait_group"):
        count = int(_number(m, 0))
        return Effect(lambda machine, instruction, mask: complete(machine, mask, count))
    cached = m.one("ca", "cg")
    m.one("shared", "shared::cta")
    m.one("global")
    for hint in ("L2::64B", "L2::128B", "L2::256B"):
        m.take(hint)
    size = int(_number(m, 2))
    if size not in ((4, 8, 16) if cached == "ca" else (16,)):
        raise m.unknown(f"{size} bytes cannot be copied")
    return _start(m, size)


def _number(m, place):
    operand = m.instruction.operands[place]
    if not isinstance(operand, Immediate):
        raise m.unknown("expected a constant")
    return int(operand.text, 0)


def _start(m, size):
    """Copy `size` bytes, the first of them from memory and the rest zeros where the fourth operand says so."""
    operands = m.instruction.operands
    target, source = address_of(operands[0], U32), address_of(operands[1], U64)
    read = reader(operands[3], U32) if len(operands) > 3 else lambda machine: np.array(size, np.uint32)

    def run(machine, instruction, mask):
        lanes = machine.active(mask)
        amount = machine.spread(read(machine))[lanes]
        if not np.isin(amount, (0, size)).all():
            raise m.unknown("only whole words, or none, are copied here")
        wanted = lanes[amount > 0]
        found, values = fetch_global(machine, instruction, wanted, source(machine)[wanted], size)
        whole = np.zeros((machine.lanes, size), np.uint8)
        whole[found] = values.view(np.uint8).reshape(-1, size)
        kept, places = shared_places(machine, instruction, lanes, target(machine)[lanes], size)
        machine.races.store(instruction, places, size, kept)
        machine.shared.written[places[:, None] + np.arange(size)] = False
        words = whole[kept].view(WORDS[size]).ravel()
        machine.copies.append(Copy(instruction, kept, machine.committed[kept], places, words))

    return Effect(run)


def complete(machine, mask, pending, uncommitted=False):
    """Finish all copies of these lanes but those of their last `pending` groups."""
    waits = np.ones(machine.lanes, bool) if mask is None else mask
    left = []
    for each in machine.copies:
        own = each.groups if uncommitted else each.groups + 1
        done = waits[each.lanes] & (own <= machine.committed[each.lanes] - pending)
        if done.any():
            size = each.values.dtype.itemsize
            places = each.places[done]
            machine.races.store(each.instruction, places, size, each.lanes[done])
            machine.shared.store(places, each.values[done])
            machine.shared.written[places[:, None] + np.arange(size)] = True
        if not done.all():
            rest = ~done
            left.append(
                Copy(each.instruction, each.lanes[rest], each.groups[rest], each.places[rest], each.values[rest])
            )
    machine.copies = left
