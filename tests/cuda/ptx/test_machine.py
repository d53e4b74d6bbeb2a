"""Memory, control flow, warps and matrices: small kernels whose result can be told beforehand."""

import numpy as np
import pytest
from ptx.sanitizer import Findings
from ptx_lanes import KERNEL, kernel, launch, run

LANE = np.arange(32, dtype=np.uint32)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_vectors_in_global_memory():
    """v2 and v4 of every width, with cache hints; lanes whose predicate is false load nothing."""
    given = np.arange(512, dtype=np.uint32)
    copied = np.zeros_like(given)
    text = KERNEL.format(parameters=".param .u64 a0, .param .u64 a1", threads=64, shared=16, loads="", stores="",
                         code="""
    ld.param.b64 %at0, [a0]; ld.param.b64 %at1, [a1];
    mad.wide.u32 %at2, %tid, 16, %at0; mad.wide.u32 %at3, %tid, 16, %at1;
    setp.lt.u32 %p0, %tid, 40;
    @%p0 ld.global.nc.L1::evict_first.v4.b32 {%r0, %r1, %r2, %r3}, [%at2];
    @%p0 st.global.L1::evict_last.v4.b32 [%at3+0], {%r0, %r1, %r2, %r3};
    @!%p0 ld.global.v2.b64 {%d0, %d1}, [%at2];
    @!%p0 st.global.cs.v2.b64 [%at3], {%d0, %d1};
    ld.global.v2.b16 {%h0, %h1}, [%at2+1024];
    st.global.v2.b16 [%at3+1024], {%h0, %h1};""")  # fmt: skip
    launch(text, {"a0": given, "a1": copied}, 64)
    expected = np.zeros_like(given)
    expected[:256] = given[:256]
    expected[256:512:4] = given[256:512:4]
    np.testing.assert_array_equal(copied, expected)


def test_narrow_words():
    """Bytes fill a wider register with zeros, or with their sign."""
    given = np.arange(32, dtype=np.uint32) * 0x01020384
    code = "st.shared.b32 [%r9], %r0; bar.warp.sync -1; ld.shared.s8 %h1, [%r9]; ld.shared.b8 %h2, [%r9+1];"
    signed, plain = run(f"shl.b32 %r9, %tid, 2; mov.b32 %r8, buffer; add.s32 %r9, %r9, %r8; {code}",
                        {"h1": "i2", "h2": "u2"}, r0=given)  # fmt: skip
    np.testing.assert_array_equal(signed, given.astype("u1").view("i1"))
    np.testing.assert_array_equal(plain, given >> 8 & 0xFF)


COPY = """
    shl.b32 %r9, %tid, 4; mov.b32 %r8, buffer; add.s32 %r9, %r9, %r8;
    ld.param.b64 %at0, [a0]; ld.param.b64 %at1, [a1]; mad.wide.u32 %at2, %tid, 16, %at0;
    setp.lt.u32 %p0, %tid, 20; selp.b32 %r7, 16, 0, %p0;
    cp.async.cg.shared.global [%r9 + 0], [%at2 + 0], 0x10, %r7;
    cp.async.commit_group;
    add.s32 %r6, %r9, 512; add.s64 %at3, %at2, 512;
    cp.async.ca.shared.global [%r6], [%at3], 0x8;
    cp.async.commit_group;
    cp.async.wait_group {first};
    ld.shared.b32 %r0, [%r9];
    cp.async.wait_group 0;
    ld.shared.b32 %r1, [%r6];
    mad.wide.u32 %at4, %tid, 8, %at1; st.global.v2.b32 [%at4], {{%r0, %r1}};"""


def copies(first):
    given, found = np.arange(1, 385, dtype=np.uint32), np.zeros(64, np.uint32)
    text = KERNEL.format(parameters=".param .u64 a0, .param .u64 a1", threads=32, shared=1024, loads="", stores="",
                         code=COPY.format(first=first))  # fmt: skip
    launch(text, {"a0": given, "a1": found}, 32)
    return given, found.reshape(32, 2)


def test_asynchronous_copies():
    """Zeros where nothing is to be copied; the first of two groups is there when one may still be under way."""
    given, found = copies(1)
    np.testing.assert_array_equal(found[:, 0], np.where(LANE < 20, given[:128:4], 0))
    np.testing.assert_array_equal(found[:, 1], given[128:256:4])
    with pytest.raises(Findings, match=r"uninitialised.*still on their way"):
        copies(2)


# --- control flow -----------------------------------------------------------------------------------------------------


def test_loops_of_different_lengths():
    """Each lane goes round as often as its number says, and all meet behind: the shuffle finds them there."""
    code = """
    mov.b32 %r1, 0; mov.b32 %r2, 0; setp.eq.u32 %p0, %r0, 0; @%p0 bra $behind;
$loop:
    add.s32 %r1, %r1, 1; add.s32 %r2, %r2, %r1; setp.lt.u32 %p1, %r1, %r0; @%p1 bra $loop;
$behind:
    shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;"""
    total, other = run(code, {"r2": "u4", "r3": "u4"}, r0=LANE)
    np.testing.assert_array_equal(total, LANE * (LANE + 1) // 2)
    np.testing.assert_array_equal(other, total[LANE ^ 1])


def test_lanes_meet_behind_a_branch_whose_side_stands_at_the_end():
    """As the compiler lays out what is seldom run; in a loop, too, which some lanes leave early."""
    code = """
    mov.b32 %r1, 0; mov.b32 %r2, 0;
$loop:
    setp.gt.u32 %p0, %r0, 20; @%p0 bra $seldom;
$back:
    shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1; add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; @%p1 bra $loop;
    bra.uni $end;
$seldom:
    add.s32 %r1, %r1, 5; bra.uni $back;
$end:
    add.s32 %r4, %r1, %r3;"""
    (found,) = run(code, {"r4": "u4"}, r0=LANE)
    own = np.where(LANE > 20, 15, 0)
    np.testing.assert_array_equal(found, own + own[LANE ^ 1])


def test_warps_wait_for_each_other():
    """Words go through shared memory from each warp to the next."""
    code = """
    shl.b32 %r9, %tid, 2; mov.b32 %r8, buffer; add.s32 %r9, %r9, %r8; st.shared.b32 [%r9], %r0;
    bar.sync 0;
    add.s32 %r7, %tid, 32; and.b32 %r7, %r7, 127; shl.b32 %r7, %r7, 2; add.s32 %r7, %r7, %r8;
    ld.shared.b32 %r1, [%r7];"""
    given = np.arange(128, dtype=np.uint32) * 7
    (found,) = run(code, {"r1": "u4"}, r0=given)
    np.testing.assert_array_equal(found, np.roll(given, -32))


def test_blocks_of_a_cluster_read_each_other():
    given, found = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    text = KERNEL.format(parameters=".param .u64 a0, .param .u64 a1", threads=32, shared=128, loads="", stores="",
                         code="""
    ld.param.b64 %at0, [a0]; ld.param.b64 %at1, [a1]; mov.u32 %r0, %ctaid.x; shl.b32 %r1, %r0, 5;
    add.s32 %r1, %r1, %tid;
    mad.wide.u32 %at2, %r1, 4, %at0; mad.wide.u32 %at3, %r1, 4, %at1; ld.global.b32 %r2, [%at2];
    shl.b32 %r9, %tid, 2; mov.b32 %r8, buffer; add.s32 %r9, %r9, %r8; st.shared.b32 [%r9], %r2;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r4, %r9, %r3;
    ld.shared::cluster.b32 %r5, [%r4]; st.global.b32 [%at3], %r5;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""")  # fmt: skip
    from ptx.machine import Launch
    from ptx.memory import GlobalMemory
    from ptx.program import Program

    memory = GlobalMemory()
    memory.add(given, "a0"), memory.add(found, "a1")
    text = text.replace(".reqntid 32", ".reqntid 32\n.reqnctapercluster 2")
    Launch(Program(text), (8, 1, 1), 32, [given.ctypes.data, found.ctypes.data], memory, 0, 2).run()
    np.testing.assert_array_equal(found.reshape(-1, 2, 32), given.reshape(-1, 2, 32)[:, ::-1])


def test_grids_have_three_dimensions():
    found = np.zeros(24, np.uint32)
    code = """
    ld.param.b64 %at0, [a0]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z;
    mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, %nctaid.y; mad.lo.s32 %r5, %r2, %r4, %r1; mad.lo.s32 %r5, %r5, %r3, %r0;
    mad.wide.u32 %at1, %r5, 4, %at0;
    mad.lo.s32 %r6, %r0, 100, %r1; mad.lo.s32 %r6, %r6, 100, %r2; setp.eq.u32 %p0, %tid, 0;
    @%p0 st.global.b32 [%at1], %r6;"""
    text = KERNEL.format(parameters=".param .u64 a0", threads=32, shared=4, loads="", stores="", code=code)
    launch(text, {"a0": found}, 32, grid=(2, 3, 4))
    z, y, x = np.meshgrid(range(4), range(3), range(2), indexing="ij")
    np.testing.assert_array_equal(found, (x * 10000 + y * 100 + z).ravel())


# --- warps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(width):
    """In segments, as CUDA's __shfl functions do; a lane outside of its segment keeps its own value."""
    given = LANE * 3 + 1
    limit = (32 - width) << 8 | 31
    code = f"shfl.sync.up.b32 %r1, %r0, 3, {(32 - width) << 8}, -1; shfl.sync.down.b32 %r2|%p0, %r0, 3, {limit}, -1;"
    code += f"shfl.sync.bfly.b32 %r3, %r0, 5, {limit}, -1; shfl.sync.idx.b32 %r4, %r0, 2, {limit}, -1;"
    code += "selp.b32 %r5, 1, 0, %p0;"
    up, down, across, picked, inside = run(code, {f"r{i}": "u4" for i in range(1, 6)}, r0=given)
    own, first = LANE % width, LANE // width * width
    np.testing.assert_array_equal(up, given[np.where(own >= 3, LANE - 3, LANE)])
    np.testing.assert_array_equal(down, given[np.where(own + 3 < width, LANE + 3, LANE) % 32])
    np.testing.assert_array_equal(inside, own + 3 < width)
    np.testing.assert_array_equal(across, given[LANE ^ 5])
    np.testing.assert_array_equal(picked, given[first + 2])


def test_reductions():
    given = np.array([(i * 2654435761) % 2**32 for i in range(64)], np.uint32)
    names = {"add.s32": lambda a: a.sum(dtype=np.uint32), "min.s32": lambda a: a.view("i4").min(), "max.u32": np.max,
             "min.u32": np.min, "xor.b32": np.bitwise_xor.reduce, "and.b32": np.bitwise_and.reduce}  # fmt: skip
    code = "\n".join(f"redux.sync.{name} %r{i + 1}, %r0, -1;" for i, name in enumerate(names))
    found = run(code, {f"r{i + 1}": "u4" for i in range(len(names))}, r0=given)
    for warp in (slice(32), slice(32, 64)):
        own = given[warp]
        expected = [int(formula(own)) % 2**32 for formula in names.values()]
        assert [int(each[warp][5]) for each in found] == expected


def test_reductions_of_floats():
    given = np.random.default_rng(0).normal(size=64).astype(np.float32)
    given[40] = np.nan
    code = "redux.sync.max.f32 %r1, %r0, -1; redux.sync.min.abs.f32 %r2, %r0, -1; redux.sync.max.NaN.f32 %r3, %r0, -1;"
    high, low, nan = run(code, {f"r{i}": "f4" for i in (1, 2, 3)}, r0=given)
    for warp in (slice(32), slice(32, 64)):
        assert high[warp][0] == np.nanmax(given[warp])
        assert low[warp][0] == np.nanmin(abs(given[warp]))
    assert nan[0] == given[:32].max()
    assert np.isnan(nan[32])


# --- matrices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices(transposed):
    """A lane gets two neighbours of a row of each matrix, or of a column; storing them again gives the matrices."""
    given = np.arange(256, dtype=np.uint16).view(np.uint32)
    way = ".trans" if transposed else ""
    code = f"""
    mov.b32 %r8, buffer; shl.b32 %r9, %tid, 4; add.s32 %r9, %r9, %r8;
    mov.b64 {{%r1, %r2}}, %d0; mov.b64 {{%r3, %r4}}, %d1; st.shared.v4.b32 [%r9], {{%r1, %r2, %r3, %r4}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r9]; bar.sync 0;
    stmatrix.sync.aligned.m8n8.x4{way}.shared.b16 [%r9], {{%r10, %r11, %r12, %r13}}; bar.sync 0;
    ld.shared.v2.b64 {{%d2, %d3}}, [%r9];"""
    words = given.reshape(32, 4).copy().view(np.uint64)
    *loaded, low, high = run(
        code,
        {"r10": "u4", "r11": "u4", "r12": "u4", "r13": "u4", "d2": "u8", "d3": "u8"},
        d0=words[:, 0],
        d1=words[:, 1],
    )
    matrices = given.view(np.uint16).reshape(4, 8, 8)
    for each, matrix in zip(loaded, matrices, strict=True):
        right = matrix.T if transposed else matrix
        np.testing.assert_array_equal(each.view(np.uint16).reshape(8, 8), right)
    np.testing.assert_array_equal(np.stack((low, high), 1), words)


def test_registers_keep_what_other_lanes_write():
    """A lane that a branch leaves out keeps its value, and its predicate."""
    code = """
    setp.lt.u32 %p0, %tid, 7; mov.b32 %r1, 5; @%p0 bra $less; mov.b32 %r1, 9; bra.uni $end;
$less:
    add.s32 %r1, %r1, %r0;
$end:
    @!%p0 add.s32 %r1, %r1, 100;"""
    (found,) = run(code, {"r1": "u4"}, r0=LANE)
    np.testing.assert_array_equal(found, np.where(LANE < 7, 5 + LANE, 109))


def test_a_kernel_is_launched_as_it_was_compiled():
    from ptx.parser import PtxError

    array = np.zeros(32, np.uint32)
    text = kernel("", {"r0": array}, {}, 32)
    for wrong in ({"threads": 64}, {"arrays": {"a": array, "b": array}}):
        with pytest.raises(PtxError, match=r"lines: "):
            launch(text, wrong.get("arrays", {"a": array}), wrong.get("threads", 32))
