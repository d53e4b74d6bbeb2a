"""What a launch asks of a device: instructions by the unit that executes them, and memory in sectors of 32 bytes.

A warp's access takes as many sectors as its addresses lie in, however few bytes of each it wants. What several warps
ask for again comes from the L2 cache; memory itself is read and written once for each sector that is touched at all.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ptx.machine import WARP
from ptx.opcodes import Modifiers
from ptx.parser import Instruction
from ptx.program import Block

if TYPE_CHECKING:
    from ptx.machine import Machine

SECTOR = 32
MOVES = ("mov", "bra", "ret", "exit")  # most of which disappear in machine code
MEMORY = ("ld", "st", "cp", "shfl", "ldmatrix", "stmatrix", "bar", "barrier", "redux")
SPECIAL = ("ex2", "lg2", "rsqrt", "sqrt", "rcp", "tanh")
DIVISIONS = {"fp32": 8, "fp64": 20, "int": 20}  # instructions that a division, a remainder or a root becomes


@dataclass
class Traffic:
    """Counts of the thread blocks that were run. warps: instructions of a warp by pipe. sectors: by way, load or store.

    wanted: bytes that lanes asked for. touched: sectors of each array, by way.
    """

    warps: Counter[str] = field(default_factory=Counter)
    sectors: Counter[str] = field(default_factory=Counter)
    wanted: Counter[str] = field(default_factory=Counter)
    touched: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def issue(self, machine: "Machine", block: Block, active: np.ndarray | None) -> None:
        """Count the instructions of a block for the warps that have a lane in it."""
        lanes = machine.lanes if active is None else 0
        warps = lanes // WARP if active is None else int(active.reshape(-1, WARP).any(1).sum())
        for pipe, count in pipes(tuple(step.instruction for step in block.steps)).items():
            self.warps[pipe] += warps * count

    def access(
        self, machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int,
        way: str,
    ) -> None:  # fmt: skip
        """Count the sectors of an access to global memory."""
        first, last = addresses // np.uint64(SECTOR), (addresses + np.uint64(width - 1)) // np.uint64(SECTOR)
        sectors = np.concatenate((first, last[last != first]))
        warps = np.concatenate((lanes, lanes[last != first])) // WARP
        self.sectors[way] += len(np.unique(np.stack((warps.astype(np.uint64), sectors)), axis=1).T) if len(lanes) else 0
        self.wanted[way] += len(lanes) * width
        owners = machine.memory.owners(addresses, width)
        for number in np.unique(owners):
            allocation = machine.memory.allocations[number]
            key = way, allocation.address
            if key not in self.touched:
                self.touched[key] = np.zeros(allocation.size // SECTOR + 2, bool)
            base = np.uint64(allocation.address // SECTOR)
            self.touched[key][first[owners == number] - base] = True
            self.touched[key][last[owners == number] - base] = True

    def memory(self, way: str) -> int:
        """Bytes of the sectors that were touched."""
        return SECTOR * sum(int(touched.sum()) for (each, _), touched in self.touched.items() if each == way)


@cache
def pipes(instructions: tuple[Instruction, ...]) -> Counter[str]:
    """How often each unit of a multiprocessor works for one warp."""
    found: Counter[str] = Counter()
    for each in instructions:
        pipe = pipe_of(each)
        if pipe:
            found[pipe] += DIVISIONS.get(pipe, 1) if each.opcode in ("div", "rem", "sqrt") else 1
    return found


def pipe_of(instruction: Instruction) -> str:
    """The unit that executes an instruction; none for what only moves values."""
    opcode = instruction.opcode
    if opcode in MOVES:
        return ""
    types = Modifiers(instruction).types
    floating = bool(types) and types[-1].is_float
    if opcode in MEMORY:
        return "" if "param" in instruction.modifiers else "memory"
    if opcode in SPECIAL and "approx" in instruction.modifiers:
        return "special"
    if opcode == "cvt":
        return "fp64" if any(each.is_float and each.bits == 64 for each in types) else "conversion"
    if floating:
        return "fp64" if types[-1].bits == 64 and not types[-1].packed else "fp32"
    return "int"
