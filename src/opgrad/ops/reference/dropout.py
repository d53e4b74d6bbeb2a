"""Dropout as an attribute of softmax."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from opgrad.contract import integer, number, shown
from opgrad.contract.signature import record


@record("seed", "offset")
@dataclass(eq=False, slots=True)
class Dropout:
    """Each element is dropped with this probability, by its own decision; the others are divided by 1 - probability.

    probability: from 0 (nothing is dropped) to 1 (all are, which gives 0). seed, offset: 64-bit integers. An element's
    decision depends on them and on its place in C order alone, not on layout, threads or device. Calls with the same
    seed and offset decide alike: give each call its own. mask: also return which elements were kept, as bool.

    Raises TypeError for a probability that is no number, a seed or an offset that is no int; ValueError for values
    outside these ranges. Random numbers are those of Philox-4x32-10 (`opgrad.ops.reference.random`).
    """

    probability: float
    seed: int = 0
    offset: int = 0
    mask: bool = False

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # seeds change: no key of a plan

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _CHECKS[name](value) if name in _CHECKS else value)


def _probability(value: Any) -> float:
    found = number("Dropout: probability", value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"Dropout: probability is {found}, expected 0 to 1")
    return found


def _mask(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"Dropout: mask is {shown(value)}, expected a bool")
    return value


def _word(name: str, value: Any) -> int:
    """A 64-bit integer in the range of int64; the upper half of uint64 stands for the negative ones."""
    found = integer(f"Dropout: {name}", value, beyond=2**64)
    return found - 2**64 if found >= 2**63 else found


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "probability": _probability,
    "seed": functools.partial(_word, "seed"),
    "offset": functools.partial(_word, "offset"),
    "mask": _mask,
}
