"""Keeps the threads that help off the caller's CPU, on Linux: on virtual machines the scheduler wakes them there.

Our own workers are kept off it (`keep_workers_apart`), and get it while the caller sleeps (`lend_cpu`). Threads of
OpenMP stay where their owners let them; one that is late is moved (`move_late`).
"""

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import atomic_load, call_address, load_word, store_word
from opgrad.cpu.runtime.threads.block import MASK, MASK_WORDS, MOST_SHARES, NO_CPU, Block


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
