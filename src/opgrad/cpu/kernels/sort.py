"""A stable counting sort, whose work threads share: positions are put in the order of their keys, from 0 to size - 1.

Each part counts its positions by key. A scan turns the counts into the places where each part's positions of each key
begin, and each part then moves its positions there. Counts and places are stored in 32 bits.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Part, Units
from opgrad.cpu.compiler.words import load_i32, load_word, store_i32, store_word

MOST_SORTED: Final = 2**31 - 1  # positions that can be sorted
HOT: Final = 8  # a key is hot if more than 1/8 of all positions have it


def counting_sort(
    key_of: Callable[..., Any], put: Callable[..., None], source: Any, target: Any
) -> tuple[Kernel, Kernel]:
    """The first and the last of the three kernels of a sort; `scan_counts` runs between them.

    key_of(source, j, size) gives the key of position j and the item that is moved. put(target, place, item, source, j)
    stores the item. source, target: the annotations of these parameters.
    """
    inline(key_of)
    inline(put)
    source_kind, target_kind = source, target

    @kernel
    def count_keys(positions: Units, part: Part, size, source: source_kind, counts):
        """counts[part, key] = how many of this part's positions have that key."""
        own = counts + 4 * part * size
        for key in range(size):
            store_i32(own, key, 0)
        for j in positions:
            _count_up(own, key_of(source, j, size)[0])

    @kernel
    def move_positions(positions: Units, part: Part, size, source: source_kind, counts, target: target_kind):
        own = counts + 4 * part * size
        for j in positions:
            key, item = key_of(source, j, size)
            put(target, _count_up(own, key), item, source, j)

    return count_keys, move_positions


@inline
def _count_up(counts: int, key: int) -> int:
    """Add one to the count of a key, and return the count before."""
    count = load_i32(counts, key)
    store_i32(counts, key, count + 1)
    return count


@kernel
def scan_counts(parts, count, size, counts, starts, hot):
    """Each part's count of a key becomes the place where its positions of the key begin; starts: where all of them do.

    hot[0] is the number of hot keys, which follow it.
    """
    place, found_hot = 0, 0
    for key in range(size):
        store_word(starts, key, place)
        for part in range(parts):
            own = counts + 4 * part * size
            found = load_i32(own, key)
            store_i32(own, key, place)
            place += found
        if place - load_word(starts, key) > count // HOT:
            found_hot += 1
            store_word(hot, found_hot, key)
    store_word(hot, 0, found_hot)
    store_word(starts, size, place)
