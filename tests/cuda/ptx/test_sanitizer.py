"""Each kind of fault, in a kernel that has it and beside one that has not."""

import numpy as np
import pytest
from ptx.sanitizer import Findings
from ptx_lanes import KERNEL, launch

POINTERS = ".param .u64 .ptr .global .align 1 a0, .param .u64 .ptr .global .align 1 a1"
SETUP = "ld.param.b64 %at0, [a0]; ld.param.b64 %at1, [a1]; mad.wide.u32 %at2, %tid, 4, %at0; mov.b32 %r8, buffer;"
SETUP += "mad.wide.u32 %at3, %tid, 4, %at1; shl.b32 %r9, %tid, 2; add.s32 %r9, %r9, %r8; mov.b32 %r0, %tid;\n"


def execute(code, threads=64, written=("a1",), size=64, **more):
    """Run a kernel with an array to read and one to write."""
    given, found = np.arange(size, dtype=np.uint32), np.zeros(size, np.uint32)
    text = KERNEL.format(parameters=POINTERS, threads=threads, shared=1024, loads=SETUP, stores="", code=code)
    launch(text, {"a0": given, "a1": found}, threads, written=written, **more)
    return found


def found_in(code, **more):
    """The findings of a kernel, each of another kind."""
    with pytest.raises(Findings) as caught:
        execute(code, **more)
    return {each.kind: each for each in caught.value.found}


def test_bounds():
    """Reads too, one word behind the end and one before the beginning; the rest of the launch goes on."""
    execute("ld.global.b32 %r1, [%at2]; st.global.b32 [%at3], %r1;")
    behind = found_in("ld.global.b32 %r1, [%at2+4];")["bounds"]
    assert (behind.thread, behind.cta, behind.count) == (63, (0, 0, 0), 1)
    assert "0 bytes behind the end of a0" in str(behind)
    before = found_in("add.s64 %at4, %at3, -4; st.global.b32 [%at4], %r0;")["bounds"]
    assert (before.thread, before.kernel) == (0, "lines")
    assert "4 bytes before a1" in str(before) or "bytes behind the end of a0" in str(before)
    across = found_in("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%at2];", threads=32, size=33)
    assert across["bounds"].count == 2
    shared = found_in("st.shared.b32 [%r9+960], %r0;")["bounds"]
    assert shared.thread == 16
    assert "outside of the 1024 of shared memory" in str(shared)


def test_alignment():
    """Of whole vectors, in global and in shared memory."""
    wide = found_in("ld.global.v2.b32 {%r1, %r2}, [%at2];", threads=32)["alignment"]
    assert (wide.thread, wide.count) == (1, 16)
    assert "no multiple of 8 bytes, in a0 (256 bytes), 4 bytes from its beginning" in str(wide)
    assert found_in("st.shared.v4.b32 [%r9], {%r0, %r0, %r0, %r0};")["alignment"].count == 48


def test_uninitialised():
    """Of an array that is there to be written, and of shared memory; what was written before may be read."""
    execute("st.global.b32 [%at3], %r0; ld.global.b32 %r1, [%at3];")
    unwritten = found_in("ld.global.b32 %r1, [%at3];")["uninitialised"]
    assert (unwritten.count, unwritten.thread) == (64, 0)
    execute("ld.global.b32 %r1, [%at3];", written=())
    half = found_in("setp.lt.u32 %p0, %tid, 32; @%p0 st.shared.b32 [%r9], %r0; ld.shared.b32 %r1, [%r9];")
    assert half["uninitialised"].count == 32


RIGHT = "st.shared.b32 [%r9], %r0; bar.sync 0; xor.b32 %r7, %r9, 252; ld.shared.b32 %r1, [%r7]; bar.sync 0;"
RIGHT += "st.shared.b32 [%r9], %r1;"


def test_races():
    """A barrier less on either side of a read; two writers; a warp's own barrier within a warp."""
    execute(RIGHT)
    read = found_in(RIGHT.replace("bar.sync 0;", "", 1))["race"]
    assert (read.instruction.opcode, read.count) == ("ld", 64)
    assert "which thread 63 wrote, with no barrier between" in str(read)
    before, _, behind = RIGHT.rpartition("bar.sync 0;")
    write = found_in(before + behind)["race"]
    assert (write.instruction.opcode, write.count) == ("st", 64)
    assert "which thread 63 read" in str(write)
    both = found_in("st.shared.b32 [%r8], %r0;")["race"]
    assert "writes something else to the same place in this instruction" in str(both)
    execute("mov.b32 %r0, 7; st.shared.b32 [%r8], %r0;")
    within = "st.shared.b32 [%r9], %r0; {} xor.b32 %r7, %r9, 4; ld.shared.b32 %r1, [%r7];"
    execute(within.format("bar.warp.sync -1;"))
    assert found_in(within.format(""))["race"].count == 64
    across = "st.shared.b32 [%r9], %r0; bar.warp.sync -1; xor.b32 %r7, %r9, 128; ld.shared.b32 %r1, [%r7];"
    assert found_in(across)["race"].count == 64


def test_many_readers_and_a_writer():
    """That thread 0 writes what all have read, of which it was the last to be noted, is a race as well."""
    code = "setp.eq.u32 %p0, %tid, {}; st.shared.b32 [%r9], %r0; bar.sync 0; ld.shared.b32 %r1, [%r8]; {}"
    code += "@%p0 st.shared.b32 [%r8], %r0;"
    for writer in (0, 31, 32, 63):
        execute(code.format(writer, "bar.sync 0;"))
        assert found_in(code.format(writer, ""))["race"].thread == writer


def test_races_in_global_memory():
    """Between threads of a block, and between blocks, whatever they write; not where each has places of its own."""
    other = "st.global.b32 [%at3], %r0; {} xor.b32 %r7, %tid, {}; mad.wide.u32 %at4, %r7, 4, %at1; {}"
    read, write = "ld.global.b32 %r1, [%at4];", "st.global.b32 [%at4], %r0;"
    for code in (read, write):
        execute(other.format("bar.sync 0;", 63, code))
        race = found_in(other.format("", 63, code))["race"]
        assert (race.instruction.opcode, race.count) == (code[:2], 64)
        assert "another thread of the block, with no barrier between, is there" in str(race)
        execute(other.format("bar.warp.sync -1;", 1, code))
        assert found_in(other.format("bar.warp.sync -1;", 32, code))["race"].count == 64
    same = found_in("mov.b32 %r0, 7; st.global.b32 [%at3], %r0;", grid=(2, 1, 1))["race"]
    assert "in a1 (256 bytes), 0 bytes from its beginning: another block is there" in str(same)
    later = "mov.u32 %r5, %ctaid.x; setp.eq.u32 %p0, %r5, {}; @%p0 st.global.b32 [%at3], %r0;"
    execute(later.format(1), grid=(3, 1, 1))
    assert "race" in found_in(later.format(1) + "@!%p0 ld.global.b32 %r1, [%at3];", grid=(2, 1, 1), written=())


def test_orders_of_blocks():
    """What several blocks write to one place is left by the one that comes last; who writes alone comes when it may."""
    every = "mov.u32 %r5, %ctaid.x; st.global.b32 [%at3], %r5;"
    found = found_in(every, grid=(1500, 1, 1), orders=(1, -1))["order"]
    assert "bytes depend on the order of blocks" in str(found)
    execute(every.replace("st.", "setp.eq.u32 %p0, %r5, 1; @%p0 st."), grid=(1500, 1, 1), orders=(1, -1))


def test_barriers():
    """One that half a warp reaches, and one that a warp never does."""
    parted = "setp.lt.u32 %p0, %tid, 40; @!%p0 bra $end; bar.sync 0;\n$end:\n"
    assert found_in(parted)["barrier"].count >= 8
    never = "setp.lt.u32 %p0, %tid, 32; @!%p0 bra $end; bar.sync 0;\n$end:\n"
    assert "not all threads of its block reach the barrier" in str(found_in(never)["barrier"])
    guarded = "setp.lt.u32 %p0, %tid, 10; @%p0 bar.sync 0;"
    assert "not all lanes of its warp" in str(found_in(guarded)["barrier"])


def test_lanes():
    """A shuffle that names lanes which do not come, and one that reads a lane which does not."""
    execute("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;")
    some = "setp.lt.u32 %p0, %tid, 16; @%p0 shfl.sync.bfly.b32 %r1, %r0, {}, 31, {};"
    execute(some.format(1, 0xFFFF), threads=32)
    assert found_in(some.format(1, -1), threads=32)["lanes"].count == 16
    assert "reads a lane that does not reach it" in str(found_in(some.format(16, 0xFFFF), threads=32)["lanes"])
    assert "lanes" in found_in("setp.lt.u32 %p0, %tid, 16; @%p0 redux.sync.add.s32 %r1, %r0, -1;")


def test_overflow():
    """An offset that 32 bits do not hold: as a product, a sum or a shift, with its sign and without; not one that no
    access is made with."""
    wide = "mul.wide.s32 %at4, %r2, 4; add.s64 %at4, %at0, %at4; @%p0 ld.global.b32 %r3, [%at4];"
    for code in ("mul.lo.s32 %r2, %r0, 100000000;", "add.s32 %r2, %r0, 2147483640;", "shl.b32 %r2, %r0, 27;"):
        always = f"setp.ge.u32 %p0, %tid, 0; {code}"
        overflow = found_in(always + wide)["overflow"]
        assert overflow.instruction.opcode == "ld"
        assert "lost its upper bits" in str(overflow)
    execute("setp.eq.u32 %p0, %tid, 1; mul.lo.s32 %r2, %r0, 20;" + wide, size=256)
    execute("setp.eq.u32 %p0, %tid, 0; mul.lo.s32 %r2, %r0, 100000000;" + wide)
    plain = "cvt.u64.u32 %at4, %r2; add.s64 %at4, %at0, %at4; ld.global.b32 %r3, [%at4];"
    execute("add.s32 %r2, %r0, 4; add.s32 %r2, %r2, -4; and.b32 %r2, %r2, -4;" + plain)
    assert "overflow" in found_in("add.s32 %r2, %r0, -60; mul.lo.s32 %r2, %r2, 4;" + plain)


def test_memory_of_a_thread():
    local = ".local .align 8 .b8 depot[16];"
    assert "16 bytes of a thread do not fit" in str(found_in(local)["local"])


def test_a_finding_names_the_line_of_python():
    code = ".loc 1 42 3 // softmax.py\nld.global.b32 %r1, [%at2+4];\n.loc 1 50 1, function_name $x, inlined_at 1 60 2\n"
    text = KERNEL.format(parameters=POINTERS, threads=32, shared=4, loads=SETUP, stores="",
                         code=code + "ld.global.b32 %r1, [%at2+8];") + '.file 1 "/tmp/opgrad/softmax.py"\n'  # fmt: skip
    given = np.arange(32, dtype=np.uint32)
    with pytest.raises(Findings) as caught:
        launch(text, {"a0": given, "a1": given}, 32)
    first, second = map(str, caught.value.found)
    assert "(ld.global.b32), softmax.py:42: thread 31 of block (0, 0, 0) at 0x" in first
    assert "softmax.py:50, called at softmax.py:60: thread 30" in second
    assert "2 threads in all" in second
