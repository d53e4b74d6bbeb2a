"""Sums into few of many elements: numbers are sorted by destination; elements that get no number are only zeroed.

This is a radix sort by the digits of the destinations, the lowest digit first. Each pass is stable: it keeps the order
of keys with the same digit. So the numbers that go to one element are added in the order in which they come.
"""

from typing import NamedTuple

from opgrad.cpu.compiler.memory import load_i32, load_word, store_i32, store_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.gather import sum_slice
from opgrad.cpu.kernels.sort import counting_sort


class Sorted(NamedTuple):
    """Keys to be sorted (int64), for each key the number of its slice (int32), and the lowest bit of the digit."""

    keys: int
    order: int
    shift: int


@inline
def _digit_of(source, j: int, size: int):
    """The digit of key j, and what is sorted: the whole key."""
    key = load_word(source.keys, j)
    return key >> source.shift & (size - 1), key


@inline
def _put_key(target, place: int, key: int, source, j: int) -> None:
    """Store the key, and the number of its slice: in the first pass, slices are in the order of their numbers."""
    store_word(target.keys, place, key)
    store_i32(target.order, place, load_i32(source.order, j) if source.shift else j)


KEYS_BY_DIGIT = counting_sort(_digit_of, _put_key, Sorted, Sorted)


@kernel
def sum_sorted(positions: Units, count, post, source: Sorted, dy: Pointer, dx: Pointer):
    """dx[v] = the sum of the slices of dy whose key is v, for each v whose first key is in this part."""
    keys, j = source.keys, positions.start
    while j < positions.stop:
        key, begin = load_word(keys, j), j
        j += 1
        while j < count and load_word(keys, j) == key:
            j += 1
        if begin == 0 or load_word(keys, begin - 1) != key:
            sum_slice(dx + key * post, dy, post, 0, post, source.order, begin, j, count - 1, 0)
