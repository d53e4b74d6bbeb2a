"""The working memory of a call: on the stack where little is needed, else from the pool of released memory.

A call takes it when it begins and gives it back when it ends. So a process keeps no more than the pool's bound, however
many signatures it has met, and any number of threads may run one plan at a time.
"""

import ctypes
from functools import cache
from typing import Final

from opgrad.cpu.compiler.memory import call_address, load_word
from opgrad.cpu.compiler.native import inline
from opgrad.locks import settling
from opgrad.native import pool

STACK_WORDS: Final = 1024  # of working memory that lie on the caller's stack, in place of 0.1 µs for taking them
POOL, TAKE, GIVE = range(3)  # words of what native code is given: the pool's table, its functions to take and to give


@inline
def take(source: int, size: int) -> int:
    """Memory of so many bytes that starts a cache line; 0 if the system refuses."""
    return call_address(load_word(source, TAKE), load_word(source, POOL), size)


@inline
def give(source: int, memory: int, size: int) -> None:
    """Give memory back that was taken."""
    call_address(load_word(source, GIVE), load_word(source, POOL), memory, size)


def source(size: int) -> int:
    """Where native code takes so many bytes from, as `take` and `give` are told; 0 if they lie on the stack."""
    return ctypes.addressof(_words()) if size > 8 * STACK_WORDS else 0


@cache
def _words() -> ctypes.Array[ctypes.c_int64]:
    """The words of the pool. Plans and threads may outlive the interpreter's objects, so they are never freed."""
    with settling:
        words = (ctypes.c_int64 * 3)(pool.table(), pool.malloc.address, pool.free.address)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(words))
        return words
