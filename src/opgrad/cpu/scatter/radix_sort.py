"""Sums over few of many places: numbers are sorted by where they go, and the places that none goes to are only zeroed.

The sort goes by digits of the destinations, the lowest first; each pass keeps the order of what has the same digit, so
the numbers that go to one place are added in the order in which they come.
"""

from typing import Final

from opgrad.cpu.compiler.memory import load_i32, load_word, store_i32, store_word
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.simd import Pointer
from opgrad.cpu.gather import sum_slice
from opgrad.cpu.loops.fill import zero_step
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Scratch, Step
from opgrad.problem import Problem

DIGIT: Final = 11  # bits: the counts of a part, 8 KiB, stay in the first-level cache
DIGITS: Final = 1 << DIGIT
FEW = 4  # places for each number from which on this is used: looking at every place costs more than sorting


@kernel
def count_digits(part, per_part, count, shift, keys, counts):
    """counts[part, d] = how many of this part's keys have the digit d."""
    mine = counts + 4 * part * DIGITS
    for d in range(DIGITS):
        store_i32(mine, d, 0)
    for j in range(part * per_part, min((part + 1) * per_part, count)):
        d = load_word(keys, j) >> shift & (DIGITS - 1)
        store_i32(mine, d, load_i32(mine, d) + 1)


@kernel
def place_digits(part, made, counts):
    """Turn counts into the place where each part's keys with the digit d begin."""
    place = 0
    for d in range(DIGITS):
        for p in range(made):
            mine = counts + 4 * p * DIGITS
            found = load_i32(mine, d)
            store_i32(mine, d, place)
            place += found


@kernel
def move_digits(part, per_part, count, shift, keys, order, counts, moved_keys, moved_order):
    """Move keys, with the numbers of what they belong to, to their places by this digit."""
    mine = counts + 4 * part * DIGITS
    for j in range(part * per_part, min((part + 1) * per_part, count)):
        key = load_word(keys, j)
        d = key >> shift & (DIGITS - 1)
        place = load_i32(mine, d)
        store_i32(mine, d, place + 1)
        store_word(moved_keys, place, key)
        store_i32(moved_order, place, load_i32(order, j) if shift else j)


@kernel
def sum_sorted(part, per_part, count, post, keys, order, dy: Pointer, dx: Pointer):
    """dx[v] = the sum of the slices of dy whose key is v, for each v whose first key is in this part."""
    j, stop = part * per_part, min((part + 1) * per_part, count)
    while j < stop:
        key, begin = load_word(keys, j), j
        j += 1
        while j < count and load_word(keys, j) == key:
            j += 1
        if begin == 0 or load_word(keys, begin - 1) != key:
            sum_slice(dx + key * post, dy, post, 0, post, order, begin, j, count - 1, 0)


def sorted_sum_steps(problem: Problem, keys: int, size: int, post: int, count: int) -> tuple[list[Step], int]:
    """The steps that zero dx and add the slices of dy, whose destinations among `size` stand from byte `keys` of
    scratch on; and where their scratch ends."""
    made = max(1, min(8, count >> 14))
    tables = [keys, (keys + 8 * count + 63) & ~63]
    orders = [tables[1] + 8 * count, tables[1] + 12 * count]
    counts = (orders[1] + 4 * (count + 16) + 63) & ~63
    sorting = {"per_part": -(-count // made), "count": count, "made": made, "counts": Scratch(counts)}
    dx, dy = problem["dx"], problem["dy"]
    steps = [zero_step(dx, size * post, size * post * problem.specs["dx"].dtype.itemsize)]
    now = 0
    for shift in range(0, max(1, (size - 1).bit_length()), DIGIT):
        pair = {"keys": Scratch(tables[now]), "order": Scratch(orders[now])}
        moved = {"moved_keys": Scratch(tables[1 - now]), "moved_order": Scratch(orders[1 - now])}
        given = sorting | pair | moved | {"shift": shift}
        steps += [Step(count_digits, made, given), Step(place_digits, 1, given), Step(move_digits, made, given)]
        now = 1 - now
    per = partition.per_part(count, 2 * post * problem.specs["dy"].dtype.itemsize + 12)
    summing = {"keys": Scratch(tables[now]), "order": Scratch(orders[now]), "per_part": per, "count": count}
    steps.append(Step(sum_sorted, partition.count(count, per), summing | {"post": post, "dy": dy, "dx": dx}))
    return steps, counts + 4 * made * DIGITS
