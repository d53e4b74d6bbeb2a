"""All cells, one after the other, into one result that JSON can hold."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import opgrad
from bench import instruction_sets, sweep
from bench.cells import DTYPES, Cell, check, select
from bench.command import BenchOptions
from bench.cpu_target import Target
from bench.figures import FORMAT, key, read, stamped
from bench.measure import measure_each
from bench.peers import COMPILE
from opgrad.base.files import replace_file
from opgrad.cli import machine
from opgrad.contract import FLOATS
from opgrad.ops import graph_operators, operators

TARGETS = ("cpu", "cuda")
Progress = Callable[[int, int, Cell], None]  # how many cells are done, of how many, and the next
Keep = Callable[[dict[str, Any]], object]  # takes the result of the cells so far


def measured(options: BenchOptions, progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure what the options ask for; the result, and what its file holds, with the cells that it had before.

    The file is written after each cell, so that whatever ends the process takes no more than a cell along.
    Raises what `prepared` and `previous` raise.
    """
    old = previous(options.json, options.update)
    keep = partial(store, options.json, old=old)
    result = prepared(options, old)(progress, keep)
    return result, keep(result)


def prepared(options: BenchOptions, old: dict[str, Any] | None = None) -> Callable[..., dict[str, Any]]:
    """What measures that which the options ask for: `run` with all its arguments but `progress` and `keep`.

    old: a result that is to be updated. Raises ValueError for unknown names and shapes, and if the old result is of
    another machine or of other versions; RuntimeError where there is no such device.
    """
    chosen = target(options.device)
    cells, peers = _asked(options, chosen)
    if old is not None:
        here = surroundings(chosen.describe(), chosen.packages)
        for what in ("machine", "device", "versions", "threads"):
            if old.get(what) != here.get(what):
                raise ValueError(f"bench: the file has another {what}, so its cells cannot be kept: omit --update")
        if options.sweep:  # it goes on where it ended
            known = {key(cell) for cell in old["cells"]}
            cells = [cell for cell in cells if key(cell.known) not in known]
    usual = (sweep.SECONDS, sweep.QUICK_SECONDS) if options.sweep else (chosen.seconds, chosen.quick_seconds)
    seconds = options.seconds_of(usual[options.quick])
    return partial(run, chosen, cells, peers, seconds, options.kept() | {"seconds": seconds})


def target(name: str) -> Target:
    """The target of this name. Raises ValueError for another one, RuntimeError where there is no such device."""
    check("device", [name], TARGETS)
    if name == "cpu":
        return Target()
    if problem := machine.cuda_problem():
        raise RuntimeError(f"bench: device is 'cuda', but {problem}")
    from bench.cuda import Cuda

    return Cuda.current()


def _asked(options: BenchOptions, chosen: Target) -> tuple[list[Cell], list[str]]:
    """The cells and the peers that are asked for."""
    ops, dtypes, shapes, groups = map(options.names, ("ops", "dtypes", "shapes", "groups"))
    peers = chosen.peers(options.names("peers"))
    if options.sweep:
        if options.device != "cpu" or shapes or not set(groups) <= set(sweep.GROUPS):
            own = ", ".join(sweep.GROUPS)
            raise ValueError(f"bench: the sweep is of the CPU, and has its own shapes and groups: {own}")
        check("dtype", dtypes, FLOATS)
        cells = sweep.cells(ops, dtypes or DTYPES, options.quick, groups)
        # By default those that compute at once: torch.compile would compile for each length.
        return cells, [name for name in peers if options.peers or name in ("torch", "onnxruntime")]
    cells = select(ops, dtypes, shapes, options.quick, chosen.workloads, groups)
    if not cells:
        raise ValueError("bench: no cell has these operators, dtypes, shapes and groups")
    if options.quick:  # the first cell of each operator, then the second of each
        of_each: dict[str, list[Cell]] = {}
        for cell in cells:
            of_each.setdefault(cell.op.name, []).append(cell)
        cells = [cell for turn in zip_longest(*of_each.values()) for cell in turn if cell is not None]
        peers = [name for name in peers if name != COMPILE or options.peers]
    return cells, peers


def run(
    chosen: Target,
    cells: Sequence[Cell],
    peers: Sequence[str],
    seconds: float,
    options: dict[str, Any],
    progress: Progress,
    keep: Keep = len,
) -> dict[str, Any]:
    """Measure the cells and return what a result file holds: of those measured so far, if the user interrupts.

    seconds: how long to measure each cell. options: kept in the result. progress: called before each cell. keep: called
    with the result after each.
    """
    began, around = time.perf_counter(), surroundings(chosen.describe(), chosen.packages)

    def measure(cell: Cell) -> dict[str, Any]:
        return {**chosen.measure(cell, names=peers, seconds=seconds), "date": now(), "options": options}

    def result(found: list[dict[str, Any]]) -> dict[str, Any]:
        names = list(dict.fromkeys(cell["operator"] for cell in found))
        # Operators took turns.
        ordered = sorted(found, key=lambda cell: names.index(cell["operator"])) if options.get("quick") else found
        return {"format": FORMAT, **dated(began), **around, "options": options, **_parts(ordered)}

    return result(measure_each(cells, measure, progress, lambda found: keep(result(found))))


def dated(began: float) -> dict[str, Any]:
    """The time of today, and the seconds since a measurement began."""
    return {"date": now(), "seconds": round(time.perf_counter() - began, 1)}


def now() -> str:
    """The time of today, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def surroundings(device: Mapping[str, Any] | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """All that a time depends on besides the cell. device: if it is not the CPU. packages: those of peers."""
    return {
        "machine": instruction_sets.describe(machine.describe()),
        **({"device": device} if device else {}),
        "versions": machine.versions(packages),
        "threads": opgrad.get_num_threads(),
    }


def _parts(measured: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The cells with times, and those without."""
    return {
        "cells": [cell for cell in measured if "left_out" not in cell],
        "left_out": [cell for cell in measured if "left_out" in cell],
    }


# --- result files ---------------------------------------------------------------------------------------------------


def previous(path: Path | None, update: bool) -> dict[str, Any] | None:
    """The result that is to be updated; None if none is. Raises ValueError for anything but a result file."""
    return read(path) if update and path and path.exists() else None


def store(path: Path | None, result: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
    """Write a result file, if one is wanted, and return what it holds: the result, and cells of the old one beside.

    Each of these keeps the date and the options with which it was measured.
    """
    if old is not None:
        parts = "cells", "left_out"
        kept = [stamped(old, cell) for part in parts for cell in old.get(part, ())]
        every = kept + [cell for part in parts for cell in result[part]]
        order = [*operators(), *graph_operators(), *dict.fromkeys(cell["operator"] for cell in every)]
        cells = {key(cell): cell for cell in every}.values()
        result = result | _parts(sorted(cells, key=lambda cell: order.index(cell["operator"])))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(result, indent=1) + "\n").encode())
    return result
