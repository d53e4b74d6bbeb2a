"""The pool: keeps released memory of results and of calls' work, since new pages cost as much time as many a kernel.

A large block is a memory mapping of its own, in huge pages where the system has them. A small block comes from malloc.
Each block begins with one cache line that describes it; its data follow. Released blocks are kept in the slots of one
table, at most LIMIT bytes in all; the block that was released first is given back first. A request gets the smallest
kept block that holds it and is at most a quarter larger, or else a new block.

No thread ever waits for another. So a process may fork at any time, and any thread may release memory, with or without
the interpreter's lock. A thread that swaps BUSY into a slot owns the slot: it takes the block out or puts one in, and
then releases the slot by one store. A thread that loses the swap allocates or frees memory as if there were no pool.

NumPy lets a program allocate the data of arrays by a handler of its own (NEP 49), which the array keeps. The handler is
part of a context of `contextvars`: results are made in a context of ours, arrays made elsewhere are not affected.
"""

import ctypes
import math
import mmap
import os
from collections.abc import Callable
from contextvars import Context
from functools import cache, partial
from typing import Final

import numpy as np

from opgrad.base import limits
from opgrad.base.locks import in_child, settling
from opgrad.contract import Array, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    Structure,
    at,
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    behind,
    call_address,
    copy_bytes,
    place,
    structure,
)
from opgrad.cpu.runtime import abi
from opgrad.cpu.runtime.system import system


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


STACK_WORDS: Final = 1024  # most words that lie on the stack; taking memory from the pool costs 0.1 µs


@structure
class Source(Structure):
    """Where memory comes from: the address of the pool's table, and of its malloc and free."""

    pool: int
    take: int
    give: int


@inline
def take(source: int, size: int) -> int:
    """Memory of so many bytes that starts a cache line; 0 if the system refuses."""
    found = at(Source, source)
    return call_address(found.take, found.pool, size)


@inline
def give(source: int, memory: int, size: int) -> None:
    """Give memory back that was taken."""
    found = at(Source, source)
    call_address(found.give, found.pool, memory, size)


def source(size: int) -> int:
    """The address of the source from which native code takes so many bytes; 0 if they lie on the stack."""
    return _source().address if size > 8 * STACK_WORDS else 0


@cache
def _source() -> Source:
    """The source, which is never freed, since plans and threads may use it while the interpreter ends."""
    with settling:
        found = Source(table(), malloc.address, free.address)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
        return found


POOLED_FROM = 1 << 16  # bytes from which a result comes from the pool
NAME_BYTES, VERSION = 127, 1  # of a handler
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


# PyDataMem_Handler with its PyDataMemAllocator.
_Handler = abi.c_structure(
    name=ctypes.c_char * NAME_BYTES, version=ctypes.c_uint8,
    **dict.fromkeys(("context", "malloc", "calloc", "realloc", "free"), ctypes.c_void_p),
)  # fmt: skip


@cache
def _context() -> Context:
    """A context in which NumPy's arrays come from the pool. Its copies are used: one runs a single call at a time."""
    with settling:
        functions = (each.address for each in (malloc, calloc, realloc, free))
        handler = _Handler(b"opgrad", VERSION, table(), *functions)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))  # arrays outlive the interpreter's objects
        capsule = _new_capsule(ctypes.addressof(handler), b"mem_handler", None)
        context = Context()
        set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(abi.numpy_function(abi.SET_HANDLER))
        context.run(set_handler, capsule)
        return context


def maker(spec: Spec) -> Callable[[], Array]:
    """A function that makes arrays of this shape, dtype and these strides, which leave no gaps.

    A large one starts a cache line, so that its vectors can be written past the cache.
    """
    axes = tuple(range(len(spec.shape)))
    in_c_order = spec.strides == contiguous(spec.shape, axes, spec.dtype.itemsize)
    plain = partial(np.empty, spec.shape, spec.dtype) if in_c_order else partial(np.empty_like, _placed(spec))
    if spec.dtype.itemsize * math.prod(spec.shape) < POOLED_FROM or abi.NUMPY_FUNCTIONS in abi.unlike():
        return plain
    context = _context()
    return lambda: context.copy().run(plain)


def _placed(spec: Spec) -> Array:
    """An array, without memory, with the strides that `empty_like` takes over."""
    word = np.empty(1, f"V{spec.dtype.itemsize}")  # `as_strided` knows NumPy's own dtypes alone
    return np.lib.stride_tricks.as_strided(word, spec.shape, spec.strides).view(spec.dtype)


EMPTIED: list[Callable[[], None]] = []  # called when the pool is emptied, of libraries that keep memory of their own


def empty_pool() -> None:
    """Give the memory of released results and of calls' work, which is kept for new ones, back to the system.

    Arrays that are in use stay as they are. Their memory is kept again when they are released; OPGRAD_POOL_BYTES=0 in
    the environment keeps none.
    """
    if _pool is not None:
        drop.call(table())
    for empty in EMPTIED:
        empty()
