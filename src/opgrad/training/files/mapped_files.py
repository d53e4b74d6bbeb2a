"""Files mapped into memory: parts that are never read take no memory, and several readers share one mapping.

The mapping is private: writing into it changes memory of this process, and never the file.
"""

import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.files import open_regular

LEAST = 1 << 20  # bytes; smaller files are read and not mapped
# Windows cannot replace a file that is mapped; there, all files are read.
MAPS = sys.platform != "win32"


class _Mapping(mmap.mmap):
    """A file that was mapped here."""


_shared: "weakref.WeakValueDictionary[tuple[int, ...], _Mapping]" = weakref.WeakValueDictionary()


def content(path: Path, shared: bool = False, follow: bool = True) -> memoryview:
    """The bytes of a regular file; writing into them changes memory of this process alone.

    shared: whether the caller writes nothing, so that it may share a mapping of the same file with others.
    Raises what `open_regular` raises.
    """
    with open_regular(path, follow=follow) as file:
        state = os.fstat(file.fileno())
        if state.st_size < LEAST or not MAPS:
            return memoryview(file.read())
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        found = _shared.get(key) if shared else None
        if found is None:
            found = _Mapping(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if shared:
                _shared[key] = found
    return memoryview(found)


def array(content: bytes | memoryview, dtype: np.dtype[Any], count: int, start: int) -> np.ndarray:
    """A read-only array of `count` elements in a file's content, from byte `start` on."""
    found = np.frombuffer(content, dtype, count, start)
    found.flags.writeable = False
    return found


def mapping_of(of: np.ndarray) -> _Mapping | None:
    """The mapped file that an array is a part of; None for other memory."""
    owner: Any = of
    while isinstance(owner, np.ndarray):
        owner = owner.base
    found = owner.obj if isinstance(owner, memoryview) else owner
    return found if isinstance(found, _Mapping) else None


def own(given: np.ndarray) -> np.ndarray:
    """The same values in memory that may be written to: the private mapping itself, or else a copy."""
    mapping = mapping_of(given)
    if mapping is None or not given.flags.c_contiguous or not given.flags.aligned:
        return np.array(given, order="C")
    start = given.ctypes.data - np.frombuffer(mapping, np.uint8, 0).ctypes.data
    return np.frombuffer(mapping, given.dtype, given.size, start).reshape(given.shape)


def release(given: np.ndarray) -> None:
    """Free the memory of a part of a mapped file that was not written to; it is read again when it is used."""
    mapping = mapping_of(given)
    if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = given.ctypes.data - np.frombuffer(mapping, np.uint8, 0).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + given.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
