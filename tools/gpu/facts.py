"""What is here: device, driver, versions, compiler, memory."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import results

from opgrad.cli import machine

PACKAGES = (
    "torch", "triton", "numpy", "ml_dtypes", "numba", "llvmlite", "jax", "cupy-cuda13x", "liger-kernel", "onnxruntime",
    "pytest", "pytest-xdist", "hypothesis", "typer", "rich",
)  # fmt: skip


def main() -> None:
    found: dict[str, object] = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cores"] = os.cpu_count()
    found["compiler"] = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    found["Python.h"] = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    found["problem"] = machine.cuda_problem()
    if not found["problem"]:
        import torch

        free, total = torch.cuda.mem_get_info()
        found |= machine.cuda_device() | {"free": free, "total": total}
    if tool := shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,compute_mode"
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
        )
        found["nvidia-smi"] = done.stdout.strip()
    if importlib.util.find_spec("triton"):
        from opgrad.cuda import triton_private

        found["missing in Triton"] = triton_private.missing()
    results.append("facts", found)
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
