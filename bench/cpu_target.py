"""This machine's CPU as a target of the benchmark: one cell measured, into what a result file holds of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench import peers, step_case
from bench.case import Case, case_of
from bench.cells import PLAIN, STEPS, WORKLOADS, Cell, Workloads
from bench.copying import MOST_COPIED, copier
from bench.measure import GIVEN, Call, finite, interleaved, raced

Rivals = Callable[[str], tuple[Mapping[str, Call], dict[str, str]]]
COMPILED_FROM = 1 << 16  # bytes moved: with fewer, the checks before torch.compile's code runs take longest


class Target:
    """This machine's CPU, of which other targets are kinds.

    `seconds` and `quick_seconds`: how long a cell is measured by default. `packages`: those of peers.
    """

    workloads: Workloads = WORKLOADS
    packages: Sequence[str] = ()
    seconds, quick_seconds = 0.5, 0.2

    def installed(self) -> list[str]:
        """The peers that this Python has."""
        return peers.installed()

    def peers(self, names: Sequence[str]) -> list[str]:
        """These peers, or all that are installed. Raises ValueError for one that is unknown or not installed."""
        return peers.chosen(names, self.installed())

    def describe(self) -> dict[str, Any] | None:
        """What a result file says of the device; None for the CPU, which it describes anyway."""
        return None

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """One cell of a result: times by name, bytes of traffic, the error of our results."""
        if cell.workload.group in STEPS:
            return step_case.measure(cell, names, seconds)
        case = case_of(cell)
        case.call(GIVEN)()
        error = case.error()
        chosen = [name for name in names if name != peers.COMPILE or case.traffic >= COMPILED_FROM]
        ours = {way: case.call(way) for way in case.ways}
        return on_host(case, ours, lambda way: peers.calls(case, chosen, way), error, seconds)


def on_host(case: Case, ours: Mapping[str, Call], rivals: Rivals, error: float, seconds: float) -> dict[str, Any]:
    """What a result file holds of a case. ours, rivals: as for `raced`. error: of our results, in ulp."""
    cell, copy = case.cell, copier(min(case.traffic, MOST_COPIED))
    return {
        **cell.known,
        "workload": case.label,
        "headline": cell.workload.headline,
        **({} if cell.workload.group == PLAIN else {"group": cell.workload.group}),
        "bytes": case.traffic,
        "copied_bytes": copy.bytes,
        "error_ulp": finite(error),
        **raced(ours, rivals, partial(interleaved, seconds=seconds), copy),
    }
