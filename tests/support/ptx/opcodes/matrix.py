"""Matrices of 8 x 8 elements of 16 bits between shared memory and the registers of a warp.

A lane holds two neighbours of row lane / 4, from column 2 * (lane % 4) on; the rows of matrix i begin at the addresses
that lanes 8 * i to 8 * i + 7 have.
"""

import numpy as np

from ptx.machine import WARP
from ptx.opcodes import Effect, opcode
from ptx.opcodes.control import check_whole_warps
from ptx.opcodes.memory import fetch_shared, put_shared
from ptx.operands import address_of, parts, reader, writer
from ptx.types import B32, U32

SIDE, ROW_BYTES = 8, 16


def _count(m):
    m.one("sync")
    m.one("aligned")
    m.one("m8n8")
    count, transposed = int(m.one("x1", "x2", "x4")[1:]), m.take("trans")
    m.one("shared", "shared::cta")
    m.one("b16")
    return count, transposed


def _holders(machine, mask, count):
    """The lanes whose addresses count."""
    lanes = machine.active(mask)
    return lanes[lanes % WARP < SIDE * count]


@opcode("ldmatrix")
def load(m):
    count, transposed = _count(m)
    result, source = m.instruction.operands
    writers, address = [writer(each, B32) for each in parts(result)], address_of(source, U32)

    def run(machine, instruction, mask):
        check_whole_warps(machine, instruction, mask)
        lanes = _holders(machine, mask, count)
        rows = np.zeros((machine.lanes, ROW_BYTES), np.uint8)
        lanes, values = fetch_shared(machine, instruction, lanes, address(machine)[lanes], ROW_BYTES)
        rows[lanes] = values.view(np.uint8).reshape(-1, ROW_BYTES)
        elements = rows.view(np.uint16).reshape(-1, WARP // SIDE, SIDE, SIDE)
        for place, write in enumerate(writers):
            matrix = elements[:, place].swapaxes(1, 2) if transposed else elements[:, place]
            write(machine, np.ascontiguousarray(matrix).view(np.uint32).reshape(-1), mask)

    return Effect(run)


@opcode("stmatrix")
def store(m):
    count, transposed = _count(m)
    target, source = m.instruction.operands
    readers, address = [reader(each, B32) for each in parts(source)], address_of(target, U32)

    def run(machine, instruction, mask):
        check_whole_warps(machine, instruction, mask)
        elements = np.zeros((machine.lanes // WARP, WARP // SIDE, SIDE, SIDE), np.uint16)
        for place, read in enumerate(readers):
            words = np.ascontiguousarray(machine.spread(read(machine)))
            matrix = words.view(np.uint16).reshape(-1, SIDE, SIDE)
            elements[:, place] = matrix.swapaxes(1, 2) if transposed else matrix
        lanes = _holders(machine, mask, count)
        rows = elements.reshape(machine.lanes, SIDE)[lanes]
        put_shared(machine, instruction, lanes, address(machine)[lanes], rows.view(np.complex128).ravel())

    return Effect(run)
