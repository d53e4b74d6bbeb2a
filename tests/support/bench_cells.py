"""Cells of the benchmark on tiny arrays."""

from bench.cells import Cell, Workload

TINY = {
    "elements": (Workload((37,)),),
    "rows": (Workload((5, 30)), Workload((3, 6, 2, 2), {"axis": 1}), Workload((6, 5), {"axis": 0})),
    "classes": (Workload((20, 10)), Workload((2, 5, 3, 4))),
    "slices": (Workload((20, 8), indices=50), Workload((20, 8), indices=50, equal=True)),
}


def tiny_cells(op, dtype="float32"):
    return [Cell(op, workload, dtype) for workload in TINY[op.kind]]
