"""CUDA's driver library, as far as launches need it that go past Triton. It is loaded at run time, by its name."""

import ctypes
import sys
from functools import cache
from typing import Any

NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
LAUNCH, COPY, SET = "cuLaunchKernelEx", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async"
# CUdevice_attribute, CUpointer_attribute and CUfunction_attribute, by their numbers in cuda.h.
MULTIPROCESSORS, MAJOR, MINOR, SHARED_MEMORY = 16, 75, 76, 97
DEVICE_ORDINAL = 9  # CUpointer_attribute
DYNAMIC_SHARED, NON_PORTABLE = 8, 14
STATIC_SHARED = 48 << 10  # bytes of shared memory of a launch, if more was not allowed before
PORTABLE = 8  # the most thread blocks of a cluster, if more were not allowed before


class DriverError(RuntimeError):
    """A function of the driver failed; the text is the driver's."""


@cache
def library() -> ctypes.CDLL:
    """The driver's library, initialised. Raises DriverError where there is none, or no device."""
    try:
        found = ctypes.CDLL(NAME)
    except OSError:
        raise DriverError(f"there is no {NAME}, CUDA's driver") from None
    if found.cuInit(0):
        raise DriverError(f"{NAME} finds no device")
    return found


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises DriverError."""
    if status := getattr(library(), name)(*arguments):
        raise DriverError(f"{name}: {error(status)}")


def error(status: int) -> str:
    """The driver's text for the status of a function."""
    text = ctypes.c_char_p()
    library().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return f"CUDA error {status}" + (f", {text.value.decode()}" if text.value else "")


def address(name: str) -> int:
    """The address of a function of the driver. Raises DriverError if it is too old to have it."""
    found = getattr(library(), name, None)
    if found is None:
        raise DriverError(f"{NAME} knows CUDA {version()} and lacks {name}, expected that of CUDA 11.8 or newer")
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def version() -> str:
    """The newest CUDA that the driver knows."""
    number = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def current() -> int:
    """The context of this thread. Raises DriverError if it has none."""
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        raise DriverError("this thread has no device")
    return context.value


def device() -> int:
    """The number of the current device."""
    found = ctypes.c_int()
    call("cuCtxGetDevice", ctypes.byref(found))
    return found.value


def device_of(address: int) -> int | None:
    """The number of the device in whose memory an address lies; None if it is no device's."""
    found = ctypes.c_int()
    status = library().cuPointerGetAttribute(
        ctypes.byref(found), ctypes.c_int(DEVICE_ORDINAL), ctypes.c_uint64(address)
    )
    return None if status else found.value


def attributes() -> dict[str, int]:
    """What decides about regimes, as `execute.Device` has it: of the current device."""
    number, value = ctypes.c_int(device()), ctypes.c_int()

    def of(attribute: int) -> int:
        call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), number)
        return value.value

    architecture = 10 * of(MAJOR) + of(MINOR)
    return {"multiprocessors": of(MULTIPROCESSORS), "shared_memory": of(SHARED_MEMORY), "architecture": architecture}


def function(code: bytes, name: str, shared: int, ctas: int) -> int:
    """A function of machine code, loaded for the current context, with as much shared memory as its launches ask for.

    It stays for the life of the process. Raises DriverError, as for another architecture's code.
    """
    module, found = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
    if shared > STATIC_SHARED:
        call("cuFuncSetAttribute", found, ctypes.c_int(DYNAMIC_SHARED), ctypes.c_int(shared))
    if ctas > PORTABLE:
        call("cuFuncSetAttribute", found, ctypes.c_int(NON_PORTABLE), ctypes.c_int(1))
    return found.value or 0
