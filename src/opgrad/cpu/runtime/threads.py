"""Runs the parts of a call on several threads: on workers of our own, which never touch Python, or on OpenMP's threads.

opgrad brings no OpenMP. Two of its runtimes in one process stall each other, it hangs after a fork, and some systems
lack it. If PyTorch has brought one, its threads do the parts. A worker spins for some tens of
microseconds after its last job, and then sleeps. It costs about 1 µs to hand a job to spinning workers and to wait
until they have done it.

After each operation of PyTorch the threads of its OpenMP runtime spin for some milliseconds, on the cores that workers
of our own would need. If they are told to do our parts, they begin at once: after an operation of PyTorch, softmax of
2048 x 32000 took 15.1 ms with them and 19.0 with workers, alone 15.5; relu of 16 million elements took 3.3 and 5.7
(Zen 5, 2 threads).

A job goes as follows. Every atomic access is sequentially consistent.

The words in capitals are those of `Block`.

* A call is given a team. A team is two words that never change: the pool, and how many of its workers may help. It is
  chosen when the call starts; `set_num_threads` only changes which team later calls are given.
* One caller at a time owns the pool (LOCK). A second caller runs its parts itself. The owner writes the words of the
  job and where each share begins. Then it publishes the job by one store to the word JOB, which holds a new, odd
  generation, how many workers may join, and that nobody has joined. A worker needs nothing else in order to join.
* A worker joins by one compare-and-swap of the word that it has read. So it joins only while that job is open, and only
  if its own number is below the one in the word. Then it reads the words of this job and of no other, because the owner
  writes them anew only after the job was closed and all workers have left.
* The number of shares follows from the same word. So all threads divide the parts into the same shares, and the counter
  of a share gives each of its parts to one thread.
* When no part is left, the owner closes the job by an even generation. Then it waits until all workers have left. A
  worker that comes late fails to swap, because the generation has changed, and looks again. The owner sees what the
  workers wrote, since it has seen them leave.
* The owner says that it sleeps (ASLEEP) before it looks for workers for the last time, and a worker leaves before it
  looks whether the owner sleeps. So at least one of them sees the other, and a second mutex ensures that the worker
  does not wake the owner before it sleeps.
* Generations count modulo 2^32. A worker that slept through all of them between its reading and its swap joins the job
  that is open now, whose word is the same.
* A worker counts itself among the sleepers before it looks for a job for the last time, and the owner publishes a job
  before it looks for sleepers. So at least one of them sees the other. The mutex ensures that the owner does not wake a
  worker before it sleeps.
"""

import ctypes
import operator
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from opgrad.base.limits import MOST_THREADS, default_threads
from opgrad.base.locks import in_child, settling
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    CACHE_LINE,
    Structure,
    at,
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_address,
    load_word,
    spin_hint,
    store_word,
    structure,
)
from opgrad.cpu.runtime.system import system

MOST_SHARES = 64
MASK_WORDS = 16  # of a set of CPUs: 1024 CPUs
MASK = 8 * MASK_WORDS  # bytes
NO_CPU = -1
GENERATION, MAY_JOIN = 32, 16  # how far these are shifted in the word `Block.job`
FIELD = 0xFFFF
SPINS = 1500  # how often a worker looks for the next job before it sleeps: for about 50 µs


@structure
class Block(Structure):
    """A pool: where its words lie, and the system's functions. Only c_limit is ever changed once threads run."""

    lock: int  # 1 while some caller owns the pool
    # generation << 32 | workers that may join << 16 | workers inside; the generation is odd while the job is open
    job: int
    current: int  # the `Work` of the job
    next: int  # the next part of each thread's share, one on each cache line
    asleep: int  # 1 while the owner sleeps until its workers have left the job
    sleepers: int
    started: int
    finished: int  # how many of OpenMP's threads have found no part left
    cpu: int  # that of the last caller
    mutex: int
    condition: int
    left_mutex: int
    left_condition: int
    # The system's number of each worker's thread; of OpenMP's threads, by their numbers in the region, and negative
    # once they have no part left.
    threads: int
    callers: int  # the CPUs that the caller may use, but the one that it runs on
    now: int  # those that a worker has now
    masks: int  # for each worker the CPUs that it may use, and those of them that it was given
    teams: int  # a `Team` for each number of workers
    c_lock: int
    c_unlock: int
    c_wait: int
    c_wake: int
    c_set_affinity: int  # Linux
    c_get_affinity: int
    c_get_thread: int
    c_get_cpu: int
    # If OpenMP's threads do the parts: what runs a parallel region, what returns in it a thread's number and how many
    # threads there are, the system's function that lets other threads run first, and what each thread runs.
    c_region: int
    c_number: int
    c_size: int
    c_yield: int
    c_work: int
    c_limit: int  # if PyTorch is loaded: the function that returns how many threads PyTorch would use


@structure
class Work(Structure):
    """A task, the address of its arguments, and the number of its parts."""

    task: int
    arguments: int
    parts: int
    shares: int  # in a region of OpenMP alone


@structure
class Team(Structure):
    """How many workers of a pool may help a call."""

    pool: int
    workers: int


WORDS = "lock", "job", "asleep", "sleepers", "started", "finished", "cpu"
WAITING = "mutex", "condition", "left_mutex", "left_condition"
BYTES = {
    **dict.fromkeys(WORDS, 8),
    **dict.fromkeys(WAITING, 128),
    "current": ctypes.sizeof(Work),
    "next": CACHE_LINE * MOST_SHARES,
    "threads": 8 * MOST_SHARES,
    "callers": MASK,
    "now": MASK,
    "masks": 2 * MASK * MOST_SHARES,
    "teams": ctypes.sizeof(Team) * MOST_THREADS,
}


def new_block() -> Block:
    """The memory of a new pool, all zero. It is never freed: workers outlive the interpreter's objects."""
    lines = {name: -(-size // CACHE_LINE) for name, size in {"": ctypes.sizeof(Block), **BYTES}.items()}
    memory = ctypes.create_string_buffer(CACHE_LINE * (sum(lines.values()) + 1))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    start = -(-ctypes.addressof(memory) // CACHE_LINE) * CACHE_LINE
    block, following = at(Block, start), start + CACHE_LINE * lines[""]
    for name in BYTES:
        setattr(block, name, following)
        following += CACHE_LINE * lines[name]
    return block


@inline
def keep_workers_apart(pool: Block) -> None:
    """Keep the workers off the caller's CPU, unless it is the one of the call before.

    The scheduler may wake a helper on the caller's CPU though another is idle, as on virtual machines, and leaves it
    there for milliseconds, in which the caller waits: after a pause of 20 ms relu of a million elements took 7.8 ms
    and takes 0.3 (Zen 5, 2 threads). Threads that are not ours, such as OpenMP's, run where their owners let them.
    """
    if pool.c_get_cpu:
        cpu = call_address(pool.c_get_cpu) & 0xFFFF
        if cpu != load_word(pool.cpu, 0) and cpu < 64 * MASK_WORDS:
            store_word(pool.cpu, 0, cpu)
            if _read_mask(pool, 0, pool.callers):
                _take_out(pool.callers, cpu)
                for worker in range(min(atomic_load(pool.started), MOST_SHARES)):
                    _keep_apart(pool, atomic_load(pool.threads + 8 * worker), pool.masks + 2 * MASK * worker)


@inline
def _read_mask(pool: Block, thread: int, cpus: int) -> bool:
    """Write the CPUs of a thread, 0 for this one, at an address. Returns whether the system has told them."""
    return call_address(pool.c_get_affinity, thread, MASK, cpus) & 0xFFFFFFFF == 0


@inline
def _give_mask(pool: Block, thread: int, cpus: int) -> None:
    """Let a thread run on the CPUs at an address alone."""
    call_address(pool.c_set_affinity, thread, MASK, cpus)


@inline
def _take_out(cpus: int, cpu: int) -> None:
    """Take a CPU out of a set of them."""
    store_word(cpus, cpu // 64, load_word(cpus, cpu // 64) & ~(1 << (cpu % 64)))


@inline
def _keep_apart(pool: Block, thread: int, allowed: int) -> None:
    """Keep a worker off the caller's CPU, on others that both may use, if there are any.

    The worker may use the CPUs that it had when it started. If it has others now than it was given here, somebody has
    changed them, as `taskset` does, and the worker may use these from then on. If somebody changes the CPUs of all
    threads, and a worker's happen to be those that it was given, the change is respected all the same, because a worker
    is never given a CPU that the caller may not use.
    """
    if thread == 0 or not _read_mask(pool, thread, pool.now):  # 0: the worker has not written its number yet
        return
    given, changed, left = allowed + MASK, False, 0
    for word in range(MASK_WORDS):
        changed |= load_word(pool.now, word) != load_word(given, word)
    for word in range(MASK_WORDS):
        if changed:
            store_word(allowed, word, load_word(pool.now, word))
        left |= load_word(allowed, word) & load_word(pool.callers, word)
    if left:
        for word in range(MASK_WORDS):
            store_word(given, word, load_word(allowed, word) & load_word(pool.callers, word))
        _give_mask(pool, thread, given)


@inline
def lend_cpu(pool: Block) -> None:
    """Let the workers run on the caller's CPU, too, until the next call keeps them off it."""
    if pool.c_get_cpu and load_word(pool.cpu, 0) != NO_CPU:
        store_word(pool.cpu, 0, NO_CPU)
        for worker in range(min(atomic_load(pool.started), MOST_SHARES)):
            thread, allowed = atomic_load(pool.threads + 8 * worker), pool.masks + 2 * MASK * worker
            if thread:
                for word in range(MASK_WORDS):
                    store_word(allowed + MASK, word, load_word(allowed, word))
                _give_mask(pool, thread, allowed)


@inline
def move_off(pool: Block, thread: int) -> None:
    """Move a thread that waits for the caller's CPU to another one. Afterwards it may use the same CPUs as before."""
    cpu = call_address(pool.c_get_cpu) & 0xFFFF
    if thread and cpu < 64 * MASK_WORDS and _read_mask(pool, thread, pool.now):
        with_own, left = load_word(pool.now, cpu // 64), 0
        _take_out(pool.now, cpu)
        for word in range(MASK_WORDS):
            left |= load_word(pool.now, word)
        if left:
            _give_mask(pool, thread, pool.now)
            store_word(pool.now, cpu // 64, with_own)
            _give_mask(pool, thread, pool.now)


@inline
def move_late(pool: Block, size: int) -> None:
    """Move the threads of the region that still have parts off the caller's CPU."""
    for number in range(1, min(size, MOST_SHARES)):
        thread = atomic_load(pool.threads + 8 * number)
        if thread > 0:
            move_off(pool, thread)


@inline
def _open_job(pool: Block, me: int, seen: int) -> int:
    """Return the word JOB if worker `me` can join, and if its generation is not `seen`, the last one; else 0."""
    job = atomic_load(pool.job)
    generation = job >> GENERATION
    return job if generation & 1 and generation != seen and me < _may_join(job) else 0


@inline
def _may_join(job: int) -> int:
    return job >> MAY_JOIN & FIELD


@inline
def _shares(workers: int) -> int:
    """Return into how many shares the parts are divided: one for each thread."""
    return min(workers + 1, MOST_SHARES)


@inline
def _take_parts(pool: Block, me: int, shares: int) -> None:
    """Do the parts of share `me`, then those that are left of the other shares.

    So a thread does the same parts in call after call, whose memory may still be in its cache: three arrays of 4 MiB
    took 75 µs instead of 91.
    """
    current = at(Work, pool.current)
    task, arguments, parts = current.task, current.arguments, current.parts
    for step in range(shares):
        share = (me + step) % shares
        end, taken = parts * (share + 1) // shares, pool.next + CACHE_LINE * share
        part = atomic_add(taken, 1)
        while part < end:
            call_address(task, arguments, part)
            part = atomic_add(taken, 1)


@inline
def _await_job(pool: Block, me: int, seen: int) -> int:
    """Spin, then sleep, until there is a job to join."""
    for _ in range(SPINS):
        job = _open_job(pool, me, seen)
        if job:
            return job
        spin_hint()
    mutex, condition = pool.mutex, pool.condition
    call_address(pool.c_lock, mutex)
    atomic_add(pool.sleepers, 1)
    job = _open_job(pool, me, seen)
    while job == 0:
        call_address(pool.c_wait, condition, mutex, 0xFFFFFFFF, 0)  # last two: Windows
        job = _open_job(pool, me, seen)
    atomic_add(pool.sleepers, -1)
    call_address(pool.c_unlock, mutex)
    return job


@inline
def _wake(pool: Block, mutex: int, condition: int) -> None:
    """Wake all threads that sleep with the mutex and the condition at these addresses."""
    call_address(pool.c_lock, mutex)
    call_address(pool.c_wake, condition)
    call_address(pool.c_unlock, mutex)


@inline
def _leave(pool: Block) -> None:
    """Leave the job, and wake its owner if it sleeps."""
    atomic_add(pool.job, -1)
    if atomic_load(pool.asleep):
        _wake(pool, pool.left_mutex, pool.left_condition)


@native(1)
def work(address: int) -> int:
    """Run in each worker thread, forever: wait for jobs and do their parts."""
    pool = at(Block, address)
    me = atomic_add(pool.started, 1)
    if pool.c_get_cpu and me < MOST_SHARES:
        atomic_store(pool.threads + 8 * me, call_address(pool.c_get_thread) & 0xFFFFFFFF)
        atomic_store(pool.cpu, NO_CPU)
    seen = 0
    while True:
        job = _await_job(pool, me, seen)
        seen = job >> GENERATION
        if atomic_swap_if(pool.job, job, job + 1):
            _take_parts(pool, me + 1, _shares(_may_join(job)))
            _leave(pool)
        else:
            seen = 0  # another worker moved the word first: look again


@inline
def _run_here(task: int, arguments: int, parts: int) -> None:
    for part in range(parts):
        call_address(task, arguments, part)


@inline
def _publish(pool: Block, workers: int) -> None:
    """Publish the job whose words are written, so that workers can join, and wake those that sleep."""
    generation = (atomic_load(pool.job) >> GENERATION) + 1
    atomic_store(pool.job, generation << GENERATION | workers << MAY_JOIN)
    if atomic_load(pool.sleepers):
        _wake(pool, pool.mutex, pool.condition)


@inline
def _write_job(pool: Block, shares: int, task: int, arguments: int, parts: int) -> None:
    """Write what a job does and where each share begins. Nobody reads these words before the job is published."""
    current = at(Work, pool.current)
    current.task, current.arguments, current.parts, current.shares = task, arguments, parts, shares
    for share in range(shares):
        atomic_store(pool.next + CACHE_LINE * share, parts * share // shares)


@inline
def _await_workers(pool: Block) -> None:
    """Wait until all workers have left the closed job: spin, then sleep.

    A worker may be in the middle of a part and wait for its CPU, which another process keeps busy for milliseconds. The
    CPU of a caller that sleeps is idle, so the scheduler moves the worker there: beside a busy process softmax of a row
    of 16 million elements takes 5.7 ms, and 7.6 if the caller spins (Zen 5, 2 CPUs).
    """
    for _ in range(SPINS):
        if atomic_load(pool.job) & FIELD == 0:
            return
        spin_hint()
    lend_cpu(pool)
    mutex, condition = pool.left_mutex, pool.left_condition
    call_address(pool.c_lock, mutex)
    atomic_store(pool.asleep, 1)
    while atomic_load(pool.job) & FIELD:
        call_address(pool.c_wait, condition, mutex, 0xFFFFFFFF, 0)  # last two: Windows
    atomic_store(pool.asleep, 0)
    call_address(pool.c_unlock, mutex)


@inline
def _run_with_workers(pool: Block, workers: int) -> None:
    """Publish the job whose words are written, do its parts, close it, and wait until all workers have left."""
    _publish(pool, workers)
    _take_parts(pool, 0, _shares(workers))
    atomic_add(pool.job, 1 << GENERATION)
    _await_workers(pool)


@inline
def _await_region(pool: Block, number: int, size: int) -> None:
    """Wait until the other threads of the region have no part left, too.

    At the region's end OpenMP's threads would spin until all are there. The scheduler may have woken one on the
    caller's CPU though another is idle, and leaves it there for milliseconds, so the caller moves it: after a pause of
    20 ms relu of a million elements took 7.8 ms, as torch's clamp_min does, and takes 0.3 (Zen 5, 2 threads). Where
    another process keeps its CPU busy, relu of 16 million elements took 5.6 ms and takes 2.9.
    """
    atomic_add(pool.finished, 1)
    spins = 0
    while atomic_load(pool.finished) < size:
        spin_hint()
        spins += 1
        if spins % SPINS == 0:
            if number == 0 and pool.c_get_cpu:
                move_late(pool, size)
            call_address(pool.c_yield)


@native(1)
def help_in_region(address: int) -> int:
    """Run in each thread of a parallel region of OpenMP: do the share of the thread's number first."""
    pool = at(Block, address)
    number = call_address(pool.c_number) & 0xFFFFFFFF
    thread = call_address(pool.c_get_thread) & 0xFFFFFFFF if pool.c_get_thread else 0
    place = pool.threads + 8 * min(number, MOST_SHARES - 1)
    atomic_store(place, thread)
    _take_parts(pool, number, at(Work, pool.current).shares)
    atomic_store(place, -thread)
    _await_region(pool, number, call_address(pool.c_size) & 0xFFFFFFFF)
    return 0


@inline
def _run_in_region(pool: Block, workers: int, shares: int) -> None:
    """Do the parts of the job whose words are written in a parallel region of OpenMP."""
    atomic_store(pool.finished, 0)
    for number in range(shares):
        place = pool.threads + 8 * number
        atomic_store(place, abs(atomic_load(place)))
    call_address(pool.c_region, pool.c_work, pool.address, workers + 1, 0)


@inline
def _helpers(pool: Block, workers: int) -> int:
    """Return how many threads may help the caller: if PyTorch is loaded, no more than it would use."""
    if pool.c_limit:
        return min(workers, (call_address(pool.c_limit) & 0xFFFFFFFF) - 1)
    return workers


@native(4)
def run(team: int, task: int, arguments: int, parts: int) -> int:
    """Call task(arguments, part) for every part. The team's workers help if the pool is free. team: 0 for none."""
    if team == 0 or parts < 2:
        _run_here(task, arguments, parts)
        return 0
    pool = at(Block, at(Team, team).pool)
    workers = _helpers(pool, at(Team, team).workers)
    if workers < 1 or not atomic_swap_if(pool.lock, 0, 1):
        _run_here(task, arguments, parts)
        return 0
    shares = _shares(workers)
    _write_job(pool, shares, task, arguments, parts)
    if pool.c_region:
        _run_in_region(pool, workers, shares)
    else:
        keep_workers_apart(pool)
        _run_with_workers(pool, workers)
    atomic_store(pool.lock, 0)
    return 0


class ThreadPool:
    """The memory block of the threads that help callers, our workers or OpenMP's threads, and how many there are."""

    def __init__(self, openmp: Sequence[int] = ()) -> None:
        """openmp: the addresses of the functions of its parallel regions."""
        self._block = block = new_block()
        self.address, self.workers = block.address, 0
        block.c_lock, block.c_unlock, block.c_wait, block.c_wake = system().waiting(block.mutex, block.condition)
        system().waiting(block.left_mutex, block.left_condition)
        ctypes.c_int64.from_address(block.cpu).value = NO_CPU
        if affinity := system().affinity():
            block.c_set_affinity, block.c_get_affinity, block.c_get_thread, block.c_get_cpu = affinity
        self.openmp, self.limited = bool(openmp), False
        if openmp:
            block.c_region, block.c_number, block.c_size = openmp
            block.c_yield, block.c_work = system().yielding(), help_in_region.address
        for workers in range(MOST_THREADS):
            team = at(Team, block.teams, workers)
            team.pool, team.workers = block.address, workers

    def limit(self, function: int) -> None:
        """Let no call use more threads than a function returns. function: its address; 0 if there is no such limit."""
        self._block.c_limit, self.limited = function, function != 0

    def team(self, workers: int) -> int:
        """The address of the team of so many workers, which must have been started."""
        return at(Team, self._block.teams, workers).address if workers else 0

    def start(self, count: int) -> str:
        """Start workers until there are `count`. Returns why the system refused to start one, or "" if it did not."""
        if self.openmp:  # starts its threads itself
            self.workers = max(self.workers, count)
        while self.workers < count:
            refusal = system().start_thread(work.address, self.address)
            if refusal:
                return refusal
            self.workers += 1
        return ""


# The first runs a parallel region; it is called with a function, its argument, the number of threads, and flags. In the
# region the second returns the number of the calling thread, the third how many threads there are. GNU's and Intel's
# runtimes have the first, and LLVM's on Linux.
REGION = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
LIMIT = "_ZN2at15get_num_threadsEv"  # at::get_num_threads


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
    """Return the addresses of functions of PyTorch and of the runtime that it uses; none if one of them is missing.

    They are looked up through PyTorch's library, since a process may hold several runtimes.
    """
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
    """Return the address of the team that `run` is given; 0 if calls shall use one thread.

    The pool is started first if calls use more.
    """
    global _pool
    if _team.value == UNSETTLED:
        with settling:
            if _team.value == UNSETTLED and chosen_threads() > 1:
                _pool = _pool or _limited(ThreadPool())
                _choose(_pool, chosen_threads())
            elif _team.value == UNSETTLED:
                _team.value = 0
    return _team.value


def threads_for() -> tuple[int, int]:
    """Return the arguments `run` and `context` of a native function whose work threads share."""
    found = team()
    return (run.address, found) if found else (0, 0)


def team_word() -> int:
    """Return the address of the word that holds the team for native code, or UNSETTLED."""
    return ctypes.addressof(_team)


def join_openmp() -> None:
    """Let the threads of PyTorch's OpenMP help later calls, if PyTorch is loaded. The caller holds the lock.

    If they cannot help, calls use no more workers than PyTorch would use.
    """
    global _pool
    if not _forked and not (_pool and _pool.openmp) and (functions := _openmp_functions(*REGION)):
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
