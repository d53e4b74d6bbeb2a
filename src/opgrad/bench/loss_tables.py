"""The losses of a result as rows of a table."""

from collections.abc import Iterator, Mapping
from typing import Any

from opgrad.bench.cells import LOSSES
from opgrad.bench.loss_case import medians
from opgrad.bench.measure import OURS

COLUMNS = (
    "function", "shape", "dtype", "time", "best peer", "its time", "ratio", "memory", "its memory", "least of a peer",
)  # fmt: skip


def rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each cell: our time beside the fastest peer's, and what both take beyond arguments and gradients."""
    for cell in result["cells"]:
        if cell.get("group") != LOSSES:
            continue
        times, beyond = medians(cell), cell["beyond"]
        ours = times.pop(OURS)
        peer = min(times, key=lambda name: times[name], default=None)
        best = [peer, _milliseconds(times[peer]), f"{times[peer] / ours:.2f}"] if peer else ["none", "", ""]
        least = min((size for name, size in beyond.items() if name != OURS and size is not None), default=None)
        sizes = [beyond[OURS], beyond[peer] if peer else None, least]
        yield [
            cell["operator"], cell["workload"], cell["dtype"], _milliseconds(ours), *best, *map(_mebibytes, sizes)
        ]  # fmt: skip


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"
