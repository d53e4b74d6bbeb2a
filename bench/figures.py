"""What a result file says: speeds, shares and ratios of each cell, and of all; when and where they were measured.

Each cell has its date and options, as a file may hold cells of several runs. A cell of an older file says nothing; the
options of the file's last run are its own if they ask for it.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import instruction_sets
from bench.cells import PLAIN
from bench.measure import FEWEST, GIVEN, OURS, WAYS
from opgrad.base.files import read_regular

Result = Mapping[str, Any]  # what a result file holds
STEP_PARTS = ("training", "generated", "attention")  # of a result of training steps
FORMAT = 2  # of result files of cells; those of training steps have 1


@dataclass(frozen=True)
class Times:
    """One way of a cell. `peer` is the fastest peer, None where nobody else works so.

    `samples`: of ours or the peers', whichever has the fewest. `host_seconds`: after which a call on a device returns;
    None on the CPU.
    """

    seconds: float
    gigabytes: float
    share_of_copy: float
    peer: str | None
    peer_seconds: float | None
    samples: int
    host_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """The fastest peer's time over ours."""
        return self.peer_seconds / self.seconds if self.peer_seconds else None

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
    headline: bool
    error_ulp: float | None
    ways: Mapping[str, Times]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.operator, self.workload, self.dtype

    @property
    def shape(self) -> str:
        """The workload's shape alone."""
        return self.workload.partition(",")[0]

    @property
    def first(self) -> Times:
        """The headline: with results in memory that is given, where it was measured so."""
        return next(self.ways[way] for way in WAYS if way in self.ways)

    @property
    def samples(self) -> int:
        """The fewest of a time."""
        return min(times.samples for times in self.ways.values())


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for anything else."""
    result = json.loads(read_regular(path, f"bench: {path}"))
    if not isinstance(result, dict) or (result.get("format") != FORMAT and "training" not in result):
        raise ValueError(f"bench: {path} is no result file of this version")
    return result


def figures(result: Result, group: str = PLAIN) -> list[Figures]:
    """The figures of every cell of a group, from median times."""
    return [
        Figures(
            *key(cell),
            cell["headline"],
            cell["error_ulp"],
            {way: _times(cell, measured) for way, measured in cell["ways"].items()},
        )
        for cell in result["cells"]
        if cell.get("group", PLAIN) == group
    ]


def key(cell: Result) -> tuple[str, str, str]:
    """What names a cell."""
    return cell["operator"], cell["workload"], cell["dtype"]


def medians(measured: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by name, of what was measured in one way."""
    return {name: taken["median"] for name, taken in measured["times"].items()}


def rivals(measured: Mapping[str, Any]) -> tuple[float, str | None, float | None]:
    """Our seconds, the fastest peer and its seconds, of what was measured in one way."""
    peers = medians(measured)
    ours = peers.pop(OURS)
    peer = min(peers, key=lambda name: peers[name], default=None)
    return ours, peer, peers[peer] if peer else None


def _times(cell: Mapping[str, Any], measured: Mapping[str, Any]) -> Times:
    ours, peer, theirs = rivals(measured)
    speed, copying = cell["bytes"] / ours, cell["copied_bytes"] / cell["copy"]["median"]
    samples, host = fewest_samples([measured]), measured["times"][OURS].get("host")
    return Times(ours, speed / 1e9, speed / copying, peer, theirs, samples, host)


def geometric_mean(cells: Sequence[Figures], way: str = GIVEN) -> float | None:
    """Of the ratios to the best peer; None if there are none."""
    ratios = [ratio for cell in cells if way in cell.ways and (ratio := cell.ways[way].ratio)]
    return statistics.geometric_mean(ratios) if ratios else None


def losses(cells: Sequence[Figures], way: str = GIVEN) -> list[Figures]:
    """The cells where a peer is faster, the worst first."""
    slower = [cell for cell in cells if way in cell.ways and cell.ways[way].is_slower]
    return sorted(slower, key=lambda cell: cell.ways[way].ratio or 0)


def fewest_samples(ways: Iterable[Mapping[str, Any]]) -> int:
    """The fewest samples of a time, of what was measured in several ways."""
    return min(taken["samples"] for measured in ways for taken in measured["times"].values())


def few_samples(result: Result) -> str:
    """How many cells have times with fewer samples than the rule asks for, in a sentence; nothing if none has."""
    every = [fewest_samples(cell["ways"].values()) for cell in result.get("cells", ())]
    every += [fewest_samples([cell]) for part in STEP_PARTS for cell in result.get(part, ()) if "times" in cell]
    few = [count for count in every if count < FEWEST]
    of = f"{len(few)} of {len(every)} cells have fewer than {FEWEST} samples of a time"
    return f"{of}, down to {min(few)}: older ones." if few else ""


def stamped(result: Result, cell: Result) -> dict[str, Any]:
    """A cell with the date and the options with which it was measured.

    Options that the file does not keep are None; the date is then the last that is possible.
    """
    options, shape = result.get("options", {}), cell["workload"].partition(",")[0]
    group = "" if options.get("sweep") else cell.get("group", PLAIN)
    has = {"ops": cell["operator"], "dtypes": cell["dtype"], "shapes": shape, "groups": group}
    wanted = {name: list(filter(None, map(str.strip, options.get(name, "").split(",")))) for name in has}
    # Whether a run with these options measures the cell.
    asks = all(not words or not has[name] or has[name] in words for name, words in wanted.items())
    return {"date": result["date"], "options": options if asks else None, **cell}


def runs(result: Result) -> dict[tuple[str, str], int]:
    """How many cells each run has measured, by its day and its command; what may be older comes first."""
    found = Counter(_run(stamped(result, cell)) for cell in result.get("cells", ()))
    return dict(sorted(found.items(), key=lambda item: (item[0][0].rpartition(" ")[2], item[0][1])))


def described(result: Result) -> str:
    """The runs of a result in one sentence."""
    parts = [
        f"{cells} cells, {day}, {f'`{command}`' if command else 'options not kept'}"
        for (day, command), cells in runs(result).items()
    ]
    return f"Runs: {'; '.join(parts)}." if parts else ""


def _run(cell: Result) -> tuple[str, str]:
    """The day, and the command line that has the options; none where they are not kept."""
    day, options = cell["date"].partition(" ")[0], cell["options"]
    if options is None:
        return f"until {day}", ""
    given = {name: value for name, value in options.items() if value is not False and value not in ("", None)}
    words = (f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())
    return day, " ".join(["python -m bench", *words])


def machine_line(result: Result) -> str:
    """Machine, threads or device, versions and date in one sentence."""
    date = f"{result['date']}, the last of several runs" if len(runs(result)) > 1 else result["date"]
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if device := result.get("device"):
        memory, l2 = device["memory"] / (1 << 30), device["l2"] >> 20
        parts = f"{device['multiprocessors']} multiprocessors, L2 {l2} MiB, memory {memory:.0f} GiB"
        driver = f"driver {device['driver'] or 'unknown'}, CUDA {device['cuda']}"
        return f"{device['name']} ({parts}), {driver}; on {machine['cpu']}; {packages}; {date}."
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in machine["caches"].items())
    cpu = f"{machine['cpu']} ({machine['llvm_cpu']}, {machine['vector_bits']}-bit vectors)"
    legend = instruction_sets.legend(machine)
    return f"{cpu}, {result['threads']} threads; {caches}; {packages}; {date}.{legend}"
