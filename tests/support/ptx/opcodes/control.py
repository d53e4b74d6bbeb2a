"""Branches, barriers, and the end of a thread."""

import numpy as np

from ptx.machine import CLUSTER_BARRIER, CTA_BARRIER, WARP
from ptx.opcodes import Effect, opcode
from ptx.operands import reader
from ptx.parser import Immediate, Symbol
from ptx.types import U32


@opcode("bra")
def branch(m):
    m.take("uni")
    (label,) = m.instruction.operands
    if not isinstance(label, Symbol):
        raise m.unknown("expected a label")
    name = label.name

    def run(machine, instruction, mask):
        machine.branch(machine.program.block_of_label[name], mask)

    return Effect(run, ends=True)


@opcode("ret", "exit")
def leave(m):
    return Effect(lambda machine, instruction, mask: machine.branch(machine.end, mask), ends=True)


@opcode("trap")
def trap(m):
    def run(machine, instruction, mask):
        machine.sanitizer.report("trap", machine, instruction, machine.active(mask), "the kernel stops itself")
        machine.branch(machine.end, mask)

    return Effect(run, ends=True)


@opcode("bar", "barrier")
def barrier(m):
    if m.take("warp"):
        return _of_warp(m)
    if m.take("cluster"):
        return _of_cluster(m)
    m.one("sync")
    m.take("aligned")
    if len(m.instruction.operands) != 1 or m.instruction.operands[0] != Immediate("0"):
        raise m.unknown("expected barrier 0 and all threads")

    def run(machine, instruction, mask):
        check_whole_warps(machine, instruction, mask)
        machine.wait(CTA_BARRIER, instruction, mask)

    return Effect(run, ends=True)


def check_whole_warps(machine, instruction, mask):
    """Report warps of which some lanes are not here."""
    if mask is None:
        return
    warps = mask.reshape(-1, WARP)
    parted = warps.any(1) & ~warps.all(1)
    lanes = np.flatnonzero((warps & parted[:, None]).ravel())
    machine.sanitizer.report("barrier", machine, instruction, lanes, "not all lanes of its warp reach it together")


def _of_warp(m):
    m.one("sync")
    read = reader(m.instruction.operands[0], U32)

    def run(machine, instruction, mask):
        check_named(machine, instruction, mask, read(machine))
        warps = np.unique(machine.active(mask) // WARP)
        machine.warp_epoch[warps] += 1

    return Effect(run)


def _of_cluster(m):
    arrives = m.one("arrive", "wait") == "arrive"
    m.take("aligned")
    m.one("release", "relaxed", "acquire", default="")

    def run(machine, instruction, mask):
        check_whole_warps(machine, instruction, mask)
        if arrives:
            machine.arrive(mask)
        else:
            machine.wait(CLUSTER_BARRIER, instruction, mask)

    return Effect(run, ends=not arrives)


def check_named(machine, instruction, mask, named):
    """Report lanes that an instruction of a warp names, and that are not here; or are here, and not named."""
    here = np.ones(machine.lanes, bool) if mask is None else mask
    named = machine.spread(np.asarray(named))
    if mask is None and (named == np.uint32(0xFFFFFFFF)).all():
        return
    bits = here.reshape(-1, WARP) @ (np.uint64(1) << np.arange(WARP, dtype=np.uint64))
    wrong = here & (named.astype(np.uint64) != np.repeat(bits, WARP))
    detail = "the lanes that it names are not those that reach it"
    machine.sanitizer.report("lanes", machine, instruction, np.flatnonzero(wrong), detail)


@opcode("fence", "membar")
def fence(m):
    """Memory is in order anyway: what has to be between threads, barriers are."""
    for each in ("proxy", "async", "acq_rel", "sc", "cta", "cluster", "gpu", "gl", "sys", "shared::cta", "global"):
        m.take(each)
    return Effect(lambda machine, instruction, mask: None)


@opcode("griddepcontrol", "nanosleep", "prefetch", "discard", "applypriority")
def hint(m):
    """No value depends on these."""
    m.left.clear()
    return Effect(lambda machine, instruction, mask: None)
