"""Floating point: each opcode against exact arithmetic, rounded once."""

import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx.opcodes.floating import DIVISION, ERRORS
from ptx_lanes import run

LIBM = ctypes.CDLL("libm.so.6")
for name, kind in (("fma", ctypes.c_double), ("fmaf", ctypes.c_float)):
    getattr(LIBM, name).argtypes, getattr(LIBM, name).restype = [kind] * 3, kind

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
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


@pytest.mark.parametrize(("dtype", "kind", "p"), [("f4", "f32", "r"), ("f8", "f64", "d")])
def test_arithmetic(dtype, kind, p):
    a, b, _ = three(np.dtype(dtype))
    names = {"add": np.add, "sub.rn": np.subtract, "mul.rn": np.multiply, "div.rn": np.divide}
    code = "\n".join(f"{name}.{kind} %{p}{i + 2}, %{p}0, %{p}1;" for i, name in enumerate(names))
    code += f"sqrt.rn.{kind} %{p}6, %{p}0;"
    found = run(code, {f"{p}{i}": dtype for i in range(2, 7)}, **{f"{p}0": a, f"{p}1": b})
    with np.errstate(all="ignore"):
        for result, formula in zip(found, names.values(), strict=False):
            same(result, formula(a, b))
        same(found[-1], np.sqrt(a))


@pytest.mark.parametrize(("dtype", "kind", "p", "name"), [("f4", "f32", "r", "fmaf"), ("f8", "f64", "d", "fma")])
def test_fused_multiply_add(dtype, kind, p, name):
    """Rounded once, also where the product almost cancels, is tiny or overflows on the way."""
    a, b, c = three(np.dtype(dtype))
    with np.errstate(all="ignore"):
        near = (-(a.astype(np.float64) * b)).astype(dtype)
        steps = np.nextafter(near, np.array(0, dtype))
    a, b, c = np.tile(a, 3), np.tile(b, 3), np.concatenate((c, near, steps))
    code = f"fma.rn.{kind} %{p}3, %{p}0, %{p}1, %{p}2;"
    count = len(a) // 3
    for part in range(3):
        own = slice(part * count, (part + 1) * count)
        (found,) = run(code, {f"{p}3": dtype}, **{f"{p}0": a[own], f"{p}1": b[own], f"{p}2": c[own]})
        exact = [getattr(LIBM, name)(*map(float, each)) for each in zip(a[own], b[own], c[own], strict=True)]
        same(found, np.array(exact, dtype), str(part))


@pytest.mark.parametrize(("dtype", "kind"), [(np.dtype("f2"), "f16"), (BFLOAT16, "bf16")])
def test_half_precision(dtype, kind):
    """Exact sums and products, rounded once; two at a time do the same."""
    a, b, c = three(dtype)
    names = {"add.rn": lambda x, y, z: x + y, "sub.rn": lambda x, y, z: x - y, "mul.rn": lambda x, y, z: x * y}
    names["fma.rn"] = lambda x, y, z: x * y + z
    for name, formula in names.items():
        operands = "%h0, %h1, %h2" if name == "fma.rn" else "%h0, %h1"
        wide = "%r0, %r1, %r2" if name == "fma.rn" else "%r0, %r1"
        code = "\n".join(f"mov.b32 %r{i}, {{%h{i}, %h{i}}};" for i in range(3))
        code += f"{name}.{kind} %h3, {operands}; {name}.{kind}x2 %r3, {wide}; mov.b32 {{%h4, %h5}}, %r3;"
        found, low, high = (each.view(dtype) for each in run(
            code, {"h3": "u2", "h4": "u2", "h5": "u2"}, h0=bits(a), h1=bits(b), h2=bits(c)))  # fmt: skip
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
    a, b, c = three(np.dtype("f4"))
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
    code = (
        "mul.f32 %r2, %r0, %r1; mul.ftz.f32 %r3, %r0, %r1; abs.ftz.f32 %r4, %r0; setp.gt.ftz.f32 %p0, %r1, 0f00000000;"
    )
    kept, flushed, size, positive = run(
        code + "selp.b32 %r5, 1, 0, %p0;", {"r2": "f4", "r3": "f4", "r4": "f4", "r5": "u4"}, r0=a, r1=b
    )
    same(kept, a * b)
    same(flushed, np.array([0, -0.0, 0, 0], np.float32))
    same(size, np.array([0, 0, 2.0**-126, 1], np.float32))
    assert positive.tolist() == [1, 1, 1, 0]


def test_saturation():
    a = np.array([-3, -0.0, 0.25, 1, 7, np.inf, np.nan], np.float32)
    (found,) = run("add.sat.f32 %r1, %r0, 0f00000000;", {"r1": "f4"}, r0=a)
    assert found.tolist() == [0, 0, 0.25, 1, 1, 1, 0]


def test_sign():
    a = values(np.dtype("f4"), 40)
    negative, size = run("neg.f32 %r1, %r0; abs.f32 %r2, %r0;", {"r1": "f4", "r2": "f4"}, r0=a)
    assert (bits(negative) == bits(a) ^ np.uint32(1 << 31)).all()
    assert (bits(size) == bits(a) & np.uint32((1 << 31) - 1)).all()


def test_comparison():
    """The plain comparisons are false for NaN, those with u are true."""
    a, b, _ = three(np.dtype("f8"))
    nan = np.isnan(a) | np.isnan(b)
    for name, test in {
        "lt": np.less,
        "le": np.less_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "ge": np.greater_equal,
    }.items():
        code = f"setp.{name}.f64 %p0, %d0, %d1; setp.{name}u.f64 %p1, %d0, %d1; setp.num.f64 %p2, %d0, %d1;"
        code += "selp.b32 %r0, 1, 0, %p0; selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 1, 0, %p2;"
        plain, unordered, numbers = run(code, {"r0": "u4", "r1": "u4", "r2": "u4"}, d0=a, d1=b)
        assert (plain == (test(a, b) & ~nan)).all(), name
        assert (unordered == (test(a, b) | nan)).all(), name
        assert (numbers == ~nan).all()


def test_comparison_of_pairs():
    """The first result is of the low halves, the second of the high ones."""
    a, b, _ = three(np.dtype("f2"))
    code = "mov.b32 %r0, {%h0, %h1}; mov.b32 %r1, {%h1, %h0}; setp.lt.f16x2 %p0|%p1, %r0, %r1;"
    code += "selp.b32 %r2, 1, 0, %p0; selp.b32 %r3, 1, 0, %p1;"
    low, high = run(code, {"r2": "u4", "r3": "u4"}, h0=bits(a), h1=bits(b))
    assert (low == (a < b)).all()
    assert (high == (b < a)).all()


def test_approximations_are_off_by_no_more_than_is_documented():
    """And by as much: half of it somewhere. Special values are exact."""
    a = np.concatenate((SPECIAL, np.random.default_rng(3).uniform(-40, 40, 3000))).astype(np.float32)
    functions = {"ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
                 "rcp": lambda x: 1 / x, "tanh": np.tanh}  # fmt: skip
    for name, function in functions.items():
        (found,) = run(f"{name}.approx.f32 %r1, %r0;", {"r1": "f4"}, threads=1024, r0=a[:1024])
        check_approximation(found, function, [a[:1024]], ERRORS[name] + 2.0**-24, name)
    b = np.roll(a, 17)[:1024]
    (found,) = run("div.full.f32 %r2, %r0, %r1;", {"r2": "f4"}, threads=1024, r0=a[:1024], r1=b)
    check_approximation(found, np.divide, [a[:1024], b], DIVISION + 2.0**-24, "div")


def check_approximation(found, function, operands, error, note):
    with np.errstate(all="ignore"):
        exact = function(*[each.astype(np.float64) for each in operands])
        rounded = exact.astype(np.float32)
        normal = np.isfinite(rounded) & (np.abs(rounded) > 1e-37)
        share = np.abs(found[normal] - exact[normal]) / np.abs(exact[normal]) / error
    assert 0.5 < share.max() <= 1, note
    same(found[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)], note)


def test_gross_approximations_of_float64():
    a = values(np.dtype("f8"), 200)
    a = a[np.isfinite(a) & (np.abs(a) > 1e-300) & (np.abs(a) < 1e300)]
    inverse, root = run(
        "rcp.approx.ftz.f64 %d1, %d0; abs.f64 %d3, %d0; rsqrt.approx.ftz.f64 %d2, %d3;", {"d1": "f8", "d2": "f8"}, d0=a
    )
    np.testing.assert_allclose(inverse, 1 / a, 2.0**-19)
    np.testing.assert_allclose(root, 1 / np.sqrt(np.abs(a)), 2.0**-19)
    assert not (bits(inverse) & np.uint64(2**32 - 1)).any()


def test_mixed_precision_and_pairs():
    a, b, _ = three(np.dtype("f4"))
    half = a.astype(BFLOAT16)
    (found,) = run("add.rn.f32.bf16 %r1, %h0, %r0;", {"r1": "f4"}, h0=bits(half), r0=b)
    same(found, half.astype(np.float32) + b)
    code = "mov.b64 %d0, {%r0, %r1}; fma.rn.f32x2 %d1, %d0, %d0, %d0; mov.b64 {%r2, %r3}, %d1;"
    low, high = run(code, {"r2": "f4", "r3": "f4"}, r0=a, r1=b)
    for found, given in ((low, a), (high, b)):
        exact = [LIBM.fmaf(*[float(each)] * 3) for each in given]
        same(found, np.array(exact, np.float32))
