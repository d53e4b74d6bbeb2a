"""Memory as kernels see it: global memory is the host's, shared memory an array for each thread block.

Both know which bytes were written. Accesses are checked before they are made, lanes that may not are left out.
"""

import ctypes
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

import numpy as np

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128, 32: np.dtype("V32")}
ORIGIN = 1 << 12  # the first page is nobody's
SHARED_BASE = 1024  # where a program's shared memory begins: null is no address of it
RANK = 24  # bits of an address of a cluster's shared memory below the rank of its block, counted from 1


@dataclass
class Allocation:
    """An array in global memory. written: a byte for each, not 0 where it was written; None: all were."""

    name: str
    address: int
    size: int
    written: np.ndarray | None = None

    @property
    def end(self):
        return self.address + self.size


def _union(one, other):
    """Both, and what lies between; written, unless neither was."""
    address, end = min(one.address, other.address), max(one.end, other.end)
    size = end - address
    both = one.written is not None and other.written is not None
    return Allocation(f"{one.name} and {other.name}", address, size, np.zeros(size, np.uint8) if both else None)


class _Everything:
    """All of the host's memory as an array from ORIGIN on."""

    def __init__(self, words):
        count = (1 << 47) // words.itemsize
        self.__array_interface__ = {
            "version": 3, "data": (ORIGIN, False), "shape": (count,), "typestr": words.str
        }  # fmt: skip


@cache
def everything(width):
    """The host's memory as words of so many bytes."""
    return np.asarray(_Everything(np.dtype(WORDS[width])))


def byte_bounds(array):
    """Where its elements begin and end; an empty array lies at one place."""
    return np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)


@dataclass
class GlobalMemory:
    """The allocations that a launch may access."""

    allocations: list[Allocation] = field(default_factory=list)

    def add(self, array, name, written=True):
        """Let kernels access an array's memory, all that lies between its first and its last element."""
        low, high = byte_bounds(array)
        return self.add_range(name, low, high - low, written)

    def add_range(self, name, address, size, written=True):
        """Let kernels access so many bytes from an address on; what overlaps becomes one allocation."""
        found = Allocation(name, address, size, None if written else np.zeros(size, np.uint8))
        for each in [each for each in self.allocations if each.address < found.end and found.address < each.end]:
            self.remove(each)
            found = _union(each, found)
        self.allocations.insert(bisect_right(self.starts(), found.address), found)
        return found

    def remove(self, allocation):
        """Let kernels access it no more."""
        self.allocations = [each for each in self.allocations if each is not allocation]

    def fill(self, low, high):
        """Note that these bytes hold something, if they are an allocation's; whether they are."""
        for each in self.allocations:
            if each.address <= low and high <= each.end:
                if each.written is not None:
                    each.written[low - each.address : high - each.address] = 1
                return True
        return False

    def bytes(self):
        """What all allocations hold."""
        return [ctypes.string_at(each.address, each.size) for each in self.allocations]

    def restore(self, content):
        """Let the allocations hold what `bytes` has given."""
        for each, own in zip(self.allocations, content, strict=True):
            ctypes.memmove(each.address, own, each.size)

    def starts(self):
        return [each.address for each in self.allocations]

    def owners(self, addresses, width):
        """The number of the allocation that each access lies in; -1 for none."""
        if not self.allocations:
            return np.full(addresses.shape, -1)
        starts = np.array(self.starts(), np.uint64)
        ends = np.array([each.end for each in self.allocations], np.uint64)
        owner = np.searchsorted(starts, addresses, "right") - 1
        inside = (owner >= 0) & (addresses + np.uint64(width) <= ends[owner])
        return np.where(inside, owner, -1)

    def beside(self, address):
        """Where an address lies, in words."""
        place = bisect_right(self.starts(), address) - 1
        near = []
        if place >= 0:
            each = self.allocations[place]
            if address < each.end:
                return f"in {each.name} ({each.size} bytes), {address - each.address} bytes from its beginning"
            near.append((address - each.end, f"{address - each.end} bytes behind the end of {each.name}"))
        if place + 1 < len(self.allocations):
            each = self.allocations[place + 1]
            near.append((each.address - address, f"{each.address - address} bytes before {each.name}"))
        return min(near)[1] if near else "no array is there"

    def load(self, addresses, width):
        return everything(width)[(addresses - np.uint64(ORIGIN)) // np.uint64(width)]

    def store(self, addresses, values):
        width = values.dtype.itemsize
        everything(width)[(addresses - np.uint64(ORIGIN)) // np.uint64(width)] = values

    def mark(self, addresses, width, owners):
        """Note that these bytes were written."""
        for number in np.unique(owners):
            each = self.allocations[number]
            if each.written is not None:
                offsets = addresses[owners == number] - np.uint64(each.address)
                each.written[offsets[:, None] + np.arange(width, dtype=np.uint64)] = 1

    def unwritten(self, addresses, width, owners):
        """Which accesses read bytes that were never written."""
        found = np.zeros(addresses.shape, bool)
        for number in np.unique(owners):
            each = self.allocations[number]
            if each.written is not None:
                own = owners == number
                offsets = addresses[own] - np.uint64(each.address)
                found[own] = ~each.written[offsets[:, None] + np.arange(width, dtype=np.uint64)].all(1)
        return found


class SharedMemory:
    """The shared memory of the thread blocks that run together.

    What a block wrote last, and which lane, is known for each byte: see `sanitizer.Races`.
    """

    def __init__(self, ctas, size):
        self.ctas, self.size = ctas, size
        self.pitch = -(-size // 32) * 32
        self.bytes = np.full(ctas * self.pitch + 32, 0xA5, np.uint8)
        self.written = np.zeros(ctas * self.pitch + 32, bool)

    def places(self, addresses, ctas):
        """Where in `bytes` the addresses of blocks are."""
        return addresses.astype(np.int64) - SHARED_BASE + ctas * self.pitch

    def inside(self, addresses, width):
        offsets = addresses.astype(np.int64) - SHARED_BASE
        return (offsets >= 0) & (offsets + width <= self.size)

    def load(self, places, width):
        return self.bytes[: len(self.bytes) // width * width].view(WORDS[width])[places // width]

    def store(self, places, values):
        width = values.dtype.itemsize
        self.bytes[: len(self.bytes) // width * width].view(values.dtype)[places // width] = values
