"""What the times of a result file say: speeds, shares and ratios of each cell, and of all."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrad.bench.cells import GROUPS, LOSSES, PLAIN, PLANS
from opgrad.bench.measure import NEW, OURS
from opgrad.bench.memories import DEFAULT
from opgrad.reading import read_regular

FORMAT = 2  # of result files of cells; those of training steps have 1


@dataclass(frozen=True)
class Times:
    """One way of a cell. `peer` is the fastest peer, `ratio` its time over ours; None where nobody else works so.

    `host_seconds`: after which a call on a device returns; None on the CPU.
    """

    seconds: float
    gigabytes: float
    share_of_copy: float
    peer: str | None
    peer_seconds: float | None
    ratio: float | None
    host_seconds: float | None = None

    @property
    def is_slower(self) -> bool:
        """Slower than the best peer, as far as the table's digits show."""
        return self.ratio is not None and round(self.ratio, 2) < 1


@dataclass(frozen=True)
class Figures:
    """One cell, in both ways; `ways` has those in which it was measured."""

    operator: str
    workload: str
    dtype: str
    memory: str
    headline: bool
    error_ulp: float | None
    ways: Mapping[str, Times]

    @property
    def name(self) -> str:
        where = "" if self.memory == DEFAULT else f" {self.memory} memory"
        return f"{self.operator} {self.workload} {self.dtype}{where}"

    @property
    def typed(self) -> str:
        """The dtype, and whose memory it is if not NumPy's."""
        return self.dtype if self.memory == DEFAULT else f"{self.dtype}, {self.memory} memory"

    @property
    def shape(self) -> str:
        """The workload's shape alone."""
        return self.workload.partition(",")[0]

    @property
    def new(self) -> Times:
        """The headline: with results in new memory."""
        return self.ways[NEW]


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for anything else."""
    result = json.loads(read_regular(path, f"bench: {path}"))
    if not isinstance(result, dict) or (result.get("format") != FORMAT and "training" not in result):
        raise ValueError(f"bench: {path} is no result file of this version")
    return result


def is_training(result: Mapping[str, Any]) -> bool:
    """Whether a result file is of training steps."""
    return "training" in result


def figures(result: dict[str, Any]) -> list[Figures]:
    """The figures of every plain cell, from median times."""
    return measured_as(result, PLAIN)


def measured_as(result: Mapping[str, Any], group: str) -> list[Figures]:
    """The figures of every cell of a group."""
    return [_figures(cell) for cell in result["cells"] if cell.get("group", PLAIN) == group]


def forms(result: dict[str, Any]) -> dict[str, list[Figures]]:
    """The figures of the forms of softmax by group; plans and losses have others."""
    of_group = {group: [cell for cell in result["cells"] if cell.get("group") == group] for group in GROUPS}
    return {
        group: list(map(_figures, cells)) for group, cells in of_group.items() if cells and group not in (PLANS, LOSSES)
    }


def times_of_fastest(cells: Sequence[Figures]) -> list[float]:
    """The time of each cell over that of the fastest of the same operator, shape and dtypes."""
    fastest: dict[tuple[str, str, str], float] = {}
    for cell in cells:
        key = cell.operator, cell.shape, cell.dtype
        fastest[key] = min(cell.new.seconds, fastest.get(key, cell.new.seconds))
    return [cell.new.seconds / fastest[cell.operator, cell.shape, cell.dtype] for cell in cells]


def medians(measured: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by name, of what was measured in one way."""
    return {name: taken["median"] for name, taken in measured["times"].items()}


def _figures(cell: dict[str, Any]) -> Figures:
    return Figures(
        cell["operator"],
        cell["workload"],
        cell["dtype"],
        cell.get("memory", DEFAULT),
        cell["headline"],
        cell["error_ulp"],
        {way: _times(cell, measured) for way, measured in cell["ways"].items()},
    )


def _times(cell: dict[str, Any], measured: dict[str, Any]) -> Times:
    peers = medians(measured)
    ours, copy = peers.pop(OURS), cell["copy"]["median"]
    speed = cell["bytes"] / ours
    peer = min(peers, key=lambda name: peers[name], default=None)
    return Times(
        ours,
        speed / 1e9,
        speed / (cell["copied_bytes"] / copy),
        peer,
        peers[peer] if peer else None,
        peers[peer] / ours if peer else None,
        measured["times"][OURS].get("host"),
    )


def geometric_mean(cells: Sequence[Figures], way: str = NEW) -> float | None:
    """Of the ratios to the best peer; None if there are none."""
    logs = [math.log(ratio) for cell in cells if way in cell.ways and (ratio := cell.ways[way].ratio)]
    return math.exp(sum(logs) / len(logs)) if logs else None


def losses(cells: Sequence[Figures], way: str = NEW) -> list[Figures]:
    """The cells where a peer is faster, the worst first."""
    slower = [cell for cell in cells if way in cell.ways and cell.ways[way].is_slower]
    return sorted(slower, key=lambda cell: cell.ways[way].ratio or 0)
