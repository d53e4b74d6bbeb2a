"""Slots of private memory: a part takes one when it starts and gives it back when it ends."""

from opgrad.cpu.compiler.helpers import inline
from opgrad.cpu.compiler.memory import atomic_add, atomic_load, atomic_swap_if, spin_hint


@inline
def take_slot(in_use: int, slots: int) -> int:
    """The number of a slot that no other part uses; the word at `in_use` has a bit for each.

    Where more threads than slots are at work, which have been set since the call was planned, a part waits for one
    that is done; whoever has a slot waits for nobody.
    """
    while True:
        taken = atomic_load(in_use)
        for slot in range(slots):
            if not taken >> slot & 1:
                if atomic_swap_if(in_use, taken, taken | 1 << slot):
                    return slot
                break
        spin_hint()


@inline
def release_slot(in_use: int, slot: int) -> None:
    atomic_add(in_use, -(1 << slot))
