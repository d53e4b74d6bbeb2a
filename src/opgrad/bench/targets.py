"""What is measured: the CPU, a CUDA device, or JAX, each with its workloads, peers and way to take time."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from opgrad.bench import loss_case, peers
from opgrad.bench.case import Case
from opgrad.bench.cells import GRAPH, LOSSES, PLAIN, SWEEP, WORKLOADS, Cell, Workloads
from opgrad.bench.copying import MOST_COPIED, copier
from opgrad.bench.form_case import FormCase
from opgrad.bench.graph_case import GraphCase
from opgrad.bench.measure import COPY, OURS, interleaved
from opgrad.bench.peers import COMPILE
from opgrad.bench.sweep import SweepCase
from opgrad.bench.ways import GIVEN, Call, measured

TARGETS = ("cpu", "cuda", "jax")
MANY_PASSES = ("scipy", "numpy")
SLOW = 0.1  # seconds of one call beyond which these are left out
COMPILED_FROM = 1 << 16  # bytes moved: with fewer, the checks before torch.compile's code runs take longest


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


class Cpu:
    """This machine's CPU."""

    workloads = WORKLOADS
    packages: Sequence[str] = ()
    seconds, quick_seconds = 0.5, 0.2

    def peers(self, names: Sequence[str]) -> list[str]:
        return peers.chosen(names, peers.installed())

    def describe(self) -> None:
        return None

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        if cell.workload.group == LOSSES:
            return loss_case.measure(cell, names, seconds)
        group, case = cell.workload.group, _case(cell)
        case.call(GIVEN)()
        traffic, error = case.traffic(), case.error()
        copy = copier(min(traffic, MOST_COPIED))
        chosen = [name for name in names if name != COMPILE or traffic >= COMPILED_FROM]
        calls, notes = contestants(case, chosen)
        times = interleaved({COPY: copy, **calls}, seconds)
        return {
            "operator": cell.op.name,
            "workload": case.label if isinstance(case, GraphCase) else cell.workload.label,
            "dtype": cell.dtype,
            "memory": cell.memory,
            "headline": cell.workload.headline,
            **({} if group == PLAIN else {"group": group}),
            **measured(times, notes, traffic, copy.bytes, error),
        }


def contestants(case: Case | GraphCase, names: Sequence[str]) -> tuple[dict[str, Call], dict[str, dict[str, str]]]:
    """Our call and the peers' by way and name, and for each way what keeps a peer from it."""
    calls: dict[str, Call] = {}
    notes: dict[str, dict[str, str]] = {}
    for way in case.ways:
        calls[f"{way} {OURS}"] = case.call(way)
        rivals, notes[way] = peers.calls(case, names, way)
        for name, call in rivals.items():
            if (reason := _unusable(name, call)) is None:
                calls[f"{way} {name}"] = call
            elif reason:
                notes[way][name] = reason
    return calls, notes


def _case(cell: Cell) -> Case | GraphCase:
    if cell.workload.group == GRAPH:
        return GraphCase(cell)
    if cell.workload.group == SWEEP:
        return SweepCase(cell)
    return Case(cell) if cell.workload.group == PLAIN else FormCase(cell)


def _unusable(name: str, call: Call) -> str | None:
    """What keeps a peer from the race: nothing, with None; that it lacks this dtype, which goes without saying."""
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        if name == COMPILE:
            return peers.reason(error)
        if isinstance(error, NotImplementedError | RuntimeError) and "not implemented" in str(error):
            return ""
        raise
    if name in MANY_PASSES and time.perf_counter() - start >= SLOW:
        return f"takes over {SLOW} seconds"
    return None
