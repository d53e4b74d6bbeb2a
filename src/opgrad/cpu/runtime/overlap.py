"""The check that a result does not overlap another operand: a quick one in native code, and an exact one in Python.

Native code compares the ranges of bytes that operands cover. Up to FEW operands, it compares each pair that must not
overlap. If there are more, as in an optimizer's lists, it sorts all ranges by address and compares neighbours. Ranges
that meet are rare, and need not share a byte, since arrays may have gaps. Then `check_overlap` decides exactly, and
raises the error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import Array, Operator, Spec
from opgrad.contract.signature import Pair, Prepared, covered, pairs
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.structures import Structure, at, structure
from opgrad.cpu.compiler.words import load_word, store_word

FEW: Final = 32  # the most operands of which every pair is compared


@structure
class Couple(Structure):
    """Two operands that must not overlap, with the range of bytes that each covers, counted from its pointer."""

    a: int
    b: int
    a_low: int
    a_high: int
    b_low: int
    b_high: int
    same: int  # whether they may be the same memory


@structure
class Span(Structure):
    """The range of bytes that an operand covers, counted from its pointer."""

    low: int
    high: int
    group: int  # operands of one group may be the same memory


def checked(prepared: Prepared) -> tuple[list[Couple], list[Span]]:
    """What is compared in calls of a signature that bring their results: couples of operands, or many operands."""
    op = prepared.operator
    if len(op.inputs) + len(op.results) > FEW:
        return [], list(_spans(prepared))
    each = [Couple(p.result, p.other, *p.result_bytes, *p.other_bytes, p.same) for p in pairs(prepared)]
    return each, []


def _spans(prepared: Prepared) -> Iterator[Span]:
    op, specs = prepared.operator, prepared.problem.specs
    names, groups = [*op.inputs, *op.results], dict[str, str]()
    for result, others in op.in_place.items():
        groups |= {name: result for name in others if _are_alike(specs, name, result)}
    for name in names:
        low, high = covered(specs[name]) if name in specs else (0, 0)
        yield Span(low, high, names.index(groups.get(name, name)))


def _are_alike(specs: Mapping[str, Spec], name: str, other: str) -> bool:
    a, b = specs.get(name), specs.get(other)
    return a is not None and b is not None and a.dtype == b.dtype and a.strides == b.strides


# --- in native code ------------------------------------------------------------------------------------------------


@inline
def may_overlap(couples: int, spans: int, first: int, operands: int, order: int) -> bool:
    """Whether operands at these addresses cover common bytes, other than operands that may be the same memory and are.

    couples, spans: how many there are; one of them is 0. first: the address of the first. order: the address of the
    operands' numbers, sorted by the addresses of the last call; they are sorted anew. If it is 0, more than FEW
    operands always count as overlapping.
    """
    for number in range(couples):
        couple = at(Couple, first, number)
        a, b = load_word(operands, couple.a), load_word(operands, couple.b)
        are_apart = a + couple.a_high <= b + couple.b_low
        are_apart |= b + couple.b_high <= a + couple.a_low
        if not are_apart and not (a == b and couple.same):
            return True
    return spans > 0 and (order == 0 or _meet(spans, first, operands, order))


@inline
def _start(spans: int, operands: int, number: int) -> int:
    return load_word(operands, number) + at(Span, spans, number).low


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
def _meet(count: int, spans: int, operands: int, order: int) -> bool:
    """Whether two operands cover common bytes, unless they are the same memory and belong to one group."""
    group, first, reached = -1, 0, 0
    _sort(spans, count, operands, order)
    for place in range(count):
        number = load_word(order, place)
        span, address = at(Span, spans, number), load_word(operands, number)
        start, end = address + span.low, address + span.high
        if start < reached and start < end:
            same = start == first and end == reached and span.group == group
            if not same:
                return True
        if end > reached:
            group, first, reached = span.group, start, end
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
