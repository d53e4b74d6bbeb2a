"""Sizes of values as far as they are known from a graph: numbers, names, and products of both.

A name stands for the same number wherever it is written. The exception are vague names, which exporters write for every
size that they do not know: two sizes with the same vague name may differ. So vague names are removed before anything is
concluded from a graph.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnx import TypeProto

Size: TypeAlias = int | str | None  # a number, a name, or None for a size of which nothing is known
Sizes: TypeAlias = Sequence[Size]
# "?" of onnxruntime and others, "unk__12" of tf2onnx, and texts for a missing number such as "None" and "-1".
VAGUE = re.compile(r"\s*(|[?x]*\?[?x]*|-\d+|none|null|nan|any|unk(nown)?|unk__\w*|\*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Term:
    """The product of a number and the named sizes; the names are sorted."""

    factor: int
    names: tuple[str, ...] = ()

    def __mul__(self, other: "Term") -> "Term":
        return Term(self.factor * other.factor, tuple(sorted(self.names + other.names)) if self.factor else ())

    @property
    def number(self) -> int | None:
        """The number if there are no names, else None."""
        return None if self.names else self.factor


Terms: TypeAlias = list[Term | None]  # None for a size of which nothing is known
COPY, REST = Term(0), Term(-1)  # in the shape of Reshape: a size to copy, and the size that follows from the others


def forget_vague(declared: TypeProto.Tensor) -> None:
    """Remove vague names, and numbers below 0, from the sizes in a tensor's type."""
    for dim in declared.shape.dim:
        if VAGUE.fullmatch(dim.dim_param) if dim.HasField("dim_param") else dim.dim_value < 0:
            dim.Clear()


def sizes_in(declared: TypeProto.Tensor | None) -> Sizes | None:
    """The sizes in a tensor's type; None if not even the rank is known."""
    if declared is None or not declared.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in declared.shape.dim]


def terms(sizes: Sizes | None) -> Terms | None:
    """The same sizes as terms."""
    if sizes is None:
        return None
    return [Term(1, (size,)) if isinstance(size, str) else None if size is None else Term(size) for size in sizes]


def numbers(found: Terms | None) -> list[int] | None:
    """The numbers of terms; None if one of them has a name or is unknown."""
    if found is None or any(each is None or each.names for each in found):
        return None
    return [each.factor for each in found if each is not None]


def known(sizes: Sizes | None) -> list[int] | None:
    """The sizes if all of them are numbers, else None."""
    return numbers(terms(sizes))


def are_equal(one: Sizes | None, other: Sizes | None) -> bool:
    """Whether two shapes are known to be equal; an unknown size does not equal another unknown size."""
    return one is not None and other is not None and None not in one and list(one) == list(other)


def constant_target(wanted: Terms, sizes: Sequence[Term | None]) -> list[int] | None:
    """The constant with which Reshape makes a value of these sizes have the wanted shape; None if there is none."""
    target: list[int] = []
    for place, term in enumerate(wanted):
        kept = term is not None and place < len(sizes) and term == sizes[place]
        number = term.number if term is not None else None
        target.append(number if number is not None else COPY.factor if kept else REST.factor)
    alone = target.count(REST.factor) <= 1
    empty = any(term == COPY and (place >= len(sizes) or sizes[place] == COPY) for place, term in enumerate(wanted))
    return target if alone and not empty else None
