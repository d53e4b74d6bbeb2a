"""The error messages for labels and indices that are out of range, for every backend."""

import math
from collections.abc import Callable

import numpy as np

from opgrad.contract.problem import Problem

Explain = Callable[[int, int], Exception]  # explain(position of a wrong number in memory order, the number)


def wrong_label(problem: Problem, operator: str) -> Explain:
    """The function that makes the error for a label that is out of range."""
    ignore, classes = problem.attributes.get("ignore_index"), problem.n
    expected = f"0 to {classes - 1}" if classes else "no label, as there are 0 classes"
    also = "" if ignore is None else f" or ignore_index {ignore}"
    return _wrong(problem, operator, "labels", lambda position: expected + also)


def wrong_index(problem: Problem, operator: str, size: int, name: str = "indices") -> Explain:
    """The function that makes the error for an index, of the operand of this name, that an axis of this size lacks."""
    expected = f"{-size} to {size - 1}" if size else "no index, as the axis has size 0"
    return _wrong(problem, operator, name, lambda position: expected)


def wrong_maximum(problem: Problem, operator: str) -> Explain:
    """The function that makes the error for the place of a maximum outside of its window's image and channel."""
    windows, plane = (math.prod(shape[2:]) for shape in (problem.specs["indices"].shape, problem.attributes["shape"]))

    def expected(position: int) -> str:
        first = position // windows * plane
        within = f"{first} to {first + plane - 1}" if plane else "no index, as shape has a size of 0"
        return f"{within}, in its image and channel"

    return _wrong(problem, operator, "indices", expected)


def _wrong(problem: Problem, operator: str, name: str, expected: Callable[[int], str]) -> Explain:
    """The function that makes such an error. expected(position) says which numbers are allowed there."""
    shape, order = problem.specs[name].shape, problem.orders[name]

    def explain(position: int, value: int) -> Exception:
        place = position_of(position, shape, order)
        return ValueError(f"{operator}: {name}{place} is {value}, expected {expected(position)}")

    return explain


def position_of(position: int, shape: tuple[int, ...], order: tuple[int, ...]) -> str:
    """`[i, j]` of the element at a position in memory order; nothing for a single number."""
    moved = np.unravel_index(position, [shape[axis] for axis in order])
    found = [int(moved[order.index(axis)]) for axis in range(len(shape))]
    return f"[{', '.join(map(str, found))}]" if found else ""
