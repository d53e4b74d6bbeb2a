"""The working memory of a program, laid out region by region before anything runs, as in oneDNN's scratchpad registry.

A call has one copy of a shared region, in which one step leaves results for the next. It has a copy of a private region
for each part that runs at the same time; the copy lies in a slot, which a part takes when it starts.
"""

import os
from dataclasses import dataclass, replace
from typing import Final

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.decorators import vector_lanes
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.runtime.threads import chosen_threads

MAX_SLOTS: Final = 63
# bytes behind each region, for whole vectors at its end; it also keeps distances off powers of two
PADDING: Final = 256
STATUS_WORDS: Final = 16  # the first words: a status, 0 if all is right, two words that explain it, and IN_USE
IN_USE: Final = 8  # the word with a bit for each slot in use


@dataclass(frozen=True)
class Scratch:
    """A region of working memory; a private one counts from the start of a slot."""

    offset: int = 0
    dtype: str = "float32"
    private: bool = False

    def moved(self, elements: int) -> "Scratch":
        """The region that begins so many elements later."""
        return replace(self, offset=self.offset + elements * DTYPES[self.dtype].itemsize)


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
        """Memory for so many numbers for each part that runs at the same time."""
        dtype = dtype or self.precision
        start, self.private_bytes = _behind(self.private_bytes, count, dtype)
        return Scratch(start, dtype, private=True)

    @property
    def is_used(self) -> bool:
        """Whether there is a region."""
        return self.shared_bytes > 8 * STATUS_WORDS or self.private_bytes > 0

    @property
    def slots_begin(self) -> int:
        return _to_line(self.shared_bytes)

    @property
    def slot_bytes(self) -> int:
        return _to_line(self.private_bytes)

    def bytes(self, slots: int) -> int:
        """The bytes of the working memory with so many slots."""
        return self.slots_begin + slots * self.slot_bytes


def _to_line(offset: int) -> int:
    return (offset + CACHE_LINE - 1) & -CACHE_LINE


def _behind(end: int, count: int, dtype: str) -> tuple[int, int]:
    """Where the region after one that ends at `end` starts and ends."""
    start = _to_line(end)
    return start, start + count * DTYPES[dtype].itemsize + PADDING


def slots_for(parts: int) -> int:
    """How many slots. The plan is kept, and a later call may use more threads, so all processors count."""
    return min(parts, MAX_SLOTS, max(os.cpu_count() or 1, chosen_threads()))


def whole_vectors(count: int, precision: str) -> int:
    """The count rounded up to whole vectors."""
    width = vector_lanes(precision)
    return -(-count // width) * width
