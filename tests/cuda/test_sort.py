"""Indices sorted on the device: the keys in order, and where each slice's begin, whatever the passes."""

import numpy as np
import pytest
from guards import Placed

pytest.importorskip("triton", reason="needs Triton")

from cuda_backend import ON_GPU, address, some

from opgrad.contract.signature import Operand
from opgrad.cuda import indexing as sorting
from opgrad.cuda.execute import ALIGNMENT, Compiled, Program, Space

pytestmark = [pytest.mark.gpu] if ON_GPU else []

INDICES = Operand(0, "int64")


def sort(indices, size):
    """The keys as (slice, position), the starts, and the number of passes after the first."""
    space = Space()
    found = sorting.sort("gather_grad", Operand(0, indices.dtype.name), len(indices), size, space)
    program = Program(found.launches, space.size)
    memory = _run_on_gpu(program, indices) if ON_GPU else _run(program, indices)
    keys = _part(memory, found.keys, len(indices)).astype(np.int64)
    starts = _part(memory, found.starts, size + 1)
    return (keys >> found.bits, keys & ((1 << found.bits) - 1)), starts, found.passes


def _part(memory, scratch, count):
    return np.frombuffer(memory, scratch.dtype, count, scratch.offset)


def _run(program, indices):
    aligned = -Placed((program.scratch_bytes,), "bool").array.ctypes.data % ALIGNMENT
    memory = Placed((program.scratch_bytes,), "bool", offset=aligned)
    addresses, scratch = [address(indices)], address(memory.array)
    Compiled(program, addresses, scratch).run(addresses, scratch, None)
    assert memory.untouched()
    return memory.array.tobytes()


def _run_on_gpu(program, indices):
    import torch

    given = torch.from_numpy(indices).cuda()
    memory = torch.empty(program.scratch_bytes, dtype=torch.uint8, device="cuda")
    addresses, stream = [given.data_ptr()], torch.cuda.current_stream().cuda_stream
    Compiled(program, addresses, memory.data_ptr()).run(addresses, memory.data_ptr(), stream)
    return memory.cpu().numpy().tobytes()


def check(indices, size):
    """Sort, compare with NumPy's stable sort, and return the number of passes."""
    wrong = (indices < -size) | (indices >= size)
    slices = np.where(wrong, size, np.where(indices < 0, indices + size, indices))
    (found, positions), starts, passes = sort(indices, size)
    order = np.argsort(slices, kind="stable")
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_array_equal(found, slices[order])
    np.testing.assert_array_equal(starts, np.searchsorted(slices[order], np.arange(size + 1)))
    return passes


SHORT = {"PASSES": ((100, 8, 4), (1 << 63, 4, 2)), "OWN": 4, "OTHERS": 4, "SEARCHES": 16}


@pytest.fixture(params=[{}, SHORT, SHORT | {"NARROW_BITS": 0}], ids=["as shipped", "short runs", "wide keys"])
def limits(request, monkeypatch):
    """Lower the limits, so that few keys need many passes."""
    for name, value in request.param.items():
        monkeypatch.setattr(sorting, name, value)


COUNTS = [1, 32, 33, 70]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_random_indices(dtype, rng):
    for count in COUNTS:
        for size in some((1, 7, 200), dtype, 3, count):
            check(rng.integers(-size, size, count).astype(dtype), size)


@pytest.mark.usefixtures("limits")
def test_indices_in_order_and_all_equal():
    check(np.arange(32), 32)
    check(np.arange(33)[::-1].copy(), 33)
    check(np.full(33, 3), 5)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_out_of_range_are_behind_all_others(dtype, rng):
    extreme = [np.iinfo(dtype).min, np.iinfo(dtype).max]
    for count in (1, 33):
        indices = rng.integers(-12, 12, count).astype(dtype)
        indices[rng.integers(0, count, 3)] = rng.choice(extreme, 3)
        check(indices, 7)
        check(np.full(count, extreme[0], dtype), 7)


@pytest.mark.usefixtures("limits")
def test_an_axis_of_size_0():
    check(np.array([0, -1, 5]), 0)


@pytest.mark.parametrize(("count", "passes"), [(1024, 0), (1025, 1)])
def test_passes(count, passes, rng):
    """A run of 1,024 needs no merging; beyond, one pass merges up to 16 runs."""
    assert check(rng.integers(0, 50, count), 50) == passes


@pytest.mark.parametrize(
    ("count", "passes"), [(1 << 14, 1), ((1 << 14) + 1, 2), (1 << 16, 2), ((1 << 16) + 1, 5), (1 << 24, 8)]
)
def test_passes_of_many_keys(count, passes):
    assert sorting.sort("gather_grad", INDICES, count, 1 << 20, Space()).passes == passes


def test_keys_are_as_narrow_as_they_may_be():
    for count, size, dtype in [(1 << 14, 128256, "int32"), ((1 << 14) + 1, 128256, "int64"), (1, 1 << 31, "int64")]:
        assert sorting.sort("gather_grad", INDICES, count, size, Space()).keys.dtype == dtype


def test_keys_of_more_than_63_bits():
    with pytest.raises(NotImplementedError, match=r"^gather_grad: .* need keys of 71 bits, on CUDA they have 63"):
        sorting.sort("gather_grad", INDICES, 1 << 30, 1 << 40, Space())
