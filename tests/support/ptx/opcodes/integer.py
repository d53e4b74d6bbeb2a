"""Integers and bits, comparison and selection."""

import numpy as np

from ptx.opcodes import Formula, opcode
from ptx.parser import Pair
from ptx.types import B32, PRED, S32, SIGNED, U32, UNSIGNED, Type

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
PLAIN = {"min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}


def exact(of, formula):
    """Where a 32-bit result is another than without a limit of bits, as a number that is extended with its sign, or
    with zeros: an address that it becomes part of is wrong. Negative constants are subtracted from unsigned numbers.
    """
    if of.bits != 32:
        return None

    def overflows(signed, *operands):
        right = formula(*[each.view(np.int32).astype(np.float64) for each in operands])
        wrong = (right < -(2.0**31)) | (right >= 2.0**31)
        if signed:
            return wrong
        positive = formula(*[each.view(np.uint32).astype(np.float64) for each in operands])
        return (wrong | (right < 0)) & ((positive < 0) | (positive >= 2.0**32))

    return overflows


@opcode("add", "sub", floating=False)
def add(m):
    of, formula = m.type(), ARITHMETIC[m.instruction.opcode]
    if m.take("sat"):
        if of != S32:
            raise m.unknown(".sat is for s32")
        ends = -(2**31), 2**31 - 1
        return Formula([of], [of, of], lambda a, b: np.clip(formula(a.astype(np.int64), b), *ends).astype(of.dtype))
    return Formula([of], [of, of], formula, exact(of, formula))


def high(a, b, of):
    """The upper half of a product."""
    if of.bits < 64:
        wide = (SIGNED if of.kind == "s" else UNSIGNED)[2 * of.bits]
        return (a.astype(wide) * b.astype(wide) >> wide(of.bits)).astype(of.dtype)
    return np.asarray(a.astype(object) * b.astype(object) >> 64, object).astype(of.dtype)


@opcode("mul", "mad", floating=False)
def multiply(m):
    way, of = m.one("lo", "hi", "wide"), m.type()
    more = m.instruction.opcode == "mad"
    if way == "wide":
        wide = Type(of.kind, 2 * of.bits)

        def product(a, b):
            return a.astype(wide.dtype) * b.astype(wide.dtype)
    elif way == "hi":
        wide = of

        def product(a, b):
            return high(a, b, of)
    else:
        wide, product = of, np.multiply
    if not more:
        return Formula([wide], [of, of], product, exact(of, np.multiply) if way == "lo" else None)
    check = exact(of, lambda a, b, c: a * b + c) if way == "lo" else None
    return Formula([wide], [of, of, wide], lambda a, b, c: product(a, b) + c, check)


@opcode("div", "rem", floating=False)
def divide(m):
    """Towards 0; what dividing by 0 gives is not specified: all ones."""
    of, quotient = m.type(), m.instruction.opcode == "div"

    def compute(a, b):
        zero = b == 0
        safe = np.where(zero, of.dtype(1), b)
        if of.kind == "s":
            lowest = safe == -1  # of which NumPy's division of the least number overflows
            safe = np.where(lowest, of.dtype(1), safe)
            rest = np.fmod(a, safe)
            found = np.where(lowest, -a, (a - rest) // safe) if quotient else np.where(lowest, of.dtype(0), rest)
        else:
            found = a // safe if quotient else a % safe
        return np.where(zero, of.dtype(-1 if of.kind == "s" else np.iinfo(of.dtype).max), found).astype(of.dtype)

    return Formula([of], [of, of], compute)


@opcode("min", "max", "neg", "abs", floating=False)
def of_integers(m):
    of, function = m.type(), PLAIN[m.instruction.opcode]
    return Formula([of], [of] * function.nin, function)


@opcode("and", "or", "xor", "not")
def logic(m):
    of, function = m.type(), LOGIC[m.instruction.opcode]
    return Formula([of], [of] * function.nin, function)


@opcode("shl", "shr")
def shift(m):
    """Amounts beyond the width shift everything out."""
    of, left = m.type(), m.instruction.opcode == "shl"

    def compute(a, b):
        amount = np.minimum(b, of.bits - 1).astype(of.dtype)
        moved = np.left_shift(a, amount) if left else np.right_shift(a, amount)
        return moved if of.kind == "s" else np.where(b >= of.bits, of.dtype(0), moved)

    check = None
    if left and of.bits == 32:
        check = exact(of, lambda a, b: a * np.exp2(b))
    return Formula([of], [of, U32], compute, check)


@opcode("bfe")
def extract(m):
    """A field of `length` bits from `start` on; of signed numbers its highest bit is repeated."""
    of = m.type()

    def compute(a, start, length):
        first, count = (start & np.uint32(0xFF)).astype(np.int64), (length & np.uint32(0xFF)).astype(np.int64)
        moved = np.where(first < of.bits, np.right_shift(a, np.minimum(first, of.bits - 1).astype(of.dtype)), 0)
        if of.kind == "s":
            moved = np.where(first < of.bits, moved, np.where(a < 0, -1, 0)).astype(of.dtype)
            room = np.clip(of.bits - count, 0, of.bits - 1).astype(of.dtype)
            field = np.right_shift(np.left_shift(moved, room), room)
        else:
            ones = np.where(count < of.bits, (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1),
                            np.uint64(0xFFFFFFFFFFFFFFFF))  # fmt: skip
            field = moved.astype(np.uint64) & ones
        return np.where(count == 0, 0, field).astype(of.dtype)

    return Formula([of], [of, U32, U32], compute)


@opcode("prmt")
def permute(m):
    """Bytes picked out of two words by the four digits of a third; a digit's highest bit repeats the byte's sign."""
    m.take("b32")

    def compute(a, b, which):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        found = np.zeros(np.broadcast(a, b, which).shape, np.uint64)
        for place in range(4):
            digit = (which >> np.uint32(4 * place)).astype(np.uint64)
            byte = both >> (np.uint64(8) * (digit & np.uint64(7))) & np.uint64(0xFF)
            signs = np.where(byte >> np.uint64(7) & np.uint64(1), np.uint64(0xFF), np.uint64(0))
            found |= np.where(digit & np.uint64(8), signs, byte) << np.uint64(8 * place)
        return found.astype(np.uint32)

    return Formula([B32], [B32, B32, B32], compute)


# --- comparison -------------------------------------------------------------------------------------------------------

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compared(name, unordered, values):
    """A comparison; unordered: true where an operand is NaN, where the others are false then."""
    if name in ("num", "nan"):

        def nan(a, b):
            either = np.isnan(values(a)) | np.isnan(values(b))
            return either if name == "nan" else ~either

        return nan
    test = COMPARISONS[name]

    def compute(a, b):
        a, b = values(a), values(b)
        if unordered:
            return test(a, b) | np.isnan(a) | np.isnan(b)
        return test(a, b) & ~(np.isnan(a) | np.isnan(b)) if name == "ne" else test(a, b)

    return compute


@opcode("setp", floating=False)
def compare(m):
    """One result, or two: a comparison and its opposite, each combined with a predicate if one is given."""
    test = COMPARISONS[m.one(*COMPARISONS)]
    return combined(m, test, m.one("and", "or", "xor", default=""), m.type())


def combined(m, test, with_, of):
    both = isinstance(m.instruction.operands[0], Pair)
    results = [PRED, PRED] if both else [PRED]

    def compute(a, b, *c):
        found = test(a, b)
        chosen = [found, ~found] if both else [found]
        chosen = [LOGIC[with_](each, c[0]) for each in chosen] if with_ else chosen
        return tuple(chosen) if both else chosen[0]

    return Formula(results, [of, of] + ([PRED] if with_ else []), compute)


@opcode("selp")
def select(m):
    of = m.type()
    raw = Type("b", of.bits)
    return Formula([raw], [raw, raw, PRED], lambda a, b, c: np.where(c, a, b))
