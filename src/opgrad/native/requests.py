"""What a process is asked to compile for another: a kernel, by how it is found there."""

from typing import Any, NamedTuple


class Named(NamedTuple):
    """A kernel or native function that a module has under a name, in some form."""

    module: str
    name: str
    form: str


class Call(NamedTuple):
    """A call of an operator, among whose kernels is the one that is asked for.

    needs: the results that it computes, if not all. lists: how long its lists of arrays are, given and made.
    specs: shape and dtype of each array, None for one left out.
    """

    operator: str
    needs: tuple[str, ...] | None
    lists: tuple[int, int] | None
    specs: tuple[tuple[tuple[int, ...], str] | None, ...]
    attributes: dict[str, Any]


class Made(NamedTuple):
    """A kernel, in some form, that a function of a module makes of these arguments: one of several, by its number."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    number: int
    form: str


Request = tuple[str, Named | Call | Made]  # the entry that it is about, and what it is made of
