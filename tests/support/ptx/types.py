"""PTX types, and operands as NumPy arrays.

A register is an array of unsigned integers, one for each lane; a predicate one of bool. An instruction's type says how
its bits are read. bfloat16 has no type in NumPy: its values are float32 in computation.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATING = {16: np.float16, 32: np.float32, 64: np.float64}


@dataclass(frozen=True)
class Type:
    """A fundamental type: "u", "s", "b", "f", "bf", "pred" and its bits; packed ones hold two values."""

    kind: str
    bits: int
    packed: bool = False

    @property
    def name(self):
        each = f"{self.kind}{self.bits // 2}x2" if self.packed else f"{self.kind}{self.bits}"
        return "pred" if self.kind == "pred" else each

    @property
    def raw(self):
        """The unsigned integer, or bool, that holds its bits."""
        return np.bool_ if self.kind == "pred" else UNSIGNED[self.bits]

    @property
    def dtype(self):
        """What an instruction computes with."""
        if self.packed or self.kind in ("b", "u", "bf", "pred"):
            return self.raw
        return (SIGNED if self.kind == "s" else FLOATING)[self.bits]

    @property
    def half(self):
        """The type of each of the two values of a packed one."""
        return Type(self.kind, self.bits // 2)

    @property
    def is_float(self):
        return self.kind in ("f", "bf")


@cache
def named(name):
    """The type that a modifier names; None if it names none."""
    if name == "pred":
        return Type("pred", 1)
    single, _, packed = name.partition("x")
    kind, digits = single.rstrip("0123456789"), single[len(single.rstrip("0123456789")) :]
    if kind not in ("u", "s", "b", "f", "bf") or not digits or packed not in ("", "2"):
        return None
    bits = int(digits) * (2 if packed else 1)
    known = {"u": (8, 16, 32, 64), "s": (8, 16, 32, 64), "b": (8, 16, 32, 64), "f": (16, 32, 64), "bf": (16, 32)}
    return Type(kind, bits, bool(packed)) if bits in known[kind] and (packed or name != "bf32") else None


B32, U32, S32, U64, PRED = Type("b", 32), Type("u", 32), Type("s", 32), Type("u", 64), Type("pred", 1)


def resized(raw, have, want):
    """Bits of a register as an instruction of another width reads them: the low ones, or zeros above."""
    return raw if have == want.bits else raw.astype(want.raw)


def extended(value, of, bits):
    """A result as a wider register takes it: signed integers keep their sign, all else has zeros above."""
    if of.kind == "s":
        return value.view(of.dtype).astype(SIGNED[bits]).view(UNSIGNED[bits])
    return value.view(of.raw).astype(UNSIGNED[bits])


def immediate(text, of):
    """A constant operand: 0fXXXXXXXX and 0dXXXXXXXXXXXXXXXX are bits of floats, all else is an integer."""
    if text[:2] in ("0f", "0d", "0F", "0D"):
        bits = int(text[2:], 16)
        width = 32 if text[1] in "fF" else 64
        value = np.array(bits, UNSIGNED[width])
        if of.is_float and not of.packed and of.bits != width:
            return value.view(FLOATING[width]).astype(of.dtype)
    elif of.kind == "pred":
        return np.array(int(text, 0) != 0)
    else:
        value = np.array(int(text, 0) & ((1 << of.bits) - 1), of.raw)
    return value.view(of.dtype) if of.dtype is not of.raw else value


def split(raw, of):
    """The low and the high half of packed values."""
    shift = of.dtype(of.bits // 2)
    return raw.astype(of.half.raw), (raw >> shift).astype(of.half.raw)


def joined(low, high, of):
    """Two values packed, the first in the low half."""
    return low.astype(of.raw) | (high.astype(of.raw) << of.raw(of.bits // 2))


def halves(formula, of):
    """A formula of single values, for both values of packed operands."""

    def apply(*operands):
        pairs = [split(operand, of) for operand in operands]
        low, high = (formula(*[pair[i].view(of.half.dtype) for pair in pairs]) for i in (0, 1))
        return joined(low.view(of.half.raw), high.view(of.half.raw), of)

    return apply
