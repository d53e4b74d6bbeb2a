"""The sweep: softmax and its kin on shapes of every kind that fill the same memory, into memory that is given.

Rows of every length; axes with something behind them, of many inner sizes; the first axis; shapes of networks.
`python -m bench --sweep` measures it instead of the table's cells; its result file is one of the same form.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.cells import SWEEP, Cell, Workload, check
from bench.figures import Figures, Result, figures
from bench.measure import GIVEN
from opgrad.contract import Shape
from opgrad.ops import operators

ELEMENTS = 1 << 24  # of an array: beyond the cache
OPERATORS = ("softmax", "softmax_grad", "log_softmax", "log_softmax_grad")
ROWS, INNER, AXES, SHAPES = GROUPS = ("rows", "inner", "axes", "shapes")
# Short rows densely, with what people reduce over (classes, heads, vocabularies); then powers of two, their
# neighbours, primes, and the lengths at which one layout of the kernels gives way to another.
LENGTHS = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 17, 20, 21, 24, 25, 31, 32, 33, 40, 48, 49, 50, 64, 65, 80, 97, 100, 127,
    128, 129, 150, 196, 197, 256, 257, 384, 512, 513, 777, 1000, 1001, 1024, 2048, 2049, 4096, 4099, 8192, 16384, 30522,
    32000, 32768, 50257, 65536, 65537, 131072, 151936, 262144, 1 << 20, 1 << 22,
)  # fmt: skip
QUICK_LENGTHS = (7, 49, 128, 1000, 32000)
# Behind the axis: a few elements, part of a cache line, planes of images; and the lengths of the axis beside each.
INNER_SIZES, INNER_LENGTHS = (2, 3, 7, 8, 16, 31, 49, 64, 196, 1024, 3136), (3, 10, 21, 100, 150, 1000, 4096)
FIRST_LENGTHS = (2, 10, 100, 1000, 4096, 32000)  # of the first axis
# Of classifiers' and segmenters' planes, with the classes along axis 1.
NETWORKS = ((8, 1000, 49, 81), (32, 150, 32, 32), (16, 1000, 7, 7), (16, 1000, 56, 56), (16, 21, 128, 128))
SECONDS, QUICK_SECONDS = 0.2, 0.05


def cells(ops: Sequence[str], dtypes: Sequence[str], quick: bool, groups: Sequence[str] = ()) -> list[Cell]:
    """The sweep of these operators, dtypes and groups; empty sequences mean the default, rows alone if quick.

    Raises ValueError for an operator that reduces no rows.
    """
    known = {name: op for name, op in operators().items() if op.kind == "rows"}
    check("operator", ops, known, "for the sweep one of")
    every: Mapping[str, tuple[int, Sequence[Shape]]] = {
        ROWS: (-1, [(_rest(n), n) for n in (QUICK_LENGTHS if quick else LENGTHS)]),
        INNER: (1, [(_rest(n * inner), n, inner) for inner in INNER_SIZES for n in INNER_LENGTHS]),
        AXES: (0, [(n, _rest(n)) for n in FIRST_LENGTHS]),
        SHAPES: (1, NETWORKS),
    }
    chosen = [every[group] for group in groups or ((ROWS,) if quick else GROUPS)]
    return [
        Cell(known[name], Workload(shape, {} if axis < 0 else {"axis": axis}, group=SWEEP), dtype)
        for axis, shapes in chosen
        for name in ops or OPERATORS
        for dtype in dtypes
        for shape in shapes
    ]


def _rest(size: int) -> int:
    """What an axis has beside others with so many elements."""
    return max(ELEMENTS // size, 1)


# --- what it says ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Time per element by the length of rows: ours, and the best peer's where there is one, in nanoseconds.

    along: of what lengths are: "rows", "axis 0", or "axis 1, inner 49".
    """

    operator: str
    dtype: str
    along: str
    times: Mapping[int, tuple[float, float | None]]

    @property
    def ratios(self) -> dict[int, float]:
        """The best peer's time over ours, by the lengths that have a peer."""
        return {n: best / ours for n, (ours, best) in self.times.items() if best is not None}

    @property
    def cliff(self) -> tuple[float, int]:
        """The largest step up from one length to the next, and that length."""
        steps = [(after / before, n) for (_, (before, _)), (n, (after, _)) in pairwise(self.times.items())]
        return max(steps, default=(1.0, 0))


def curves(result: Result) -> list[Curve]:
    """The curves of a result: operator by operator, dtype by dtype, rows before other axes."""
    found: dict[tuple[str, str, str], dict[int, tuple[float, float | None]]] = {}
    for cell in figures(result, SWEEP):
        if place := _place(cell):
            along, n = place
            times, each = cell.ways[GIVEN], 1e9 / math.prod(map(int, cell.shape.split("x")))
            best = None if times.peer_seconds is None else times.peer_seconds * each
            found.setdefault((cell.operator, cell.dtype, along), {})[n] = times.seconds * each, best
    return [Curve(*known, dict(sorted(times.items()))) for known, times in found.items()]


def is_sweep(result: Result) -> bool:
    """Whether a result file is of a sweep."""
    return any(cell.get("group") == SWEEP for cell in result["cells"])


def shapes(result: Result) -> list[Figures]:
    """The cells of a sweep that lie on no curve."""
    return [cell for cell in figures(result, SWEEP) if not _place(cell)]


def _place(cell: Figures) -> tuple[str, int] | None:
    """The curve that a cell lies on, and where; None for the shapes of networks."""
    sizes, axis = [*map(int, cell.shape.split("x"))], cell.workload.partition(", ")[2]
    if len(sizes) > 3:
        return None
    if len(sizes) == 3:
        return f"{axis}, inner {sizes[2]}", sizes[1]
    return (axis, sizes[0]) if axis else (ROWS, sizes[1])
