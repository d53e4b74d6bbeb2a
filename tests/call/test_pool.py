"""The pool of released memory, from which large NumPy results come."""

import gc
import os
import pickle
import queue
import random
import signal
import tracemalloc
import warnings

import numpy as np
import pytest
from callers import call_at_once
from subprocesses import TIMEOUT, run_python

import opgrad
from opgrad.contract import DTYPES, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.cpu.compiler.words import at, behind
from opgrad.cpu.runtime import pool

SIZES = (1 << 16, 1 << 17, (1 << 20) + 8, 5 << 20)  # bytes, of malloc's blocks and of mappings
HELD = 8 << 20
HANDLER = "opgrad"


def made(size: int, order=None, shape=None):
    """A new result of so many bytes."""
    shape = shape or (size // 4,)
    strides = contiguous(shape, order or tuple(range(len(shape))), 4)
    return pool.maker(Spec(shape, DTYPES["float32"], strides))()


def handler(array):
    return np._core.multiarray.get_handler_name(array)


@pytest.fixture(autouse=True)
def bounded():
    """A pool that is empty, and holds little."""
    made(1 << 16)
    table = pool._pool
    opgrad.empty_pool()
    before, table.limit = table.limit, HELD
    yield table
    opgrad.empty_pool()
    table.limit = before
    assert pool.held() == 0


def test_large_results_come_from_memory_that_was_released():
    x = np.linspace(-1, 1, 1 << 15, dtype=np.float32)
    y = opgrad.relu(x)
    place = y.ctypes.data
    assert (handler(y), place % 64) == (HANDLER, 0)
    assert handler(opgrad.relu(x[:100])) == "default_allocator" == handler(x)
    del y
    assert pool.held() >= x.nbytes
    y = opgrad.relu(x)
    assert (y.ctypes.data, pool.held()) == (place, 0)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.mark.parametrize("size", SIZES)
def test_results_are_owned_like_any_array(size):
    array = made(size)
    assert array.base is None
    assert array.flags.owndata
    assert array.flags.writeable
    assert array.flags.c_contiguous
    array[:] = np.arange(array.size)
    known = array.copy()
    for count in (array.size + 1, array.size * 3, array.size, 5, 0, 7):
        kept = min(count, known.size)
        array.resize(count)
        np.testing.assert_array_equal(array[:kept], known[:kept])
        assert not array[kept:].any()
        known = array.copy()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)), known)


def test_axes_lie_in_memory_as_asked_for():
    array = made(0, order=(2, 0, 1), shape=(40, 50, 30))
    assert array.base is None
    assert array.strides == (50 * 4, 4, 40 * 50 * 4)
    assert made(0, order=(1, 0), shape=(2, 3)).strides == (4, 8)


def test_views_and_buffers_keep_the_memory():
    for lend in (lambda array: array[10:], memoryview, lambda array: np.from_dlpack(array)):
        array = made(SIZES[-1])
        array.fill(7)
        lent = lend(array)
        del array
        other = made(SIZES[-1])
        other.fill(1)
        assert np.asarray(lent).min() == 7
        del lent, other


def test_released_memory_is_bounded_and_the_oldest_goes():
    arrays = [made(HELD // 4 - 4096) for _ in range(8)]
    places = [array.ctypes.data for array in arrays]
    while arrays:
        del arrays[0]
        assert pool.held() <= HELD
    again = made(HELD // 4 - 4096)
    assert again.ctypes.data in places[4:]
    before = pool.held()
    made(HELD + (1 << 20))  # larger than the bound: not kept, and nothing goes for it
    assert pool.held() == before


def test_more_blocks_than_slots():
    arrays = [made(1 << 16) for _ in range(2 * pool.SLOTS)]
    arrays.clear()
    assert pool.held() <= pool.SLOTS * ((1 << 16) + 4096)


def test_much_larger_memory_is_not_used():
    large = made(4 << 20)
    place = large.ctypes.data
    del large
    small = made(1 << 20)
    assert small.ctypes.data != place
    close = made((4 << 20) - (1 << 19))
    assert close.ctypes.data == place


def test_memory_of_live_arrays_stays_when_the_pool_is_emptied():
    released, live = made(SIZES[-1]), made(SIZES[-1])
    live.fill(3)
    del released
    opgrad.empty_pool()
    assert pool.held() == 0
    assert (live == 3).all()
    del live
    assert pool.held() > 0


def test_zeros_are_zero_and_what_no_system_has_is_refused():
    dirty = made(SIZES[0])
    dirty.fill(9)
    del dirty
    context = pool._context()
    zeros = context.copy().run(np.zeros, SIZES[0] // 4, np.float32)
    assert handler(zeros) == HANDLER
    assert not zeros.any()
    with pytest.raises(MemoryError):
        context.copy().run(np.empty, 1 << 60, np.uint8)
    assert pool.calloc.call(pool.table(), 1 << 40, 1 << 40) == 0
    assert handler(np.empty(1 << 16)) == "default_allocator"


def test_traced_memory_is_that_of_live_arrays():
    tracemalloc.start()
    try:
        array = made(SIZES[-1])
        assert tracemalloc.get_traced_memory()[0] >= SIZES[-1]
        del array
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < SIZES[-1]
        assert pool.held() >= SIZES[-1]
    finally:
        tracemalloc.stop()


def test_threads_never_share_memory():
    """Each array holds its own number from when it is made until another thread releases it."""
    passed: queue.SimpleQueue = queue.SimpleQueue()
    wrong = []

    def work(seed):
        draw, mine = random.Random(seed), []
        for number in range(300):
            array = made(draw.choice(SIZES[:3]))
            array[::512] = seed * 1000 + number
            mine.append((array, seed * 1000 + number))
            passed.put(mine.pop(draw.randrange(len(mine))))
            other, value = passed.get()
            wrong.extend([value] * bool((other[::512] != value).any()))
            mine = mine[-4:]

    call_at_once(4, work)
    assert not wrong
    assert 0 <= pool.held() <= HELD


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(bounded):
    live, released = made(SIZES[-1]), made(SIZES[-1])
    live.fill(5)
    place = released.ctypes.data
    del released
    slot = at(pool.Slot, behind(bounded), pool.SLOTS - 1)
    slot.block = pool.BUSY  # as if another thread were at it
    bounded.held += 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX, which another test may have loaded, warns of every fork
        child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT)
        fine = slot.block == pool.EMPTY and pool.held() < SIZES[-1] + 8192
        array = made(SIZES[-1])
        array.fill(1)
        os._exit(not (fine and array.ctypes.data == place and pool.held() == 0))
    slot.block = pool.EMPTY
    bounded.held -= 100
    assert os.waitpid(child, 0)[1] == 0
    assert (live == 5).all()


BOUND = """
import numpy as np, opgrad
from opgrad.cpu.runtime import pool
y = opgrad.relu(np.ones(1 << 19, np.float32))
assert y.flags.owndata and y.ctypes.data % 64 == 0
del y
print(pool.held())
"""


def test_the_environment_bounds_the_pool():
    assert run_python(BOUND, OPGRAD_POOL_BYTES="0") == "0"
    assert int(run_python(BOUND, OPGRAD_POOL_BYTES="10000000")) > 1 << 21
    refused = "try:\n    opgrad.relu(np.ones(1 << 19, np.float32))\nexcept ValueError as error:\n    print(error)"
    said = run_python(f"import numpy as np, opgrad\n{refused}", OPGRAD_POOL_BYTES="1 GiB")
    assert said == "OPGRAD_POOL_BYTES is '1 GiB', expected a number of bytes"


def test_the_default_bound_is_a_share_of_the_memory(monkeypatch):
    monkeypatch.delenv("OPGRAD_POOL_BYTES", raising=False)
    monkeypatch.setattr(pool, "_memory", lambda: 80)
    assert pool.bound.__wrapped__() == 10
    monkeypatch.setattr(pool, "_memory", lambda: 1 << 50)
    assert pool.bound.__wrapped__() == 1 << 30
