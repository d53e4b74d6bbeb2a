"""Writing past the cache, which small arrays never do by themselves: every dtype, from every place in a cache line."""

import numpy as np
import pytest
from samples import bits

import opgrad
import opgrad.random
from opgrad.contract import BYTES, DTYPES, FLOAT8, FLOATS
from opgrad.cpu.runtime import partition

LINE = 64
CALLS = {
    "softmax": {"where": np.ones(1, bool), "out_scale": 0.01},
    "log_softmax": {"result_scale": 2.0},
}


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.setattr(partition, "streams", lambda size: True)


def placed(shape, dtype, offset):
    """An array that starts so many elements into a cache line, and the memory around it, full of 77."""
    size = int(np.prod(shape))
    memory = np.full(2 * LINE + (size + LINE) * dtype.itemsize, 77, np.uint8)
    start = LINE + -memory.ctypes.data % LINE + offset * dtype.itemsize
    return memory, memory[start : start + size * dtype.itemsize].view(dtype).reshape(shape)


def holds(memory, array):
    """Whether nothing around the array was written."""
    start = array.ctypes.data - memory.ctypes.data
    return bool((memory[:start] == 77).all() and (memory[start + array.nbytes :] == 77).all())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *BYTES])
def test_stages(name, dtype, rng, streaming):
    function, dtype = getattr(opgrad, name), DTYPES[dtype]
    for shape, axis in (((9, 131), 1), ((2, 33, 130), 1)):
        x = rng.normal(size=shape).astype(np.float32)
        expected = function(x, axis, out_dtype=dtype, **CALLS[name])
        for offset in range(LINE // dtype.itemsize):
            memory, out = placed(shape, dtype, offset)
            function(x, axis, out=out, **CALLS[name])
            assert bits(out) == bits(expected), offset
            assert holds(memory, out), offset


def test_mask(rng, streaming):
    x = rng.normal(size=(7, 300)).astype(np.float32)
    kept = opgrad.random.keep_mask(x.shape, 0.5, 3, 4)
    for offset in range(LINE):
        memory, mask = placed(x.shape, np.dtype(bool), offset)
        opgrad.softmax(x, dropout=opgrad.Dropout(0.5, 3, 4, mask=True), out=(np.empty_like(x), mask))
        assert np.array_equal(mask, kept), offset
        assert holds(memory, mask), offset


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["relu", "softmax", "log_softmax"])
def test_plain_kernels(name, dtype, rng, streaming):
    function, dtype = getattr(opgrad, name), DTYPES[dtype]
    for shape in ((5, 131), (9, 700)):
        x = rng.normal(size=shape).astype(dtype)
        expected = function(x)
        for offset in range(LINE // dtype.itemsize):
            memory, out = placed(shape, dtype, offset)
            function(x, out=out)
            assert bits(out) == bits(expected), offset
            assert holds(memory, out), offset
