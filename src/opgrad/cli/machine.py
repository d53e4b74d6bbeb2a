"""Describes this machine: CPU, caches and vector instructions, the CUDA device, and the versions of packages."""

import ctypes
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FEATURES = ("avx512f", "avx512bf16", "avx2", "fma", "f16c", "neon")  # instruction sets that make kernels faster
PACKAGES = ("opgrad", "numpy", "ml_dtypes", "numba", "llvmlite", "onnxruntime", "torch", "triton", "scipy")


def describe() -> dict[str, Any]:
    """The machine as a result file keeps it."""
    from opgrad.cpu.compiler.target import host, vector_bytes
    from opgrad.cpu.runtime.plan import caches

    name, features = host()
    present, cpu = features.split(","), platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "llvm_cpu": name,
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vector_bits": 8 * vector_bytes(),
        "features": [feature for feature in FEATURES if "+" + feature in present],
        "caches": caches(),
    }


def versions(more: Sequence[str] = ()) -> dict[str, str | None]:
    """The versions of Python, of the packages and of some more; None for what is neither installed nor imported."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = getattr(sys.modules.get(package), "__version__", None)
    return found


# --- CUDA -----------------------------------------------------------------------------------------------------------


def cuda_problem() -> str:
    """The reason why CUDA kernels cannot run here, and the remedy, as the end of a sentence; "" if they can.

    Loads PyTorch only where there is a device.
    """
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: install it for CUDA, see https://pytorch.org/get-started"
    if importlib.util.find_spec("triton") is None:
        return 'Triton is not installed: pip install "opgrad[cuda]"'
    devices = _cuda_devices()
    if devices is None:
        return "there is no NVIDIA driver here: install it, so that nvidia-smi lists the device"
    if not devices:
        return "the NVIDIA driver shows no device: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: see https://pytorch.org/get-started for one with it"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} cannot use it: its CUDA {torch.version.cuda} may need a newer driver"
    return ""


def cuda_device() -> dict[str, Any]:
    """PyTorch's current CUDA device as a result file keeps it."""
    torch = importlib.import_module("torch")
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    tool, version_of_driver = shutil.which("nvidia-smi"), None
    if tool is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        version_of_driver = None if done.returncode else done.stdout.split()[0]
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "l2": found.L2_cache_size,
        "driver": version_of_driver,
        "cuda": torch.version.cuda,
    }


def _cuda_devices() -> int | None:
    """The number of devices that the driver shows; None if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    except OSError:
        return None
    count = ctypes.c_int()
    shown = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if shown else 0
