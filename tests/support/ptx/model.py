"""A model of the time that a launch takes: of each resource what it needs, and the slowest of them decides.

It is a model. It knows what was executed, and NVIDIA's published rates; of latencies, of how memory controllers
schedule, of what ptxas makes of the PTX but its registers, it knows nothing. Where it says "memory" the kernel can be
as fast as memory is; where it says something else, that is worth looking at.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ptx.traffic import Traffic

REACHED = 0.93  # of the rate of memory: the best published for such kernels on H100 are 90 to 96 %
LAUNCH = 2.5e-6  # seconds from the end of one kernel to the next one's first instruction
LATENCY = 700e-9  # seconds of an access to memory under load
L2_BYTES = 5120  # a clock, of the whole device, as published for the A100
THREADS, REGISTERS, BLOCKS = 2048, 65536, 32  # of a multiprocessor
RESERVED = 1024  # bytes of shared memory that each thread block takes beside its own


@dataclass(frozen=True)
class Gpu:
    """Published rates. memory: bytes a second. shared: bytes of a multiprocessor. lanes: results of it in a clock."""

    name: str
    architecture: int
    multiprocessors: int
    clock: float
    memory: float
    shared: int
    lanes: Mapping[str, int]


def _lanes(fp32: int, fp64: int) -> Mapping[str, int]:
    return {"fp32": fp32, "fp64": fp64, "int": 64, "conversion": 64, "special": 16, "memory": 32}


GPUS = (
    Gpu("A100", 80, 108, 1.41e9, 2.039e12, 167936, _lanes(64, 32)),
    Gpu("H100", 90, 132, 1.755e9, 3.35e12, 233472, _lanes(128, 64)),
    Gpu("H200", 90, 132, 1.755e9, 4.8e12, 233472, _lanes(128, 64)),
    Gpu("B200", 100, 148, 1.85e9, 8.0e12, 233472, _lanes(128, 64)),
)


@dataclass(frozen=True)
class Resources:
    """What one thread block takes: threads, registers of each, bytes of shared memory."""

    threads: int
    registers: int
    shared: int

    def resident(self, gpu: Gpu) -> int:
        """The thread blocks that a multiprocessor holds at a time."""
        registers = -(-self.registers // 8) * 8 * self.threads
        limits = (THREADS // self.threads, REGISTERS // max(registers, 1), gpu.shared // (self.shared + RESERVED))
        return max(min(*limits, BLOCKS), 1)


@dataclass(frozen=True)
class Prediction:
    """The seconds of a launch, what decides about them, and the bytes that memory moves."""

    seconds: float
    bound: str
    bytes: float


def predict(traffic: Traffic, share: float, blocks: int, resources: Resources, gpu: Gpu) -> Prediction:
    """The time of a launch of so many thread blocks, of which a share was executed."""
    moved = (traffic.memory("load") + traffic.memory("store")) / share
    times = {"memory": moved / (gpu.memory * REACHED)}
    times["L2"] = sum(traffic.sectors.values()) * 32 / share / (L2_BYTES * gpu.clock)
    rate = gpu.multiprocessors * gpu.clock
    times["issue"] = sum(traffic.warps.values()) / share / (4 * rate)
    for pipe, count in traffic.warps.items():
        times[pipe if pipe != "memory" else "load/store units"] = 32 * count / share / (gpu.lanes[pipe] * rate)
    places = resources.resident(gpu) * gpu.multiprocessors
    for each in times.keys() - {"memory", "L2"}:
        times[each] *= math.ceil(blocks / places) * places / blocks  # multiprocessors without work
    held = 4 * resources.registers * resources.threads + resources.shared
    flying = min(blocks, places) * min(traffic.wanted["load"] / share / blocks, held)
    if flying:
        times["latency"] = moved / gpu.memory * LATENCY * gpu.memory / flying
    bound = max(times, key=times.__getitem__)
    seconds = LAUNCH + LATENCY + times[bound]
    return Prediction(seconds, bound if times[bound] > LAUNCH + LATENCY else "launch", moved)
