"""Keeps how many threads a call may use, and chooses whose they are: opgrad's own, or those of PyTorch's OpenMP."""

import ctypes
import operator
import warnings
from typing import Final

from opgrad.base.limits import MOST_THREADS, default_threads
from opgrad.base.locks import in_child, settling
from opgrad.cpu.runtime.threads import openmp
from opgrad.cpu.runtime.threads.workers import ThreadPool, run

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
    return min(chosen_threads(), openmp.most() or MOST_THREADS)


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
    if not _forked and not (_pool and _pool.openmp) and (functions := openmp.region()):
        _pool, _team.value = _limited(ThreadPool(functions)), UNSETTLED
    elif _pool and not _pool.limited:
        _limited(_pool)


def _limited(pool: ThreadPool) -> ThreadPool:
    pool.limit(openmp.limit())
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
