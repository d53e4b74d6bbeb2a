"""Masked loads and stores move the lanes that a mask names, and touch no other memory."""

import numpy as np
import pytest
from guards import Placed
from tasks import run_task

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.decorators import kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.compiler.simd import first, load, load_masked, store, store_masked

DTYPE_NAMES = ("float32", "float16", "bfloat16", "int8", "uint8")
FILL = 3


@kernel
def copy_range(begin, end, x: Pointer, y: Pointer, loaded: Pointer):
    """y = x for the lanes from `begin` to `end`; `loaded` gets what was loaded, in all lanes."""
    mask = first(x, end) ^ first(x, begin)
    value = load_masked(x, 0, mask, 3.0)
    store(loaded, 0, value)
    store_masked(y, 0, value, mask)


@kernel
def copy_chosen(chosen: Pointer, x: Pointer, y: Pointer, loaded: Pointer):
    """The same for the lanes where `chosen` is not 0."""
    mask = load(chosen, 0) != 0.0
    value = load_masked(x, 0, mask, 3.0)
    store(loaded, 0, value)
    store_masked(y, 0, value, mask)


def check(dtype, held, copy):
    """copy(x, y, loaded) copies the lanes in `held`, and reads and writes no others."""
    lanes = vector_lanes("float32")
    x = np.arange(1, lanes + 1).astype(DTYPES[dtype])
    y, loaded = Placed((lanes,), dtype, offset=1), np.zeros(lanes, np.float32)
    y.array[:] = 77
    copy(x.ctypes.data, y.array.ctypes.data, loaded.ctypes.data)
    assert y.untouched()
    assert y.array.astype(np.float32).tolist() == [float(x[i]) if i in held else 77 for i in range(lanes)]
    assert loaded.tolist() == [float(x[i]) if i in held else FILL for i in range(lanes)]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_range_of_lanes(dtype):
    task, lanes = copy_range.task([dtype, dtype, "float32"]), vector_lanes("float32")
    for begin in range(lanes + 1):
        for end in range(begin, lanes + 1):
            check(dtype, range(begin, end), lambda *places, b=begin, e=end: run_task(task, [b, e, *places]))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_lanes_apart(dtype):
    task, lanes = copy_chosen.task(["float32", dtype, dtype, "float32"]), vector_lanes("float32")
    rng = np.random.default_rng(5)
    for share in (0.1, 0.5, 0.9):
        chosen = (rng.random(lanes) < share).astype(np.float32)
        held = set(np.flatnonzero(chosen))
        check(dtype, held, lambda *places, chosen=chosen: run_task(task, [chosen.ctypes.data, *places]))
