"""Cells of the benchmark on tiny arrays."""

from dataclasses import replace

from bench.cells import GRAPH, GROUPS, PLAIN, STEPS, Cell, Workload, select

TINY = {
    "elements": (Workload((37,)),),
    "rows": (Workload((5, 30)), Workload((3, 6, 2, 2), {"axis": 1}), Workload((6, 5), {"axis": 0})),
    "classes": (Workload((20, 10)), Workload((2, 5, 3, 4))),
    "slices": (Workload((20, 8), indices=50), Workload((20, 8), indices=50, equal=True)),
}
FORMS = {
    cell.name: cell
    for cell in select(
        [], [], [], quick=False, groups=[group for group in GROUPS if group not in (PLAIN, GRAPH, *STEPS)]
    )
}


def tiny_cells(op, dtype="float32"):
    return [Cell(op, workload, dtype) for workload in TINY[op.kind]]


def tiny_form(cell):
    """The same form of few numbers, the last axis still the longest."""
    return replace(
        cell, workload=replace(cell.workload, shape=(6, 10) if len(cell.workload.shape) == 2 else (3, 2, 4, 5))
    )
