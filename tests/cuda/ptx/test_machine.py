"""Copies, control flow and warps: small kernels whose result can be told beforehand.

Whatever else the CUDA kernels are compiled to is tested by their own tests, which run on it (OPGRAD_PTX).
"""

import numpy as np
import pytest
from ptx.sanitizer import Findings
from ptx_lanes import KERNEL, kernel, launch, run

LANE = np.arange(32, dtype=np.uint32)


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


def test_a_kernel_is_launched_as_it_was_compiled():
    from ptx.parser import PtxError

    array = np.zeros(32, np.uint32)
    text = kernel("", {"r0": array}, {}, 32)
    for wrong in ({"threads": 64}, {"arrays": {"a": array, "b": array}}):
        with pytest.raises(PtxError, match=r"lines: "):
            launch(text, wrong.get("arrays", {"a": array}), wrong.get("threads", 32))
