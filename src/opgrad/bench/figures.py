"""What the times of a result file say: speeds, shares and ratios of each cell, and of all."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrad.bench.cells import GROUPS, PLAIN, PLANS
from opgrad.bench.measure import CALL, COPY, KERNEL, OURS


@dataclass(frozen=True)
class Figures:
    """One cell. `peer` is the fastest peer, `ratio` its time over ours; None where nobody else computes it.

    `host_seconds`: after which a call on a device returns; None on the CPU.
    """

    operator: str
    workload: str
    dtype: str
    headline: bool
    seconds: float
    gigabytes: float
    share_of_copy: float
    peer: str | None
    peer_seconds: float | None
    ratio: float | None
    error_ulp: float | None
    host_seconds: float | None = None

    @property
    def name(self) -> str:
        return f"{self.operator} {self.workload} {self.dtype}"

    @property
    def shape(self) -> str:
        """The workload's shape alone."""
        return self.workload.partition(",")[0]

    @property
    def is_slower(self) -> bool:
        """Slower than the best peer, as far as the table's digits show."""
        return self.ratio is not None and round(self.ratio, 2) < 1


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for anything else."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("format") != 1:
        raise ValueError(f"bench: {path} is no result file of this version")
    return result


def figures(result: dict[str, Any]) -> list[Figures]:
    """The figures of every plain cell, from median times."""
    return [_figures(cell) for cell in result["cells"] if cell.get("group", PLAIN) == PLAIN]


def forms(result: dict[str, Any]) -> dict[str, list[Figures]]:
    """The figures of the forms of softmax by group, plans left out."""
    of_group = {group: [cell for cell in result["cells"] if cell.get("group") == group] for group in GROUPS}
    return {group: list(map(_figures, cells)) for group, cells in of_group.items() if cells and group != PLANS}


def times_of_fastest(cells: Sequence[Figures]) -> list[float]:
    """The time of each cell over that of the fastest of the same operator, shape and dtypes."""
    fastest: dict[tuple[str, str, str], float] = {}
    for cell in cells:
        key = cell.operator, cell.shape, cell.dtype
        fastest[key] = min(cell.seconds, fastest.get(key, cell.seconds))
    return [cell.seconds / fastest[cell.operator, cell.shape, cell.dtype] for cell in cells]


@dataclass(frozen=True)
class PlanFigures:
    """Seconds of a plan's call, of the plain call, and of the kernel alone."""

    operator: str
    workload: str
    dtype: str
    plan: float
    call: float
    kernel: float


def plans(result: dict[str, Any]) -> list[PlanFigures]:
    """The figures of the plans that were measured."""
    found = []
    for cell in result["cells"]:
        if cell.get("group") == PLANS:
            times = [cell["times"][name]["median"] for name in (OURS, CALL, KERNEL)]
            found.append(PlanFigures(cell["operator"], cell["workload"], cell["dtype"], *times))
    return found


def _figures(cell: dict[str, Any]) -> Figures:
    medians = {name: times["median"] for name, times in cell["times"].items()}
    ours, copy = medians.pop(OURS), medians.pop(COPY)
    speed = cell["bytes"] / ours
    peer = min(medians, key=lambda name: medians[name], default=None)
    return Figures(
        cell["operator"],
        cell["workload"],
        cell["dtype"],
        cell["headline"],
        ours,
        speed / 1e9,
        speed / (cell["copied_bytes"] / copy),
        peer,
        medians[peer] if peer else None,
        medians[peer] / ours if peer else None,
        cell["error_ulp"],
        cell["times"][OURS].get("host"),
    )


def geometric_mean(cells: Sequence[Figures]) -> float | None:
    """Of the ratios to the best peer; None if there are none."""
    logs = [math.log(cell.ratio) for cell in cells if cell.ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def losses(cells: Sequence[Figures]) -> list[Figures]:
    """The cells where a peer is faster, the worst first."""
    return sorted((cell for cell in cells if cell.is_slower), key=lambda cell: cell.ratio or 0)
