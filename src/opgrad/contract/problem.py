"""The problem of a call, for kernels of any backend: loop sizes, operands with their strides, attributes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opgrad.contract.dtypes import Shape, Spec


@dataclass(frozen=True)
class Operand:
    """An array argument or result: its number, dtype and strides in elements."""

    number: int
    dtype: str
    outer: int = 0
    n: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Problem:
    """The argument of a kernel function: the loops' sizes, the operands by name, the attributes.

    `bytes` counts each operand once. Operands that were not given are None. `orders` are the memory orders of
    their axes, `specs` how they lie in memory.
    """

    outer: int
    n: int
    inner: int
    operands: Mapping[str, Operand | None]
    attributes: Mapping[str, Any]
    specs: Mapping[str, Spec]
    orders: Mapping[str, tuple[int, ...]]
    bytes: int

    @property
    def is_general(self) -> bool:
        """Whether the call has attributes, or dtypes, that plain calls lack (opgrad.ops.reference.primitive)."""
        return "post_ops" in self.attributes

    @property
    def shapes(self) -> dict[str, Shape]:
        """The operands' shapes by name."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def listed(self, parameter: str) -> list[str]:
        """The names of the arrays in the list that the call gives, or returns, under this name."""
        return [name for name in self.operands if name.startswith(f"{parameter}[")]

    def __getitem__(self, name: str) -> Any:
        return self.operands[name]


@dataclass(frozen=True)
class Pair:
    """A result and another operand that must not overlap. same: whether they may be one and the same memory.

    result_bytes, other_bytes: the bytes that the operands cover, counted from their data pointers.
    """

    result: int
    other: int
    result_bytes: tuple[int, int]
    other_bytes: tuple[int, int]
    same: bool
