"""Moving and converting."""

import numpy as np

from ptx.opcodes import Formula, opcode
from ptx.opcodes.floating import flushed, narrowed, to_bfloat16, widened
from ptx.parser import Vector
from ptx.types import Type, joined

TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("mov")
def move(m):
    """Bits as they are; several words into one, the first the lowest, or one into several."""
    of = m.type()
    raw = of if of.kind == "pred" else Type("b", of.bits)
    result, source = m.instruction.operands
    if isinstance(source, Vector):
        part = Type("b", of.bits // len(source.items))
        return Formula([raw], [part] * len(source.items), lambda *parts: _packed(parts, part, raw))
    if isinstance(result, Vector):
        count = len(result.items)
        part = Type("b", of.bits // count)
        shifts = [raw.dtype(i * part.bits) for i in range(count)]
        return Formula([part] * count, [raw], lambda a: tuple((a >> each).astype(part.raw) for each in shifts))
    return Formula([raw], [raw], lambda a: a)


def _packed(parts, of, whole):
    found = whole.dtype(0)
    for place, part in enumerate(parts):
        found = found | part.astype(whole.raw) << whole.dtype(place * of.bits)
    return found


@opcode("cvt")
def convert(m):
    integral = m.one(*TO_INTEGRAL, default="")
    rounding = m.one("rn", "rna", default="") if not integral else ""
    ftz, sat = m.take("ftz"), m.take("sat")
    to, of = m.type(packed=True), m.type()
    if rounding == "rna" or (sat and to.is_float):
        raise m.unknown("no such conversion")
    if to.packed:
        return _pair(m, to, of)
    if to.is_float and of.is_float:
        return Formula([to], [of], _between_floats(m, to, of, integral, ftz))
    if to.is_float:
        if not rounding and not (of.bits <= 16 and to.bits == 64):
            raise m.unknown("expected .rn")
        return Formula([to], [of], lambda a: _from_integer(a, to))
    if of.is_float:
        if not integral:
            raise m.unknown(f"expected one of {', '.join(TO_INTEGRAL)}")
        return Formula([to], [of], _to_integer(to, of, TO_INTEGRAL[integral], ftz))
    if sat:
        info, own = np.iinfo(to.dtype), np.iinfo(of.dtype)
        least, most = max(info.min, own.min), min(info.max, own.max)
        return Formula([to], [of], lambda a: np.clip(a, least, most).astype(to.dtype))
    return Formula([to], [of], lambda a: a.astype(to.dtype))


def _pair(m, to, of):
    """The first operand in the upper half."""
    if of != Type("f", 32):
        raise m.unknown("expected f32")

    def compute(upper, lower):
        low, high = (narrowed(each, to.half).view(np.uint16) for each in (lower, upper))
        return joined(low, high, to)

    return Formula([to], [of, of], compute)


def _between_floats(m, to, of, integral, ftz):
    wide = widened(of)
    if integral and to != of:
        raise m.unknown("rounding to integers is between equal types")
    if ftz and 32 not in (to.bits, of.bits):
        raise m.unknown(".ftz is for f32")

    def compute(a):
        value = wide(a)
        value = flushed(value) if ftz and value.dtype == np.float32 else value
        if integral:
            return TO_INTEGRAL[integral](value)
        if to.kind == "bf":
            return to_bfloat16(value)
        found = value.astype(to.dtype)
        return flushed(found) if ftz and to.bits == 32 else found

    return compute


def _from_integer(a, to):
    if to.bits > 16:
        return a.astype(to.dtype)
    # float16 and bfloat16: a float64 rounded to odd loses no tie
    exact = a.astype(np.float64)
    return narrowed(exact, to)


def _to_integer(to, of, rounded, ftz):
    """Clamped to what the integer holds; NaN is 0, or of or into 64 bits the highest bit alone."""
    wide, info = widened(of), np.iinfo(to.dtype)
    nan = (1 << 63) if of.bits == 64 or to.bits == 64 else 0

    def compute(a):
        value = wide(a)
        value = flushed(value) if ftz else value
        whole = rounded(value.astype(np.float64))
        inside = (whole >= float(info.min)) & (whole < float(info.max) + (1 if to.bits == 64 else 0.5))
        found = np.where(inside, whole, 0).astype(to.dtype)
        found = np.where(inside, found, np.where(whole < 0, info.min, info.max).astype(to.dtype))
        return np.where(np.isnan(value), np.array(nan & ((1 << to.bits) - 1), to.raw).view(to.dtype), found)

    return compute
