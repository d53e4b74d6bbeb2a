"""What the times of a result file say: speeds, shares and ratios of each cell, and of all."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrad.bench.measure import COPY, OURS


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
    def lost(self) -> bool:
        """Slower than the best peer, as far as the table's digits show."""
        return self.ratio is not None and round(self.ratio, 2) < 1


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for anything else."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("format") != 1:
        raise ValueError(f"bench: {path} is no result file of this version")
    return result


def figures(result: dict[str, Any]) -> list[Figures]:
    """The figures of every cell, from median times."""
    return [_figures(cell) for cell in result["cells"]]


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
    return sorted((cell for cell in cells if cell.lost), key=lambda cell: cell.ratio or 0)
