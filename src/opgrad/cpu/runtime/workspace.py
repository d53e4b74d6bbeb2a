"""The working memory of a program, taken region by region before anything runs, as oneDNN's scratchpad registry does.

A shared region is there once for a call: what a step leaves for the next. A private one is there once for each part
that runs at a time: it lies in a slot that the part takes when it starts.
"""

import os
from dataclasses import dataclass
from typing import Final

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.native import vector_lanes
from opgrad.native.threads import get_num_threads

MAX_SLOTS: Final = 63
LINE: Final = 64
PADDING: Final = 256  # bytes behind each region: a masked tail may be stored whole, and none are a power of two apart
STATUS_WORDS: Final = 16  # working memory starts with a status (0: fine), what it is about, and IN_USE
IN_USE: Final = 8  # the word with a bit for each slot in use


@dataclass(frozen=True)
class Scratch:
    """A region of working memory; a private one counts from the start of a slot."""

    offset: int = 0
    dtype: str = "float32"
    private: bool = False


class Workspace:
    """Working memory of a program whose computations have this precision."""

    def __init__(self, precision: str = "float32"):
        self.precision = precision
        self.shared_bytes, self.private_bytes = 8 * STATUS_WORDS, 0

    def shared(self, count: int, dtype: str | None = None) -> Scratch:
        """Memory for so many numbers, of the precision unless a dtype is given."""
        dtype = dtype or self.precision
        start, self.shared_bytes = _behind(self.shared_bytes, count, dtype)
        return Scratch(start, dtype)

    def private(self, count: int, dtype: str | None = None) -> Scratch:
        """The same for each part that runs at a time."""
        dtype = dtype or self.precision
        start, self.private_bytes = _behind(self.private_bytes, count, dtype)
        return Scratch(start, dtype, private=True)

    @property
    def slots_begin(self) -> int:
        return _to_line(self.shared_bytes)

    @property
    def slot_bytes(self) -> int:
        return _to_line(self.private_bytes)

    def bytes(self, slots: int) -> int:
        """The size of all of it."""
        return self.slots_begin + slots * self.slot_bytes


def _to_line(offset: int) -> int:
    return (offset + LINE - 1) & -LINE


def _behind(end: int, count: int, dtype: str) -> tuple[int, int]:
    """Where the next region starts and ends."""
    start = _to_line(end)
    return start, start + count * DTYPES[dtype].itemsize + PADDING


def slots_for(parts: int) -> int:
    """How many parts get memory of their own; the plan is kept, and there may be more threads when it runs again."""
    return min(parts, MAX_SLOTS, max(os.cpu_count() or 1, get_num_threads()))


def whole_vectors(count: int, precision: str) -> int:
    """The count rounded up to whole vectors."""
    width = vector_lanes(precision)
    return -(-count // width) * width
