"""What no kernel may do, found while it runs.

bounds          an access outside of every array that the launch was given, or outside of shared memory
alignment       an access at an address that is no multiple of its width
uninitialised   a read of memory that nobody wrote
race            two threads at one place of memory, one of them writing, with no barrier between; two blocks at one
                place of global memory, one of them writing
order           bytes that depend on the order in which blocks run
barrier         a barrier that not all threads reach, or not together
lanes           an instruction of a warp that other lanes reach than it names, or that reads a lane which did not
overflow        an address made of a 32-bit number that lost its upper bits
local           memory of a thread's own, where registers were wanted
"""

from dataclasses import dataclass, field

import numpy as np

from ptx.memory import GlobalMemory
from ptx.parser import Instruction
from ptx.stamps import Stamps


@dataclass
class Finding:
    """One kind of fault of one instruction; of the first thread that had it, and how many had."""

    kind: str
    kernel: str
    instruction: Instruction
    cta: tuple[int, int, int]
    thread: int
    detail: str
    address: int | None = None
    count: int = 1

    def __str__(self):
        at = "" if self.address is None else f" at {self.address:#x}"
        return (
            f"{self.kind}: {self.kernel}, PTX line {self.instruction.line} ({self.instruction.name}), "
            f"{self.instruction.source}: thread {self.thread} of block {self.cta}{at}: {self.detail}"
            + (f"; {self.count} threads in all" if self.count > 1 else "")
        )


class Findings(Exception):
    """What was found in a launch."""

    def __init__(self, found):
        super().__init__("\n".join(map(str, found)))
        self.found = found


@dataclass
class Sanitizer:
    """Collects findings. checked: accesses that were looked at, in lanes."""

    kernel: str
    memory: GlobalMemory
    granule: int = 1
    found: dict[tuple[str, int], Finding] = field(default_factory=dict)
    checked: int = 0
    stamps: dict[int, Stamps] = field(default_factory=dict)  # by the address of an allocation

    def report(self, kind, machine, instruction, lanes, detail, address=None):
        """A fault of these lanes, if there are any."""
        if not len(lanes):
            return
        known = self.found.get((kind, instruction.line))
        if known is not None:
            known.count += len(lanes)
            return
        place, count = machine.place(int(lanes[0])), len(lanes)
        self.found[kind, instruction.line] = Finding(kind, self.kernel, instruction, *place, detail, address, count)

    def report_where(self, wrong, kind, machine, instruction, lanes, detail, addresses=None):
        """A fault of those of the lanes that are wrong; the address is that of the first."""
        address = int(addresses[wrong.argmax()]) if addresses is not None and len(lanes) else None
        self.report(kind, machine, instruction, lanes[wrong], detail, address)

    def raise_found(self):
        if self.found:
            raise Findings(list(self.found.values()))

    # --- global memory

    def allowed(self, machine, instruction, lanes, addresses, width):
        """Which accesses may be made, and the allocations they are in."""
        self.checked += len(lanes)
        owners = self.memory.owners(addresses, width)
        skewed = addresses & np.uint64(width - 1) != 0
        outside = owners < 0
        self._place(machine, instruction, "alignment", lanes, addresses, skewed, f"no multiple of {width} bytes")
        self._place(machine, instruction, "bounds", lanes, addresses, outside, f"{width} bytes")
        return ~(skewed | outside), owners

    def _place(self, machine, instruction, kind, lanes, addresses, wrong, what):
        if wrong.any():
            first = int(addresses[wrong.argmax()])
            detail = f"{what}, {self.memory.beside(first)}"
            self.report(kind, machine, instruction, lanes[wrong], detail, first)

    def written(self, machine, instruction, lanes, addresses, width, owners):
        """Look for reads of what nobody wrote."""
        unwritten = self.memory.unwritten(addresses, width, owners)
        self._place(machine, instruction, "uninitialised", lanes, addresses, unwritten, f"{width} bytes never written")

    def stamp(self, machine, instruction, lanes, addresses, width, owners, writes):
        """Look for races with what was read or written before in this launch."""
        for number in np.unique(owners):
            allocation = self.memory.allocations[number]
            stamps = self.stamps.get(allocation.address)
            if stamps is None:
                stamps = self.stamps[allocation.address] = Stamps(allocation, self.granule)
            own = owners == number
            at, who = stamps.words(addresses[own], width, lanes[own])
            both = stamps.touch(machine, at, who, writes)
            for wrong, by in zip(both, ("block", "thread of the block, with no barrier between,"), strict=True):
                if wrong.any():
                    address = allocation.address + int(at[wrong.argmax()]) * self.granule
                    detail = f"{self.memory.beside(address)}: another {by} is there, too, and one of them writes"
                    self.report("race", machine, instruction, np.unique(who[wrong]), detail, address)

    def compare(self, expected, instruction):
        """Look for bytes that another order of blocks has left otherwise."""
        for each, own, found in zip(self.memory.allocations, expected, self.memory.bytes(), strict=True):
            if own != found:
                differ = np.frombuffer(own, np.uint8) != np.frombuffer(found, np.uint8)
                address = each.address + int(differ.argmax())
                detail = f"{self.memory.beside(address)}: {int(differ.sum())} bytes depend on the order of blocks"
                self.found["order", address] = Finding("order", self.kernel, instruction, (0, 0, 0), 0, detail, address)


class Races:
    """Who touched what of the shared memory since the last barrier.

    A barrier of a block, a cluster or a warp ends an epoch of theirs. Two accesses to one place, one of them a write,
    by two threads are in order if between them ended an epoch of what holds both threads.
    """

    def __init__(self, machine, granule):
        size = len(machine.shared.bytes) // granule + 1
        self.machine, self.granule = machine, granule
        self.writer, self.reader = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.written, self.read = np.zeros((3, size), np.int32), np.zeros((3, size), np.int32)
        self.lanes_read, self.warps_read = np.zeros(size, bool), np.zeros(size, bool)

    def _now(self, lanes):
        m = self.machine
        return np.stack((m.warp_epoch[lanes // 32], m.cta_epoch[m.cta[lanes]], m.cluster_epoch[m.cluster[lanes]]))

    def _spread(self, places, width, lanes):
        count = max(width // self.granule, 1)
        if count == 1:
            return places // self.granule, lanes
        return (places[:, None] // self.granule + np.arange(count)).ravel(), np.repeat(lanes, count)

    def _unordered(self, other, then, lanes, now):
        """Whether accesses by other lanes, in their epochs then, are in no order with those of these lanes now."""
        m = self.machine
        there = (other >= 0) & (other != lanes)
        same_cta = m.cta[other] == m.cta[lanes]
        same_warp = other // 32 == lanes // 32
        ordered = now[2] > then[2]
        ordered |= same_cta & (now[1] > then[1])
        ordered |= same_warp & (now[0] > then[0])
        return there & ~ordered

    def load(self, instruction, places, width, lanes):
        """Note reads, and report those of what another thread wrote meanwhile."""
        at, who = self._spread(places, width, lanes)
        now = self._now(who)
        self._report(instruction, self._unordered(self.writer[at], self.written[:, at], who, now), who, at, self.writer)
        before = self.reader[at]
        known = self._unordered(before, self.read[:, at], who, now)  # another reader since the last barrier
        own = (before == who) & (now == self.read[:, at]).all(0)
        self.lanes_read[at] = np.where(known, True, np.where(own, self.lanes_read[at], False))
        self.warps_read[at] = np.where(known & (before // 32 != who // 32), True, known & self.warps_read[at])
        self.reader[at], self.read[:, at] = who, now
        other = self.reader[at] != who
        self.lanes_read[at[other]] = True
        apart = self.reader[at] // 32 != who // 32
        self.warps_read[at[apart]] = True

    def store(self, instruction, places, width, lanes):
        """Note writes, and report those to what another thread wrote or read meanwhile; the accesses of which another
        lane makes one to the same place at the same time."""
        at, who = self._spread(places, width, lanes)
        now = self._now(who)
        self._report(instruction, self._unordered(self.writer[at], self.written[:, at], who, now), who, at, self.writer)
        m, reader, then = self.machine, self.reader[at], self.read[:, at]
        alone = self._unordered(reader, then, who, now)
        ended = (now[1] > then[1]) & (m.cta[reader] == m.cta[who]) | (now[2] > then[2])
        crowd = (reader >= 0) & ~ended & self.lanes_read[at]
        crowd &= self.warps_read[at] | (reader // 32 != who // 32) | (now[0] <= then[0])
        self._report(instruction, alone | crowd, who, at, self.reader)
        self.writer[at], self.written[:, at] = who, now
        return self.writer[at] != who

    def _report(self, instruction, wrong, lanes, at, others):
        if wrong.any():
            first = wrong.argmax()
            _, other = self.machine.place(int(others[at[first]]))
            what = "wrote" if others is self.writer else "read"
            address = int(at[first]) * self.granule % self.machine.shared.pitch
            detail = f"byte {address} of shared memory, which thread {other} {what}, with no barrier between"
            self.machine.sanitizer.report("race", self.machine, instruction, lanes[wrong], detail, address)
