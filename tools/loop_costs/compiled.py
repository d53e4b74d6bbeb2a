"""Prints the assembly of the headline kernels as JSON; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name the processor.

    python tools/loop_costs/compiled.py TRIPLE [OPERATOR …]

A process compiles for one instruction set, because the width of vectors is settled when opgrad is imported.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import llvmlite.binding as llvm
import numpy as np
from numba.core import config
from numba.core.registry import cpu_target

from opgrad.bench.cells import select
from opgrad.contract import DTYPES, Operator, Spec
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler import emit
from opgrad.cpu.compiler.lowering import modules
from opgrad.cpu.compiler.target import host
from opgrad.native.plan import dtypes_of
from opgrad.testing.arguments import arguments

INLINE_ASSEMBLY = re.compile(r"^.*\bcall void asm .*$", re.MULTILINE)
OPTIMISED = modules.optimised


def headline_steps(operators: list[str]) -> Iterator[tuple[str, Any]]:
    """The steps of the headline cells' programs, each with a label; a kernel that several cells have comes once."""
    seen = set()
    for cell in select(operators, ["float32", "bfloat16"], [], False):
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
    return cell.op.kernel()(_prepared(cell.op, made).problem).steps


def target_machine(triple: str) -> Any:
    """LLVM's target machine for the processor that the environment names."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    name, features = host()
    options = emit.code_model(triple.startswith("x86_64"))
    return llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=3, **options)


def optimised_for(triple: str) -> Any:
    """`modules.optimised` for a module that is to run elsewhere.

    Instructions that are written as assembly, fences and pauses, are left out where LLVM has no assembler for them.
    """

    def optimised(module: Any, exported: str, machine: Any) -> Any:
        found = llvm.parse_assembly(INLINE_ASSEMBLY.sub("", str(module)))
        found.triple, found.data_layout = triple, str(machine.target_data)
        return OPTIMISED(found, exported, machine)

    return optimised


def main(triple: str, *operators: str) -> None:
    machine = target_machine(triple)
    if triple.split("-")[0] != llvm.get_process_triple().split("-")[0]:
        config.CPU_NAME, config.CPU_FEATURES = "generic", ""  # Numba's own code stays for the processor that is here
        cpu_target.target_context.codegen()
        patch("opgrad.cpu.compiler.lowering.build.optimised", optimised_for(triple)).start()
        patch.object(llvm, "get_process_triple", lambda: triple).start()
    with patch.object(emit, "machine", lambda: machine):
        texts = {
            label: emit.assembly(step.kernel.function, dtypes_of(step), step.interface)
            for label, step in headline_steps(list(operators))
        }
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
