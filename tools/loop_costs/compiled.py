"""Prints the assembly of the headline kernels as JSON, for the processor that the arguments name.

    python tools/loop_costs/compiled.py ARCHITECTURE CPU FEATURES [OPERATOR …]

A process compiles for one instruction set, because the width of vectors is settled when opgrad is imported.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # for bench

from bench.cells import select
from opgrad.cli.examples.arguments import arguments
from opgrad.contract import DTYPES, Operator, Spec
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler import decorators, target
from opgrad.cpu.compiler.target import Processor
from opgrad.cpu.runtime import plan
from opgrad.cpu.runtime.plan import dtypes_of


def headline_steps(operators: list[str]) -> Iterator[tuple[str, Any]]:
    """The steps of the headline cells' programs, each with a label; a kernel that several cells have comes once.

    Each cell has a program past a cache of no bytes and one through a cache that holds all: the machine's own decides
    nothing.
    """
    seen = set()
    for cell, cache in product(select(operators, ["float32", "bfloat16"], [], False), (0, 1 << 62)):
        plan.last_level_cache = lambda cache=cache: cache
        if cell.workload.headline and cell.workload.group == "plain":
            for step in _steps(cell):
                key = step.kernel.function, step.interface, *dtypes_of(step)
                if key not in seen:
                    seen.add(key)
                    yield f"{cell.op.name} {cell.dtype} {cell.workload.label}: {step.kernel.__name__}", step


class Zeros:
    """Arguments of zeros, which take no memory as long as nobody touches them."""

    def integers(self, high: int, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, np.int64)

    def normal(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, DTYPES[dtype])

    factors = normal


def _forward(op: Operator, given: dict[str, Any]) -> list[Any]:
    """Zeros in place of the results of a forward operator."""
    return [np.zeros(spec.shape, spec.dtype) for spec in _prepared(op, given).results.values()]


def _prepared(op: Operator, given: dict[str, Any]) -> Any:
    specs = [Spec(given[name].shape, given[name].dtype) if name in given else None for name in op.arrays]
    return prepare(op, specs, {name: given[name] for name in op.attributes if name in given})


def _steps(cell: Any) -> Any:
    workload = cell.workload
    indices = (workload.indices,) if workload.indices else ()
    options = {"indices": indices, "source": lambda seed: Zeros(), "forward": _forward}
    made = arguments(cell.op, workload.shape, cell.dtype, **options, **workload.attributes)
    return cell.op.kernel("opgrad.cpu.programs")(_prepared(cell.op, made)).steps


def main(architecture: str, cpu: str, features: str, *operators: str) -> None:
    # before kernels are imported, whose blocks follow from the processor's registers
    target.named = lambda: Processor(architecture, cpu, features)
    texts = {
        label: decorators.assembly(step.kernel.function, dtypes_of(step), step.interface)
        for label, step in headline_steps(list(operators))
    }
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
