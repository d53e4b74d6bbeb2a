"""Sizes of values as far as they are known from a graph: numbers and names.

A name stands for the same number wherever it is written. The exception are vague names, which exporters write for every
size that they do not know: two sizes with the same vague name may differ. So vague names are removed before anything is
concluded from a graph.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

from onnx import TypeProto

Size: TypeAlias = int | str | None  # a number, a name, or None for a size of which nothing is known
Sizes: TypeAlias = Sequence[Size]
# "?" of onnxruntime and others, "unk__12" of tf2onnx, and texts for a missing number such as "None" and "-1".
VAGUE = re.compile(r"\s*(|[?x]*\?[?x]*|-\d+|none|null|nan|any|unk(nown)?|unk__\w*|\*)\s*", re.IGNORECASE)


def forget_vague(declared: TypeProto.Tensor) -> None:
    """Remove vague names, and numbers below 0, from the sizes in a tensor's type."""
    for dim in declared.shape.dim:
        if VAGUE.fullmatch(dim.dim_param) if dim.HasField("dim_param") else dim.dim_value < 0:
            dim.Clear()


def sizes_in(declared: TypeProto.Tensor | None) -> Sizes | None:
    """The sizes in a tensor's type; None if not even the rank is known."""
    if declared is None or not declared.HasField("shape"):
        return None
    return [dim.dim_value or dim.dim_param or (0 if dim.HasField("dim_value") else None) for dim in declared.shape.dim]


def known(sizes: Sizes | None) -> list[int] | None:
    """The sizes if all of them are numbers, else None."""
    numbers = [size for size in sizes or () if isinstance(size, int)]
    return numbers if sizes is not None and len(numbers) == len(sizes) else None


def are_equal(one: Sizes | None, other: Sizes | None) -> bool:
    """Whether two shapes are known to be equal; an unknown size does not equal another unknown size."""
    return one is not None and other is not None and None not in one and list(one) == list(other)
