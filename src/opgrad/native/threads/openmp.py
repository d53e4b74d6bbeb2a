"""The OpenMP runtime that PyTorch brought into the process, whose threads can do a call's parts.

After each of its operations that runtime's threads spin for some milliseconds on the very cores that workers of our
own would need. Told to do our parts, they do them at once: softmax of 2048x32000 behind an operation of PyTorch's took
15.1 ms with them and 19.0 with workers (15.5 alone), relu of 16 million elements 3.3 and 5.7 (Zen 5, 2 threads).
"""

import ctypes
import os
import sys
from pathlib import Path

# A parallel region, called with a function, its argument, how many threads, and flags; my number in the region. GNU's,
# Intel's and, on Linux, LLVM's runtimes have the first.
REGION = ("GOMP_parallel", "omp_get_thread_num")
LIMIT = "_ZN2at15get_num_threadsEv"  # at::get_num_threads


def region() -> tuple[int, ...]:
    """The addresses of the functions REGION in the very runtime that PyTorch uses; none where one is missing.

    Looked up through PyTorch's library, since a process may hold several runtimes.
    """
    return _functions(*REGION)


def limit() -> int:
    """The address of PyTorch's function that tells how many threads it would use in the calling thread; 0 without one.

    It starts none, so a forked child may call it, too.
    """
    return next(iter(_functions(LIMIT)), 0)


def _functions(*names: str) -> tuple[int, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(os, "RTLD_NOLOAD"):
        return ()
    try:
        library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError):
        return ()
