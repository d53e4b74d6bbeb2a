"""Plans that native callers find by a key of words: nodes of onnxruntime, and functions that JAX has compiled.

A caller writes its key, such as the shapes of its arrays, and looks it up in a linked list. For a key that is not there
it calls Python, which puts the plan before the others. Other threads may be walking through the list at any time, so
nothing is ever taken out of it.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import atomic_load, load_word
from opgrad.cpu.plans import Plan

# Words of a keyed plan: the address of the next one, that of the plan, and the most parts of one of its steps; then
# the caller's own words, and the key. The first word of a key is its length.
NEXT, PLAN, PARTS, OWN = range(4)


def words(values: Iterable[int]) -> Any:
    """A block of int64 words."""
    block = tuple(values)
    return (ctypes.c_int64 * len(block))(*block)


class KeyedPlan:
    """A plan with its key and its caller's own words. In place of a block of words stands the block's address."""

    def __init__(self, plan: Plan, key: tuple[int, ...], own: Sequence[Any], following: int):
        """following: the address of the next one."""
        self.plan, self.key, self.own = plan, key, own
        facts = [each if isinstance(each, int) else ctypes.addressof(each) for each in own]
        self._words = words([following, plan.address, plan.parts_max, *facts, *key])
        self.address = ctypes.addressof(self._words)


@inline
def find_keyed(first: int, key: int, begin: int) -> int:
    """The keyed plan that has this key, or 0.

    first: the address of the word that has the address of the first one. begin: the word at which keys begin.
    """
    keyed, count = atomic_load(first), load_word(key, 0)
    while keyed != 0:
        same = 0
        while same < count and load_word(keyed, begin + same) == load_word(key, same):
            same += 1
        if same == count:
            return keyed
        keyed = load_word(keyed, NEXT)
    return 0
