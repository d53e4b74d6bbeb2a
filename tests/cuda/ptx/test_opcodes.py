"""Opcodes: integers, floating point rounded once, approximations and conversions, against wider arithmetic.

Logic, fields, comparisons and moves are tested by the CUDA kernels' own tests, which run on them (OPGRAD_PTX).
"""

import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx.opcodes.floating import DIVISION, ERRORS
from ptx.parser import PtxError
from ptx_lanes import run

INTERESTING = [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 0x12345678, 0xDEADBEEF]
REGISTERS = {2: "h", 4: "r", 8: "d"}  # by size


def one(instruction, dtype, *operands):
    """What an instruction makes of operands: {0}, {1}, … name their registers, {z} that of the result."""
    names = [f"{REGISTERS[each.dtype.itemsize]}{place}" for place, each in enumerate(operands)]
    result = f"{REGISTERS[np.dtype(dtype).itemsize]}7"
    code = instruction.format(*(f"%{name}" for name in names), z=f"%{result}")
    (found,) = run(code, {result: dtype}, **dict(zip(names, operands, strict=True)))
    return found


def pairs(bits):
    """Every two of the interesting numbers, and random ones, as bits."""
    rng = np.random.default_rng(0)
    numbers = [each & (2**bits - 1) for each in INTERESTING]
    numbers += [2 ** (bits - 1), 2**bits - 1, 2 ** (bits - 1) - 1] + [
        int(each) for each in rng.integers(0, 2**63, 8, np.uint64) % np.uint64(2**bits - 1)
    ]
    grid = np.array([(a, b) for a in numbers for b in numbers], f"u{bits // 8}")
    return grid[:, 0].copy(), grid[:, 1].copy()


def signed(value, bits):
    return value - 2**bits if value >> (bits - 1) else value


def truncated(a, b):
    """The quotient towards 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# Of numbers a and b of so many bits; the third operand of mad is the bits of a.
INTEGERS = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "mul.wide": lambda a, b, bits: a * b,
    "mad.lo": lambda a, b, bits: a * b + a % 2**bits,
    "mad.wide": lambda a, b, bits: a * b + a % 2**bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "div": lambda a, b, bits: truncated(a, b) if b else None,
    "rem": lambda a, b, bits: a - b * truncated(a, b) if b else None,
}


@pytest.mark.parametrize("kind", ["u", "s"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integers(kind, bits):
    """Results are the last bits of what integers give; dividing by 0 gives something."""
    a, b = pairs(bits)
    own = (lambda value: signed(value, bits)) if kind == "s" else int
    for name, formula in INTEGERS.items():
        size = bits << name.endswith("wide")
        if size <= 64:
            third = [a.astype(f"u{size // 8}")] if name.startswith("mad") else []
            operands = ", ".join(f"{{{place}}}" for place in range(2 + len(third)))
            found = one(f"{name}.{kind}{bits} {{z}}, {operands};", f"u{size // 8}", a, b, *third)
            for x, y, result in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
                expected = formula(own(x), own(y), bits)
                assert expected is None or result == expected % 2**size, (name, x, y)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("frob.s32 %r1, %r0;", "unknown instruction frob.s32"),
        ("add.s32.sideways %r1, %r0, %r0;", "add.s32.sideways: unknown modifier .sideways"),
        ("add.rm.f32 %r1, %r0, %r0;", "unknown modifier .rm"),
        ("ld.global.frob.b32 %r1, [%d0];", "unknown modifier .frob"),
        ("ex2.approx.f16x2 %r1, %r0;", "no operation on .f16x2 is known"),
        ("add.s32 %r1, %r0;", "has 2 operands, expected 3"),
        ("atom.global.add.u32 %r1, [%d0], %r0;", "unknown instruction atom.global.add.u32"),
        ("mov.u32 %r1, %smid;", "unknown special register %smid"),
        ("bar.sync 1;", "expected barrier 0"),
    ],
)
def test_what_is_not_known_is_named(code, message):
    with pytest.raises(PtxError, match=message.replace(".", r"\.")):
        run(code, {"r1": "u4"}, r0=np.zeros(32, "u4"))


# --- floating point --------------------------------------------------------------------------------------------------

LIBM = ctypes.CDLL("libm.so.6")
for name, kind in (("fma", ctypes.c_double), ("fmaf", ctypes.c_float)):
    getattr(LIBM, name).argtypes, getattr(LIBM, name).restype = [kind] * 3, kind

HALF, BFLOAT16, SINGLE, DOUBLE = (np.dtype(each) for each in ("f2", ml_dtypes.bfloat16, "f4", "f8"))
FLOATS = {"f16": HALF, "bf16": BFLOAT16, "f32": SINGLE, "f64": DOUBLE}
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1.5, 1 / 3, -2.75, 65504.0, 3e38, 1e-38, -1e-45, 2.0**-24]


def values(dtype, count=600):
    """Special values, and random ones of every size, denormals too."""
    rng = np.random.default_rng(1)
    info = ml_dtypes.finfo(dtype)
    sizes = np.exp2(rng.uniform(info.minexp - info.nmant, info.maxexp - 1, count // 2))
    with np.errstate(all="ignore"):
        near = rng.normal(size=count - count // 2)
        return np.concatenate((SPECIAL, sizes * rng.choice([-1, 1], len(sizes)), near)).astype(dtype)


def three(dtype):
    rng, given = np.random.default_rng(2), values(dtype)
    return [given[rng.permutation(len(given))] for _ in range(3)]


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def same(found, expected, note=""):
    """Equal bits, but that any NaN is as good as another."""
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), nan, note)
    np.testing.assert_array_equal(bits(found)[~nan], bits(expected)[~nan], note)


# Rounded once; without an approximation.
ARITHMETIC = {
    "add.{kind} {z}, {0}, {1};": np.add,
    "sub.rn.{kind} {z}, {0}, {1};": np.subtract,
    "mul.rn.{kind} {z}, {0}, {1};": np.multiply,
    "div.rn.{kind} {z}, {0}, {1};": np.divide,
    "sqrt.rn.{kind} {z}, {0};": lambda a, b: np.sqrt(a),
    "neg.{kind} {z}, {0};": lambda a, b: -a,
    "abs.{kind} {z}, {0};": lambda a, b: abs(a),
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floating_arithmetic(kind):
    dtype = FLOATS[kind]
    a, b, _ = three(dtype)
    for instruction, formula in ARITHMETIC.items():
        with np.errstate(all="ignore"):
            same(one(instruction.replace("{kind}", kind), dtype, a, b), formula(a, b), instruction)


@pytest.mark.parametrize(("kind", "name"), [("f32", "fmaf"), ("f64", "fma")])
def test_fused_multiply_add(kind, name):
    """Rounded once, also where the product almost cancels, is tiny or overflows on the way."""
    dtype = FLOATS[kind]
    a, b, c = three(dtype)
    with np.errstate(all="ignore"):
        near = (-(a.astype(np.float64) * b)).astype(dtype)
    for third in (c, near, np.nextafter(near, np.array(0, dtype))):
        exact = [getattr(LIBM, name)(*map(float, each)) for each in zip(a, b, third, strict=True)]
        same(one(f"fma.rn.{kind} {{z}}, {{0}}, {{1}}, {{2}};", dtype, a, b, third), np.array(exact, dtype))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision(kind):
    """Exact sums and products, rounded once; two at a time do the same."""
    dtype = FLOATS[kind]
    a, b, c = three(dtype)
    names = {"add.rn": lambda x, y, z: x + y, "sub.rn": lambda x, y, z: x - y, "mul.rn": lambda x, y, z: x * y}
    names["fma.rn"] = lambda x, y, z: x * y + z
    for name, formula in names.items():
        count = 3 if name == "fma.rn" else 2
        operands, wide = (", ".join(f"%{prefix}{i}" for i in range(count)) for prefix in "hr")
        code = "\n".join(f"mov.b32 %r{i}, {{%h{i}, %h{i}}};" for i in range(3))
        code += f"{name}.{kind} %h3, {operands}; {name}.{kind}x2 %r3, {wide}; mov.b32 {{%h4, %h5}}, %r3;"
        found, low, high = run(code, dict.fromkeys(("h3", "h4", "h5"), dtype), h0=a, h1=b, h2=c)
        same(low, found, name)
        same(high, found, name)
        check_rounded(found, [a, b, c], formula, dtype, name)


def check_rounded(found, operands, formula, dtype, note):
    """No number of this dtype lies nearer to the exact result than what was found."""
    for result, *given in zip(found, *operands, strict=True):
        numbers = [float(each) for each in given]
        if all(map(np.isfinite, numbers)) and np.isfinite(float(result)):
            exact = formula(*map(Fraction, numbers))
            error = abs(Fraction(float(result)) - exact)
            for toward in (-np.inf, np.inf):
                with np.errstate(over="ignore"):
                    other = float(np.nextafter(result, dtype.type(toward)))
                assert not np.isfinite(other) or error <= abs(Fraction(other) - exact), (note, numbers)


def test_minimum_and_maximum():
    """NaN loses without .NaN and wins with it; -0 is less than +0."""
    a, b, c = three(SINGLE)
    a[:4], b[:4] = [0.0, -0.0, np.nan, 1.0], [-0.0, 0.0, np.nan, np.nan]
    code = "min.f32 %r3, %r0, %r1; max.f32 %r4, %r0, %r1; min.NaN.f32 %r5, %r0, %r1; max.NaN.f32 %r6, %r0, %r1;"
    code += "max.f32 %r7, %r0, %r1, %r2;"
    low, high, low_nan, high_nan, highest = run(code, {f"r{i}": "f4" for i in range(3, 8)}, r0=a, r1=b, r2=c)
    assert bits(low[:3]).tolist() == [0x80000000, 0x80000000, 0x7FFFFFFF]
    assert bits(high[:3]).tolist() == [0, 0, 0x7FFFFFFF]
    rest = slice(2, None)
    same(low[rest], np.fmin(a, b)[rest])
    same(low_nan[rest] + 0.0, np.minimum(a, b)[rest] + 0.0)
    same(high_nan[rest] + 0.0, np.maximum(a, b)[rest] + 0.0)
    same(highest[rest] + 0.0, np.fmax(np.fmax(a, b), c)[rest] + 0.0)


def test_denormals_are_flushed_only_where_asked():
    a, b = (np.array(each, np.float32) for each in ([1e-40, -1e-40, 2.0**-126, 1.0], [1.0, 1.0, 0.5, 1e-40]))
    same(one("mul.f32 {z}, {0}, {1};", SINGLE, a, b), a * b)
    same(one("mul.ftz.f32 {z}, {0}, {1};", SINGLE, a, b), np.array([0, -0.0, 0, 0], np.float32))
    same(one("abs.ftz.f32 {z}, {0};", SINGLE, a), np.array([0, 0, 2.0**-126, 1], np.float32))
    positive = one("setp.gt.ftz.f32 %p0, {0}, 0f00000000; selp.b32 {z}, 1, 0, %p0;", "u4", b)
    assert positive.tolist() == [1, 1, 1, 0]


def test_saturation():
    a = np.array([-3, -0.0, 0.25, 1, 7, np.inf, np.nan], np.float32)
    assert one("add.sat.f32 {z}, {0}, 0f00000000;", SINGLE, a).tolist() == [0, 0, 0.25, 1, 1, 1, 0]


APPROXIMATED = {
    "ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "rcp": lambda x: 1 / x,
    "tanh": np.tanh, "div.full": np.divide,
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATED)
def test_approximations_are_off_by_no_more_than_is_documented(name):
    """And by as much: half of it somewhere. Special values are exact."""
    a = np.concatenate((SPECIAL, np.random.default_rng(3).uniform(-40, 40, 3000))).astype(np.float32)
    operands = [a[:1024], np.roll(a, 17)[:1024]][: 1 + (name == "div.full")]
    error = (DIVISION if name == "div.full" else ERRORS[name]) + 2.0**-24
    approximately = name if name == "div.full" else f"{name}.approx"
    found = one(f"{approximately}.f32 {{z}}, {', '.join(f'{{{i}}}' for i in range(len(operands)))};", SINGLE, *operands)
    with np.errstate(all="ignore"):
        exact = APPROXIMATED[name](*[each.astype(np.float64) for each in operands])
        rounded = exact.astype(np.float32)
        normal = np.isfinite(rounded) & (np.abs(rounded) > 1e-37)
        share = np.abs(found[normal] - exact[normal]) / np.abs(exact[normal]) / error
    assert 0.5 < share.max() <= 1
    same(found[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)])


def test_gross_approximations_of_float64():
    a = values(DOUBLE, 200)
    a = a[np.isfinite(a) & (np.abs(a) > 1e-300) & (np.abs(a) < 1e300)]
    inverse = one("rcp.approx.ftz.f64 {z}, {0};", DOUBLE, a)
    np.testing.assert_allclose(inverse, 1 / a, 2.0**-19)
    np.testing.assert_allclose(one("rsqrt.approx.ftz.f64 {z}, {0};", DOUBLE, abs(a)), 1 / np.sqrt(abs(a)), 2.0**-19)
    assert not (bits(inverse) & np.uint64(2**32 - 1)).any()


def test_mixed_precision_and_pairs():
    a, b, _ = three(SINGLE)
    half = a.astype(BFLOAT16)
    same(one("add.rn.f32.bf16 {z}, {0}, {1};", SINGLE, half, b), half.astype(np.float32) + b)
    code = "mov.b64 %d0, {%r0, %r1}; fma.rn.f32x2 %d1, %d0, %d0, %d0; mov.b64 {%r2, %r3}, %d1;"
    for found, given in zip(run(code, {"r2": "f4", "r3": "f4"}, r0=a, r1=b), (a, b), strict=True):
        exact = [LIBM.fmaf(*[float(each)] * 3) for each in given]
        same(found, np.array(exact, np.float32))


# --- conversions -----------------------------------------------------------------------------------------------------

NUMBERS = np.concatenate(([0.0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-30, 65519.99, 65520, 2.0**-25,
                           3.5, 2.5, -2.5, 1e300, 3.4e38, 1e-45, 2.0**31, 2.0**63, -(2.0**31), -1.0],
                          np.random.default_rng(0).normal(0, 1000, 200)))  # fmt: skip


@pytest.mark.parametrize(("of", "to"), [(of, to) for of in FLOATS for to in FLOATS if of != to])
def test_between_floats(of, to):
    """Rounded once, to the nearest: from float64 to bfloat16 too, which ml_dtypes rounds by way of float32."""
    kind, result = FLOATS[of], FLOATS[to]
    with np.errstate(all="ignore"):
        given = NUMBERS.astype(kind)
        if (of, to) == ("f64", "bf16"):
            given = given.astype(np.float32).astype(np.float64)  # of these, rounding twice is rounding once
        expected = given.astype(np.float64).astype(np.float32 if to == "bf16" else result).astype(result)
    rounding = ".rn" if result.itemsize < kind.itemsize or {of, to} == {"f16", "bf16"} else ""
    found = one(f"cvt{rounding}.{to}.{of} {{z}}, {{0}};", result, given)
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_floats_to_integers(to):
    """Clamped to what the integer holds; NaN is 0, or the highest bit of 64."""
    number = int(to[1:])
    info = np.iinfo(f"{'i' if to[0] == 's' else 'u'}{number // 8}")
    for way, rounded in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        found = one(f"cvt.{way}.{to}.f64 {{z}}, {{0}};", info.dtype, np.append(NUMBERS, np.nan))
        whole = [int(each) if np.isfinite(each) else (info.max if each > 0 else info.min) for each in rounded(NUMBERS)]
        assert found[:-1].tolist() == [min(max(each, info.min), info.max) for each in whole], way
        assert int(found[-1]) % 2**number == 1 << 63 & (2**number - 1)


def test_integers_of_other_widths():
    """Signed numbers keep their sign in a wider register; a narrower type takes the last bits of a register."""
    given = np.array([0, 1, 127, 128, 255, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    short = given.astype("u2")
    for instruction, of, expected in (
        ("cvt.s64.s32", given, given.view("i4").astype("i8")), ("cvt.u64.u32", given, given.astype("u8")),
        ("cvt.u16.u32", given, short), ("cvt.s16.s8", short, given.astype("u1").view("i1").astype("i2")),
        ("cvt.sat.s16.s32", given, np.clip(given.view("i4"), -(2**15), 2**15 - 1).astype("i2")),
        ("cvt.u32.u16", short, short.astype("u4")),
    ):  # fmt: skip
        found = one(f"{instruction} {{z}}, {{0}};", expected.dtype, of)
        np.testing.assert_array_equal(found, expected, instruction)
