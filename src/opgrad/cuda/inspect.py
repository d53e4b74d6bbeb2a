"""What the compiler makes of a program, on any machine: the PTX, the registers, the widths of memory accesses.

No GPU is needed, only Triton: kernels are compiled for an architecture by name.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrad.cuda import triton_private
from opgrad.cuda.ahead import built
from opgrad.cuda.execute import Program

# ld.global.L1::evict_last.v4.b32: the number of words and the bits of a word.
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\b")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?,[^;]*?, (0x[0-9a-f]+|\d+)")
USAGE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


@dataclass(frozen=True)
class Report:
    """One kernel of a program as compiled.

    registers: of a thread. spilled: bytes of a thread that did not fit into registers. shared: bytes of a
    program in shared memory. loads and stores: how many instructions access global memory, by bytes of a thread.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    ptx: str


def compiled(program: Program, addresses_aligned: bool = True, arch: int = 90) -> list[Report]:
    """Compile the kernels of a program for an architecture (90: H100 and H200) and report on each.

    addresses_aligned: all arrays begin at multiples of 16 bytes, as new ones do; otherwise only scratch memory.

    Raises RuntimeError under TRITON_INTERPRET, where nothing is compiled. For example, the PTX of softmax_grad:

        import numpy as np
        from opgrad.contract import Spec
        from opgrad.ops import operators
        from opgrad.contract.signature import prepare
        from opgrad.cuda.inspect import compiled

        op = operators()["softmax_grad"]
        array = Spec((4096, 1024), np.dtype("float32"))
        problem = prepare(op, [array, array], {"axis": -1}, any_stride=True)
        for report in compiled(op.kernel("opgrad.cuda")(problem)):
            print(report.name, report.registers, report.loads, report.stores)
            print(report.ptx)
    """
    if triton_private.is_interpreting():
        raise RuntimeError("opgrad.cuda.inspect: TRITON_INTERPRET is set, so that kernels are interpreted; unset it")
    launches = (*program.checks, *program.launches)
    return [_report(built(launch, arch, addresses_aligned)) for launch in launches]


def _report(kernel: Any) -> Report:
    ptx, usage = kernel.asm["ptx"], _usage(kernel.asm["cubin"])
    loads, stores = accesses(ptx)
    spilled = usage["STACK"] + usage["LOCAL"]
    return Report(kernel.metadata.name, usage["REG"], spilled, kernel.metadata.shared, loads, stores, ptx)


def _usage(cubin: bytes) -> dict[str, int]:
    """The resources of a kernel, from the tool that comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton_private.disassembler(), "--dump-resource-usage", file]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    return {name: int(amount) for name, amount in USAGE.findall(said.stdout)}


def accesses(ptx: str) -> tuple[Counter[int], Counter[int]]:
    """How many instructions load from and store to global memory, by their bytes; copies to shared memory load."""
    loads: Counter[int] = Counter(int(size, 0) for size in COPY.findall(ptx))
    stores: Counter[int] = Counter()
    for kind, words, bits in ACCESS.findall(ptx):
        (loads if kind == "ld" else stores)[int(words or 1) * int(bits) // 8] += 1
    return loads, stores
