"""The pool: keeps the memory of released results for later ones, since new pages cost as much time as many a kernel.

A large block is a memory mapping of its own, in huge pages where the system has them. A small block comes from malloc.
Each block begins with one cache line that describes it; its data follow. Released blocks are kept in the slots of one
table, at most LIMIT bytes in all; the block that was released first is given back first. A result gets the smallest
kept block that holds it and is at most a quarter larger, or else a new block.

No thread ever waits for another. So a process may fork at any time, and any thread may release memory, with or without
the interpreter's lock. A thread that swaps BUSY into a slot owns the slot: it takes the block out or puts one in, and
then releases the slot by one store. A thread that loses the swap allocates or frees memory as if there were no pool.
"""

import ctypes
import mmap
import os
from functools import cache
from typing import Final

from opgrad.base import limits
from opgrad.base.locks import in_child, settling
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_address,
    copy_bytes,
    load_word,
    store_word,
)
from opgrad.cpu.runtime.threads.system import system

# Words of the table, then of each slot: its block, the bytes that the block has for data, and when it was released.
# USED: how many slots have ever had a block; only these are searched, since searching all of them took 0.1 µs.
LIMIT, HELD, CLOCK, C_MAP, C_UNMAP, C_ADVISE, FLAGS, C_MALLOC, C_CALLOC, C_FREE, USED, FIRST = range(12)
BLOCK, CAPACITY, STAMP, SLOT = 0, 1, 2, 3
SLOTS: Final = 64
EMPTY, BUSY = 0, 1  # the word of a slot without a block
# Words in front of a block's data: the bytes for data, the address of the memory, the length of the mapping or 0.
HOLDS, BASE, LENGTH, HEADER = 0, 1, 2, 64
PAGE: Final = mmap.PAGESIZE
HUGE: Final = 1 << 21  # bytes of a huge page; a larger block starts one
MAPPED_FROM = 1 << 20  # bytes of a block that is a mapping: a smaller one costs more to map than to use
SPARE = 4  # a kept block may be larger than requested by a quarter
MOST_BYTES: Final = 1 << 62  # of a block that can be asked for
REFUSED = -1  # the result of mmap if it fails
ACCESS = 3  # PROT_READ | PROT_WRITE
ADVICE: Final = getattr(mmap, "MADV_HUGEPAGE", 0)
# By default at most so many bytes are kept, and at most this part, an eighth, of the memory that the process may use.
MOST = 1 << 30
SHARE = 8
VARIABLE = "OPGRAD_POOL_BYTES"


@inline
def _slot(pool: int, number: int) -> int:
    return pool + 8 * (FIRST + SLOT * number)


@inline
def _described(start: int, holds: int, base: int, length: int) -> int:
    """Write the words that describe a block which begins at `start`; return the address of its data."""
    store_word(start, HOLDS, holds)
    store_word(start, BASE, base)
    store_word(start, LENGTH, length)
    return start + HEADER


@inline
def _map(pool: int, size: int) -> int:
    """The data of a new mapping; 0 if the system refuses."""
    whole = (size + HEADER + PAGE - 1) & -PAGE
    length = whole + HUGE if whole >= HUGE else whole
    base = call_address(load_word(pool, C_MAP), 0, length, ACCESS, load_word(pool, FLAGS), -1, 0)
    if base == REFUSED:
        return 0
    start = base
    if whole >= HUGE:
        start = (base + HUGE - 1) & -HUGE
        if ADVICE:
            call_address(load_word(pool, C_ADVISE), start, whole, ADVICE)
    return _described(start, whole - HEADER, base, length)


@inline
def _in_heap(base: int, capacity: int) -> int:
    """The data of a block in memory that malloc gave; 0 if it gave none."""
    return _described((base + HEADER - 1) & -HEADER, capacity, base, 0) if base else 0


@inline
def _new(pool: int, size: int) -> int:
    """The data of a new block; 0 if the system refuses."""
    if size >= MAPPED_FROM and load_word(pool, C_MAP):
        return _map(pool, size)
    capacity = (size + HEADER - 1) & -HEADER
    return _in_heap(call_address(load_word(pool, C_MALLOC), capacity + 2 * HEADER), capacity)


@inline
def _free(pool: int, block: int) -> None:
    """Give a block back to the system."""
    start = block - HEADER
    base, length = load_word(start, BASE), load_word(start, LENGTH)
    if length:
        call_address(load_word(pool, C_UNMAP), base, length)
    else:
        call_address(load_word(pool, C_FREE), base)


@inline
def _claim(slot: int) -> int:
    """The block that is kept in a slot, which is busy from now on; 0 if there is none, or another thread is faster."""
    block = atomic_load(slot)
    return block if block > BUSY and atomic_swap_if(slot, block, BUSY) else 0


@inline
def _take(pool: int, size: int) -> int:
    """The data of a kept block; 0 if none fits."""
    most, best, least = size + size // SPARE + PAGE, 0, 0
    for number in range(atomic_load(pool + 8 * USED)):
        slot = _slot(pool, number)
        capacity = atomic_load(slot + 8 * CAPACITY)
        better = best == 0 or capacity < least
        if atomic_load(slot) > BUSY and size <= capacity and capacity <= most and better:
            best, least = slot, capacity
    block = _claim(best) if best else 0
    if block == 0:
        return 0
    capacity = load_word(block - HEADER, HOLDS)  # another block may have come meanwhile
    if capacity < size or capacity > most:
        atomic_store(best, block)
        return 0
    atomic_add(pool + 8 * HELD, -capacity)
    atomic_store(best, EMPTY)
    return block


@inline
def _evict(pool: int) -> int:
    """Free the block that was released first. Returns whether there was one."""
    oldest, first = 0, 0
    for number in range(atomic_load(pool + 8 * USED)):
        slot = _slot(pool, number)
        stamp = atomic_load(slot + 8 * STAMP)
        if atomic_load(slot) > BUSY and (oldest == 0 or stamp < first):
            oldest, first = slot, stamp
    block = _claim(oldest) if oldest else 0
    if block == 0:
        return 0
    atomic_add(pool + 8 * HELD, -load_word(block - HEADER, HOLDS))
    atomic_store(oldest, EMPTY)
    _free(pool, block)
    return 1


@inline
def _put(pool: int, block: int) -> int:
    """Put a block into an empty slot. Returns whether there was one."""
    for number in range(SLOTS):
        slot = _slot(pool, number)
        if atomic_load(slot) == EMPTY and atomic_swap_if(slot, EMPTY, BUSY):
            atomic_store(slot + 8 * CAPACITY, load_word(block - HEADER, HOLDS))
            atomic_store(slot + 8 * STAMP, atomic_add(pool + 8 * CLOCK, 1))
            atomic_store(slot, block)
            used = atomic_load(pool + 8 * USED)
            while used <= number and not atomic_swap_if(pool + 8 * USED, used, number + 1):
                used = atomic_load(pool + 8 * USED)
            return 1
    return 0


@inline
def _keep(pool: int, block: int) -> None:
    """Keep a released block for the next result, in place of the oldest ones if need be, or give it back."""
    capacity, limit = load_word(block - HEADER, HOLDS), load_word(pool, LIMIT)
    if capacity > limit:
        _free(pool, block)
        return
    held = atomic_add(pool + 8 * HELD, capacity) + capacity
    evicted = 1
    while held > limit and evicted:
        evicted = _evict(pool)
        held = atomic_load(pool + 8 * HELD)
    kept = 0
    if held <= limit:
        kept = _put(pool, block)
        if not kept and _evict(pool):
            kept = _put(pool, block)
    if not kept:
        atomic_add(pool + 8 * HELD, -capacity)
        _free(pool, block)


# --- as NumPy calls them: PyDataMemAllocator --------------------------------------------------------------------------


@native(2)
def malloc(pool: int, size: int) -> int:
    """Memory for so many bytes; 0 if there is none."""
    block = _take(pool, size)
    return block if block else _new(pool, size)


@native(3)
def calloc(pool: int, count: int, size: int) -> int:
    """Memory for `count` items of `size` bytes, all zero; 0 if there is none."""
    if size and count > MOST_BYTES // size:
        return 0
    capacity = count * size
    return _in_heap(call_address(load_word(pool, C_CALLOC), 1, capacity + 2 * HEADER), capacity)


@native(3)
def realloc(pool: int, block: int, size: int) -> int:
    """The block, or another one with the same data, with room for `size` bytes.

    0 if there is none, and nothing changes.
    """
    if block == 0:
        return _new(pool, size)
    capacity = load_word(block - HEADER, HOLDS)
    if size <= capacity and capacity <= 2 * size + PAGE:
        return block
    moved = _new(pool, size)
    if moved:
        copy_bytes(moved, block, min(size, capacity))
        _keep(pool, block)
    return moved


@native(3)
def free(pool: int, block: int, size: int) -> int:
    """Release a block."""
    if block:
        _keep(pool, block)
    return 0


@native(1)
def drop(pool: int) -> int:
    """Free all kept blocks; a block that another thread releases at the same time may stay."""
    for _ in range(SLOTS):
        _evict(pool)
    return 0


# --- the table --------------------------------------------------------------------------------------------------------


@cache
def bound() -> int:
    """How many bytes of released memory are kept: OPGRAD_POOL_BYTES, else 1 GiB or an eighth of the memory."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return min(MOST, _memory() // SHARE)
    if not wanted.isdecimal():
        raise ValueError(f"{VARIABLE} is {wanted!r}, expected a number of bytes")
    return min(int(wanted), MOST_BYTES)


def _memory() -> int:
    """The bytes of memory that this process may use: the machine's, or the limit of its control groups if less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else MOST * SHARE
    return int(min(machine, limits.memory()))


_words: ctypes.Array[ctypes.c_int64] | None = None


def table() -> int:
    """The address of the table, which is made once."""
    global _words
    with settling:
        if _words is None:
            _words = _made()
    return ctypes.addressof(_words)


def _made() -> ctypes.Array[ctypes.c_int64]:
    """Make the table. It is never freed, since arrays may outlive the interpreter's objects.

    If the bound is 0, or if the system has no mappings, all blocks come from malloc.
    """
    words = (ctypes.c_int64 * (FIRST + SLOT * SLOTS + 1))()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(words))
    words[LIMIT] = bound()
    for word, name in ((C_MALLOC, "malloc"), (C_CALLOC, "calloc"), (C_FREE, "free")):
        words[word] = system().heap(name)
    mappings = system().mappings()
    if mappings and bound():
        words[C_MAP], words[C_UNMAP], words[C_ADVISE], words[FLAGS] = mappings
    return words


def held() -> int:
    """How many bytes of released memory are kept now."""
    return 0 if _words is None else _words[HELD]


def empty() -> None:
    """Give all memory that is kept back to the system."""
    if _words is not None:
        drop.call(table())


def _settle_after_fork() -> None:
    """In a forked child, empty the slots that the parent's threads owned at the fork, and count the kept bytes anew."""
    if _words is None:
        return
    held = 0
    for start in range(FIRST, FIRST + SLOT * SLOTS, SLOT):
        if _words[start + BLOCK] == BUSY:
            _words[start + BLOCK] = EMPTY
        held += _words[start + CAPACITY] if _words[start + BLOCK] else 0
    _words[HELD] = held


in_child(_settle_after_fork)
