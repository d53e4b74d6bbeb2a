"""Functions that kernels call: they are compiled as a part of each kernel, and known to Numba when one is."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
INLINE: list[Callable[..., Any]] = []
KNOWN: set[Callable[..., Any]] = set()
CHOOSE: list[Callable[..., Any]] = []


def inline(function: F) -> F:
    """Mark a helper that kernels may call; it becomes part of each of them. Marking it again changes nothing."""
    if function not in KNOWN:
        KNOWN.add(function)
        INLINE.append(function)
    return function


def by_precision(single: Callable[..., Any], double: Callable[..., Any]) -> Callable[..., Any]:
    """A helper of vectors that is one function where they hold float32, another where they hold float64."""

    def chosen(bits: Any, *others: Any) -> Any:
        """Numba asks with the number of bits; an interpreted kernel calls with its vectors."""
        if isinstance(bits, int) and not others:
            return single if bits == 32 else double
        given = (bits, *others)
        return (single if next(each.bits for each in given if hasattr(each, "bits")) == 32 else double)(*given)

    CHOOSE.append(chosen)
    return chosen


def constant(single: float, double: float) -> Callable[..., float]:
    """A number that depends on the precision: constant(vector)."""
    return by_precision(inline(lambda x: single), inline(lambda x: double))
