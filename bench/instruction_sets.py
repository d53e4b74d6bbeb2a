"""The instruction set that is measured: what the processor has, or a lower one.

A lower one needs a new process, as libraries look at the processor when they are loaded: our kernels are compiled
for it, into the folder of the kernel cache that is for it alone; torch, what torch compiles, oneDNN, MKL, NumPy and XLA
are told to use no more. onnxruntime and SciPy cannot be told.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.cells import check
from opgrad.cpu.compiler.cache import directory
from opgrad.cpu.compiler.decorators import vector_bytes

TITLES = {"avx2": "AVX2", "avx512": "AVX-512"}  # those that can be asked for, the slower first
AVX2, AVX512 = TITLES
PROCESSOR = "OPGRAD_BENCH_PROCESSOR"  # the variable that tells a process which is held to a lower set what there is
HELD = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}
NUMPYS = ("AVX512", "X86_V4")  # how the names begin that NumPy has for AVX-512


def of(machine: Mapping[str, Any]) -> str:
    """That of a result file's machine; older files do not name it."""
    widest = {512: AVX512, 256: AVX2}.get(machine["vector_bits"], f"{machine['vector_bits']} bits")
    return str(machine.get("instruction_set", widest))


def title(machine: Mapping[str, Any]) -> str:
    """Its usual name."""
    return TITLES.get(of(machine), of(machine))


def titled(results: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Results by the names of their sets; one alone has none."""
    return {title(each["machine"]) if len(results) > 1 else "": each for each in results}


def describe(machine: Mapping[str, Any]) -> dict[str, Any]:
    """A machine with its instruction set, and what the processor has if that is more."""
    processor = os.environ.get(PROCESSOR)
    return {**machine, "instruction_set": of(machine), **({"processor_has": processor} if processor else {})}


def legend(machine: Mapping[str, Any]) -> str:
    """What is said below a table of who was held to a lower set than the processor has."""
    if "processor_has" not in machine:
        return ""
    has = TITLES.get(machine["processor_has"], machine["processor_has"])
    return f" Held to {title(machine)} on a processor with {has}, but for onnxruntime and SciPy, which use all it has."


def hold(name: str, program: str) -> None:
    """Begin the program anew, held to the set of this name, unless the process has no higher one; "": what there is.

    program: a module whose command line this process has. Raises ValueError for a set that is unknown or that the
    processor lacks.
    """
    own = {64: AVX512, 32: AVX2}.get(vector_bytes())
    if not name:
        return
    check("isa", [name], TITLES, "of")
    if own is None or (name == AVX512 and own == AVX2):
        raise ValueError(f"bench: isa is {name!r}, but this processor has no {TITLES[name]}")
    if name == own:
        return
    found: Iterable[str] = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    held = HELD | {PROCESSOR: AVX512, "NPY_DISABLE_CPU_FEATURES": " ".join(x for x in found if x.startswith(NUMPYS))}
    # torch.compile finds its code by the graph alone; code for one set corrupts memory beside torch's for another.
    held |= {"TORCHINDUCTOR_CACHE_DIR": f"{kept}-torch-avx2"} if (kept := directory()) else {}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", program, *sys.argv[1:]], os.environ | held)
