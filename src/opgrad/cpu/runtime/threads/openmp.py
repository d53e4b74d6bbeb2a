"""Finds the OpenMP runtime that PyTorch has brought into the process, whose threads can do a call's parts.

After each operation of PyTorch the threads of that runtime spin for some milliseconds, on the cores that workers of our
own would need. If they are told to do our parts, they begin at once. After an operation of PyTorch, softmax of 2048 x
32000 took 15.1 ms with them and 19.0 with workers, alone 15.5; relu of 16 million elements took 3.3 and 5.7 (Zen 5, 2
threads).
"""

import ctypes
import os
import sys
from pathlib import Path

# The first runs a parallel region; it is called with a function, its argument, the number of threads, and flags. In the
# region the second returns the number of the calling thread, the third how many threads there are. GNU's and Intel's
# runtimes have the first, and LLVM's on Linux.
REGION = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
LIMIT = "_ZN2at15get_num_threadsEv"  # at::get_num_threads


def region() -> tuple[int, ...]:
    """Return the addresses of the functions REGION in the runtime that PyTorch uses; none if one of them is missing.

    They are looked up through PyTorch's library, since a process may hold several runtimes.
    """
    return _functions(*REGION)


def limit() -> int:
    """Return the address of PyTorch's function for how many threads it would use in the calling thread; 0 if missing.

    That function starts no thread, so a forked child may call it, too.
    """
    return next(iter(_functions(LIMIT)), 0)


def most() -> int:
    """How many threads PyTorch would use in the calling thread; 0 if it is not loaded or cannot be asked."""
    function = limit()
    return ctypes.CFUNCTYPE(ctypes.c_int)(function)() if function else 0


def _functions(*names: str) -> tuple[int, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(os, "RTLD_NOLOAD"):
        return ()
    try:
        library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError):
        return ()
