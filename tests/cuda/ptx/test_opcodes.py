"""Each opcode: integers and bits, floating point rounded once, moves and conversions, against wider arithmetic."""

import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx.opcodes.floating import DIVISION, ERRORS
from ptx.parser import PtxError
from ptx_lanes import run

INTERESTING = [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 0x12345678, 0xDEADBEEF]
PREFIX = {16: "h", 32: "r", 64: "d"}


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


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else None,
    "rem": lambda a, b: a - b * truncated(a, b) if b else None,
}


@pytest.mark.parametrize("kind", ["u", "s"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_arithmetic(kind, bits):
    """Results are the last bits of what integers give; dividing by 0 gives something."""
    a, b = pairs(bits)
    p = PREFIX[bits]
    own = (lambda value: signed(value, bits)) if kind == "s" else int
    names = list(BINARY)
    code = "\n".join(f"{name}.{kind}{bits} %{p}{i + 2}, %{p}0, %{p}1;" for i, name in enumerate(names))
    found = run(code, {f"{p}{i + 2}": f"u{bits // 8}" for i in range(len(names))}, **{f"{p}0": a, f"{p}1": b})
    for name, results in zip(names, found, strict=True):
        for x, y, result in zip(a.tolist(), b.tolist(), results.tolist(), strict=True):
            expected = BINARY[name](own(x), own(y))
            assert expected is None or result == expected % 2**bits, (name, x, y)


@pytest.mark.parametrize("kind", ["u", "s"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_products(kind, bits):
    a, b = pairs(bits)
    p, own = PREFIX[bits], (lambda value: signed(value, bits)) if kind == "s" else int
    code = f"mul.hi.{kind}{bits} %{p}2, %{p}0, %{p}1; mad.lo.{kind}{bits} %{p}3, %{p}0, %{p}1, %{p}0;"
    results = {f"{p}2": f"u{bits // 8}", f"{p}3": f"u{bits // 8}"}
    if bits < 64:
        w = PREFIX[2 * bits]
        code += f"mul.wide.{kind}{bits} %{w}4, %{p}0, %{p}1; mad.wide.{kind}{bits} %{w}5, %{p}0, %{p}1, %{w}4;"
        results |= {f"{w}4": f"u{bits // 4}", f"{w}5": f"u{bits // 4}"}
    found = run(code, results, **{f"{p}0": a, f"{p}1": b})
    for row in zip(a.tolist(), b.tolist(), *[each.tolist() for each in found], strict=True):
        x, y, high, low, *wide = row
        product = own(x) * own(y)
        assert (high, low) == ((product >> bits) % 2**bits, (product + own(x)) % 2**bits), (x, y)
        assert wide in ([], [product % 4**bits, 2 * product % 4**bits]), (x, y)


def test_bits():
    a, b = pairs(32)
    formulas = {
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "xor.b32": lambda x, y: x ^ y,
        "shl.b32": lambda x, y: x << y if y < 32 else 0,
        "shr.u32": lambda x, y: x >> y if y < 32 else 0,
        "shr.s32": lambda x, y: signed(x, 32) >> min(y, 31),
    }
    code = "\n".join(f"{name} %r{i + 2}, %r0, %r1;" for i, name in enumerate(formulas))
    found = run(code, {f"r{i + 2}": "u4" for i in range(len(formulas))}, r0=a, r1=b)
    for (name, formula), results in zip(formulas.items(), found, strict=True):
        expected = [formula(x, y) % 2**32 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert results.tolist() == expected, name


def test_one_operand():
    a = np.array([*INTERESTING, 2**31], np.uint32)
    code = "not.b32 %r1, %r0; neg.s32 %r2, %r0; abs.s32 %r3, %r0;"
    found = run(code, {f"r{i}": "u4" for i in range(1, 4)}, r0=a)
    for x, *results in zip(a.tolist(), *[each.tolist() for each in found], strict=True):
        assert results == [2**32 - 1 - x, -x % 2**32, abs(signed(x, 32)) % 2**32], x


def test_fields():
    """Fields that begin or end behind the last bit, and of length 0."""
    a = np.array([0xDEADBEEF], np.uint32)
    starts, lengths = np.meshgrid(np.arange(0, 40), np.arange(0, 40))
    starts, lengths = (each.ravel().astype(np.uint32) for each in (starts, lengths))
    code = "bfe.u32 %r4, %r0, %r2, %r3; bfe.s32 %r5, %r0, %r2, %r3;"
    plain, extended = run(code, {"r4": "u4", "r5": "u4"}, threads=1600, r0=a, r2=starts, r3=lengths)
    x = int(a[0])
    for place, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        mask = (1 << length) - 1
        assert plain[place] == (x >> start) & mask, (start, length)
        last = min(start + length - 1, 31)
        sign = -1 if length and x >> last & 1 else 0
        field = sum((x >> i & 1 if i < 32 else -sign) << (i - start) for i in range(start, start + length))
        assert extended[place] == ((field | sign << length) % 2**32 if length else 0), (start, length)


def test_permutation():
    """The manual's defaults: a digit picks a byte, its highest bit repeats the byte's sign."""
    found = run(
        "prmt.b32 %r2, %r0, %r1, 0x3210U; prmt.b32 %r3, %r0, %r1, 0x7654; prmt.b32 %r4, %r0, %r1, 0x04AB;",
        {f"r{i}": "u4" for i in range(2, 5)},
        r0=np.uint32([0x80112233]),
        r1=np.uint32([0x44556677]),
    )
    expected = [
        0x80112233,
        0x44556677,
        0x337700FF & 0xFFFF0000 | 0x00FF,
    ]
    assert [int(each[0]) for each in found] == expected


def test_comparison_and_selection():
    a, b = pairs(32)
    names = {"lt.s32": np.less, "ge.s32": np.greater_equal, "eq.b32": np.equal, "ne.u32": np.not_equal}
    names |= {"hi.u32": np.greater, "lt.u32": np.less}
    for name, test in names.items():
        kind = "i4" if ".s" in name else "u4"
        right = test(a.view(kind), b.view(kind))
        code = f"setp.{name} %p0|%p1, %r0, %r1; selp.b32 %r2, 1, 2, %p0; selp.b32 %r3, 1, 2, %p1;"
        code += f"setp.{name.replace('.', '.and.')} %p2, %r0, %r1, !%p1; selp.b32 %r4, 1, 2, %p2;"
        found, opposite, both = run(code, {"r2": "u4", "r3": "u4", "r4": "u4"}, r0=a, r1=b)
        np.testing.assert_array_equal(found, np.where(right, 1, 2), name)
        np.testing.assert_array_equal(opposite, np.where(right, 2, 1), name)
        np.testing.assert_array_equal(both, np.where(right, 1, 2), name)


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
def test_floating_arithmetic(dtype, kind, p):
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


FLOATS = {
    "f16": (np.dtype("f2"), "h"),
    "bf16": (BFLOAT16, "h"),
    "f32": (np.dtype("f4"), "r"),
    "f64": (np.dtype("f8"), "d"),
}
NUMBERS = np.concatenate(([0.0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-30, 65519.99, 65520, 2.0**-25,
                           3.5, 2.5, -2.5, 1e300, 3.4e38, 1e-45, 2.0**31, 2.0**63, -(2.0**31), -1.0],
                          np.random.default_rng(0).normal(0, 1000, 200)))  # fmt: skip


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
