"""Converts attributes to plain values, which never change, so that they can be part of a plan's key.

A number may be passed in an array or in any object with `__float__` or `__index__`. If such an object were hashed
itself, it would find the plan of the number that it held before.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from opgrad.contract.attributes import read_axes
from opgrad.contract.checks import normalise
from opgrad.contract.declaration import Operator
from opgrad.contract.dtypes import Attributes

T = TypeVar("T")
# The types themselves: a class derived from one of them may say anything of its value.
# A library adds its own when it is first met.
PLAIN: set[type] = {bool, int, float, str, type(None)} | {
    np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
}

# Types of values that change, all of whose fields are slots; for each the fields that hold int64 numbers and are no
# part of a plan.
RECORDS: dict[type, tuple[str, ...]] = {}


def record(*numbers: str) -> Callable[[type[T]], type[T]]:
    """Declare a class with slots whose objects are values of attributes; `numbers`: see RECORDS."""

    def declare(kind: type[T]) -> type[T]:
        RECORDS[kind] = numbers
        return kind

    return declare


def fields(kind: type) -> list[str]:
    """The fields of a record in the order in which they lie in its objects: CPython sorts slots."""
    return sorted(kind.__slots__)  # type: ignore[attr-defined]


def is_plain(value: Any) -> bool:
    """Whether a value is plain, so that it never changes."""
    if type(value) in PLAIN or isinstance(value, np.dtype | type):
        return True
    return isinstance(value, tuple) and all(is_plain(each) for each in value)


def plain(op: Operator, given: Mapping[str, Any], names: Iterable[str] | None = None) -> Mapping[str, Any]:
    """A call's arguments with plain values for attributes, as the contract reads them; raises what it raises.

    names: of the attributes, if they are not the operator's own.
    """
    attributes = op.attributes if names is None else names
    changing: Attributes = {name: given[name] for name in attributes if name in given and not is_plain(given[name])}
    if not changing:
        return given
    axis = {"axis": read_axes(f"{op.name}: axis", changing.pop("axis"))} if "axis" in changing else {}
    normalise(op, changing, {})
    return {**given, **changing, **axis}
