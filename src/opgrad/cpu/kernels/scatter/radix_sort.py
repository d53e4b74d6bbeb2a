"""Sums into few of many elements: numbers are sorted by destination; elements that get no number are only zeroed.

This is a radix sort by the digits of the destinations, the lowest digit first. Each pass is stable: it keeps the order
of keys with the same digit. So the numbers that go to one element are added in the order in which they come.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler.memory import load_i32, load_word, store_i32, store_word
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Units
from opgrad.cpu.kernels.gather import count_up, sum_slice

DIGIT: Final = 11  # bits: the counts of a part, 8 KiB, stay in the first-level cache
DIGITS: Final = 1 << DIGIT


class Sorted(NamedTuple):
    """Keys to be sorted (int64), and for each key the number of its slice (int32)."""

    keys: int
    order: int


@kernel
def count_digits(positions: Units, part: Part, shift, source: Sorted, counts):
    """counts[part, d] = how many of this part's keys have the digit d."""
    mine = counts + 4 * part * DIGITS
    for d in range(DIGITS):
        store_i32(mine, d, 0)
    for j in positions:
        count_up(mine, load_word(source.keys, j) >> shift & (DIGITS - 1))


@kernel
def scan_digits(parts, counts):
    """The exclusive scan of the counts: where each part's keys with the digit d begin."""
    position = 0
    for d in range(DIGITS):
        for part in range(parts):
            mine = counts + 4 * part * DIGITS
            found = load_i32(mine, d)
            store_i32(mine, d, position)
            position += found


@kernel
def move_digits(positions: Units, part: Part, shift, source: Sorted, counts, moved: Sorted):
    """Move keys, with the numbers of their slices, to their positions by this digit."""
    mine = counts + 4 * part * DIGITS
    for j in positions:
        key = load_word(source.keys, j)
        position = count_up(mine, key >> shift & (DIGITS - 1))
        store_word(moved.keys, position, key)
        store_i32(moved.order, position, load_i32(source.order, j) if shift else j)


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
