"""Functions that kernels call: they are compiled as a part of each kernel, and known to Numba when one is."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
INLINE: list[Callable[..., Any]] = []
CHOOSE: list[Callable[..., Any]] = []


def inline(function: F) -> F:
    """Mark a helper that kernels may call; it becomes part of each of them."""
    INLINE.append(function)
    return function


def by_precision(function: F) -> F:
    """Mark a helper that names, for 32 or 64 bits, the implementation that kernels call in its place."""
    CHOOSE.append(function)
    return function
