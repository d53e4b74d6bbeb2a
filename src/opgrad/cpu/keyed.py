"""Plans that native callers find by a key of words: nodes of onnxruntime, and functions that JAX has compiled.

A caller writes its key, such as the shapes of its arrays, and looks it up in a linked list. For a key that is not there
it calls Python, which puts the plan before the others. Other threads may be walking through the list at any time, so
nothing is ever taken out of it.
"""

import ctypes
from typing import Any

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.structures import Structure, at, structure, words
from opgrad.cpu.compiler.words import atomic_load, load_word
from opgrad.cpu.plans import Plan


@structure
class Keyed(Structure):
    """A plan with its key, in a list. The addresses of what belongs to it."""

    next: int  # the next one, or 0
    key: int  # the words of the key; the first is their number
    plan: int
    parts: int  # the most parts of one of the plan's steps
    own: int  # the caller's structure


class KeyedPlan:
    """A plan with its key, and the structure in which its caller has what else it knows of it."""

    def __init__(self, plan: Plan, key: tuple[int, ...], own: Any, following: int, *kept: Any):
        """following: the address of the next one. kept: blocks to which `own` points."""
        self.plan, self.key, self.own = plan, key, own
        self._key = words(key)
        self._kept = kept
        self._keyed = Keyed(following, ctypes.addressof(self._key), plan.address, plan.parts_max, own.address)
        self.address = self._keyed.address


@inline
def find_keyed(first: int, key: int) -> int:
    """The keyed plan that has this key, or 0. first: the address of the word that has the address of the first one."""
    address, count = atomic_load(first), load_word(key, 0)
    while address != 0:
        keyed, same = at(Keyed, address), 0
        while same < count and load_word(keyed.key, same) == load_word(key, same):
            same += 1
        if same == count:
            return address
        address = keyed.next
    return 0
