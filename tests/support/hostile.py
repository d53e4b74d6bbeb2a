"""Values that no attribute expects, and those that are nearly what one expects."""

import decimal
import fractions

import ml_dtypes
import numpy as np

from opgrad.cli.examples import examples
from opgrad.contract import NEEDS


def raises(error):
    def method(self, *_, **__):
        raise error

    return method


class Raising:
    """Whatever is asked of it, it raises something else."""

    __index__, __float__ = raises(RuntimeError("no index")), raises(KeyError("no float"))
    __len__, __iter__ = raises(ZeroDivisionError("no length")), raises(IndexError("nothing to go through"))
    __eq__, __bool__ = raises(OSError("not comparable")), raises(AttributeError("neither true nor false"))
    __array__, __hash__ = raises(AssertionError("no array")), object.__hash__


class Lying:
    """It says that it is a number, and gives none."""

    def __index__(self):
        return "three"

    __float__ = __index__


class Unprintable(Raising):
    """Its representation raises, too."""

    __repr__ = raises(ValueError("nothing to show"))


def values():
    """Made anew for each use: some are changed by being used."""
    scalars = [
        np.dtype(name).type(1)
        for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    ]
    scalars += [np.float16(1.5), np.float32(1.5), np.float64(1.5), np.longdouble(1.5)]
    scalars += [np.complex64(1), np.complex128(1), ml_dtypes.bfloat16(1), np.str_("a"), np.bytes_(b"a")]
    scalars += [np.datetime64("2000-01-01")]
    return [
        *(None, True, False, 0, 1, -1, 2, 5, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 10**5000),
        *(0.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), -float("inf"), 1j),
        *("", "a", "mean", "float32", "\ud800", "two\nlines", b"", b"mean", bytearray(b"a"), memoryview(b"ab")),
        *((), (0,), (0, 1), (1, 0), (0, 0), (0, None), ("a",), (1.5,), (2**63,), (-(2**70),), ((0,),), (Raising(),)),
        *([], [0], [[0, 1], [2]], [None], ["a"], [Unprintable()], {}, {0: 1}, {0}, frozenset({0}), range(2), iter([0])),
        *(slice(None), ..., object(), int, len, np.float32, np.dtype("float32"), Raising(), Lying(), Unprintable()),
        *(decimal.Decimal(1), fractions.Fraction(1, 2), np.uint64(2**64 - 1), np.ma.masked, *scalars),
        *(np.array(each) for each in (1, 1.5, [0], [True, False], [0.5, 1], [[0, 1]], [])),
        *(np.array(each) for each in (["a"], [None], None, {}, "a")),
        *(np.array([2**64 - 1], np.uint64), np.zeros(2, "i4,f4"), np.ones((0, 3)), np.array([1j]), np.array(b"a")),
        np.array(["2000"], "M8[Y]"),
    ]


def attributes(op):
    """What an operator takes beside arrays and `out`."""
    more = op.general.keywords if op.general else ()
    return [*op.attributes, *(name for name in more if name != NEEDS), *([NEEDS] if NEEDS in more else [])]


def arguments(op, sampled):
    """Valid arguments of an operator."""
    return dict(sampled(op) if op.family in SAMPLED else examples(op, "float32")[0].arguments)


SAMPLED = ("softmax", "cross_entropy", "activation", "gather", "accumulate")
