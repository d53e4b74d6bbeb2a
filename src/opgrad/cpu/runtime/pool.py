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
from opgrad.cpu.compiler.structures import Structure, at, behind, place, structure
from opgrad.cpu.compiler.words import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_address,
    copy_bytes,
)
from opgrad.cpu.runtime.threads.system import system


@structure
class Pool(Structure):
    """The table of the pool; its slots follow."""

    limit: int  # the most bytes that are kept, and how many are
    held: int
    clock: int
    c_map: int  # the addresses of C functions
    c_unmap: int
    c_advise: int
    flags: int  # of a new mapping
    c_malloc: int
    c_calloc: int
    c_free: int
    used: int  # how many slots have ever had a block; searching all of them took 0.1 µs


@structure
class Slot(Structure):
    block: int  # the address of its data, EMPTY or BUSY
    capacity: int  # the bytes that it has for data
    stamp: int  # when it was released


@structure
class Head(Structure):
    """What stands before a block's data, HEADER bytes in front of them."""

    holds: int  # the bytes for data
    base: int  # the address of the memory
    length: int  # of the mapping, or 0


SLOTS: Final = 64
EMPTY, BUSY = 0, 1  # the word of a slot without a block
HEADER = 64
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
def _head(block: int) -> Head:
    """What describes a block."""
    return at(Head, block - HEADER)


@inline
def _described(start: int, holds: int, base: int, length: int) -> int:
    """Write what describes a block that begins at `start`; return the address of its data."""
    head = at(Head, start)
    head.holds, head.base, head.length = holds, base, length
    return start + HEADER


@inline
def _map(pool: Pool, size: int) -> int:
    """The data of a new mapping; 0 if the system refuses."""
    whole = (size + HEADER + PAGE - 1) & -PAGE
    length = whole + HUGE if whole >= HUGE else whole
    base = call_address(pool.c_map, 0, length, ACCESS, pool.flags, -1, 0)
    if base == REFUSED:
        return 0
    start = base
    if whole >= HUGE:
        start = (base + HUGE - 1) & -HUGE
        if ADVICE:
            call_address(pool.c_advise, start, whole, ADVICE)
    return _described(start, whole - HEADER, base, length)


@inline
def _in_heap(base: int, capacity: int) -> int:
    """The data of a block in memory that malloc gave; 0 if it gave none."""
    return _described((base + HEADER - 1) & -HEADER, capacity, base, 0) if base else 0


@inline
def _new(pool: Pool, size: int) -> int:
    """The data of a new block; 0 if the system refuses."""
    if size >= MAPPED_FROM and pool.c_map:
        return _map(pool, size)
    capacity = (size + HEADER - 1) & -HEADER
    return _in_heap(call_address(pool.c_malloc, capacity + 2 * HEADER), capacity)


@inline
def _free(pool: Pool, block: int) -> None:
    """Give a block back to the system."""
    head = _head(block)
    if head.length:
        call_address(pool.c_unmap, head.base, head.length)
    else:
        call_address(pool.c_free, head.base)


# --- kept blocks ------------------------------------------------------------------------------------------------------


@inline
def _claim(slot: Slot) -> int:
    """The block of a slot, which is this thread's from now on; 0 if there is none, or another thread is faster."""
    word = place(slot, "block")
    block = atomic_load(word)
    return block if block > BUSY and atomic_swap_if(word, block, BUSY) else 0


@inline
def _take(pool: Pool, size: int) -> int:
    """The data of a kept block; 0 if none fits."""
    slots, most, best, least = behind(pool), size + size // SPARE + PAGE, -1, 0
    for number in range(atomic_load(place(pool, "used"))):
        slot = at(Slot, slots, number)
        capacity = atomic_load(place(slot, "capacity"))
        better = best < 0 or capacity < least
        if atomic_load(place(slot, "block")) > BUSY and size <= capacity and capacity <= most and better:
            best, least = number, capacity
    if best < 0:
        return 0
    slot = at(Slot, slots, best)
    block = _claim(slot)
    if block == 0:
        return 0
    capacity = _head(block).holds  # another block may have come meanwhile
    if capacity < size or capacity > most:
        atomic_store(place(slot, "block"), block)
        return 0
    atomic_add(place(pool, "held"), -capacity)
    atomic_store(place(slot, "block"), EMPTY)
    return block


@inline
def _evict(pool: Pool) -> int:
    """Free the block that was released first. Returns whether there was one."""
    slots, oldest, first = behind(pool), -1, 0
    for number in range(atomic_load(place(pool, "used"))):
        slot = at(Slot, slots, number)
        stamp = atomic_load(place(slot, "stamp"))
        if atomic_load(place(slot, "block")) > BUSY and (oldest < 0 or stamp < first):
            oldest, first = number, stamp
    if oldest < 0:
        return 0
    slot = at(Slot, slots, oldest)
    block = _claim(slot)
    if block == 0:
        return 0
    atomic_add(place(pool, "held"), -_head(block).holds)
    atomic_store(place(slot, "block"), EMPTY)
    _free(pool, block)
    return 1


@inline
def _put(pool: Pool, block: int) -> int:
    """Put a block into an empty slot. Returns whether there was one."""
    slots, used = behind(pool), place(pool, "used")
    for number in range(SLOTS):
        slot = at(Slot, slots, number)
        word = place(slot, "block")
        if atomic_load(word) == EMPTY and atomic_swap_if(word, EMPTY, BUSY):
            atomic_store(place(slot, "capacity"), _head(block).holds)
            atomic_store(place(slot, "stamp"), atomic_add(place(pool, "clock"), 1))
            atomic_store(word, block)
            before = atomic_load(used)
            while before <= number and not atomic_swap_if(used, before, number + 1):
                before = atomic_load(used)
            return 1
    return 0


@inline
def _keep(pool: Pool, block: int) -> None:
    """Keep a released block for the next result, in place of the oldest ones if need be, or give it back."""
    capacity, limit, word = _head(block).holds, pool.limit, place(pool, "held")
    if capacity > limit:
        _free(pool, block)
        return
    held = atomic_add(word, capacity) + capacity
    evicted = 1
    while held > limit and evicted:
        evicted = _evict(pool)
        held = atomic_load(word)
    kept = 0
    if held <= limit:
        kept = _put(pool, block)
        if not kept and _evict(pool):
            kept = _put(pool, block)
    if not kept:
        atomic_add(word, -capacity)
        _free(pool, block)


# --- as NumPy calls them: PyDataMemAllocator --------------------------------------------------------------------------


@native(2)
def malloc(address: int, size: int) -> int:
    """Memory for so many bytes, from the pool at this address; 0 if there is none."""
    pool = at(Pool, address)
    block = _take(pool, size)
    return block if block else _new(pool, size)


@native(3)
def calloc(address: int, count: int, size: int) -> int:
    """Memory for `count` items of `size` bytes, all zero; 0 if there is none."""
    if size and count > MOST_BYTES // size:
        return 0
    capacity = count * size
    return _in_heap(call_address(at(Pool, address).c_calloc, 1, capacity + 2 * HEADER), capacity)


@native(3)
def realloc(address: int, block: int, size: int) -> int:
    """The block, or another one with the same data, with room for `size` bytes.

    0 if there is none, and nothing changes.
    """
    pool = at(Pool, address)
    if block == 0:
        return _new(pool, size)
    capacity = _head(block).holds
    if size <= capacity and capacity <= 2 * size + PAGE:
        return block
    moved = _new(pool, size)
    if moved:
        copy_bytes(moved, block, min(size, capacity))
        _keep(pool, block)
    return moved


@native(3)
def free(address: int, block: int, size: int) -> int:
    """Release a block."""
    if block:
        _keep(at(Pool, address), block)
    return 0


@native(1)
def drop(address: int) -> int:
    """Free all kept blocks; a block that another thread releases at the same time may stay."""
    pool = at(Pool, address)
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


_pool: Pool | None = None


def table() -> int:
    """The address of the pool, which is made once."""
    global _pool
    with settling:
        if _pool is None:
            _pool = _made()
    return _pool.address


def _made() -> Pool:
    """Make the pool. It is never freed, since arrays may outlive the interpreter's objects.

    If the bound is 0, or if the system has no mappings, all blocks come from malloc.
    """
    memory = ctypes.create_string_buffer(ctypes.sizeof(Pool) + SLOTS * ctypes.sizeof(Slot))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    pool = at(Pool, ctypes.addressof(memory))
    pool.limit = bound()
    pool.c_malloc, pool.c_calloc, pool.c_free = map(system().heap, ("malloc", "calloc", "free"))
    mappings = system().mappings()
    if mappings and bound():
        pool.c_map, pool.c_unmap, pool.c_advise, pool.flags = mappings
    return pool


def held() -> int:
    """How many bytes of released memory are kept now."""
    return 0 if _pool is None else _pool.held


def empty() -> None:
    """Give all memory that is kept back to the system."""
    if _pool is not None:
        drop.call(table())


def _settle_after_fork() -> None:
    """In a forked child, empty the slots that the parent's threads owned at the fork, and count the kept bytes anew."""
    if _pool is None:
        return
    slots = [at(Slot, behind(_pool), number) for number in range(SLOTS)]
    for slot in slots:
        if slot.block == BUSY:
            slot.block = EMPTY
    _pool.held = sum(slot.capacity for slot in slots if slot.block)


in_child(_settle_after_fork)
