"""What runs here: the CPU, its caches and vector instructions, and the versions of what opgrad works with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FEATURES = ("avx512f", "avx512bf16", "avx2", "fma", "f16c", "neon")  # what kernels gain from
PACKAGES = ("opgrad", "numpy", "ml_dtypes", "numba", "llvmlite", "onnxruntime", "torch", "scipy")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe() -> dict[str, Any]:
    """The machine as a result file keeps it."""
    from opgrad.cpu.native import host, vector_bytes

    name, features = host()
    present = features.split(",")
    return {
        "cpu": _cpu_name(),
        "llvm_cpu": name,
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vector_bits": 8 * vector_bytes(),
        "features": [feature for feature in FEATURES if "+" + feature in present],
        "caches": caches(),
    }


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def caches() -> dict[str, int]:
    """Bytes of the data caches that the first core sees; empty where the system does not say."""
    sizes = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K"):
            sizes[f"L{level}"] = int(size[:-1]) << 10
    return sizes


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
