"""Results must not lie where other operands lie: asked natively before each call, and settled exactly where in doubt.

Native code compares the bytes that operands cover around their pointers: the pairs that must be apart, up to FEW
operands; of more, as of an optimizer's lists, all of them in the order of their addresses. Where these meet, which is
rare, `check_overlap` settles it element by element, and says what is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import Array, Operator, Spec
from opgrad.contract.problem import Pair
from opgrad.contract.signature import Prepared, covered, pairs
from opgrad.cpu.compiler.memory import load_word, store_word
from opgrad.cpu.compiler.native import inline

FEW: Final = 32  # operands up to which every pair of them is compared
# Words of what must be apart: how many pairs and how many spans there are, one of them 0; then these.
PAIRS, SPANS, FIRST = range(3)
# Words of a pair: two operands, the bytes that each covers around its pointer, whether they may be the same.
A, B, A_LOW, A_HIGH, B_LOW, B_HIGH, SAME, PAIR = range(8)
# Words of a span, of which each operand has one: the bytes that it covers around its pointer, and a number that those
# share which may be the same memory.
LOW, HIGH, GROUP, SPAN = range(4)
NOTHING: Final = (0, 0)  # the words where everything is apart, or nobody asks


def words(prepared: Prepared) -> Sequence[int]:
    """The words of what must be apart in calls of a signature: where results are brought, these and all else."""
    if not prepared.brought:
        return NOTHING
    op = prepared.operator
    if len(op.inputs) + len(op.results) > FEW:
        spans = _spans(prepared)
        return [0, len(spans) // SPAN, *spans]
    found = pairs(prepared)
    each = [(p.result, p.other, *p.result_bytes, *p.other_bytes, p.same) for p in found]
    return [len(found), 0, *(word for pair in each for word in pair)]


def _spans(prepared: Prepared) -> list[int]:
    op, present = prepared.operator, prepared.present
    names, groups = [*op.inputs, *op.results], dict[str, str]()
    for result, others in op.in_place.items():
        groups |= {name: result for name in others if _are_alike(present, name, result)}
    spans: list[int] = []
    for name in names:
        span = covered(present[name]) if name in present else (0, 0)
        spans += [*span, names.index(groups.get(name, name))]
    return spans


def _are_alike(specs: Mapping[str, Spec], name: str, other: str) -> bool:
    a, b = specs.get(name), specs.get(other)
    return a is not None and b is not None and a.dtype == b.dtype and a.strides == b.strides


# --- in native code ------------------------------------------------------------------------------------------------


@inline
def may_overlap(apart: int, operands: int, order: int) -> bool:
    """Whether operands at these addresses cover common bytes without being the same memory where that is allowed.

    order: where their numbers stand in the order of the last call's addresses, which is changed; 0 where there is none:
    then many operands always seem to overlap.
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
    """Put operands' numbers into the order of their addresses by insertion, from that of the last call.

    It is mostly the same, so that this takes one comparison for each operand.
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
    """Whether operands cover common bytes that are not one array under two names that it may have."""
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
    """Whether two operands at these addresses cover common bytes, unless they are one and may be."""
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
    """The places of arrays whose spans meet, group by group; arrays of different groups share nothing.

    Comparing every pair took 0.5 ms for the 65 arrays of a list operator.
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
    """The addresses between which an array lies."""
    start = array.ctypes.data
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return start + sum(min(step, 0) for step in steps), start + sum(max(step, 0) for step in steps) + array.itemsize
