"""Registers opgrad's operators with onnxruntime without a compiled library.

On Linux (x86-64, arm64) `register_custom_ops_library` loads a shared object that Python has written. On other
systems the C pointer of the session options is passed to the C library in the onnxruntime package.
"""

import atexit
import ctypes
import functools
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from opgrad.onnxruntime import elf, private
from opgrad.onnxruntime.abi import address_of, callback, forever

NAME = "libopgrad_onnxruntime.so"
PATTERNS = ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")

_received: list[tuple[int, int]] = []


def options_and_base(options: Any) -> tuple[int, int]:
    """The C pointer of a SessionOptions object and an OrtApiBase that can work on it.

    RuntimeError on a system where there is no way to them.
    """
    if sys.platform == "linux" and platform.machine() in elf.MACHINES:
        return through_stub(options)
    return through_package(options)


def through_stub(options: Any) -> tuple[int, int]:
    """onnxruntime loads the shared object and calls its RegisterCustomOps, which jumps to `_receive`."""
    options.register_custom_ops_library(_stub())
    return _received.pop()


def _receive(options: int, base: int) -> int:
    _received.append((options, base))
    return 0


@functools.cache
def _stub() -> str:
    """The path of the shared object, loaded and pointing at `_receive`."""
    path = write(elf.shared_object(platform.machine(), NAME))
    receive = forever(callback(_receive, ctypes.c_size_t, 2))
    ctypes.c_size_t.in_dll(ctypes.CDLL(path), elf.SLOT).value = address_of(receive)
    return path


def write(image: bytes) -> str:
    """A path that the image can be loaded from, for as long as the process lives."""
    try:
        descriptor = os.memfd_create(NAME)
        path = f"/proc/self/fd/{descriptor}"
    except OSError:
        descriptor, path = tempfile.mkstemp(NAME)
        atexit.register(_remove, path, os.getpid())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(image)
    return path


def _remove(path: str, owner: int) -> None:
    """Remove a file at exit, but only in the process that made it: a forked child runs this function, too."""
    if os.getpid() == owner:
        Path(path).unlink(missing_ok=True)


def through_package(options: Any) -> tuple[int, int]:
    """Read the pointer from the memory of the Python object, and load the C library in the package's folder."""
    pointer = private.options_pointer(options)
    if pointer is None:
        raise _unknown("its SessionOptions is not the object that we know")
    get_base = _package_library().OrtGetApiBase
    get_base.restype = ctypes.c_size_t
    return pointer, get_base()


@functools.cache
def _package_library() -> ctypes.CDLL:
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "capi"
    found = [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]
    if not found:
        raise _unknown("it comes without its C library")
    return ctypes.CDLL(str(found[0]))


def _unknown(reason: str) -> RuntimeError:
    import onnxruntime

    return RuntimeError(
        f"opgrad.onnxruntime: cannot register operators with onnxruntime {onnxruntime.__version__} on"
        f" {sys.platform} {platform.machine()}: {reason}; expected Linux on x86_64 or aarch64, or the package"
        " that `pip install onnxruntime` gets"
    )
