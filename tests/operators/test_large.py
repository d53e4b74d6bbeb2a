"""More than 2**31 elements: sizes and offsets are 64-bit everywhere."""

import ctypes
import mmap
import os
import sys

import numpy as np
import pytest

import opgrad

BLOCK = 1 << 10
ROWS, LENGTH = (1 << 16) + 3, 1 << 15  # 98,304 elements more than 2**31
ROW_BYTES = 2 * LENGTH
FIXED, POPULATED = 0x10, 0x8000  # MAP_FIXED and MAP_POPULATE

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, to have the same memory at many addresses"
)


def large_array():
    """Zeros. All blocks of rows but the first and the last are the same memory: 4 GiB of addresses take 192 MiB.

    A system gives out new memory more slowly than anything here computes, 3 s for a GiB on some virtual machines.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    file = os.memfd_create("rows")
    os.truncate(file, ROWS * ROW_BYTES)
    array = np.frombuffer(mmap.mmap(file, ROWS * ROW_BYTES), np.float16).reshape(ROWS, LENGTH)
    last = ROWS - ROWS % BLOCK - BLOCK
    for row in range(0, ROWS, BLOCK):
        size = min(BLOCK, ROWS - row) * ROW_BYTES
        offset = (0 if row == 0 else BLOCK if row < last else 2 * BLOCK + row - last) * ROW_BYTES
        place = array.ctypes.data + row * ROW_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = library.mmap(place, size, access, mmap.MAP_SHARED | FIXED | POPULATED, file, offset)
        assert found == place, os.strerror(ctypes.get_errno())
    os.close(file)
    return array


@pytest.fixture(scope="module")
def memory():
    """Two arrays for all tests: what one writes must not be what it is yet to read, under another address."""
    return large_array(), large_array()


@pytest.fixture
def x(memory):
    memory[0][...] = 0
    return memory[0]


@pytest.fixture
def y(memory):
    memory[1][...] = 7
    return memory[1]


def count_nonzero(x):
    """How many elements are not +0; NumPy counts integers ten times as fast as float16."""
    return np.count_nonzero(x.view(np.uint16))


def test_elements(x, y):
    flat = x.reshape(-1)
    places = [0, 1, 2**31 - 1, 2**31, 2**31 + 5, flat.size - 1]
    flat[places] = [-1, 2, 3, -4, 5, 6]
    opgrad.relu(x, out=y)
    assert y.reshape(-1)[places].tolist() == [0, 2, 3, 0, 5, 6]
    assert count_nonzero(y) == 4


def test_rows(x, y):
    x[-1, -1] = 10
    last = opgrad.softmax(x[-1].copy())
    opgrad.softmax(x, out=y)
    assert (y[[0, 1, ROWS // 2, ROWS - 2]] == np.float16(1 / LENGTH)).all()
    assert np.array_equal(y[-1], last)


def test_one_row(x, y):
    given, row = x.reshape(-1), y.reshape(-1)
    given[:] = -np.inf
    given[[0, 2**31 + 7]] = 1
    opgrad.softmax(given, out=row)
    assert row[[0, 2**31 + 7]].tolist() == [0.5, 0.5]
    assert count_nonzero(row) == 2


def test_inner_axis(x, y):
    """Of some columns, whose numbers lie as far apart as whole rows do."""
    some, found = x[:, -300:], y[:, -300:]
    some[-1, -1] = np.inf
    opgrad.softmax(some, axis=0, out=found)
    assert np.isnan(found[:, -1]).all()
    assert (found[[0, -1], :-1] == np.float16(1 / ROWS)).all()
    assert (y[[0, -1], :-300] == 7).all()


def test_loss(x, y):
    x[-1, 5] = 20
    labels = np.zeros(ROWS, np.int32)
    labels[-1] = 5
    losses = opgrad.softmax_cross_entropy_loss_only(x, labels, reduction="none", out_dtype="float32")
    np.testing.assert_allclose(losses[:-1], np.log(LENGTH), rtol=1e-6)
    assert losses[-1] < 1e-3
    loss, gradient = opgrad.softmax_cross_entropy_loss_and_grad(
        x, labels, reduction="sum", out=(np.empty((), np.float16), y)
    )
    assert gradient is y
    assert loss == np.inf  # beyond float16
    assert (y[:-1, 0] == np.float16(1 / LENGTH - 1)).all()
    assert (y[[0, ROWS - 2], 1:] == np.float16(1 / LENGTH)).all()
    assert abs(float(y[-1, 5]) - (1 / (1 + (LENGTH - 1) * np.exp(-20.0)) - 1)) < 1e-6


def test_gather(x):
    x[-1], x[1] = 7, 3
    indices = np.array([ROWS - 1, 0, -1, 1])
    assert opgrad.gather(x, indices)[:, -1].tolist() == [7, 0, 7, 3]


def test_gather_gradient(x):
    x[...] = 1
    indices = np.array([ROWS - 1, 0, -1])
    opgrad.gather_grad(x.shape, indices, np.full((3, LENGTH), 2, np.float16), out=x)
    assert (x[-1] == 4).all()
    assert (x[0] == 2).all()
    assert count_nonzero(x[1:-1]) == 0


MANY = 1 << 31


def broadcast(values, *shape):
    """An array of that many elements that takes no memory."""
    return np.broadcast_to(np.asarray(values), shape)


TOO_MANY = {
    "gather_grad": ((5, 3), broadcast(0, MANY), broadcast(np.float32(1), MANY, 3)),
    "gather_nd_grad": ((5, 3), broadcast(0, MANY, 1), broadcast(np.float32(1), MANY, 3)),
    "gather_nd_grad of a large shape": ((5 * MANY,), broadcast(0, MANY, 1), broadcast(np.float32(1), MANY)),
    "gather_elements_grad": ((5 * MANY,), broadcast(0, MANY), broadcast(np.float32(1), MANY)),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_more_indices_than_can_be_sorted_are_refused(case):
    """While slices are sorted, their numbers take 32 bits."""
    name, (shape, indices, dy) = case.split()[0], TOO_MANY[case]
    out = np.full(shape, 7, np.float32) if shape[0] < MANY else None
    with pytest.raises(NotImplementedError, match=rf"{name}: indices name {MANY} slices, expected at most {MANY - 1}"):
        getattr(opgrad, name)(shape=shape, indices=indices, dy=dy, out=out)
    assert out is None or (out == 7).all()
