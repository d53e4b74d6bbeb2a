"""Keeps how many threads a call may use, and chooses whose they are: opgrad's own, or those of PyTorch's OpenMP.

After each operation of PyTorch the threads of its OpenMP runtime spin for some milliseconds, on the cores that workers
of our own would need. If they are told to do our parts, they begin at once: after an operation of PyTorch, softmax of
2048 x 32000 took 15.1 ms with them and 19.0 with workers, alone 15.5; relu of 16 million elements took 3.3 and 5.7
(Zen 5, 2 threads).
"""

import ctypes
import operator
import os
import sys
import warnings
from pathlib import Path
from typing import Final

from opgrad.base.limits import MOST_THREADS, default_threads
from opgrad.base.locks import in_child, settling
from opgrad.cpu.runtime.workers import ThreadPool, run

# The first runs a parallel region; it is called with a function, its argument, the number of threads, and flags. In the
# region the second returns the number of the calling thread, the third how many threads there are. GNU's and Intel's
# runtimes have the first, and LLVM's on Linux.
REGION = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
LIMIT = "_ZN2at15get_num_threadsEv"  # at::get_num_threads


def openmp_region() -> tuple[int, ...]:
    """Return the addresses of the functions REGION in the runtime that PyTorch uses; none if one of them is missing.

    They are looked up through PyTorch's library, since a process may hold several runtimes.
    """
    return _openmp_functions(*REGION)


def openmp_limit() -> int:
    """Return the address of PyTorch's function for how many threads it would use in the calling thread; 0 if missing.

    That function starts no thread, so a forked child may call it, too.
    """
    return next(iter(_openmp_functions(LIMIT)), 0)


def openmp_most() -> int:
    """How many threads PyTorch would use in the calling thread; 0 if it is not loaded or cannot be asked."""
    function = openmp_limit()
    return ctypes.CFUNCTYPE(ctypes.c_int)(function)() if function else 0


def _openmp_functions(*names: str) -> tuple[int, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(os, "RTLD_NOLOAD"):
        return ()
    try:
        library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError):
        return ()


__all__ = ["chosen_threads", "get_num_threads", "join_openmp", "run", "set_num_threads", "team"]


_pool: ThreadPool | None = None
UNSETTLED: Final = -1
_team = ctypes.c_int64(UNSETTLED)  # the team that calls are given; UNSETTLED until the pool is started
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_team))  # native code reads it until the process ends
_threads: int | None = None
_forked = False  # OpenMP's threads do not survive a fork, and GNU's runtime then waits for them forever


def get_num_threads() -> int:
    """How many threads a call may use, the caller's included.

    If PyTorch is loaded on Linux, no more than `torch.get_num_threads()`, in a forked process, too.
    """
    return min(chosen_threads(), openmp_most() or MOST_THREADS)


def chosen_threads() -> int:
    """The number that was set, or that of the system; calls use fewer where PyTorch has a limit."""
    global _threads
    if _threads is None:
        _threads = default_threads()
    return _threads


def set_num_threads(n: int) -> None:
    """Use at most `n` threads a call, the caller's included; results do not depend on it.

    Calls that have begun keep the number that they began with. If the system refuses to start so many threads, a
    RuntimeWarning says so, calls use as many as it allows, and `get_num_threads` returns that number. If PyTorch is
    loaded on Linux, its threads help, and calls use no more of them than `torch.get_num_threads()`; nor does
    `get_num_threads` return more.

    Raises TypeError unless `n` is an int, ValueError unless it is from 1 to four times the number of CPUs or 64,
    whichever is more.
    """
    global _threads
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"set_num_threads: n is {n!r}, expected an int")
    n = operator.index(n)
    if not 1 <= n <= MOST_THREADS:
        raise ValueError(f"set_num_threads: n is {n}, expected at least 1 and at most {MOST_THREADS}")
    with settling:
        _threads = n
        if _pool is None:
            _team.value = UNSETTLED
        else:
            _choose(_pool, n)


def team() -> int:
    """Return the address of the team that `run` is given; 0 if calls shall use one thread."""
    settled = _team.value
    return _start() if settled == UNSETTLED else settled


def threads_for() -> tuple[int, int]:
    """Return the arguments `run` and `context` of a native function whose work threads share."""
    found = team()
    return (run.address, found) if found else (0, 0)


def team_word() -> int:
    """Return the address of the word that holds the team for native code, or UNSETTLED."""
    return ctypes.addressof(_team)


def _start() -> int:
    """Start the pool if calls use more than one thread; return the team."""
    global _pool
    with settling:
        if _team.value == UNSETTLED:
            if chosen_threads() == 1:
                _team.value = 0
            else:
                _pool = _pool or _limited(ThreadPool())
                _choose(_pool, chosen_threads())
        return _team.value


def join_openmp() -> None:
    """Let the threads of PyTorch's OpenMP help later calls, if PyTorch is loaded. The caller holds the lock.

    If they cannot help, calls use no more workers than PyTorch would use.
    """
    global _pool
    if not _forked and not (_pool and _pool.openmp) and (functions := openmp_region()):
        _pool, _team.value = _limited(ThreadPool(functions)), UNSETTLED
    elif _pool and not _pool.limited:
        _limited(_pool)


def _limited(pool: ThreadPool) -> ThreadPool:
    pool.limit(openmp_limit())
    return pool


def _choose(pool: ThreadPool, threads: int) -> None:
    """Let calls use so many threads, or as many as the system allows."""
    global _threads
    refusal = pool.start(threads - 1)
    workers = min(threads - 1, pool.workers)
    _team.value, _threads = pool.team(workers), workers + 1
    if refusal:
        fewer = f"calls use {workers + 1} of {threads} threads"
        warnings.warn(
            f"opgrad: the system refused to start a thread ({refusal}): {fewer}", RuntimeWarning, stacklevel=3
        )


def _forget_after_fork() -> None:
    """A forked child has none of the threads that helped: it starts its own when it needs them."""
    global _pool, _forked
    _pool, _team.value, _forked = None, UNSETTLED, True


in_child(_forget_after_fork)
