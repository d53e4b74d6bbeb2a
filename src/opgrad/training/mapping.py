"""Files whose bytes are mapped into memory: what is never read takes none, and what several read is there once.

The mapping is private: whoever writes into it changes memory of this process, and never the file.
"""

import mmap
import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.reading import open_regular
from opgrad.writing import replaced

LEAST = 1 << 20  # bytes of a file that is mapped; smaller ones are read
# Windows replaces no file that is mapped: there, files are read.
MAPS = sys.platform != "win32"


class _Mapping(mmap.mmap):
    """A mapped file. file: its device and number."""

    file: tuple[int, int]


_live: "weakref.WeakSet[_Mapping]" = weakref.WeakSet()
_shared: "weakref.WeakValueDictionary[tuple[int, ...], _Mapping]" = weakref.WeakValueDictionary()


def content(path: Path, shared: bool = False) -> memoryview:
    """The bytes of a regular file; to write into them is to change memory of one's own.

    shared: whether the caller writes nothing, and takes the memory that others have of the same file.
    Raises what `open_regular` raises.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size < LEAST or not MAPS:
            return memoryview(file.read())
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        found = _shared.get(key) if shared else None
        if found is None:
            found = _Mapping(file.fileno(), 0, access=mmap.ACCESS_COPY)
            found.file = key[:2]
            _live.add(found)
            if shared:
                _shared[key] = found
    return memoryview(found)


def array(content: bytes | memoryview, dtype: np.dtype[Any], count: int, start: int) -> np.ndarray:
    """So many elements of a file's content, from a byte on; read-only."""
    found = np.frombuffer(content, dtype, count, start)
    found.flags.writeable = False
    return found


def _mapping(of: np.ndarray) -> _Mapping | None:
    """The mapped file that an array is a part of."""
    owner: Any = of
    while isinstance(owner, np.ndarray):
        owner = owner.base
    found = owner.obj if isinstance(owner, memoryview) else owner
    return found if isinstance(found, _Mapping) else None


def is_mapped(given: np.ndarray) -> bool:
    """Whether an array is a part of a mapped file."""
    return _mapping(given) is not None


def own(given: np.ndarray) -> np.ndarray:
    """The same values in memory that may be written to: that of a mapped file, or else a copy."""
    mapping = _mapping(given)
    if mapping is None or not given.flags.c_contiguous or not given.flags.aligned:
        return np.array(given, order="C")
    start = given.ctypes.data - np.frombuffer(mapping, np.uint8, 0).ctypes.data
    return np.frombuffer(mapping, given.dtype, given.size, start).reshape(given.shape)


def release(given: np.ndarray) -> None:
    """Give back the memory of a part of a mapped file that nobody has written to; it is read anew when need be."""
    mapping = _mapping(given)
    if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = given.ctypes.data - np.frombuffer(mapping, np.uint8, 0).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + given.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def keep_values(path: Path) -> None:
    """Before a file is changed in place: let whoever has it mapped in this process keep it as it is.

    The name becomes that of a copy. To cut a mapped file takes even pages away that were written to.
    """
    if not path.is_file():
        return
    state = path.stat()
    if any(mapping.file == (state.st_dev, state.st_ino) for mapping in list(_live)):
        with replaced(path) as temporary:
            shutil.copyfile(path, temporary)
