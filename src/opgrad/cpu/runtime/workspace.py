"""Working space for kernels: each part takes a slot of scratch memory and gives it back."""

import os
from typing import Any, Final

from opgrad.cpu.compiler.memory import atomic_add, atomic_load, atomic_swap_if, spin_hint
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.runtime.execute import SLOTS, STATUS_WORDS, Scratch
from opgrad.cpu.runtime.parallel import get_num_threads

MAX_SLOTS: Final = 63


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


def working_space(elements: int, dtype: str, made: int, start: int = 8 * STATUS_WORDS) -> tuple[dict[str, Any], int]:
    """Arguments `scratch`, `slots`, `space`, `space_size` for kernels that need `elements` numbers in each of
    `made` parts, from byte `start` of scratch on; and where it ends."""
    size = elements + 64  # not a power of two apart, and a masked tail may be stored whole
    slots = min(made, MAX_SLOTS, max(os.cpu_count() or 1, get_num_threads()))
    item = 8 if dtype == "float64" else 4
    start = (start + 63) & ~63
    arguments = {"scratch": Scratch(), "slots": slots, "space": Scratch(start, dtype), "space_size": size}
    return arguments, start + slots * size * item
