"""Functions that kernels call.

Each kernel contains its own compiled copy; Numba learns of them before it compiles one.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
INLINE: list[Callable[..., Any]] = []
KNOWN: set[Callable[..., Any]] = set()
CHOOSE: list[Callable[..., Any]] = []


def inline(function: F) -> F:
    """Mark a function as one that kernels may call.

    It is inlined into each of them. Marking it twice changes nothing.
    """
    if function not in KNOWN:
        KNOWN.add(function)
        INLINE.append(function)
    return function


def by_precision(single: Callable[..., Any], double: Callable[..., Any]) -> Callable[..., Any]:
    """A helper that calls `single` if its vectors hold float32, and `double` if they hold float64."""

    def chosen(bits: Any, *others: Any) -> Any:
        """Numba passes the number of bits alone and gets a function; an interpreted kernel passes its vectors."""
        if isinstance(bits, int) and not others:
            return single if bits == 32 else double
        given = (bits, *others)
        return (single if next(each.bits for each in given if hasattr(each, "bits")) == 32 else double)(*given)

    CHOOSE.append(chosen)
    return chosen


def constant(single: float, double: float) -> Callable[..., float]:
    """A number that depends on the precision: constant(vector)."""
    return by_precision(inline(lambda x: single), inline(lambda x: double))
