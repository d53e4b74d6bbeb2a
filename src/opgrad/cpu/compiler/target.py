"""The CPU that code is compiled for, and how wide its vectors are."""

import functools
import os


def host() -> tuple[str, str]:
    """The CPU's name and features as LLVM spells them; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override."""
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else llvm.get_host_cpu_features().flatten()
    return name, features


@functools.cache
def vector_bytes() -> int:
    """The size of the host's vector registers."""
    features = host()[1].split(",")
    return 64 if "+avx512f" in features else 32 if "+avx2" in features else 16


def vector_lanes(dtype: str) -> int:
    """Elements in a kernel's vectors when it computes in float32 or float64: two registers full."""
    return 2 * vector_bytes() // (8 if dtype == "float64" else 4)
