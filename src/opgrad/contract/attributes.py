"""Checks the attributes of a call by their annotations in the declaration.

`alpha: float` has the check of its type; `logit_scale: Annotated[float, finite]` has the check that it names: a
function that is given the value and what it stands beside, and returns the value that kernels see.
"""

import math
import operator as arithmetic
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
BYTES = ("int8", "uint8")
INTEGERS = ("int32", "int64")
DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16", *BYTES, *INTEGERS, "bool")} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *FLOAT8)
}

Array = NDArray[Any]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Attributes = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """The description of an array that is checked: shape, dtype, and strides in bytes, None for C order."""

    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape | None = None


REDUCTIONS = ("none", "mean", "sum")
# Types that float() accepts, but that are not numbers here.
NO_NUMBERS = (str, bytes, bytearray, complex, np.complexfloating, np.ma.MaskedArray)
MOST_ELEMENTS = 1 << 59  # bytes of an array are counted in int64
LONGEST = 120  # characters of a value in a message


class Beside(NamedTuple):
    """The context of an attribute in its call: the results by name, the shapes of arrays, the other attributes."""

    results: Collection[str]
    shapes: Shapes
    attributes: Attributes


# check(what, value, beside); `what` names the operator and the attribute in messages
Check = Callable[[str, Any, Beside], Any]
Condition = tuple[Callable[[float], bool], str]


def check_of(hint: Any) -> Check | None:
    """The check that an annotation names, or that of its type; None if there is none."""
    if typing.get_origin(hint) is not Annotated:
        return _of_type(hint)
    return next((each for each in hint.__metadata__ if callable(each)), _of_type(hint.__origin__))


# --- values: `what` names the function and the argument --------------------------------------------------------------


def shown(value: Any) -> str:
    """A value as messages show it: in one line of bounded length, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # its own, or that of a number with too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def dimensions(rank: int) -> str:
    """A rank as messages show it."""
    return f"{rank} dimension{'' if rank == 1 else 's'}"


def integer(what: str, value: Any, beyond: int = 2**63) -> int:
    """An integer from -2**63 up to, but not including, `beyond`; a bool is refused."""
    if type(value) is int and -(2**63) <= value < beyond:
        return value
    wrong = f"{what} is {shown(value)}, expected"
    if isinstance(value, bool):
        raise TypeError(f"{wrong} an int")
    try:
        found = arithmetic.index(value)
    except Exception:  # a foreign __index__ may raise anything
        raise TypeError(f"{wrong} an int") from None
    if not -(2**63) <= found < beyond:
        raise ValueError(f"{wrong} a 64-bit integer")
    return found


def integers(what: str, value: Any) -> Shape:
    """A tuple of such numbers, from a tuple, a list or an array."""
    return tuple(integer(what, each) for each in _elements(what, value, "ints"))


def numbers(what: str, value: Any) -> tuple[float, ...]:
    """A tuple of numbers, from a tuple, a list or an array."""
    return tuple(number(what, each) for each in _elements(what, value, "numbers"))


def _elements(what: str, value: Any, kind: str) -> Sequence[Any]:
    try:
        # PyTorch's own list takes no NumPy view of a tensor's memory, which would keep it from being resized.
        array = value if isinstance(value, tuple | list) or hasattr(value, "tolist") else np.asarray(value)
        found = array if isinstance(array, tuple | list) else array.tolist()
    except Exception:  # a foreign __array__ may raise anything
        found = None
    if not isinstance(found, tuple | list):
        raise TypeError(f"{what} is {shown(value)}, expected a tuple of {kind}")
    return found


def flag(what: str, value: Any) -> bool:
    """A bool, Python's or NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{what} is {shown(value)}, expected a bool")
    return bool(value)


def number(what: str, value: Any) -> float:
    """A number as a float."""
    if type(value) is float:
        return value + 0.0
    try:
        if isinstance(value, NO_NUMBERS):
            raise TypeError
        # PyTorch warns of float() for a parameter.
        found = float(value.detach() if hasattr(value, "detach") else value)
        return found + 0.0  # -0.0 becomes 0.0: as keys of plans they are the same
    except Exception:  # a foreign __float__ may raise anything
        raise TypeError(f"{what} is {shown(value)}, expected a number") from None


def read_axes(what: str, value: Any) -> int | tuple[int, ...]:
    """An axis, or a tuple of them, as Python's integers."""
    return integers(what, value) if isinstance(value, tuple) else integer(what, value)


# --- the checks of types ---------------------------------------------------------------------------------------------


_READ: dict[Any, Callable[[str, Any], Any]] = {
    bool: flag,
    int: integer,
    float: number,
    tuple[int, ...]: integers,
    tuple[float, ...]: numbers,
}


def _of_type(hint: Any) -> Check | None:
    """The check of a type, or of that type or None."""
    if hint in _READ:
        return lambda what, value, beside: _READ[hint](what, value)
    read = next((_READ[each] for each in typing.get_args(hint) if each in _READ), None)
    if read is None or type(None) not in typing.get_args(hint):
        return None
    return lambda what, value, beside: None if value is None else read(what, value)


# --- the checks that annotations name --------------------------------------------------------------------------------


def axis(what: str, value: Any, beside: Beside) -> range:
    """One axis of the first array, as a range."""
    return axes(what, integer(what, value), beside)


def axes(what: str, value: Any, beside: Beside) -> range:
    """The named axes of the first array as a range; a tuple must name adjacent axes."""
    rank = len(beside.attributes.get("shape", next(iter(beside.shapes.values()))))
    named = read_axes(what, value)
    several = named if isinstance(named, tuple) else (named,)
    for each in several:
        if not -rank <= each < rank:
            bounds = f"{-rank} to {rank - 1}" if rank else "an array of at least one dimension"
            raise ValueError(f"{what} is {named}, expected {bounds} for an array of {dimensions(rank)}")
    found = sorted(each % rank for each in several)
    if not found or found != list(range(found[0], found[0] + len(found))):
        raise ValueError(f"{what} is {named}, expected an int or a tuple of adjacent axes")
    return range(found[0], found[-1] + 1)


def sizes(what: str, value: Any, beside: Beside) -> Shape:
    """The shape of an array that is made."""
    shape = integers(what, value)
    if any(size < 0 for size in shape):
        raise ValueError(f"{what} is {shape}, expected sizes of at least 0")
    if math.prod(size for size in shape if size) >= MOST_ELEMENTS:
        raise ValueError(f"{what} is {shape}, expected fewer than {MOST_ELEMENTS} elements")
    return shape


def one_of(*names: str) -> Check:
    """One of these words."""

    def check(what: str, value: Any, beside: Beside) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{what} is {shown(value)}, expected one of {', '.join(names)}")
        return str(value)

    return check


# What is asked of a number: whether it holds, and how a message says so.
FINITE: Condition = (math.isfinite, "a finite number")


def number_that(*conditions: Condition) -> Check:
    """The check for a number of which all these conditions hold."""

    def check(what: str, value: Any, beside: Beside) -> float:
        found = number(what, value)
        for holds, expected in conditions:
            if not holds(found):
                raise ValueError(f"{what} is {found}, expected {expected}")
        return found

    return check


finite = number_that(FINITE)
divisor = number_that((lambda value: math.isfinite(value) and value != 0, "a finite number other than 0"))


def float_dtypes(what: str, value: Any, beside: Beside) -> Any:
    """A dtype for all results, or a tuple with one for each; None stands for the result's own."""
    if not isinstance(value, tuple):
        return result_dtype(what, value, FLOATS)
    if len(beside.results) == 1:
        raise TypeError(f"{what} is {shown(value)}, expected one of {', '.join(FLOATS)}")
    if len(value) != len(beside.results):
        raise TypeError(f"{what} is {shown(value)}, expected one dtype or a tuple of {len(beside.results)}")
    each = zip(beside.results, value, strict=True)
    return tuple(result_dtype(f"{what} for {name}", dtype, FLOATS) for name, dtype in each)


def result_dtype(what: str, value: Any, allowed: Sequence[str]) -> np.dtype[Any] | None:
    """One of the allowed dtypes, by its name or as NumPy takes it; None stands for the result's own."""
    if value is None:
        return None
    try:
        dtype = DTYPES[value] if isinstance(value, str) and value in DTYPES else np.dtype(value)
    except Exception:  # NumPy asks foreign objects for their dtype
        raise TypeError(f"{what} is {shown(value)}, expected one of {', '.join(allowed)}") from None
    if dtype.name not in allowed or not dtype.isnative:
        raise TypeError(f"{what} is {dtype}, expected one of {', '.join(allowed)}")
    return dtype


# Annotations of attributes that several families of declarations share.
Axis = Annotated[int, axis]
Axes = Annotated[int | tuple[int, ...], axes]
Sizes = Annotated[Any, sizes]
Reduction = Annotated[str, one_of(*REDUCTIONS)]
FloatDtypes = Annotated[Any, float_dtypes]
