"""Keeps the threads that help off the caller's CPU, on Linux: on virtual machines the scheduler wakes them there.

Our own workers are kept off it (`keep_workers_apart`), and get it while the caller sleeps (`lend_cpu`). Threads of
OpenMP stay where their owners let them; one that is late is moved (`move_late`).
"""

from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import atomic_load, call_address, load_word, store_word
from opgrad.cpu.runtime.threads.block import (
    C_GET_AFFINITY,
    C_GET_CPU,
    C_SET_AFFINITY,
    CALLERS,
    CPU,
    MASK_WORDS,
    MASKS,
    MOST_SHARES,
    NO_CPU,
    NOW,
    STARTED,
    THREADS,
)


@inline
def keep_workers_apart(pool: int) -> None:
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
                _take_out(pool, CALLERS, cpu)
                for worker in range(min(atomic_load(pool + 8 * STARTED), MOST_SHARES)):
                    _keep_apart(pool, atomic_load(pool + 8 * (THREADS + worker)), MASKS + 2 * MASK_WORDS * worker)


@inline
def _read_mask(pool: int, thread: int, place: int) -> bool:
    """Write the CPUs of a thread, 0 for this one, into the pool's words. Returns whether the system has told them."""
    return call_address(load_word(pool, C_GET_AFFINITY), thread, 8 * MASK_WORDS, pool + 8 * place) & 0xFFFFFFFF == 0


@inline
def _give_mask(pool: int, thread: int, place: int) -> None:
    """Let a thread run on the CPUs in the pool's words alone."""
    call_address(load_word(pool, C_SET_AFFINITY), thread, 8 * MASK_WORDS, pool + 8 * place)


@inline
def _take_out(pool: int, place: int, cpu: int) -> None:
    """Take a CPU out of a set of them."""
    store_word(pool, place + cpu // 64, load_word(pool, place + cpu // 64) & ~(1 << (cpu % 64)))


@inline
def _keep_apart(pool: int, thread: int, allowed: int) -> None:
    """Keep a worker off the caller's CPU, on others that both may use, if there are any.

    The worker may use the CPUs that it had when it started. If it has others now than it was given here, somebody has
    changed them, as `taskset` does, and the worker may use these from then on. If somebody changes the CPUs of all
    threads, and a worker's happen to be those that it was given, the change is respected all the same, because a worker
    is never given a CPU that the caller may not use.
    """
    if thread == 0 or not _read_mask(pool, thread, NOW):  # 0: the worker has not written its number yet
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
        _give_mask(pool, thread, given)


@inline
def lend_cpu(pool: int) -> None:
    """Let the workers run on the caller's CPU, too, until the next call keeps them off it."""
    if load_word(pool, C_GET_CPU) and load_word(pool, CPU) != NO_CPU:
        store_word(pool, CPU, NO_CPU)
        for worker in range(min(atomic_load(pool + 8 * STARTED), MOST_SHARES)):
            thread, allowed = atomic_load(pool + 8 * (THREADS + worker)), MASKS + 2 * MASK_WORDS * worker
            if thread:
                for word in range(MASK_WORDS):
                    store_word(pool, allowed + MASK_WORDS + word, load_word(pool, allowed + word))
                _give_mask(pool, thread, allowed)


@inline
def move_off(pool: int, thread: int) -> None:
    """Move a thread that waits for the caller's CPU to another one. Afterwards it may use the same CPUs as before."""
    cpu = call_address(load_word(pool, C_GET_CPU)) & 0xFFFF
    if thread and cpu < 64 * MASK_WORDS and _read_mask(pool, thread, NOW):
        with_own, left = load_word(pool, NOW + cpu // 64), 0
        _take_out(pool, NOW, cpu)
        for word in range(MASK_WORDS):
            left |= load_word(pool, NOW + word)
        if left:
            _give_mask(pool, thread, NOW)
            store_word(pool, NOW + cpu // 64, with_own)
            _give_mask(pool, thread, NOW)


@inline
def move_late(pool: int, size: int) -> None:
    """Move the threads of the region that still have parts off the caller's CPU."""
    for number in range(1, min(size, MOST_SHARES)):
        thread = atomic_load(pool + 8 * (THREADS + number))
        if thread > 0:
            move_off(pool, thread)
