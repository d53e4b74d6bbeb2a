"""Install PyTorch's CPU build into the running environment.

On Linux, pip's usual index has only the CUDA build of PyTorch, which brings gigabytes of CUDA packages along. So
pip is asked first what it would install; unless that is a CPU build, uv installs one, as it knows where they are.
"""

import importlib.util
import json
import platform
import subprocess
import sys

TORCH = "torch==2.13.0"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def main() -> None:
    if importlib.util.find_spec("torch") is not None:
        return
    if is_cpu_build(offered()):
        subprocess.run([*PIP, "install", TORCH], check=True)
    else:
        subprocess.run([*PIP, "install", "uv"], check=True)
        uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet")
        subprocess.run([*uv, "--python", sys.executable, "--torch-backend", "cpu", TORCH], check=True)


def offered() -> str:
    """The version of PyTorch that pip would install."""
    report = (*PIP, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", TORCH)
    found = json.loads(subprocess.run(report, check=True, capture_output=True, text=True).stdout)
    return str(found["install"][0]["metadata"]["version"])


def is_cpu_build(version: str) -> bool:
    """Whether this version is a CPU build: it says so, or its platform has no other."""
    return version.endswith("+cpu") or platform.system() != "Linux"


if __name__ == "__main__":
    main()
