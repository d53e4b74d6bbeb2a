"""The order of a recurrent layer's steps in memory and in time."""

from typing import Any, NamedTuple

from opgrad.cpu.compiler.native import inline


class Layer(NamedTuple):
    """Steps, directions, sequences, the numbers of a state, whether the first direction goes from the last step."""

    steps: int
    directions: int
    batch: int
    hidden: int
    reverse: int


@inline
def time_of(layer: Layer, direction: int, step: int) -> int:
    """Where a direction's step in its own time stands in x."""
    return layer.steps - 1 - step if layer.reverse or direction else step


@inline
def place_of(layer: Layer, direction: int, t: int) -> int:
    """The row at which a direction's states of a step of x begin, of [steps, directions, sequences]."""
    return (t * layer.directions + direction) * layer.batch


@inline
def sequences_of(layer: Layer, units: Any, direction: int) -> tuple[int, int]:
    """The sequences of a direction that are among these units, all sequences of one direction behind the other."""
    first = direction * layer.batch
    return max(units.start - first, 0), min(units.stop - first, layer.batch)
