"""Public functions: what people call in place of a declared operator, whose own function is its reference."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from opgrad.call.arrays import dispatcher
from opgrad.contract import declared

F = TypeVar("F", bound=Callable[..., Any])


def public(function: F) -> F:
    """The public function of an operator, whose calls run kernels.

    function: that of a declaration in `opgrad.ops`, whose signature and docstring the public one has.
    """
    return cast(F, public_function(function.__name__))


@functools.cache
def public_function(name: str) -> Callable[..., Any]:
    """The public function of a declared operator, by the operator's name."""
    op = declared()[name]
    made = functools.wraps(op.reference)(dispatcher(op))
    made.__module__ = "opgrad"  # where people find it, and pickle
    return made
