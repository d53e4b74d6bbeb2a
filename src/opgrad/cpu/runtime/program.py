"""The program that a kernel function returns: steps in order, each a kernel with its arguments and units of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opgrad.contract.signature import Explain
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.workspace import Workspace, slots_for


@dataclass(frozen=True)
class Operands:
    """An argument: the address of the table of all operands' addresses, in which a kernel finds operands by number."""


@dataclass(frozen=True)
class Address:
    """An argument: a fixed address of memory that outlives the program."""

    value: int
    dtype: str


@dataclass(frozen=True)
class Step:
    """A kernel with its arguments by parameter name, its number of units, and the units of each part.

    interface: for which the kernel is compiled; see `Kernel.task`.
    """

    kernel: Kernel
    units: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_part: int = 1
    interface: str = "task"

    @property
    def parts(self) -> int:
        return partition.count(self.units, self.per_part)


def shared_out(
    kernel: Kernel, units: int, unit_bytes: float, arguments: Mapping[str, Any], interface: str = "task"
) -> Step:
    """A step whose parts are large enough to be handed to threads; each unit touches `unit_bytes` bytes."""
    return Step(kernel, units, arguments, partition.per_part(units, unit_bytes), interface)


class Tables(list[Any]):
    """Arrays of numbers that kernels read through their addresses; the program keeps them alive."""

    def add(self, numbers: Any, dtype: str = "int64") -> int:
        """The address of a table with these numbers."""
        self.append(np.ascontiguousarray(numbers, dtype))
        return int(self[-1].ctypes.data)


@dataclass(frozen=True)
class Program:
    """The steps, their working memory, and the function that makes the error which a kernel reports.

    name: which kernels run, for `PlannedCall.implementation`. tables: see `Tables`.
    """

    steps: Sequence[Step]
    workspace: Workspace | None = None
    explain: Explain | None = None
    name: str = ""
    tables: Sequence[Any] = ()
    slots: int = field(init=False)  # how many parts can have private memory at the same time

    def __post_init__(self) -> None:
        parts = max((step.parts for step in self.steps if step.kernel.takes_private), default=0)
        object.__setattr__(self, "slots", slots_for(parts))

    @property
    def scratch_bytes(self) -> int:
        return self.workspace.bytes(self.slots) if self.workspace else 0
