"""Integers and bits: each opcode against Python's integers, which have no width."""

import numpy as np
import pytest
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
