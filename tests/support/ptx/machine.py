"""Thread blocks at work: all their lanes at once, in lockstep where their ways agree.

Each lane has a block of instructions to run next. The lanes of the first such block (flow.py) run it together, so that
lanes that parted meet again behind the branch; a barrier holds a lane until all of its thread block are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx.memory import SHARED_BASE, GlobalMemory, SharedMemory
from ptx.parser import PtxError
from ptx.program import Program
from ptx.sanitizer import Finding, Races, Sanitizer

WARP = 32
FORWARD, BACKWARD = 1, -1  # orders in which thread blocks run
POISON = {1: True, 16: 0xA5A5, 32: 0xA5A5A5A5, 64: 0xA5A5A5A5A5A5A5A5}  # what a register holds that was never written
CTA_BARRIER, CLUSTER_BARRIER = 1, 2
LANES = 1 << 15  # that run at a time: their registers stay in the caches


@dataclass
class Launch:
    """One launch. arguments: numbers by parameter. shared: bytes. ctas: of a cluster. local: bytes of memory of its own
    that a thread may have. orders: those in which
    they run, each from the same memory."""

    program: Program
    grid: tuple[int, int, int]
    threads: int
    arguments: Sequence[int]
    memory: GlobalMemory
    shared: int = 0
    ctas: int = 1
    local: int = 0
    orders: tuple[int, ...] = (FORWARD,)
    sanitizer: Sanitizer = field(init=False)

    def __post_init__(self):
        kernel = self.program.kernel
        self.sanitizer = Sanitizer(kernel.name, self.memory, self.program.global_granule)
        if kernel.threads not in (0, self.threads):
            raise PtxError(f"{kernel.name}: launched with {self.threads} threads, compiled for {kernel.threads}")
        if kernel.ctas != self.ctas:
            raise PtxError(f"{kernel.name}: launched in clusters of {self.ctas}, compiled for {kernel.ctas}")
        if len(self.arguments) != len(kernel.parameters):
            raise PtxError(f"{kernel.name}: {len(self.arguments)} arguments for {len(kernel.parameters)} parameters")

        if kernel.local > self.local:
            detail = f"{kernel.local} bytes of a thread do not fit into registers, {self.local} may"
            first = kernel.instructions[0]
            self.sanitizer.found["local", 0] = Finding("local", kernel.name, first, (0, 0, 0), 0, detail)

    def run(self):
        """Run the thread blocks, in each of the orders from the same memory. Raises Findings for what no kernel may
        do, and if orders leave different bytes."""
        before = self.memory.bytes() if len(self.orders) > 1 else None
        self._run_in(self.orders[0])
        for order in self.orders[1:]:
            after = self.memory.bytes()
            self.memory.restore(before)
            self.sanitizer.stamps.clear()
            self._run_in(order)
            self.sanitizer.compare(after, self.program.kernel.instructions[0])
        self.sanitizer.raise_found()

    def _run_in(self, order):
        blocks = self.blocks().reshape(-1, self.ctas)[::order].ravel()
        together = max(LANES // (self.threads * self.ctas), 1) * self.ctas
        with np.errstate(all="ignore"):
            for first in range(0, len(blocks), together):
                Machine(self, blocks[first : first + together]).run()

    def blocks(self):
        """The thread blocks that are run, whole clusters of them."""
        return np.arange(self.grid[0] * self.grid[1] * self.grid[2])


class Machine:
    """Some thread blocks of a launch. blocks: their numbers in the grid."""

    warp = WARP

    def __init__(self, launch, blocks):
        self.launch, self.program, self.sanitizer = launch, launch.program, launch.sanitizer
        self.memory = launch.memory
        self.blocks, self.threads = blocks, launch.threads
        self.lanes = len(blocks) * self.threads
        self.every = np.arange(self.lanes)
        self.cta = np.repeat(np.arange(len(blocks)), self.threads)
        self.cluster = self.cta // launch.ctas
        self.tid = np.tile(np.arange(self.threads), len(blocks))
        self.registers = {}
        self.next = np.zeros(self.lanes, np.int32)
        self.waiting = np.zeros(self.lanes, np.int8)
        self.arrivals = np.zeros(self.lanes, np.int32)  # at the barrier of the cluster
        self.warp_epoch = np.zeros(self.lanes // WARP, np.int32)
        self.cta_epoch = np.zeros(len(blocks), np.int32)
        self.cluster_epoch = np.zeros(len(blocks) // launch.ctas, np.int32)
        self.shared = SharedMemory(len(blocks), launch.shared + sum(self.program.kernel.shared.values()))
        self.races = Races(self, self.program.granule)
        self.copies = []
        self.committed = np.zeros(self.lanes, np.int32)
        self._lost = {}
        names = [each.name for each in self.program.kernel.parameters]
        self.parameters = dict(zip(names, launch.arguments, strict=True))

    @property
    def end(self):
        """The number of the block behind the last: where lanes have exited."""
        return len(self.program.blocks)

    def run(self):
        """Run until all lanes have exited."""
        while True:
            ready = np.where(self.waiting == 0, self.next, self.end)
            number = int(ready.min())
            if number == self.end:
                if (self.next == self.end).all():
                    return
                if not self._stuck():
                    return
                continue
            active = ready == number
            self._run_block(number, None if active.all() else active)

    def _run_block(self, number, active):
        block = self.program.blocks[number]
        self.branch(block.following, active)
        for step in block.steps:
            mask = active
            if step.guard is not None:
                mask = self.spread(step.guard(self))
                mask = mask if active is None else active & mask
                mask = None if mask.all() else mask
            if mask is None or mask.any():
                step.run(self, mask)
            for name in step.last:
                self.registers.pop(name, None)
                self._lost.pop(name, None)

    # --- registers and constants

    def register(self, register):
        """A register's lanes."""
        found = self.registers.get(register.name)
        if found is None:
            found = self.registers[register.name] = np.full(self.lanes, POISON[register.type.bits], register.type.raw)
        return found

    def spread(self, value):
        """A value that all lanes share as an entry for each."""
        return value if value.ndim else np.broadcast_to(value, (self.lanes,))

    def scatter(self, lanes, values, of):
        """Values of some lanes as an array of all, and the mask of those."""
        if len(lanes) == self.lanes:
            return values, None
        whole, mask = np.zeros(self.lanes, of.raw), np.zeros(self.lanes, bool)
        whole[lanes], mask[lanes] = values, True
        return whole, mask

    def active(self, mask):
        """The numbers of the lanes in a mask."""
        return self.every if mask is None else np.flatnonzero(mask)

    def place(self, lane):
        """The block and the thread of a lane."""
        number, (x, y, _) = int(self.blocks[self.cta[lane]]), self.launch.grid
        return (number % x, number // x % y, number // (x * y)), int(self.tid[lane])

    def special(self, name):
        """A special register."""
        register, _, axis = name.lstrip("%").partition(".")
        place, grid = "xyz".index(axis) if axis else 0, self.launch.grid
        block = self.blocks[self.cta]
        ctaid = (block % grid[0], block // grid[0] % grid[1], block // (grid[0] * grid[1]))
        ctas = self.launch.ctas
        values = {
            "tid": (self.tid, 0, 0), "ntid": (self.threads, 1, 1), "ctaid": ctaid, "nctaid": grid,
            "laneid": (self.tid % WARP,), "warpid": (self.tid // WARP,), "cluster_ctarank": (ctaid[0] % ctas,),
            "cluster_ctaid": (ctaid[0] % ctas, 0, 0), "cluster_nctaid": (ctas, 1, 1), "cluster_nctarank": (ctas,),
            "clusterid": (ctaid[0] // ctas, ctaid[1], ctaid[2]),
        }  # fmt: skip
        if register not in values:
            raise PtxError(f"unknown special register {name}")
        return self.spread(np.asarray(values[register][place]))

    def symbol(self, name):
        """The address of a variable in shared memory."""
        at = SHARED_BASE
        for each, size in sorted(self.program.kernel.shared.items(), key=lambda item: -item[1]):
            if each == name:
                return at
            at += size
        raise PtxError(f"unknown symbol {name}")

    # --- address arithmetic that lost bits

    def lost(self, names):
        """The lanes in which one of these registers depends on a number that lost its upper bits."""
        found = [self._lost[name] for name in names if name in self._lost]
        return np.logical_or.reduce(found) if found else None

    def note_lost(self, names, lost, mask):
        for name in names:
            before = self._lost.get(name)
            if lost is None and before is None:
                continue
            now = np.zeros(self.lanes, bool) if lost is None else self.spread(np.asarray(lost))
            if mask is not None:
                now = np.where(mask, now, False if before is None else before)
            self._lost[name] = now

    # --- branches and barriers

    def branch(self, target, mask):
        """Send lanes to another block."""
        if mask is None:
            self.next[:] = target
        else:
            self.next[mask] = target

    def wait(self, barrier, instruction, mask):
        """Let lanes wait at a barrier: at that of their block until all its lanes do, at that of their cluster until
        all its lanes have arrived as often as they."""
        self.waiting[self.active(mask)] = barrier
        self.barrier = instruction
        self._release_cta() if barrier == CTA_BARRIER else self._release_clusters()

    def arrive(self, mask):
        """Let lanes arrive at the barrier of their cluster."""
        self.arrivals[self.active(mask)] += 1
        self._release_clusters()

    def _release_cta(self):
        there = (self.waiting == CTA_BARRIER).reshape(-1, self.threads).all(1)
        self.waiting.reshape(-1, self.threads)[there] = 0
        self.cta_epoch[there] += 1

    def _release_clusters(self):
        least = self.arrivals.reshape(len(self.cluster_epoch), -1).min(1)
        ended = least > self.cluster_epoch
        self.cta_epoch.reshape(-1, self.launch.ctas)[ended] += 1
        self.cluster_epoch[:] = least
        through = (self.waiting == CLUSTER_BARRIER) & (self.arrivals <= least[self.cluster])
        self.waiting[through] = 0

    def _stuck(self):
        """Report lanes that wait for others which never come, and let them go on; whether there were any."""
        lanes = np.flatnonzero(self.waiting)
        detail = "not all threads of its block reach the barrier: others have exited or wait at another one"
        self.sanitizer.report("barrier", self, self.barrier, lanes, detail)
        self.waiting[:] = 0
        return len(lanes) > 0
