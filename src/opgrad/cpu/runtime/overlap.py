"""The check that a result does not overlap another operand: a quick one in native code, and an exact one in Python.

Native code compares the ranges of bytes that operands cover. Up to FEW operands, it compares each pair that must not
overlap. If there are more, as in an optimizer's lists, it sorts all ranges by address and compares neighbours. Ranges
that meet are rare, and need not share a byte, since arrays may have gaps. Then `check_overlap` decides exactly, and
raises the error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import Array, Operator, Spec
from opgrad.contract.problem import Pair
from opgrad.contract.signature import Prepared, covered, pairs
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import load_word, store_word

FEW: Final = 32  # the most operands of which every pair is compared
# The words for the check: the number of pairs and the number of spans, one of which is 0; then the pairs or the spans.
PAIRS, SPANS, FIRST = range(3)
# Words of a pair: two operands, the range of bytes that each covers, counted from its pointer, and whether they may be
# the same memory.
A, B, A_LOW, A_HIGH, B_LOW, B_HIGH, SAME, PAIR = range(8)
# Words of a span, of which each operand has one: the range of bytes that it covers, counted from its pointer, and the
# number of its group; operands of one group may be the same memory.
LOW, HIGH, GROUP, SPAN = range(4)
NOTHING: Final = (0, 0)  # the words of a check that finds nothing


def words(prepared: Prepared) -> Sequence[int]:
    """The words for the check in calls of a signature that bring their results."""
    op = prepared.operator
    if len(op.inputs) + len(op.results) > FEW:
        spans = _spans(prepared)
        return [0, len(spans) // SPAN, *spans]
    found = pairs(prepared)
    each = [(p.result, p.other, *p.result_bytes, *p.other_bytes, p.same) for p in found]
    return [len(found), 0, *(word for pair in each for word in pair)]


def _spans(prepared: Prepared) -> list[int]:
    op, specs = prepared.operator, prepared.problem.specs
    names, groups = [*op.inputs, *op.results], dict[str, str]()
    for result, others in op.in_place.items():
        groups |= {name: result for name in others if _are_alike(specs, name, result)}
    spans: list[int] = []
    for name in names:
        span = covered(specs[name]) if name in specs else (0, 0)
        spans += [*span, names.index(groups.get(name, name))]
    return spans


def _are_alike(specs: Mapping[str, Spec], name: str, other: str) -> bool:
    a, b = specs.get(name), specs.get(other)
    return a is not None and b is not None and a.dtype == b.dtype and a.strides == b.strides


# --- in native code ------------------------------------------------------------------------------------------------


@inline
def may_overlap(apart: int, operands: int, order: int) -> bool:
    """Whether operands at these addresses cover common bytes, other than operands that may be the same memory and are.

    order: the address of the operands' numbers, sorted by the addresses of the last call; they are sorted anew. If it
    is 0, more than FEW operands always count as overlapping.
    """
    pair = apart + 8 * FIRST
    for _ in range(load_word(apart, PAIRS)):
        a, b = load_word(operands, load_word(pair, A)), load_word(operands, load_word(pair, B))
        are_apart = a + load_word(pair, A_HIGH) <= b + load_word(pair, B_LOW)
        are_apart |= b + load_word(pair, B_HIGH) <= a + load_word(pair, A_LOW)
        if not are_apart and not (a == b and load_word(pair, SAME)):
            return True
        pair += 8 * PAIR
    return load_word(apart, SPANS) > 0 and (order == 0 or _meet(apart, operands, order))


@inline
def _start(spans: int, operands: int, number: int) -> int:
    return load_word(operands, number) + load_word(spans + 8 * SPAN * number, LOW)


@inline
def _sort(spans: int, count: int, operands: int, order: int) -> None:
    """Sort operands' numbers by their addresses. Insertion sort starts from the order of the last call.

    That order is usually right already, so this takes one comparison for each operand.
    """
    for place in range(1, count):
        number, free = load_word(order, place), place
        start = _start(spans, operands, number)
        while free > 0 and _start(spans, operands, load_word(order, free - 1)) > start:
            store_word(order, free, load_word(order, free - 1))
            free -= 1
        store_word(order, free, number)


@inline
def _meet(apart: int, operands: int, order: int) -> bool:
    """Whether two operands cover common bytes, unless they are the same memory and belong to one group."""
    spans, count, before, first, reached = apart + 8 * FIRST, load_word(apart, SPANS), 0, 0, 0
    _sort(spans, count, operands, order)
    for place in range(count):
        number = load_word(order, place)
        span, address = spans + 8 * SPAN * number, load_word(operands, number)
        start, end = address + load_word(span, LOW), address + load_word(span, HIGH)
        if start < reached and start < end:
            same = start == first and end == reached and load_word(span, GROUP) == load_word(before, GROUP)
            if not same:
                return True
        if end > reached:
            before, first, reached = span, start, end
    return False


# --- exactly ---------------------------------------------------------------------------------------------------------


def touch(pair: Pair, result: int, other: int) -> bool:
    """Whether two operands at these addresses cover common bytes, unless they are the same memory and may be."""
    (low, high), (other_low, other_high) = pair.result_bytes, pair.other_bytes
    apart = result + high <= other + other_low or other + other_high <= result + low
    return not apart and not (result == other and pair.same)


def check_overlap(op: Operator, arrays: Sequence[Array | None]) -> None:
    """Raise ValueError if a result overlaps another array in a way that is not allowed."""
    names, first_result = [*op.arrays, *op.results], len(op.arrays)
    for group in _close(arrays):
        for number, place in enumerate(group):
            for other in group[:number] if place >= first_result else ():
                _check_pair(op, names[place], arrays[place], names[other], arrays[other])


def _check_pair(op: Operator, result: str, output: Any, name: str, array: Any) -> None:
    if not np.shares_memory(array, output):
        return
    allowed = name in op.in_place.get(result, ())
    same = array.ctypes.data == output.ctypes.data and array.strides == output.strides
    if not (allowed and same and array.dtype == output.dtype):
        expected = f"{name} itself or separate memory" if allowed else "separate memory"
        raise ValueError(f"{op.name}: out for {result} overlaps {name}, expected {expected}")


def _close(arrays: Sequence[Array | None]) -> list[list[int]]:
    """Groups of arrays whose ranges of bytes meet, by their places; arrays of different groups share no memory.

    Comparing every pair of arrays exactly took 0.5 ms for the 65 arrays of a list operator.
    """
    spans = sorted((*_span(array), place) for place, array in enumerate(arrays) if array is not None and array.size)
    groups: list[list[int]] = []
    reached = 0
    for start, end, place in spans:
        if start >= reached:
            groups.append([])
        groups[-1].append(place)
        reached = max(reached, end)
    return [sorted(group) for group in groups if len(group) > 1]


def _span(array: Array) -> tuple[int, int]:
    """The first address of an array's memory, and the address behind its last byte."""
    start = array.ctypes.data
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return start + sum(min(step, 0) for step in steps), start + sum(max(step, 0) for step in steps) + array.itemsize
