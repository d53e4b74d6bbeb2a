"""opgrad's own threads: native workers that never touch Python.

No OpenMP: two of its runtimes in one process (torch brings one) stall each other, it hangs after a fork,
and some systems lack it. A worker spins for some tens of microseconds after its last job, then sleeps.
Handing a job to spinning workers and joining them costs about 1 µs.
"""

import ctypes
import operator
import os
import signal
import sys
import threading

from opgrad.cpu.compiler.memory import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_address,
    load_word,
    spin_hint,
    store_word,
)
from opgrad.cpu.compiler.native import inline, native

# Words of the pool's memory block; what several threads write stands on cache lines of its own.
LOCK = 0  # 1 while some caller owns the pool
TASK, ARGUMENTS, PARTS, LIMIT = 8, 9, 10, 11  # the job, and how many workers may join it
JOB = 24  # generation << 16 | workers inside; the generation is odd while the job may be joined
SLEEPERS, STARTED = 32, 33
C_LOCK, C_UNLOCK, C_WAIT, C_WAKE = 40, 41, 42, 43  # addresses of the system's functions
MUTEX, CONDITION = 48, 64
NEXT, LINE = 80, 8  # for each thread, on a line of its own: the next part of its share
MOST_SHARES = 64
# Linux: the CPU of the last caller, the system's functions, the CPUs allowed, those for workers, their threads.
CPU, C_GET_CPU, C_SET_AFFINITY, C_GET_THREAD = 34, 44, 45, 46
ALLOWED = NEXT + LINE * MOST_SHARES
MASK_WORDS = 16  # 1024 CPUs
FOR_WORKERS, THREADS = ALLOWED + MASK_WORDS, ALLOWED + 2 * MASK_WORDS
WORDS = THREADS + MOST_SHARES
NO_CPU = -1

INSIDE = 0xFFFF
GENERATION = 0x10000
SPINS = 1500  # about 50 µs of waiting for the next job before a worker sleeps


@inline
def _open_job(pool: int, seen: int) -> int:
    """The job word if it can be joined and is not the one last seen, else 0."""
    job = atomic_load(pool + 8 * JOB)
    generation = job >> 16
    return job if generation & 1 and generation != seen else 0


@inline
def _shares(pool: int) -> int:
    """Into how many shares the parts are cut: one for each thread."""
    return min(load_word(pool, LIMIT) + 1, MOST_SHARES)


@inline
def _take_parts(pool: int, me: int) -> None:
    """Do my share of the parts, then help the others.

    The same thread does the same parts in call after call, so they may still be in its cache: 75 µs against 91
    for three arrays of 4 MiB.
    """
    task, arguments, parts = load_word(pool, TASK), load_word(pool, ARGUMENTS), load_word(pool, PARTS)
    shares = _shares(pool)
    for step in range(shares):
        share = (me + step) % shares
        end, taken = parts * (share + 1) // shares, pool + 8 * (NEXT + LINE * share)
        part = atomic_add(taken, 1)
        while part < end:
            call_address(task, arguments, part)
            part = atomic_add(taken, 1)


@inline
def _await_job(pool: int, seen: int) -> int:
    """Spin, then sleep, until there is a job to join."""
    for _ in range(SPINS):
        job = _open_job(pool, seen)
        if job:
            return job
        spin_hint()
    mutex, condition = pool + 8 * MUTEX, pool + 8 * CONDITION
    call_address(load_word(pool, C_LOCK), mutex)
    atomic_add(pool + 8 * SLEEPERS, 1)
    job = _open_job(pool, seen)
    while job == 0:
        call_address(load_word(pool, C_WAIT), condition, mutex, 0xFFFFFFFF, 0)  # last two: Windows
        job = _open_job(pool, seen)
    atomic_add(pool + 8 * SLEEPERS, -1)
    call_address(load_word(pool, C_UNLOCK), mutex)
    return job


@inline
def _keep_apart(pool: int) -> None:
    """Keep the workers off the caller's CPU.

    The scheduler may wake a worker on it though another is idle, and leaves it there for milliseconds: calls after
    a pause of 10 ms then took 1.4 ms instead of 0.8.
    """
    if load_word(pool, C_GET_CPU):
        cpu = call_address(load_word(pool, C_GET_CPU)) & 0xFFFF
        if cpu != load_word(pool, CPU) and cpu < 64 * MASK_WORDS:
            store_word(pool, CPU, cpu)
            for word in range(MASK_WORDS):
                store_word(pool, FOR_WORKERS + word, load_word(pool, ALLOWED + word))
            own = FOR_WORKERS + cpu // 64
            store_word(pool, own, load_word(pool, own) & ~(1 << (cpu % 64)))
            for worker in range(min(load_word(pool, STARTED), MOST_SHARES)):
                mask = pool + 8 * FOR_WORKERS
                call_address(load_word(pool, C_SET_AFFINITY), load_word(pool, THREADS + worker), 8 * MASK_WORDS, mask)


@native(1)
def work(pool: int) -> int:
    """What a worker thread does, forever."""
    me = atomic_add(pool + 8 * STARTED, 1)
    if load_word(pool, C_GET_CPU) and me < MOST_SHARES:
        store_word(pool, THREADS + me, call_address(load_word(pool, C_GET_THREAD)) & 0xFFFFFFFF)
        atomic_store(pool + 8 * CPU, NO_CPU)
    seen = 0
    while True:
        job = _await_job(pool, seen)
        seen = job >> 16
        if me < load_word(pool, LIMIT):
            if atomic_swap_if(pool + 8 * JOB, job, job + 1):
                _take_parts(pool, me + 1)
                atomic_add(pool + 8 * JOB, -1)
            else:
                seen = 0  # another worker moved the word first: look again


@native(4)
def run(pool: int, task: int, arguments: int, parts: int) -> int:
    """Call task(arguments, part) for every part, with the pool's workers if they are free."""
    if pool == 0 or parts < 2 or not atomic_swap_if(pool + 8 * LOCK, 0, 1):
        for part in range(parts):
            call_address(task, arguments, part)
        return 0
    _keep_apart(pool)
    store_word(pool, TASK, task)
    store_word(pool, ARGUMENTS, arguments)
    store_word(pool, PARTS, parts)
    shares = _shares(pool)
    for share in range(shares):
        atomic_store(pool + 8 * (NEXT + LINE * share), parts * share // shares)
    atomic_add(pool + 8 * JOB, GENERATION)
    if atomic_load(pool + 8 * SLEEPERS):
        call_address(load_word(pool, C_LOCK), pool + 8 * MUTEX)
        call_address(load_word(pool, C_WAKE), pool + 8 * CONDITION)
        call_address(load_word(pool, C_UNLOCK), pool + 8 * MUTEX)
    _take_parts(pool, 0)
    atomic_add(pool + 8 * JOB, GENERATION)
    while atomic_load(pool + 8 * JOB) & INSIDE:
        spin_hint()
    atomic_store(pool + 8 * LOCK, 0)
    return 0


def default_threads() -> int:
    """OPGRAD_NUM_THREADS, else the number of CPUs that this process may use."""
    wanted = os.environ.get("OPGRAD_NUM_THREADS")
    if wanted is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"OPGRAD_NUM_THREADS is {wanted!r}, expected a whole number of at least 1")
    return int(wanted)


class _Pool:
    """The memory block of the workers, and how many there are."""

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(8 * WORDS + 64)
        # Workers outlive the interpreter's objects: what they read is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.address = (ctypes.addressof(memory) + 63) & ~63
        self.workers = 0
        words = (ctypes.c_int64 * WORDS).from_address(self.address)
        words[C_LOCK], words[C_UNLOCK], words[C_WAIT], words[C_WAKE] = _system_calls(words)
        words[CPU] = NO_CPU
        _allow_affinity(words)
        self.words = words

    def set_workers(self, count: int) -> None:
        """Let `count` workers join a job; start those that are missing."""
        while self.workers < count:
            _start_thread(work.address, self.address)
            self.workers += 1
        self.words[LIMIT] = count


def _system_calls(words: ctypes.Array[ctypes.c_int64]) -> list[int]:
    """Initialise the mutex and the condition; the addresses of lock, unlock, wait and wake."""
    mutex, condition = (ctypes.c_void_p(ctypes.addressof(words) + 8 * word) for word in (MUTEX, CONDITION))
    if sys.platform == "win32":
        system = ctypes.WinDLL("kernel32")
        system.InitializeSRWLock(mutex)
        system.InitializeConditionVariable(condition)
        names = [
            "AcquireSRWLockExclusive",
            "ReleaseSRWLockExclusive",
            "SleepConditionVariableSRW",
            "WakeAllConditionVariable",
        ]
    else:
        system = ctypes.CDLL(None)
        system.pthread_mutex_init(mutex, None)
        system.pthread_cond_init(condition, None)
        names = ["pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"]
    return [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in names]


def _allow_affinity(words: ctypes.Array[ctypes.c_int64]) -> None:
    """Let callers keep workers off their CPU, where the system can say which it is and there is another."""
    system = ctypes.CDLL(None) if sys.platform == "linux" else None
    cpus = os.sched_getaffinity(0) if system else set()
    if len(cpus) < 2 or max(cpus) >= 64 * MASK_WORDS or not hasattr(system, "gettid"):
        return
    for cpu in cpus:
        words[ALLOWED + cpu // 64] |= ctypes.c_int64(1 << cpu % 64).value
    for word, name in ((C_SET_AFFINITY, "sched_setaffinity"), (C_GET_THREAD, "gettid"), (C_GET_CPU, "sched_getcpu")):
        words[word] = ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0


def _start_thread(function: int, argument: int) -> None:
    """Start a thread that Python does not know, with every signal left to Python's own threads."""
    entry, handle = ctypes.c_void_p(function), ctypes.c_void_p()
    if sys.platform == "win32":
        if not ctypes.WinDLL("kernel32").CreateThread(None, 0, entry, ctypes.c_void_p(argument), 0, None):
            raise RuntimeError("opgrad: the system refused to start a thread")
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        error = ctypes.CDLL(None).pthread_create(ctypes.byref(handle), None, entry, ctypes.c_void_p(argument))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if error:
        raise RuntimeError(f"opgrad: the system refused to start a thread: {os.strerror(error)}")


_lock = threading.Lock()
_pool: _Pool | None = None
_threads: int | None = None


def get_num_threads() -> int:
    """How many threads a call may use, the caller's included."""
    global _threads
    if _threads is None:
        _threads = default_threads()
    return _threads


def set_num_threads(n: int) -> None:
    """Use at most `n` threads a call, the caller's included; results do not depend on it.

    Raises TypeError unless `n` is an int, ValueError if it is below 1.
    """
    global _threads
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"set_num_threads: n is {n!r}, expected an int")
    n = operator.index(n)
    if n < 1:
        raise ValueError(f"set_num_threads: n is {n}, expected at least 1")
    with _lock:
        _threads = n
        if _pool is not None:
            _pool.set_workers(n - 1)


def pool() -> int:
    """The address of the pool to hand to `run`; 0 if calls shall use one thread."""
    global _pool
    if _pool is None:
        threads = get_num_threads()
        if threads == 1:
            return 0
        with _lock:
            if _pool is None:
                started = _Pool()
                started.set_workers(threads - 1)
                _pool = started
    return _pool.address


def _forget_after_fork() -> None:
    """A forked child has none of the workers: it starts its own when it needs them."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
