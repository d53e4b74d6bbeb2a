"""Programs: steps in order, each a kernel with its arguments, its parts for threads, and its working memory.

Working memory is laid out region by region before anything runs, as in oneDNN's scratchpad registry. A call has one
copy of a shared region, in which one step leaves results for the next. It has a copy of a private region for each part
that runs at the same time; the copy lies in a slot, which a part takes when it starts.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from opgrad.contract import DTYPES
from opgrad.contract.signature import Explain
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.runtime.threads import chosen_threads

# The least bytes of a part: handing it to a thread pays from about 5 µs of work, which is 128 KiB at 25 GB/s.
PART_BYTES = 1 << 17
# The most bytes of a part: with larger ones, threads only end at more different times.
MAX_PART_BYTES = 1 << 20
DEFAULT_CACHE = 32 << 20


@functools.cache
def caches() -> dict[str, int]:
    """Bytes of the first core's data caches by level, "L1" first; empty where the system does not say."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K") and size[:-1].isdecimal():
            sizes[f"L{level}"] = int(size[:-1]) << 10
    return sizes


def last_level_cache() -> int:
    """The size of the largest cache in bytes."""
    return max(caches().values(), default=DEFAULT_CACHE)


def streams(size: int) -> bool:
    """Whether a call that touches `size` bytes writes past the cache. If all fits the cache, that would be slower."""
    return size > last_level_cache()


def units_per_part(units: int, unit_bytes: float) -> int:
    """How many units of work (rows, blocks, strips) make a part."""
    total = units * unit_bytes
    wanted = min(max(PART_BYTES, total / 64), MAX_PART_BYTES)
    return max(1, min(units, round(wanted / max(unit_bytes, 1))))


def ceil_div(units: int, per: int) -> int:
    """How many parts, each of `per` units, so many units make."""
    return -(-units // per)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


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


@dataclass(frozen=True)
class Operands:
    """An argument: the address of the table of all operands' addresses, in which a kernel finds operands by number."""


@dataclass(frozen=True)
class Address:
    """An argument: a fixed address of memory that outlives the program."""

    value: int
    dtype: str


@dataclass(frozen=True)
class Step:
    """A kernel with its arguments by parameter name, its number of units, and the units of each part.

    interface: for which the kernel is compiled; see `Kernel.task`.
    """

    kernel: Kernel
    units: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_part: int = 1
    interface: str = "task"

    @property
    def parts(self) -> int:
        return ceil_div(self.units, self.per_part)


def shared_out(
    kernel: Kernel, units: int, unit_bytes: float, arguments: Mapping[str, Any], interface: str = "task"
) -> Step:
    """A step whose parts are large enough to be handed to threads; each unit touches `unit_bytes` bytes."""
    return Step(kernel, units, arguments, units_per_part(units, unit_bytes), interface)


class Tables(list[Any]):
    """Arrays of numbers that kernels read through their addresses; the program keeps them alive."""

    def add(self, numbers: Any, dtype: str = "int64") -> int:
        """The address of a table with these numbers."""
        self.append(np.ascontiguousarray(numbers, dtype))
        return int(self[-1].ctypes.data)


@dataclass(frozen=True)
class Program:
    """The steps, their working memory, and the function that makes the error which a kernel reports.

    name: which kernels run, for `PlannedCall.implementation`. tables: see `Tables`.
    """

    steps: Sequence[Step]
    workspace: Workspace | None = None
    explain: Explain | None = None
    name: str = ""
    tables: Sequence[Any] = ()
    slots: int = field(init=False)  # how many parts can have private memory at the same time

    def __post_init__(self) -> None:
        parts = max((step.parts for step in self.steps if step.kernel.takes_private), default=0)
        object.__setattr__(self, "slots", slots_for(parts))

    @property
    def scratch_bytes(self) -> int:
        return self.workspace.bytes(self.slots) if self.workspace else 0
