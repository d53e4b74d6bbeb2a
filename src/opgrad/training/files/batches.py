"""The axis of each input of a graph along which the examples of a batch lie."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

WHO = "ArtifactSet"
ROWS = "rows"  # the name for a variable batch size that has none in the graph


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input: its name, dtype and shape; a name in place of a size stands for any size.

    axis: the axis of the examples; None: the input is the same for all examples, such as a recurrence's first state.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    axis: int | None = 0

    @property
    def rows(self) -> int | str:
        """The size of the axis of the examples; 1 for an input that is the same for all examples."""
        return 1 if self.axis is None else self.shape[self.axis]


def located(inputs: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int | None]:
    """The inputs with their axes of examples, and the number of rows if they only take one number, else None.

    The examples lie along the first axis, unless the sizes of the inputs contradict that, or a name of theirs does.
    A single number, and an input of one row beside data and labels of more, are the same for all examples.
    Raises ValueError without inputs, NotImplementedError where no axis can be that of the examples.
    """
    shared = _same_for_all(inputs)
    each, rows = _located([spec for spec in inputs if spec not in shared])
    places = {spec.name: spec for spec in (*each, *(replace(spec, axis=None) for spec in shared))}
    return tuple(places[spec.name] for spec in inputs), rows


def _same_for_all(inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The inputs that are the same for all examples."""
    rows = [spec for spec in inputs if spec.shape and spec.shape[0] != 1]
    firsts = {spec.shape[0] for spec in rows}
    return [
        spec
        for spec in inputs
        if not spec.shape
        or (
            spec.shape[0] == 1
            and len(rows) > 1
            and not any(size in firsts or _is_batch(size) for size in spec.shape[1:])
        )
    ]


def _located(inputs: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int | None]:
    """`located` for inputs that all have rows of their own for each example."""
    if not inputs:
        raise ValueError(f"{WHO}: the training graph has no inputs beside the parameters, expected data")
    common = _common(inputs)
    placed = tuple(replace(spec, axis=spec.shape.index(common) if common in spec.shape else 0) for spec in inputs)
    fixed = sorted({spec.rows for spec in placed if isinstance(spec.rows, int)})
    if not _multiples(fixed) or (len(fixed) > 1 and any(spec.axis for spec in placed)):
        raise NotImplementedError(f"{WHO}: the inputs have {fixed} rows, expected one number of them")
    return tuple(_varying(spec, fixed[0]) if fixed else spec for spec in placed), fixed[0] if fixed else None


def _multiples(numbers: Sequence[int]) -> bool:
    """Whether all numbers are multiples of the first, as the number of tokens' labels is one of that of examples."""
    return len(numbers) < 2 or (numbers[0] > 0 and all(each % numbers[0] == 0 for each in numbers))


def _varying(spec: TensorSpec, least: int) -> TensorSpec:
    """The same input, but for any number of rows."""
    times = spec.rows // least if isinstance(spec.rows, int) and spec.rows > least else 1
    size, axis = ROWS if times == 1 else f"{times}*{ROWS}", spec.axis or 0
    return replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1 :]))


def _common(inputs: Sequence[TensorSpec]) -> int | str | None:
    """The size of the axis of the examples, where that is not the first of every input."""
    shared = [size for size, count in _counted(inputs).items() if count > 1 or _is_batch(size)]
    if not _contradicts(inputs, shared) and not _named(inputs, shared):
        return None
    everywhere = [size for size in shared if all(size in spec.shape or _alone(spec, shared) for spec in inputs)]
    names = [size for size in everywhere if isinstance(size, str)]
    return next(iter([*filter(_is_batch, names), *names, *everywhere]), None)


def _counted(inputs: Iterable[TensorSpec]) -> Mapping[int | str, int]:
    """For each size the number of inputs in which it stands exactly once; a size of 1 says nothing and is left out."""
    return Counter(size for spec in inputs for size in set(spec.shape) if spec.shape.count(size) == 1 and size != 1)


def _contradicts(inputs: Sequence[TensorSpec], shared: Sequence[int | str]) -> bool:
    """Whether the first axes cannot all be those of the examples."""
    firsts = {spec.shape[0] for spec in inputs}
    elsewhere = any(size in spec.shape[1:] for size in firsts for spec in inputs if size in shared)
    return len(firsts) > 1 and (elsewhere or not _multiples(sorted(each for each in firsts if isinstance(each, int))))


def _named(inputs: Sequence[TensorSpec], shared: Sequence[int | str]) -> bool:
    """Whether some axis has a name such as "batch", but no first axis has one."""
    return any(map(_is_batch, shared)) and not any(_is_batch(spec.shape[0]) for spec in inputs)


def _is_batch(size: int | str) -> bool:
    return isinstance(size, str) and ("batch" in size.lower() or size in ("N", "B"))


def _alone(spec: TensorSpec, shared: Sequence[int | str]) -> bool:
    """Whether no other input has the sizes of this one; labels for the tokens of all examples are an example."""
    return len(spec.shape) == 1 and spec.shape[0] not in shared
