"""All cells, one after the other, into one result that JSON can hold."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import opgrad
from opgrad import machine
from opgrad.bench import peers
from opgrad.bench.case import Case
from opgrad.bench.cells import Cell
from opgrad.bench.copying import MOST_COPIED, copier
from opgrad.bench.measure import interleaved

OURS, COPY = "opgrad", "copy"
MANY_PASSES = ("scipy", "numpy")
SLOW = 0.5  # seconds of one call beyond which these are left out


def run(
    cells: Sequence[Cell],
    peer_names: Sequence[str],
    seconds: float,
    options: dict[str, Any],
    progress: Callable[[int, Cell], None],
) -> dict[str, Any]:
    """Measure the cells and return what a result file holds.

    seconds: how long to measure each cell. options: kept in the result. progress: called before each
    cell with the number of those done.
    """
    began = time.perf_counter()
    measured = []
    for done, cell in enumerate(cells):
        progress(done, cell)
        measured.append(measure(cell, peer_names, seconds))
    return {
        "format": 1,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "threads": opgrad.get_num_threads(),
        "options": options,
        "cells": measured,
    }


def measure(cell: Cell, peer_names: Sequence[str], seconds: float) -> dict[str, Any]:
    """One cell of a result: times by name, bytes of traffic, the error of our results."""
    case = Case(cell)
    ours = case.call()
    ours()
    traffic = case.traffic()
    error = case.error()
    copy = copier(min(traffic, MOST_COPIED))
    rivals = {name: call for name, call in peers.calls(case, peer_names).items() if _usable(name, call)}
    return {
        "operator": cell.op.name,
        "workload": cell.workload.label,
        "dtype": cell.dtype,
        "headline": cell.workload.headline,
        "bytes": traffic,
        "copied_bytes": copy.bytes,
        "error_ulp": error if math.isfinite(error) else None,
        "times": interleaved({OURS: ours, COPY: copy, **rivals}, seconds),
    }


def _usable(name: str, call: Callable[[], object]) -> bool:
    """Whether a peer has this dtype and is not out of the race."""
    start = time.perf_counter()
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented" not in str(error):
            raise
        return False
    return name not in MANY_PASSES or time.perf_counter() - start < SLOW
