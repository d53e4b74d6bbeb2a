"""The sweep: rows of every length, as many as fill the same memory, in memory that is given; a curve for each operator.

`opgrad bench --sweep` measures it instead of the table's cells; its result file is one of the same form.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from opgrad.bench.cells import SWEEP, Cell, Workload
from opgrad.bench.figures import Figures, measured_as
from opgrad.bench.measure import GIVEN
from opgrad.bench.peers import COMPILE
from opgrad.contract import operators

ELEMENTS = 1 << 24  # of an array: beyond the cache
OPERATORS = ("softmax", "softmax_grad", "log_softmax", "log_softmax_grad")
# Short rows densely, with what people reduce over (classes, heads, vocabularies); then powers of two, their
# neighbours, primes, and the lengths at which one layout of the kernels gives way to another.
LENGTHS = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 17, 20, 21, 24, 25, 31, 32, 33, 40, 48, 49, 50, 64, 65, 80, 97, 100, 127,
    128, 129, 150, 196, 197, 256, 257, 384, 512, 513, 777, 1000, 1001, 1024, 2048, 2049, 4096, 4099, 8192, 16384, 30522,
    32000, 32768, 50257, 65536, 65537, 131072, 151936, 262144, 1 << 20, 1 << 22,
)  # fmt: skip
QUICK_LENGTHS = (7, 49, 128, 1000, 32000)
SECONDS, QUICK_SECONDS = 0.2, 0.05


def cells(ops: Sequence[str], dtypes: Sequence[str], memories: Sequence[str], quick: bool) -> list[Cell]:
    """The sweep of these operators, dtypes and memories. Raises ValueError for an operator that reduces no rows."""
    known = {name: op for name, op in operators().items() if op.kind == "rows"}
    if wrong := [name for name in ops if name not in known]:
        raise ValueError(f"bench: operator is {wrong[0]!r}, expected for the sweep one of {', '.join(known)}")
    return [
        Cell(known[name], Workload((max(ELEMENTS // n, 1), n), group=SWEEP), dtype, memory)
        for memory in memories
        for name in ops or OPERATORS
        for dtype in dtypes
        for n in (QUICK_LENGTHS if quick else LENGTHS)
    ]


def peers(names: Sequence[str], present: Sequence[str]) -> list[str]:
    """Those asked for, or those that compute at once: torch.compile would compile for each length."""
    return list(names or (name for name in present if name not in (COMPILE, "scipy", "numpy")))


# --- what it says ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Time per element over the length of rows: ours, and the best peer's where there is one, in nanoseconds."""

    operator: str
    dtype: str
    memory: str
    lengths: Sequence[int]
    ours: Sequence[float]
    best: Sequence[float | None]

    @property
    def ratios(self) -> list[float]:
        """The best peer's time over ours, at each length that has a peer."""
        return [best / ours for ours, best in zip(self.ours, self.best, strict=True) if best is not None]

    @property
    def mean(self) -> float | None:
        """The geometric mean of the ratios."""
        ratios = self.ratios
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    @property
    def worst(self) -> tuple[float, int] | None:
        """The smallest ratio, and the length where it is."""
        found = [(best / ours, n) for n, ours, best in zip(self.lengths, self.ours, self.best, strict=True) if best]
        return min(found, default=None)

    @property
    def cliff(self) -> tuple[float, int]:
        """The largest step up from one length to the next, and that length."""
        steps = [(after / before, n) for (before, after), n in zip(pairwise(self.ours), self.lengths[1:], strict=True)]
        return max(steps, default=(1.0, 0))


def curves(result: Mapping[str, Any]) -> list[Curve]:
    """The curves of a result: operator by operator, dtype by dtype, memory by memory."""
    found: dict[tuple[str, str, str], dict[int, Figures]] = {}
    for cell in measured_as(result, SWEEP):
        n = int(cell.shape.rpartition("x")[2])
        found.setdefault((cell.operator, cell.dtype, cell.memory), {})[n] = cell
    return [_curve(*key, dict(sorted(points.items()))) for key, points in found.items()]


def _curve(operator: str, dtype: str, memory: str, points: Mapping[int, Figures]) -> Curve:
    ours, best = [], []
    for cell in points.values():
        elements = math.prod(map(int, cell.shape.split("x")))
        times = cell.ways[GIVEN]
        ours.append(times.seconds / elements * 1e9)
        best.append(None if times.peer_seconds is None else times.peer_seconds / elements * 1e9)
    return Curve(operator, dtype, memory, list(points), ours, best)
