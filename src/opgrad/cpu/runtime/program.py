"""What a kernel function returns: kernels in order, each with its arguments and its units of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opgrad.contract.ranges import Explain
from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.workspace import Workspace, slots_for


@dataclass(frozen=True)
class Operands:
    """The table of all operands' addresses, for kernels that find theirs by number."""


@dataclass(frozen=True)
class Address:
    """Memory that outlives the program, at a fixed address."""

    value: int
    dtype: str


@dataclass(frozen=True)
class Step:
    """One kernel with its arguments by parameter name, to be run for all units, so many in each part."""

    kernel: Kernel
    units: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_part: int = 1

    @property
    def parts(self) -> int:
        return partition.count(self.units, self.per_part)


def shared_out(kernel: Kernel, units: int, unit_bytes: float, arguments: Mapping[str, Any]) -> Step:
    """The step whose parts are worth a thread's attention, a unit touching so many bytes."""
    return Step(kernel, units, arguments, partition.per_part(units, unit_bytes))


@dataclass(frozen=True)
class Program:
    """What a kernel function returns: steps, their working memory, and the words for what may go wrong.

    `name` tells how it is done, `tables` keeps the memory that arguments point to. `later`: what shall run instead as
    soon as its kernels are compiled.
    """

    steps: Sequence[Step]
    workspace: Workspace | None = None
    explain: Explain | None = None
    name: str = ""
    tables: Sequence[Any] = ()
    later: "Program | None" = None
    slots: int = field(init=False)  # how many parts can have private memory at a time, settled once

    def __post_init__(self) -> None:
        parts = max((step.parts for step in self.steps if step.kernel.takes_private), default=0)
        object.__setattr__(self, "slots", slots_for(parts))

    @property
    def scratch_bytes(self) -> int:
        return self.workspace.bytes(self.slots) if self.workspace else 0
