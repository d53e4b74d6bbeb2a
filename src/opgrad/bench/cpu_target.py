"""This machine's CPU as a target of the benchmark: one cell measured, into what a result file holds of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from opgrad.bench import loss_case, peers
from opgrad.bench.case import Case, case_of
from opgrad.bench.cells import LOSSES, PLAIN, WORKLOADS, Cell
from opgrad.bench.copying import MOST_COPIED, copier
from opgrad.bench.measure import COPY, GIVEN, OURS, Call, interleaved, measured
from opgrad.bench.peers import COMPILE

COMPILED_FROM = 1 << 16  # bytes moved: with fewer, the checks before torch.compile's code runs take longest


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
        case = case_of(cell)
        case.call(GIVEN)()
        error = case.error()
        chosen = [name for name in names if name != COMPILE or case.traffic >= COMPILED_FROM]
        calls: dict[str, Call] = {}
        notes: dict[str, dict[str, str]] = {}
        for way in case.ways:
            rivals, notes[way] = peers.calls(case, chosen, way)
            calls |= {f"{way} {name}": call for name, call in {OURS: case.call(way), **rivals}.items()}
        return raced(case, calls, notes, error, seconds)


def raced(
    case: Case, calls: Mapping[str, Call], notes: Mapping[str, dict[str, str]], error: float, seconds: float
) -> dict[str, Any]:
    """What a result file holds of a case. calls: by way and name. notes: by way, what keeps peers from it."""
    cell, copy = case.cell, copier(min(case.traffic, MOST_COPIED))
    times = interleaved({COPY: copy, **calls}, seconds)
    return {
        **cell.known,
        "workload": case.label,
        "memory": cell.memory,
        "headline": cell.workload.headline,
        **({} if cell.workload.group == PLAIN else {"group": cell.workload.group}),
        **measured(times, notes, case.traffic, copy.bytes, error),
    }
