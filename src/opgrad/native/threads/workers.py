"""Who does a call's parts: native workers of our own that never touch Python, or torch's OpenMP threads.

No OpenMP of our own: two of its runtimes in one process stall each other, it hangs after a fork, and some systems
lack it. Where torch has brought one, its threads do the parts (`openmp.py`). A worker spins for some tens of
microseconds after its last job, then sleeps. Handing a job to spinning workers and joining them costs about 1 µs.

How a job goes. Every atomic access is sequentially consistent.

* A call has a team: two words that never change, the pool and how many of its workers may help. It is chosen when
  the call starts; `set_num_threads` only chooses what calls to come are given.
* One caller at a time owns the pool (LOCK); a second one runs its parts itself. The owner writes the job's words and
  where each share begins, then publishes the job by one store of the word JOB: a new, odd generation, how many
  workers may join, and nobody inside. The word tells all that a worker must know to join.
* A worker joins by one compare-and-swap of the very word it has read, so only while that job is open, and only if
  its number is below the one in this word. It then reads the words of this job and no other: the owner writes them
  anew only when the job is closed and nobody is inside.
* The shares' number comes from the word, too: all who are inside cut the parts alike, and the counter of each share
  gives each part to one of them.
* The owner closes the job (an even generation) when no part is left, then waits until nobody is inside. Whoever comes
  late fails to swap, because the generation has changed, and looks again. What workers wrote is visible to the owner,
  who has seen them leave.
* Generations count modulo 2^32. A worker that slept through all of them between its reading and its swap joins the
  job that is open now, whose word is the same.
* A worker counts itself among the sleepers before it looks for a job for the last time; the owner publishes before it
  looks for sleepers. One of them sees the other, and the mutex keeps the waking from coming before the sleeping.
"""

import ctypes
from collections.abc import Sequence

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
from opgrad.limits import MOST_THREADS
from opgrad.native.threads.system import system

# Words of the pool's memory block; what several threads write stands on cache lines of its own.
LOCK = 0  # 1 while some caller owns the pool
TASK, ARGUMENTS, PARTS, SHARES = 8, 9, 10, 11  # the job; shares: in a region of OpenMP
JOB = 24  # generation << 32 | workers that may join << 16 | workers inside; the generation is odd while the job is open
SLEEPERS, STARTED = 32, 33
C_LOCK, C_UNLOCK, C_WAIT, C_WAKE = 40, 41, 42, 43  # addresses of the system's functions
MUTEX, CONDITION = 48, 64
NEXT, LINE = 80, 8  # for each thread, on a line of its own: the next part of its share
MOST_SHARES = 64
# Linux: the CPU of the last caller, and the system's functions.
CPU, C_GET_CPU, C_SET_AFFINITY, C_GET_AFFINITY, C_GET_THREAD = 34, 44, 45, 46, 47
# Where OpenMP's threads do the parts, functions: a parallel region, my number in it. Where torch is loaded: how many
# threads it would use.
C_REGION, C_NUMBER, C_LIMIT, WORK_IN_REGION = 36, 37, 38, 39
# The workers' threads as the system numbers them; sets of CPUs: the caller's but its own, those that a worker has now;
# for each worker those that it may use, and those among them that it was given.
THREADS = NEXT + LINE * MOST_SHARES
MASK_WORDS = 16  # 1024 CPUs
CALLERS = THREADS + MOST_SHARES
NOW, MASKS = CALLERS + MASK_WORDS, CALLERS + 2 * MASK_WORDS
TEAMS = MASKS + 2 * MASK_WORDS * MOST_SHARES  # for each number of workers a team: the pool's address, and that number
POOL, WORKERS, TEAM = 0, 1, 2
NO_CPU = -1

GENERATION, MAY_JOIN = 32, 16  # how far these are shifted in JOB
FIELD = 0xFFFF
SPINS = 1500  # about 50 µs of waiting for the next job before a worker sleeps


@inline
def _open_job(pool: int, me: int, seen: int) -> int:
    """The job word if worker `me` can join and its generation is not the one last seen, else 0."""
    job = atomic_load(pool + 8 * JOB)
    generation = job >> GENERATION
    return job if generation & 1 and generation != seen and me < _may_join(job) else 0


@inline
def _may_join(job: int) -> int:
    return job >> MAY_JOIN & FIELD


@inline
def _shares(workers: int) -> int:
    """Into how many shares the parts are cut: one for each thread."""
    return min(workers + 1, MOST_SHARES)


@inline
def _take_parts(pool: int, me: int, shares: int) -> None:
    """Do my share of the parts, then help the others.

    The same thread does the same parts in call after call, so they may still be in its cache: 75 µs against 91
    for three arrays of 4 MiB.
    """
    task, arguments, parts = load_word(pool, TASK), load_word(pool, ARGUMENTS), load_word(pool, PARTS)
    for step in range(shares):
        share = (me + step) % shares
        end, taken = parts * (share + 1) // shares, pool + 8 * (NEXT + LINE * share)
        part = atomic_add(taken, 1)
        while part < end:
            call_address(task, arguments, part)
            part = atomic_add(taken, 1)


@inline
def _await_job(pool: int, me: int, seen: int) -> int:
    """Spin, then sleep, until there is a job to join."""
    for _ in range(SPINS):
        job = _open_job(pool, me, seen)
        if job:
            return job
        spin_hint()
    mutex, condition = pool + 8 * MUTEX, pool + 8 * CONDITION
    call_address(load_word(pool, C_LOCK), mutex)
    atomic_add(pool + 8 * SLEEPERS, 1)
    job = _open_job(pool, me, seen)
    while job == 0:
        call_address(load_word(pool, C_WAIT), condition, mutex, 0xFFFFFFFF, 0)  # last two: Windows
        job = _open_job(pool, me, seen)
    atomic_add(pool + 8 * SLEEPERS, -1)
    call_address(load_word(pool, C_UNLOCK), mutex)
    return job


@inline
def _keep_workers_apart(pool: int) -> None:
    """Keep the workers off the caller's CPU, unless it is the one of the call before.

    The scheduler may wake a helper on the caller's CPU though another is idle, as on virtual machines, and leaves it
    there for milliseconds, in which the caller waits: after a pause of 20 ms relu of a million elements took 7.8 ms
    and takes 0.3 (Zen 5, 2 threads). Threads that are not ours, such as OpenMP's, run where their owners let them.
    """
    if load_word(pool, C_GET_CPU):
        cpu = call_address(load_word(pool, C_GET_CPU)) & 0xFFFF
        if cpu != load_word(pool, CPU) and cpu < 64 * MASK_WORDS:
            store_word(pool, CPU, cpu)
            if _read_mask(pool, 0, CALLERS):
                own = CALLERS + cpu // 64
                store_word(pool, own, load_word(pool, own) & ~(1 << (cpu % 64)))
                for worker in range(min(atomic_load(pool + 8 * STARTED), MOST_SHARES)):
                    _keep_apart(pool, atomic_load(pool + 8 * (THREADS + worker)), MASKS + 2 * MASK_WORDS * worker)


@inline
def _read_mask(pool: int, thread: int, place: int) -> bool:
    """Write the CPUs of a thread, 0 for this one, into the pool's words; whether the system has told them."""
    return call_address(load_word(pool, C_GET_AFFINITY), thread, 8 * MASK_WORDS, pool + 8 * place) & 0xFFFFFFFF == 0


@inline
def _keep_apart(pool: int, thread: int, allowed: int) -> None:
    """Keep a worker off the caller's CPU, on others that both may use, if there are any.

    It may use those that it had when it started. If it has others now than it was given, somebody has changed them, as
    `taskset` does, and it may use these from then on. Whoever changes them to just those that it was given, with those
    of all other threads, is respected because it never gets one that the caller may not use.
    """
    if thread == 0 or not _read_mask(pool, thread, NOW):  # 0: it has not written it yet
        return
    given, changed, left = allowed + MASK_WORDS, False, 0
    for word in range(MASK_WORDS):
        changed |= load_word(pool, NOW + word) != load_word(pool, given + word)
    for word in range(MASK_WORDS):
        if changed:
            store_word(pool, allowed + word, load_word(pool, NOW + word))
        left |= load_word(pool, allowed + word) & load_word(pool, CALLERS + word)
    if left:
        for word in range(MASK_WORDS):
            store_word(pool, given + word, load_word(pool, allowed + word) & load_word(pool, CALLERS + word))
        call_address(load_word(pool, C_SET_AFFINITY), thread, 8 * MASK_WORDS, pool + 8 * given)


@native(1)
def work(pool: int) -> int:
    """What a worker thread does, forever."""
    me = atomic_add(pool + 8 * STARTED, 1)
    if load_word(pool, C_GET_CPU) and me < MOST_SHARES:
        atomic_store(pool + 8 * (THREADS + me), call_address(load_word(pool, C_GET_THREAD)) & 0xFFFFFFFF)
        atomic_store(pool + 8 * CPU, NO_CPU)
    seen = 0
    while True:
        job = _await_job(pool, me, seen)
        seen = job >> GENERATION
        if atomic_swap_if(pool + 8 * JOB, job, job + 1):
            _take_parts(pool, me + 1, _shares(_may_join(job)))
            atomic_add(pool + 8 * JOB, -1)
        else:
            seen = 0  # another worker moved the word first: look again


@inline
def _run_here(task: int, arguments: int, parts: int) -> None:
    for part in range(parts):
        call_address(task, arguments, part)


@inline
def _publish(pool: int, workers: int) -> None:
    """Let workers join the job whose words are written, and wake those that sleep."""
    generation = (atomic_load(pool + 8 * JOB) >> GENERATION) + 1
    atomic_store(pool + 8 * JOB, generation << GENERATION | workers << MAY_JOIN)
    if atomic_load(pool + 8 * SLEEPERS):
        call_address(load_word(pool, C_LOCK), pool + 8 * MUTEX)
        call_address(load_word(pool, C_WAKE), pool + 8 * CONDITION)
        call_address(load_word(pool, C_UNLOCK), pool + 8 * MUTEX)


@inline
def _write_job(pool: int, shares: int, task: int, arguments: int, parts: int) -> None:
    """Write what a job does and where each share begins; nobody reads it yet."""
    store_word(pool, TASK, task)
    store_word(pool, ARGUMENTS, arguments)
    store_word(pool, PARTS, parts)
    for share in range(shares):
        atomic_store(pool + 8 * (NEXT + LINE * share), parts * share // shares)


@inline
def _run_with_workers(pool: int, workers: int) -> None:
    """Open the job that is written, do its parts, and close it."""
    _publish(pool, workers)
    _take_parts(pool, 0, _shares(workers))
    atomic_add(pool + 8 * JOB, 1 << GENERATION)
    while atomic_load(pool + 8 * JOB) & FIELD:
        spin_hint()


@native(1)
def work_in_region(pool: int) -> int:
    """What a thread of OpenMP does in a parallel region: the parts of the share of its number first."""
    number = call_address(load_word(pool, C_NUMBER)) & 0xFFFFFFFF
    _take_parts(pool, number, load_word(pool, SHARES))
    return 0


@inline
def _helpers(pool: int, workers: int) -> int:
    """How many threads may help the caller: no more than torch would use, where it is loaded."""
    if load_word(pool, C_LIMIT):
        return min(workers, (call_address(load_word(pool, C_LIMIT)) & 0xFFFFFFFF) - 1)
    return workers


@native(4)
def run(team: int, task: int, arguments: int, parts: int) -> int:
    """Call task(arguments, part) for every part, with the team's helpers if the pool is free; 0: without."""
    if team == 0 or parts < 2:
        _run_here(task, arguments, parts)
        return 0
    pool = load_word(team, POOL)
    workers = _helpers(pool, load_word(team, WORKERS))
    if workers < 1 or not atomic_swap_if(pool + 8 * LOCK, 0, 1):
        _run_here(task, arguments, parts)
        return 0
    shares = _shares(workers)
    _write_job(pool, shares, task, arguments, parts)
    if load_word(pool, C_REGION):
        store_word(pool, SHARES, shares)
        call_address(load_word(pool, C_REGION), load_word(pool, WORK_IN_REGION), pool, workers + 1, 0)
    else:
        _keep_workers_apart(pool)
        _run_with_workers(pool, workers)
    atomic_store(pool + 8 * LOCK, 0)
    return 0


class Pool:
    """The memory block of a call's helpers, and how many there are: own workers, or the threads of OpenMP."""

    def __init__(self, openmp: Sequence[int] = ()) -> None:
        """openmp: the addresses of the functions of its parallel regions."""
        count = TEAMS + TEAM * MOST_THREADS
        memory = ctypes.create_string_buffer(8 * count + 64)
        # Workers outlive the interpreter's objects: what they read is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.address = (ctypes.addressof(memory) + 63) & ~63
        self.workers = 0
        self._words = words = (ctypes.c_int64 * count).from_address(self.address)
        waiting = system().waiting(self.address + 8 * MUTEX, self.address + 8 * CONDITION)
        words[C_LOCK], words[C_UNLOCK], words[C_WAIT], words[C_WAKE] = waiting
        words[CPU] = NO_CPU
        self.openmp, self.limited = bool(openmp), False
        if openmp:
            words[C_REGION], words[C_NUMBER] = openmp
            words[WORK_IN_REGION] = work_in_region.address
        elif affinity := system().affinity():
            words[C_SET_AFFINITY], words[C_GET_AFFINITY], words[C_GET_THREAD], words[C_GET_CPU] = affinity
        for workers, place in enumerate(range(TEAMS, count, TEAM)):
            words[place + POOL], words[place + WORKERS] = self.address, workers

    def limit(self, function: int) -> None:
        """Have no more threads at work than this function says, at an address, when a call starts; 0: no function."""
        self._words[C_LIMIT], self.limited = function, function != 0

    def team(self, workers: int) -> int:
        """The address of the team of so many workers, which must have been started."""
        return self.address + 8 * (TEAMS + TEAM * workers) if workers else 0

    def start(self, count: int) -> str:
        """Start the workers that are missing for `count`; the reason if the system refused one of them, else ""."""
        if self.openmp:  # starts its threads itself
            self.workers = max(self.workers, count)
        while self.workers < count:
            refusal = system().start_thread(work.address, self.address)
            if refusal:
                return refusal
            self.workers += 1
        return ""
