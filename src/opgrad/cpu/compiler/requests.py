"""Requests that one process sends to another for kernels to be compiled: they tell how the kernels are found there."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Named(NamedTuple):
    """A kernel or native function that is a global of a module, and the interface for which it is compiled."""

    module: str
    name: str
    interface: str


class Call(NamedTuple):
    """A call of an operator; one of the kernels of its plan is the requested one.

    needs: the results that it computes, None for all. lists: the lengths of its lists of inputs and of results.
    specs: shape and dtype of each array, None for one left out.
    """

    operator: str
    needs: tuple[str, ...] | None
    lists: tuple[int, int] | None
    specs: tuple[tuple[tuple[int, ...], str] | None, ...]
    attributes: dict[str, Any]


class Work(NamedTuple):
    """A function to call, a global of a module, because it compiles several kernels while it runs."""

    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()


# The name of the object code, and how its kernel is found; for work, any name that tells it from other work.
Request = tuple[str, Named | Call | Work]
