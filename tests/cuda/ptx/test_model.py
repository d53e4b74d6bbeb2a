"""Sectors and instructions as they are counted, and what a model of the time makes of them."""

import numpy as np
import pytest
from ptx.machine import Launch
from ptx.memory import GlobalMemory
from ptx.model import GPUS, LAUNCH, REACHED, Resources, predict
from ptx.program import Program
from ptx.traffic import Traffic
from ptx_lanes import KERNEL

COPY = "ld.param.b64 %at0, [a0]; ld.param.b64 %at1, [a1]; mov.u32 %r0, %ctaid.x; shl.b32 %r0, %r0, 8; {at}"
COPY += "mad.wide.u32 %at2, %r1, 4, %at0; mad.wide.u32 %at3, {to}, 4, %at1; ld.global.b32 %r2, [%at2];"
COPY += "st.global.b32 [%at3], %r2;"
# Where a thread reads and where it writes; places that all blocks read are not written, which would be a race.
NEIGHBOURS = {"at": "add.s32 %r1, %r0, %tid;", "to": "%r1"}
APART = {"at": "shl.b32 %r1, %tid, 3; add.s32 %r3, %r0, %tid;", "to": "%r3"}


def aligned(size):
    memory = np.zeros(4 * size + 64, np.uint8)
    place = -memory.ctypes.data % 64
    return memory[place : place + 4 * size].view(np.uint32)


def counted(places, blocks, size, most=None):
    """The traffic of a copy of words by 256 threads a block."""
    arrays, memory, traffic = [aligned(size), aligned(size)], GlobalMemory(), Traffic()
    for number, array in enumerate(arrays):
        memory.add(array, f"a{number}")
    text = KERNEL.format(parameters=".param .u64 a0, .param .u64 a1", threads=256, shared=16, loads="", stores="",
                         code=COPY.format(**places))  # fmt: skip
    launch = Launch(Program(text), (blocks, 1, 1), 256, [each.ctypes.data for each in arrays], memory, traffic=traffic,
                    most=most)  # fmt: skip
    launch.run()
    return traffic, len(launch.blocks()) / blocks


def test_sectors():
    """Of neighbours four for each 128 bytes; of words apart one for each, asked for by every block, touched once."""
    traffic, _ = counted(NEIGHBOURS, 4, 1024)
    assert traffic.sectors == {"load": 128, "store": 128}
    assert traffic.wanted == {"load": 4096, "store": 4096}
    assert traffic.memory("load") == traffic.memory("store") == 4096
    apart, _ = counted(APART, 4, 2048)
    assert apart.sectors["load"] == 4 * 256
    assert apart.memory("load") == 256 * 32


def test_instructions():
    """Of the warps that execute them: two accesses, and products, sums and shifts."""
    traffic, _ = counted(NEIGHBOURS, 4, 1024)
    assert traffic.warps == {"memory": 2 * 8 * 4, "int": 4 * 8 * 4}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_time(gpu):
    """A large copy takes as long as memory does, from a few of its blocks as from all; a small one a launch."""
    resources = Resources(256, 32, 16)
    blocks = 1 << 16
    traffic, share = counted(NEIGHBOURS, blocks, 256 * blocks, most=64)
    found = predict(traffic, share, blocks, resources, gpu)
    assert found.bound in ("memory", "latency")
    assert found.bytes == 2 * 4 * 256 * blocks
    assert found.seconds >= found.bytes / (gpu.memory * REACHED)
    small = predict(*counted(NEIGHBOURS, 1, 256), 1, resources, gpu)
    assert small.bound == "launch"
    assert LAUNCH < small.seconds < 2 * LAUNCH


def test_resident_blocks():
    """As many as registers, threads and shared memory allow."""
    h100 = next(gpu for gpu in GPUS if gpu.name == "H100")
    assert Resources(256, 32, 0).resident(h100) == 8
    assert Resources(256, 128, 0).resident(h100) == 2
    assert Resources(128, 32, 100 << 10).resident(h100) == 2
