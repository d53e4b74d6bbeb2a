"""The working memory of a call: up to 8 KiB lie on the stack, more comes from the pool of released memory.

A call takes its memory when it begins and gives it back when it ends. So the process keeps no more than the pool's
bound, however many signatures it has met, and any number of threads can run one plan at the same time.
"""

import ctypes
from functools import cache
from typing import Final

from opgrad.base.locks import settling
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.structures import Structure, at, structure
from opgrad.cpu.compiler.words import call_address
from opgrad.cpu.runtime import pool

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
        found = Source(pool.table(), pool.malloc.address, pool.free.address)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
        return found
