"""What kernels over rows share: writing a row, working space, and the cut of few long rows into blocks."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu import parts
from opgrad.cpu.execute import SLOTS, STATUS_WORDS, Scratch
from opgrad.cpu.memory import atomic_add, atomic_load, atomic_swap_if, spin_hint
from opgrad.cpu.native import inline
from opgrad.cpu.simd import (
    Vector,
    first,
    index,
    lanes,
    load,
    load_masked,
    store,
    store_masked,
    store_streaming,
    to_line,
)

MAX_SLOTS: Final = 63


def map_one(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], s, t, i) for i in [begin, end); past the cache if `stream`."""

    @inline
    def masked(out: Any, i: int, count: int, a: Any, s: Any, t: Any) -> None:
        mask = first(out, count)
        store_masked(out, i, formula(load_masked(a, i, mask, 0.0), s, t, index(out, i)), mask)

    @inline
    def write(out: Any, begin: int, end: int, stream: int, a: Any, s: Any, t: Any) -> None:
        w, i = lanes(out), begin
        if stream:
            head = min(to_line(out, i), end - i)
            if head > 0:
                masked(out, i, head, a, s, t)
                i += head
            if head >= 0:
                while i + w <= end:
                    store_streaming(out, i, formula(load(a, i), s, t, index(out, i)))
                    i += w
        while i + w <= end:
            store(out, i, formula(load(a, i), s, t, index(out, i)))
            i += w
        if i < end:
            masked(out, i, end - i, a, s, t)

    return write


def map_two(formula: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = formula(a[i], b[i], s, t, i) for i in [begin, end); past the cache if `stream`."""

    @inline
    def masked(out: Any, i: int, count: int, a: Any, b: Any, s: Any, t: Any) -> None:
        mask = first(out, count)
        value = formula(load_masked(a, i, mask, 0.0), load_masked(b, i, mask, 0.0), s, t, index(out, i))
        store_masked(out, i, value, mask)

    @inline
    def write(out: Any, begin: int, end: int, stream: int, a: Any, b: Any, s: Any, t: Any) -> None:
        w, i = lanes(out), begin
        if stream:
            head = min(to_line(out, i), end - i)
            if head > 0:
                masked(out, i, head, a, b, s, t)
                i += head
            if head >= 0:
                while i + w <= end:
                    store_streaming(out, i, formula(load(a, i), load(b, i), s, t, index(out, i)))
                    i += w
        while i + w <= end:
            store(out, i, formula(load(a, i), load(b, i), s, t, index(out, i)))
            i += w
        if i < end:
            masked(out, i, end - i, a, b, s, t)

    return write


@inline
def take_slot(scratch: int, slots: int) -> int:
    """A working space that no other part uses; give it back with `release_slot`."""
    word = scratch + 8 * SLOTS
    while True:
        taken = atomic_load(word)
        for slot in range(slots):
            if not taken >> slot & 1:
                if atomic_swap_if(word, taken, taken | 1 << slot):
                    return slot
                break
        spin_hint()


@inline
def release_slot(scratch: int, slot: int) -> None:
    atomic_add(scratch + 8 * SLOTS, -(1 << slot))


def working_space(
    elements: int, dtype: str, made: int, start: int = 8 * STATUS_WORDS
) -> tuple[dict[str, Any], int]:
    """Arguments `scratch`, `slots`, `space`, `space_size` for kernels that need `elements` numbers in each of
    `made` parts, from byte `start` of scratch on; and where it ends."""
    size = elements + 64  # not a power of two apart, and a masked tail may be stored whole
    slots = min(made, MAX_SLOTS)
    item = 8 if dtype == "float64" else 4
    start = (start + 63) & ~63
    arguments = {"scratch": Scratch(), "slots": slots, "space": Scratch(start, dtype), "space_size": size}
    return arguments, start + slots * size * item


def precision(problem: Any) -> str:
    """The dtype in which the problem is computed."""
    dtypes = {operand.dtype for operand in problem.operands.values() if operand is not None}
    return "float64" if "float64" in dtypes else "float32"


def few(rows: int, n: int) -> bool:
    """Whether rows are so few and long that each is worth splitting over threads; depends on the shape alone."""
    return n > LONGEST_ROW or (rows < 8 and rows * n >= SPLIT_FROM)


LONGEST_ROW = 1 << 16  # elements: such a row and its exponentials, 512 KiB, still fit the second-level cache
SPLIT_FROM = 1 << 17  # elements: two threads gain from here on
BLOCK: Final = 1 << 14  # elements of a split row that one part handles


def blocks(n: int) -> int:
    return parts.count(n, BLOCK)
