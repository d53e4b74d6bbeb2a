"""Moves and conversions, against NumPy's and ml_dtypes' own and against the manual's words on what does not fit."""

import ml_dtypes
import numpy as np
import pytest
from ptx_lanes import run

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {
    "f16": (np.dtype("f2"), "h"),
    "bf16": (BFLOAT16, "h"),
    "f32": (np.dtype("f4"), "r"),
    "f64": (np.dtype("f8"), "d"),
}
NUMBERS = np.concatenate(([0.0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-30, 65519.99, 65520, 2.0**-25,
                           3.5, 2.5, -2.5, 1e300, 3.4e38, 1e-45, 2.0**31, 2.0**63, -(2.0**31), -1.0],
                          np.random.default_rng(0).normal(0, 1000, 200)))  # fmt: skip


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("of", FLOATS)
def test_between_floats(to, of):
    """Rounded once, to the nearest: from float64 to bfloat16 too, which ml_dtypes rounds by way of float32."""
    (kind, p), (result, q) = FLOATS[of], FLOATS[to]
    with np.errstate(all="ignore"):
        given = NUMBERS.astype(kind)
        expected = given.astype(np.float64).astype(result)
        if (of, to) == ("f64", "bf16"):
            given = given.astype(np.float32).astype(np.float64)  # of these, rounding twice is rounding once
            expected = given.astype(np.float32).astype(BFLOAT16)
    if of == to:
        return
    rounding = ".rn" if result.itemsize < kind.itemsize or {of, to} == {"f16", "bf16"} else ""
    code = f"cvt{rounding}.{to}.{of} %{q}5, %{p}0;"
    (found,) = run(code, {f"{q}5": f"u{result.itemsize}"}, **{f"{p}0": bits(given)})
    np.testing.assert_array_equal(found, bits(expected))


def test_two_at_a_time():
    """The first operand goes to the upper half."""
    with np.errstate(over="ignore"):
        a, b = NUMBERS.astype(np.float32), NUMBERS[::-1].astype(np.float32)
    found, other = run(
        "cvt.rn.bf16x2.f32 %r2, %r0, %r1; cvt.rn.f16x2.f32 %r3, %r0, %r1;", {"r2": "u4", "r3": "u4"}, r0=a, r1=b
    )
    with np.errstate(all="ignore"):
        for result, kind in ((found, BFLOAT16), (other, np.dtype("f2"))):
            np.testing.assert_array_equal(result >> 16, bits(a.astype(kind)))
            np.testing.assert_array_equal(result & 0xFFFF, bits(b.astype(kind)))


@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_floats_to_integers(to):
    """Clamped to what the integer holds; NaN is 0, or the highest bit of 64."""
    number = int(to[1:])
    info = np.iinfo(f"{'i' if to[0] == 's' else 'u'}{number // 8}")
    given = np.append(NUMBERS, np.nan)
    p = {16: "h", 32: "r", 64: "d"}[number]
    for way, rounded in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        (found,) = run(f"cvt.{way}.{to}.f64 %{p}5, %d0;", {f"{p}5": info.dtype.str}, d0=given)
        whole = [
            int(each) if np.isfinite(each) else (info.max if each > 0 else info.min) for each in rounded(given[:-1])
        ]
        assert found[:-1].tolist() == [min(max(each, info.min), info.max) for each in whole], way
        assert int(found[-1]) % 2**number == 1 << 63 & (2**number - 1)


def test_integers_to_floats():
    given = np.array([0, 1, -1, 2**24 + 1, 2**31 - 1, -(2**31), 123456789], np.int32)
    single, double, half, unsigned = run(
        "cvt.rn.f32.s32 %r1, %r0; cvt.rn.f64.s32 %d1, %r0; cvt.rn.f16.s32 %h1, %r0; cvt.rn.f32.u32 %r2, %r0;",
        {"r1": "f4", "d1": "f8", "h1": "f2", "r2": "f4"},
        r0=given,
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(half, given.astype(np.float64).astype("f2"))
    np.testing.assert_array_equal(single, given.astype("f4"))
    np.testing.assert_array_equal(double, given)
    np.testing.assert_array_equal(unsigned, given.view("u4").astype("f4"))


def test_integers_of_other_widths():
    """Signed numbers keep their sign in a wider register; a narrower type takes the last bits of a register."""
    given = np.array([0, 1, 127, 128, 255, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    code = "cvt.s64.s32 %d0, %r0; cvt.u64.u32 %d1, %r0; cvt.u16.u32 %h0, %r0; cvt.s16.s8 %h1, %h0;"
    code += "cvt.sat.s16.s32 %h2, %r0; cvt.u32.u16 %r1, %h0;"
    long, ulong, short, byte, clamped, back = run(
        code, {"d0": "i8", "d1": "u8", "h0": "u2", "h1": "i2", "h2": "i2", "r1": "u4"}, r0=given
    )
    np.testing.assert_array_equal(long, given.view("i4"))
    np.testing.assert_array_equal(ulong, given)
    np.testing.assert_array_equal(short, given.astype("u2"))
    np.testing.assert_array_equal(byte, given.astype("u1").view("i1"))
    np.testing.assert_array_equal(clamped, np.clip(given.view("i4"), -(2**15), 2**15 - 1))
    np.testing.assert_array_equal(back, given & 0xFFFF)


def test_rounding_to_integral_floats():
    given = NUMBERS[np.isfinite(NUMBERS)]
    nearest, down = run("cvt.rni.f64.f64 %d1, %d0; cvt.rmi.f64.f64 %d2, %d0;", {"d1": "f8", "d2": "f8"}, d0=given)
    np.testing.assert_array_equal(nearest, np.rint(given))
    np.testing.assert_array_equal(down, np.floor(given))


def test_words_in_parts():
    """mov packs the first word lowest; a part may be dropped; a scope has registers of its own."""
    given = np.arange(32, dtype=np.uint64) * np.uint64(0x0123456789ABCDEF)
    code = "mov.b64 {%r0, %r1}, %d0; mov.b64 %d1, {%r1, %r0}; mov.b32 {%h0, _}, %r0; mov.b32 {_, %h1}, %r0;"
    code += "{ .reg .b32 tmp; mov.b64 {%r2, tmp}, %d0; }"
    low, swapped, first, second, kept = run(
        code, {"r0": "u4", "d1": "u8", "h0": "u2", "h1": "u2", "r2": "u4"}, d0=given
    )
    np.testing.assert_array_equal(low, given.astype("u4"))
    np.testing.assert_array_equal(kept, low)
    np.testing.assert_array_equal(swapped, (given >> np.uint64(32)) | (given << np.uint64(32)))
    np.testing.assert_array_equal(first, low & 0xFFFF)
    np.testing.assert_array_equal(second, low >> 16)


def test_constants():
    """Bits of floats, negative and hexadecimal integers, in registers of any width."""
    code = (
        "mov.b32 %r0, 0f3F800000; mov.b64 %d0, 0d3FF0000000000000; mov.b32 %r1, -2; mov.u64 %d1, 0x10; mov.b16 %h0, -1;"
    )
    code += "add.f32 %r2, %r0, 0f40000000; mov.pred %p0, -1; @!%p0 mov.b32 %r1, 5;"
    one, double, minus, hexa, half, three = run(
        code, {"r0": "f4", "d0": "f8", "r1": "i4", "d1": "u8", "h0": "u2", "r2": "f4"}
    )
    assert (one[0], double[0], minus[0], hexa[0], half[0], three[0]) == (1, 1, -2, 16, 65535, 3)
