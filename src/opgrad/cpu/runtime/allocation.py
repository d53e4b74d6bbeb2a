"""Allocates NumPy results; the memory of large ones comes from the pool of released memory. They own their data.

NumPy lets a program allocate the data of arrays by a handler of its own (NEP 49). An array keeps the handler that was
set when it was made, which also resizes and frees its data. The handler is part of a context of `contextvars`. So
results are made in a context of ours, and arrays that are made elsewhere are not affected.
"""

import ctypes
import math
from collections.abc import Callable
from contextvars import Context
from functools import cache, partial

import numpy as np

from opgrad.base.locks import settling
from opgrad.contract import Array, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.cpu.runtime import abi, pool

POOLED_FROM = 1 << 16  # bytes from which a result comes from the pool
NAME_BYTES, VERSION = 127, 1  # of a handler
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Handler(ctypes.Structure):
    """PyDataMem_Handler with its PyDataMemAllocator."""

    _fields_ = (
        ("name", ctypes.c_char * NAME_BYTES),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


@cache
def _context() -> Context:
    """A context in which NumPy's arrays come from the pool. Its copies are used: one runs a single call at a time."""
    with settling:
        functions = (each.address for each in (pool.malloc, pool.calloc, pool.realloc, pool.free))
        handler = _Handler(b"opgrad", VERSION, pool.table(), *functions)
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
    pool.empty()
    for empty in EMPTIED:
        empty()
