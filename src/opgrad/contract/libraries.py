"""The functions of an array library with which calls are expanded; each front end passes those of its library."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from opgrad.contract.dtypes import DTYPES, Array, Shape, Spec

NUMBERS = (bool, int, float)  # types of numbers that may be passed in place of an array


class Arrays(Protocol):
    """The functions of the library to which a call's arrays belong, which make the arrays of an expanded call."""

    def __hash__(self) -> int: ...

    def owns(self, value: Any) -> bool:
        """Whether a value is one of the library's arrays."""

    def spec(self, array: Any) -> Spec:
        """The shape and the dtype of an array, or of what NumPy takes for one."""

    def broadcast(self, array: Any, shape: Shape, like: Any) -> Any:
        """A view of an array, or a number as an array beside `like`, in this shape; what is neither as it is.

        Raises ValueError if the array has another shape."""

    def state(self, seed: int, offset: int, like: Any) -> Any:
        """Seed and offset as an int64 array on the device of `like`, for which the call does not wait."""

    def total(self, array: Any, axes: tuple[int, ...], shape: Shape, dtype: str) -> Any:
        """The sum over these axes (none: the array), in float64, rounded to this dtype and in this shape."""


class Memory(Protocol):
    """How a library's arrays lie in memory, and how it makes new ones: what `native.runners` needs."""

    def spec(self, array: Any) -> Spec:
        """Shape, dtype and strides in bytes. Raises TypeError for a dtype that NumPy and ml_dtypes lack."""

    def address(self, array: Any) -> int:
        """Where the first element lies."""

    def strides(self, spec: Spec, order: tuple[int, ...], model: Any) -> tuple[int, ...]:
        """The strides in bytes that a new array is given. `order` is the memory order of the axes that suits the
        kernels; `model` is the first array of the call if the new one has an entry for each of its elements."""

    def maker(self, spec: Spec, like: Any) -> Callable[[], Any]:
        """What makes new arrays of this shape, dtype and strides beside `like`."""

    def packed(self, array: Any, order: tuple[int, ...]) -> Any:
        """A copy whose axes lie in memory in this order."""

    def assign(self, destination: Any, source: Any) -> None:
        """Copy the elements of one array into another of the same shape."""


class Host:
    """`Arrays` for NumPy's."""

    @staticmethod
    def owns(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    @staticmethod
    def spec(array: Any) -> Spec:
        found = np.asarray(array)
        return Spec(found.shape, found.dtype)

    @staticmethod
    def broadcast(array: Any, shape: Shape, like: Any) -> Array:
        found = np.asarray(float(array) if isinstance(array, int) and not isinstance(array, bool) else array)
        return found if found.shape == shape else np.broadcast_to(found, shape)

    @staticmethod
    def state(seed: int, offset: int, like: Any) -> Array:
        return np.array((seed, offset), np.int64)

    @staticmethod
    def total(array: Array, axes: tuple[int, ...], shape: Shape, dtype: str) -> Array:
        summed = array.sum(axes, dtype=np.float64).reshape(shape) if axes else array
        with np.errstate(all="ignore"):  # what is too large becomes infinite, as in kernels
            return np.asarray(summed, DTYPES[dtype])  # a sum over all axes is no array


HOST = Host()


def is_masked(value: Any) -> bool:
    """Whether a value is a masked array. The question does not import np.ma: without it there is no such array."""
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and isinstance(value, kind)
