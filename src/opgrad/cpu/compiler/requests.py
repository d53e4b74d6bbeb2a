"""Requests that one process sends to another for a kernel to be compiled: they tell how the kernel is found there."""

from typing import Any, NamedTuple


class Named(NamedTuple):
    """A kernel or native function that is a global of a module, and the form in which it is compiled."""

    module: str
    name: str
    form: str


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


class Made(NamedTuple):
    """A kernel that a function of a module returns for these arguments, by its number among those that it returns."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    number: int
    form: str


Request = tuple[str, Named | Call | Made]  # the name of the object code, and how its kernel is found
