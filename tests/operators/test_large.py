"""More than 2**31 elements: sizes and offsets are 64-bit everywhere."""

import os
from pathlib import Path

import numpy as np
import pytest

import opgrad

ROWS, LENGTH = (1 << 16) + 3, 1 << 15  # 98,304 elements more than 2**31
NEEDED = 10 << 30  # bytes: the array of 4 GiB, what the system keeps, and room for others


def available():
    """The bytes of memory that can be had without swapping."""
    information = Path("/proc/meminfo")
    if information.exists():
        lines = dict(line.split(":") for line in information.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


pytestmark = pytest.mark.skipif(available() < NEEDED, reason="needs 10 GiB of free memory")


@pytest.fixture(scope="module")
def memory():
    """One array for all tests: each writes what it reads."""
    return np.zeros((ROWS, LENGTH), np.float16)


@pytest.fixture
def x(memory):
    memory[...] = 0
    return memory


def count_nonzero(x):
    """How many elements are not +0; NumPy counts integers ten times as fast as float16."""
    return np.count_nonzero(x.view(np.uint16))


def test_elements(x):
    flat = x.reshape(-1)
    places = [0, 1, 2**31 - 1, 2**31, 2**31 + 5, flat.size - 1]
    flat[places] = [-1, 2, 3, -4, 5, 6]
    opgrad.relu(x, out=x)
    assert flat[places].tolist() == [0, 2, 3, 0, 5, 6]
    assert count_nonzero(x) == 4


def test_rows(x):
    x[-1, -1] = 10
    last = opgrad.softmax(x[-1].copy())
    opgrad.softmax(x, out=x)
    assert (x[[0, 1, ROWS // 2, ROWS - 2]] == np.float16(1 / LENGTH)).all()
    assert np.array_equal(x[-1], last)


def test_one_row(x):
    row = x.reshape(-1)
    row[:] = -np.inf
    row[[0, 2**31 + 7]] = 1
    opgrad.softmax(row, out=row)
    assert row[[0, 2**31 + 7]].tolist() == [0.5, 0.5]
    assert count_nonzero(row) == 2


def test_inner_axis(x):
    x[-1, -1] = np.inf
    opgrad.softmax(x, axis=0, out=x)
    assert np.isnan(x[:, -1]).all()
    assert (x[[0, -1], :-1] == np.float16(1 / ROWS)).all()


def test_loss(x):
    x[-1, 5] = 20
    labels = np.zeros(ROWS, np.int32)
    labels[-1] = 5
    losses = opgrad.softmax_cross_entropy_loss_only(x, labels, reduction="none", out_dtype="float32")
    np.testing.assert_allclose(losses[:-1], np.log(LENGTH), rtol=1e-6)
    assert losses[-1] < 1e-3
    loss, gradient = opgrad.softmax_cross_entropy_loss_and_grad(
        x, labels, reduction="sum", out=(np.empty((), np.float16), x)
    )
    assert gradient is x
    assert loss == np.inf  # beyond float16
    assert (x[:-1, 0] == np.float16(1 / LENGTH - 1)).all()
    assert (x[[0, ROWS - 2], 1:] == np.float16(1 / LENGTH)).all()
    assert abs(float(x[-1, 5]) - (1 / (1 + (LENGTH - 1) * np.exp(-20.0)) - 1)) < 1e-6


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
