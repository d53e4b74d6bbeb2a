"""The memory that interpreted kernels may touch: each access is checked against what a call was given."""

import bisect
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np


class Region(NamedTuple):
    """A range of bytes that a kernel may access, and the name of its owner."""

    start: int
    stop: int
    name: str


class Regions:
    """The memory of the calls that run now; without any, as inside of onnxruntime, nothing is checked."""

    def __init__(self) -> None:
        self._sorted: list[Region] = []

    @contextmanager
    def allowed(self, regions: Sequence[Region]) -> Iterator[None]:
        """Within this context, kernels may access these regions."""
        before = self._sorted
        self._sorted = sorted({*before, *regions})
        try:
            yield
        finally:
            self._sorted = before

    def add(self, region: Region) -> None:
        """Allow one more region until the call ends."""
        bisect.insort(self._sorted, region)

    def check(self, address: int, size: int) -> None:
        """Raise IndexError unless these bytes lie inside one region."""
        if not self._sorted or size <= 0:
            return
        for region in self._sorted[: bisect.bisect(self._sorted, (address + 1,))][::-1]:
            if region.start <= address and address + size <= region.stop:
                return
        near = min(self._sorted, key=lambda each: max(each.start - address, address - each.stop))
        has, place = near.stop - near.start, address - near.start
        raise IndexError(f"a kernel touches {size} bytes at {place} of {near.name}, which has {has}")


REGIONS = Regions()


def bytes_at(address: int, size: int) -> Any:
    """The bytes at an address, as memory that NumPy can read and write."""
    REGIONS.check(address, size)
    return (ctypes.c_uint8 * size).from_address(address)


def region_of(array: np.ndarray, name: str) -> Region:
    """The bytes that an array's elements lie in."""
    start, stop = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
    return Region(int(start), int(stop), name)
