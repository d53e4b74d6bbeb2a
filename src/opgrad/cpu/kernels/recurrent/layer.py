"""The order of a recurrent layer's steps in memory and in time."""

from typing import Any, NamedTuple

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.kernels.loops.map import write_same


class States(NamedTuple):
    """A state for each sequence of each direction, and the distances between directions and between sequences."""

    data: Pointer
    direction: int
    row: int


class Layer(NamedTuple):
    """The number of steps, directions, sequences, and of a state's numbers; whether the first direction is reversed."""

    steps: int
    directions: int
    batch: int
    hidden: int
    reverse: int


@inline
def time_of(layer: Layer, direction: int, step: int) -> int:
    """The step of x that is a direction's step number `step`."""
    return layer.steps - 1 - step if layer.reverse or direction else step


@inline
def place_of(layer: Layer, direction: int, t: int) -> int:
    """The first of a direction's rows for a step of x, in an array [steps, directions, sequences]."""
    return (t * layer.directions + direction) * layer.batch


@inline
def sequences_of(layer: Layer, units: Any, direction: int) -> tuple[int, int]:
    """The sequences of a direction among these units. A unit is a sequence; one direction follows the other."""
    first = direction * layer.batch
    return max(units.start - first, 0), min(units.stop - first, layer.batch)


@inline
def states_before(layer: Layer, first: States, states: Any, direction: int, step: int) -> tuple[Any, int]:
    """Where the states before a direction's step begin, and the elements from one sequence's to the next."""
    if step:
        return states + place_of(layer, direction, time_of(layer, direction, step - 1)) * layer.hidden, layer.hidden
    return first.data + direction * first.direction, first.row


@inline
def copy_states(target: Any, source: Any, row_step: int, begin: int, end: int, n: int) -> None:
    """Copy the states of sequences [begin, end) into rows behind each other."""
    for row in range(begin, end):
        write_same(target + row * n, 0, n, 0, (source + row * row_step,), ())
