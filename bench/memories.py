"""Whose memory the arrays of a cell lie in: everybody works on the same."""

import importlib
import math
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import aligned
from opgrad.contract import Array, Shape

Empty = Callable[[Shape, np.dtype[Any]], Array]

HUGE_PAGE = 1 << 21  # bytes


def _torch(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """PyTorch's, at a cache line, in small pages."""
    torch = importlib.import_module("torch")
    memory: Array = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).numpy()
    return memory.view(dtype).reshape(shape)


def _huge(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """From the start of a huge page on, in such pages where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size + 2 * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return whole[-whole.ctypes.data % HUGE_PAGE :][:size].view(dtype).reshape(shape)


def _view(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """One element behind where NumPy's memory starts."""
    return np.empty(math.prod(shape) + 1, dtype)[1:].reshape(shape)


# NumPy's memory starts 16 bytes behind a multiple of 64 if it is large; it asks for huge pages then.
MEMORIES: Mapping[str, Empty] = {"aligned": aligned, "huge": _huge, "numpy": np.empty, "torch": _torch, "view": _view}
DEFAULT = "numpy"
