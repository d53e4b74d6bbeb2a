"""The memory of large results on the CPU: a pool of PyTorch's own storages, reused when only the pool refers to them.

PyTorch cannot be told whose memory a storage is without losing what users expect of it: a storage that borrows its
memory cannot be resized. So results lie in storages as torch.empty makes them, of which the pool keeps one reference
each. It looks at the counts of references, of C++ and of Python, when it needs a storage of that size: a tensor, a
view, autograd, a NumPy array or DLPack's capsule hold one each.

Storages are taken out of a queue before they are looked at, which no two threads can do with one, so there is no lock.
A result gets a storage of its own size or a new one, because torch.save writes whole storages.
"""

import ctypes
import math
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from operator import call
from typing import Any

import torch

from opgrad.call.libraries import torch_private
from opgrad.contract import Shape
from opgrad.cpu.runtime import pool

POOLED_FROM = 1 << 20  # bytes from which a result comes from the pool: malloc itself keeps the memory of smaller ones
HUGE_FROM = 1 << 22  # bytes from which huge pages are asked for, as NumPy does
LOOKED_AT = 8  # storages for a result; the next one looks at others
Kept = tuple[Any, int]  # a storage, and where its memory was
NONE: deque[Kept] = deque()

_kept: dict[int, deque[Kept]] = {}  # by size in bytes
pool.EMPTIED.append(_kept.clear)
# Without the interpreter's lock other threads may change both counts at any time.
_has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
_references: Callable[[int], int] | None = torch_private.references if _has_lock else None


def maker(shape: Shape, strides: Shape, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """What makes results on the CPU of this shape and dtype, with strides in elements that leave no gaps."""
    plain = partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu")
    size = dtype.itemsize * math.prod(shape)
    if size < POOLED_FROM or size > pool.bound() or _references is None:
        return plain

    def make() -> torch.Tensor:
        storage = _take(size)
        if storage is None:
            return _new(plain, size)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    return make


def _take(size: int) -> Any:
    """A storage of so many bytes that nobody uses, which the pool goes on keeping; None if there is none."""
    queue = _kept.get(size, NONE)
    for _ in range(min(len(queue), LOOKED_AT)):
        try:
            kept = queue.popleft()
        except IndexError:  # another thread took it
            return None
        if _counts(kept) != _ALONE:
            queue.append(kept)
        elif _is_as_it_was(kept, size):
            storage = kept[0]
            queue.append(kept)
            return storage
    return None


def _counts(kept: Kept) -> list[int]:
    """How many references C++ and Python have to a storage, counted in one step of the interpreter.

    Between two steps another thread might turn a reference of the one kind into one of the other.
    """
    counters: tuple[Any, Any] = _references, sys.getrefcount
    return list(map(call, counters, (kept[0]._cdata, kept[0])))


def _is_as_it_was(kept: Kept, size: int) -> bool:
    """Whether a storage has its own memory of so many bytes, and may be resized.

    It is not if a user resized or shared it, or had a NumPy array of it; of one that was cloned lazily, data_ptr makes
    the copy.
    """
    storage, address = kept
    return bool(storage.nbytes() == size and storage.resizable() and storage.data_ptr() == address)


def _new(plain: Callable[[], torch.Tensor], size: int) -> torch.Tensor:
    """A result in new memory, which is kept in place of the storages of other sizes."""
    made = plain()
    _ask_for_huge_pages(made.data_ptr(), size)
    _kept.setdefault(size, deque()).append((made.untyped_storage(), made.data_ptr()))
    while _held() > pool.bound():
        _drop(next((other for other in list(_kept) if other != size), size))
    return made


def _held() -> int:
    """The bytes of all storages that are kept, in use or not: whatever is released, no more stays."""
    return sum(size * len(queue) for size, queue in list(_kept.items()))


def _drop(size: int) -> None:
    """Keep one storage less of this size."""
    queue = _kept.get(size, deque())
    with suppress(IndexError):  # another thread was faster
        queue.popleft()
    if not queue:
        _kept.pop(size, None)


@cache
def _advise() -> Any:
    """The system's madvise, where it can be asked for huge pages."""
    if not pool.ADVICE:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Have the system put the whole huge pages of new memory into such."""
    start = -(-address // pool.HUGE) * pool.HUGE
    length = (address + size) // pool.HUGE * pool.HUGE - start
    if size >= HUGE_FROM and length > 0 and (advise := _advise()):
        advise(start, length, pool.ADVICE)


_ALONE = _counts((torch.UntypedStorage(1), 0)) if _references else []
