"""What is measured: the CPU, a CUDA device, or JAX, each with its workloads, peers and way to take time."""

from collections.abc import Sequence
from typing import Any, Protocol

from opgrad.bench.cells import Cell, Workloads
from opgrad.bench.cpu_target import Cpu

TARGETS = ("cpu", "cuda", "jax")


class Target(Protocol):
    """`seconds` and `quick_seconds`: how long a cell is measured by default. `packages`: those of peers."""

    workloads: Workloads
    packages: Sequence[str]
    seconds: float
    quick_seconds: float

    def peers(self, names: Sequence[str]) -> list[str]:
        """These peers, or all that are installed. Raises ValueError for one that is unknown or not installed."""

    def describe(self) -> dict[str, Any] | None:
        """What a result file says of the device; None for the CPU, which it describes anyway."""

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """One cell of a result: times by name, bytes of traffic, the error of our results."""


def target(name: str) -> Target:
    """The target of this name. Raises ValueError for another one, RuntimeError where there is no such device."""
    if name not in TARGETS:
        raise ValueError(f"bench: device is {name!r}, expected one of {', '.join(TARGETS)}")
    if name == "cpu":
        return Cpu()
    if name == "jax":
        from opgrad.bench import jax_target

        if problem := jax_target.missing():
            raise RuntimeError(f"bench: device is 'jax', but {problem}")
        return jax_target.Jax()
    from opgrad import machine

    if problem := machine.cuda_problem():
        raise RuntimeError(f"bench: device is 'cuda', but {problem}")
    from opgrad.bench.cuda.target import Cuda

    return Cuda.current()
