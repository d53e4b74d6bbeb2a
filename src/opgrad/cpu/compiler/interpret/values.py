"""What interpreted kernels compute with: pointers, and vectors as NumPy arrays of their lanes."""

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from opgrad.cpu.compiler.interpret.regions import bytes_at
from opgrad.cpu.compiler.target import vector_lanes

# How elements stand in memory: floats, then numbers that kernels compute with as floats, then indices.
STORAGE: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int32_number": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.uint8,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
}
INDICES = ("int64", "int32", "int16")


class CheckedPointer:
    """An address of elements, with the precision in which a kernel computes with them, and with its vectors' lanes."""

    def __init__(self, address: int, storage: str, bits: int, lanes: int = 0):
        self.address, self.storage, self.bits = address, storage, bits
        self.dtype = np.dtype(STORAGE[storage])
        self.element = np.dtype(f"{'i' if storage in INDICES else 'f'}{bits // 8}")
        self.lanes = lanes or vector_lanes(f"float{bits}")

    def __add__(self, elements: int) -> "CheckedPointer":
        return self.at_byte(int(elements) * self.dtype.itemsize)

    def at_byte(self, offset: int) -> "CheckedPointer":
        return CheckedPointer(self.address + int(offset), self.storage, self.bits, self.lanes)

    def read(self, i: int, count: int) -> np.ndarray:
        """`count` elements from element i on, in the precision of the computation."""
        raw = self.stored(i, count)
        if self.storage == "bool":
            raw = raw != 0
        return raw.astype(self.element)

    def stored(self, i: int, count: int) -> np.ndarray:
        """The same elements as they stand in memory, to read or to write."""
        size = self.dtype.itemsize
        return np.frombuffer(bytes_at(self.address + int(i) * size, count * size), self.dtype)

    def write(self, i: int, values: np.ndarray) -> None:
        """Write elements from element i on, rounded once."""
        self.stored(i, len(values))[:] = self._rounded(values)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        if self.storage == "bool":
            return values != 0
        if self.storage in INDICES:
            return values.astype(np.int64).astype(self.dtype)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            near = np.where(np.isnan(values), 0, np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max))
            return near.astype(self.dtype)
        if self.dtype.itemsize <= 2 and values.dtype == np.float64:
            values = _to_odd(values)
        return values.astype(self.dtype)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32 rounded to odd, so that a second rounding gives the value rounded once."""
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != values) & (bits & 1 == 0)
    step = np.where(np.abs(values) > np.abs(near.astype(np.float64)), 1, -1).astype(np.int32)
    return np.where(inexact, bits + step, bits).view(np.float32)


class Vector:
    """Lanes of one dtype: float32, float64, integers as wide, or the truth values of a mask."""

    def __init__(self, lanes: np.ndarray):
        self.lanes = lanes

    @property
    def bits(self) -> int:
        """The precision that helpers are chosen by."""
        return 8 * self.lanes.dtype.itemsize

    @property
    def element(self) -> np.dtype:
        """The dtype of a lane, as a pointer has that of an element."""
        return self.lanes.dtype

    def __repr__(self) -> str:
        return f"Vector({self.lanes})"

    def __neg__(self) -> "Vector":
        return Vector(-self.lanes)

    def __rshift__(self, count: Any) -> "Vector":
        """Brings in zeros, whatever the sign."""
        unsigned = np.dtype(f"u{self.lanes.dtype.itemsize}")
        shifted = self.lanes.view(unsigned) >> lanes_of(count, self).astype(unsigned)
        return Vector(shifted.view(self.lanes.dtype))


def lanes_of(value: Any, like: Vector) -> np.ndarray:
    """A vector's lanes, or a number in all of them."""
    if isinstance(value, Vector):
        return value.lanes
    dtype = like.lanes.dtype
    number = np.int64(value).astype(dtype) if dtype.kind == "i" else dtype.type(value)
    return np.full(len(like.lanes), number, dtype)


def lifted(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A binary operation on a vector and a vector, or a number and a vector."""

    def operate(a: Any, b: Any) -> Any:
        like = a if isinstance(a, Vector) else b
        if not isinstance(like, Vector):
            return apply(a, b)
        return Vector(apply(lanes_of(a, like), lanes_of(b, like)))

    return operate


def _give_operators() -> None:
    """The operators of vectors: a float vector divides as floats do, one of integers towards zero."""

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.trunc(a / b).astype(a.dtype) if a.dtype.kind == "i" else a / b

    pairs = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": divide}
    pairs |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    for name, apply in pairs.items():
        operate = lifted(apply)
        setattr(Vector, f"__{name}__", operate)
        setattr(Vector, f"__r{name}__", lambda a, b, operate=operate: operate(b, a))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Vector, f"__{name}__", lifted(getattr(operator, name)))
    Vector.__hash__ = None  # type: ignore[assignment]


_give_operators()
