"""What is measured: the CPU, or a CUDA device, each with its workloads, peers and way to take time."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from opgrad.bench import peers
from opgrad.bench.case import Case
from opgrad.bench.cells import GRAPH, PLAIN, WORKLOADS, Cell, Workloads
from opgrad.bench.copying import MOST_COPIED, copier
from opgrad.bench.form_case import FormCase
from opgrad.bench.graph_case import GraphCase
from opgrad.bench.measure import COPY, OURS, interleaved

TARGETS = ("cpu", "cuda")
MANY_PASSES = ("scipy", "numpy")
SLOW = 0.5  # seconds of one call beyond which these are left out


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
    from opgrad import machine

    if problem := machine.cuda_problem():
        raise RuntimeError(f"bench: device is 'cuda', but {problem}")
    from opgrad.bench.cuda.target import Cuda

    return Cuda.current()


class Cpu:
    """This machine's CPU."""

    workloads = WORKLOADS
    packages: Sequence[str] = ()
    seconds, quick_seconds = 0.6, 0.2

    def peers(self, names: Sequence[str]) -> list[str]:
        return peers.chosen(names, peers.installed())

    def describe(self) -> None:
        return None

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        group = cell.workload.group
        case = _case(cell)
        ours = case.call()
        ours()
        traffic = case.traffic()
        error = case.error()
        copy = copier(min(traffic, MOST_COPIED))
        rivals = {name: call for name, call in peers.calls(case, names).items() if _usable(name, call)}
        return {
            "operator": cell.op.name,
            "workload": case.label if isinstance(case, GraphCase) else cell.workload.label,
            "dtype": cell.dtype,
            "headline": cell.workload.headline,
            **({} if group == PLAIN else {"group": group}),
            "bytes": traffic,
            "copied_bytes": copy.bytes,
            "error_ulp": error if math.isfinite(error) else None,
            "times": interleaved({OURS: ours, COPY: copy, **rivals}, seconds),
        }


def _case(cell: Cell) -> Case | GraphCase:
    if cell.workload.group == GRAPH:
        return GraphCase(cell)
    return Case(cell) if cell.workload.group == PLAIN else FormCase(cell)


def _usable(name: str, call: Callable[[], object]) -> bool:
    """Whether a peer has this dtype and is not out of the race."""
    start = time.perf_counter()
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented" not in str(error):
            raise
        return False
    return name not in MANY_PASSES or time.perf_counter() - start < SLOW
