"""What is measured: the workloads of each kind of operator, in each dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opgrad.contract import FLOATS, Operator, Shape, operators

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Workload:
    """A shape with what belongs to it. `headline`: in the short table; `quick`: measured by `--quick`."""

    shape: Shape
    attributes: Mapping[str, Any] = field(default_factory=dict)
    indices: int = 0
    equal: bool = False
    headline: bool = False
    quick: bool = False

    @property
    def label(self) -> str:
        """The workload as tables write it."""
        parts = ["x".join(map(str, self.shape))]
        parts += [f"{name} {value}" for name, value in self.attributes.items()]
        parts += [f"{self.indices} indices"] if self.indices else []
        return ", ".join(parts + ["all equal"] * self.equal)


ELEMENTS = (
    Workload((1 << 24,), headline=True),
    Workload((1 << 20,), quick=True),
    Workload((1000,)),
)
ROWS = (
    Workload((32768, 128), headline=True, quick=True),
    Workload((4096, 1000), headline=True),
    Workload((4096, 1001)),
    Workload((2048, 32000), headline=True),
    Workload((64, 32000)),
    Workload((16, 1000, 56, 56), {"axis": 1}, headline=True),
    Workload((1000, 4096), {"axis": 0}),
    Workload((100000, 10)),
    Workload((100, 10)),
    Workload((1, 1000)),
)
CLASSES = (
    Workload((4096, 1000), headline=True, quick=True),
    Workload((2048, 32000), headline=True),
    Workload((100000, 10)),
    Workload((16, 21, 128, 128)),
    Workload((100, 10)),
)
SLICES = (
    Workload((50257, 768), indices=8192, headline=True),
    Workload((1000, 256), indices=65536, headline=True, quick=True),
    Workload((1000, 256), indices=65536, equal=True, headline=True),
)
Workloads = Mapping[str, Sequence[Workload]]  # by kind of operator
WORKLOADS: Workloads = {"elements": ELEMENTS, "rows": ROWS, "classes": CLASSES, "slices": SLICES}


@dataclass(frozen=True)
class Cell:
    """One operator on one workload in one dtype."""

    op: Operator
    workload: Workload
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.workload.label} {self.dtype}"


def select(
    ops: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[str],
    quick: bool,
    workloads: Workloads = WORKLOADS,
) -> list[Cell]:
    """The cells of these operators, dtypes and shapes; an empty sequence means the default.

    A shape such as "4096x1000" that no workload has is added to all operators that take it.

    Raises ValueError for a name that is not known.
    """
    declared = operators()
    _check("operator", ops, declared)
    _check("dtype", dtypes, FLOATS)
    cells = []
    for op in [declared[name] for name in ops or declared]:
        for workload in _workloads(op, workloads[op.kind], shapes, quick):
            cells += [Cell(op, workload, dtype) for dtype in dtypes or DTYPES]
    return cells


def _check(what: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"bench: {what} is {name!r}, expected one of {', '.join(known)}")


def _workloads(op: Operator, table: Sequence[Workload], shapes: Sequence[str], quick: bool) -> list[Workload]:
    if not shapes:
        return [workload for workload in table if workload.quick or not quick]
    found = []
    for text in shapes:
        shape = _shape(text)
        known = [workload for workload in table if workload.shape == shape]
        ranks = next(iter(op.inputs.values())).ranks
        extra = Workload(shape, indices=shape[0] if op.kind == "slices" else 0)
        found += known or ([extra] if len(shape) in ranks else [])
    return found


def _shape(text: str) -> Shape:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"bench: shape is {text!r}, expected sizes such as 4096x1000")
    return tuple(map(int, sizes))
