"""A stand-in for CUDA's driver library: Triton finds a device, loads kernels as PTX and launches them; they run here.

    from ptx import driver

    device = driver.start(90)     # before Triton is imported; PyTorch must not be
    device.lend(array, "x")       # memory that kernels may access
    ...                           # whatever launches Triton kernels
    device.launches, device.checked

What a launch does wrong raises: Triton reports the driver's error, whose text are the findings. A C compiler builds the
library, as Triton needs one to build its launcher.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache, partialmethod
from pathlib import Path

from ptx.driver.device import Device

NAME = "libcuda.so.1"
SOURCE = Path(__file__).with_name("libcuda.c")


@cache
def library():
    """The shared library, built once in a process. Raises RuntimeError without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the stand-in for the driver's library needs a C compiler: gcc or clang")
    folder = tempfile.mkdtemp(prefix="opgrad-driver-")
    path = Path(folder, NAME)
    command = [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


@cache
def start(architecture):
    """Make this process one that has a device of this architecture."""
    path = library()
    loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    device = Device(architecture)
    loaded.set_handler(device.handler)
    import triton

    triton.knobs.nvidia.libcuda_path = str(path.parent)
    triton.knobs.runtime.add_stages_inspection_hook = _as_ptx
    device.watch(triton)
    # Looking for devices, Triton would import PyTorch and ask that for them; before 3.8 its driver always does.
    triton.backends.driver.GPUDriver.__init__ = partialmethod(_ask_for_one_device, architecture)
    triton.runtime.driver.set_active(triton.backends.backends["nvidia"].driver())
    return device


def _ask_for_one_device(driver, architecture):
    """What Triton's driver asks PyTorch for, of a process whose only device this is."""
    driver.get_current_device = lambda: 0
    driver.set_current_device = lambda device: None
    driver.get_current_stream = lambda device: 0
    driver.get_device_capability = lambda device: divmod(architecture, 10)


def _as_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Let Triton hand PTX to the driver, which takes it as well as machine code: half the time of compiling."""
    if stages is not None:
        stages["cubin"] = lambda source, metadata: source.encode() + b"\0"
    return "as PTX", "as PTX"
