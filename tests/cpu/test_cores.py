"""The cores of the staged softmax as the engine calls them: in place, on a buffer with guard cells around it."""

import ctypes

import numpy as np
import pytest

from opgrad.cpu.compiler.decorators import vector_lanes
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax import split
from opgrad.cpu.programs.softmax import FORWARD, GRADIENTS, in_place

LENGTHS = [*range(1, 131), 4095, 4096, 4097]
LAYOUTS = ["rows", "transposed", "columns"]
FORWARD_LAYOUTS = [*LAYOUTS, "groups", "split"]
WIDER = {"float32": np.float64, "float64": np.longdouble}
GUARD = 64
SENTINEL = -12345.0


class Buffer:
    """Numbers with guard cells on both sides."""

    def __init__(self, values, dtype):
        self.memory = np.full(np.size(values) + 2 * GUARD, SENTINEL, dtype)
        self.values = self.memory[GUARD : GUARD + np.size(values)].reshape(np.shape(values))
        self.values[...] = values

    @property
    def address(self):
        return self.values.ctypes.data

    def untouched(self):
        return bool(
            (self.memory[:GUARD] == SENTINEL).all() and (self.memory[GUARD + self.values.size :] == SENTINEL).all()
        )


def call(kernel, dtype, *arguments):
    task = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(kernel.task([dtype] * 4))
    words = np.array(arguments, np.int64)
    task(words.ctypes.data, 0)


def run(kernels, layout, values, other=None, inf_as_zero=False):
    """The results and stats of a core for rows `values` of shape (rows, n), however the layout wants them."""
    dtype, (rows, n) = values.dtype.name, values.shape
    lanes = vector_lanes(dtype)
    width = -(-rows // lanes) * lanes
    stored = [values, values if other is None else other]
    if layout == "columns":
        stored = [np.concatenate([array.T, np.ones((n, width - rows), dtype)], axis=1) for array in stored]
    count = width if layout == "columns" else rows
    buffers = [Buffer(array, dtype) for array in stored]
    blocks = 2 * split.STATS * -(-n // BLOCK)
    size = {"groups": group_tiles(lanes), "split": blocks}.get(layout, 2 * tile_size(n, lanes))
    stats, tile = Buffer(np.zeros(count), dtype), Buffer(np.zeros(size), dtype)
    sizes = (0, n, width) if layout == "columns" else (rows, n, 0)
    call(kernels[layout], dtype, *(b.address for b in (*buffers, stats, tile)), *sizes, inf_as_zero)
    assert all(b.untouched() for b in (*buffers, stats, tile)), f"{layout}, {values.shape}: wrote beyond a buffer"
    assert other is None or np.array_equal(buffers[1].values, stored[1]), "the second operand was changed"
    result = buffers[0].values.T[:rows] if layout == "columns" else buffers[0].values
    return result.copy(), stats.values[:rows].copy()


def exact(name, x, inf_as_zero=False):
    """The result and the log-sum-exp in wider arithmetic."""
    x = x.astype(WIDER[x.dtype.name])
    with np.errstate(all="ignore"):
        m = x.max(1, keepdims=True)
        e = np.exp(x - m)
        lost = np.sum(np.where(x == m, e - e, e), 1, keepdims=True)
        log_s = np.log1p(lost + ((x == m).sum(1, keepdims=True) - 1))
        y = e / e.sum(1, keepdims=True) if name == "softmax" else (x - m) - log_s
        stats = (m + np.log(e.sum(1, keepdims=True)))[:, 0]
    empty = (x == -np.inf).all(1)
    stats[empty] = -np.inf
    if inf_as_zero and name == "softmax":
        y[empty] = 0
    return y, stats


def exact_gradient(name, dy, y):
    dy, y = dy.astype(WIDER[dy.dtype.name]), y.astype(WIDER[y.dtype.name])
    if name == "softmax_grad":
        return y * (dy - (dy * y).sum(1, keepdims=True))
    return dy - np.exp(y) * dy.sum(1, keepdims=True)


def assert_close(given, expected, scale, note):
    """Within 8 roundings of the largest term, and equal where it is not finite."""
    np.testing.assert_array_equal(np.isfinite(given), np.isfinite(expected.astype(given.dtype)), note)
    finite = np.isfinite(given)
    np.testing.assert_array_equal(given[~finite], expected.astype(given.dtype)[~finite], note)
    error = np.abs(given[finite].astype(expected.dtype) - expected[finite])
    info = np.finfo(given.dtype)
    allowed = np.broadcast_to(scale, given.shape)[finite] * float(info.eps) * 8 + float(info.smallest_subnormal)
    assert (error <= allowed).all(), f"{note}: {np.max(error / allowed)} times the tolerance"


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "exact"])
def sums(request):
    return request.param


@pytest.mark.parametrize("layout", FORWARD_LAYOUTS)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_of_every_length(name, layout, dtype, rng, sums):
    for n in LENGTHS:
        x = rng.normal(0, 3, (5 if n > 200 else vector_lanes(dtype) + 3, n)).astype(dtype)
        given, stats = run(in_place(name, sums), layout, x)
        y, lse = exact(name, x)
        assert_close(given, y, np.abs(y), f"{n}")
        if sums:  # kernels whose sums are plain keep none
            assert_close(stats, lse, np.abs(lse) + np.abs(x).max(1), f"{n}: stats")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_backward_of_every_length(name, layout, dtype, rng):
    forward = name.removesuffix("_grad")
    for n in LENGTHS:
        x, dy = rng.normal(0, 3, (2, 5 if n > 200 else vector_lanes(dtype) + 3, n)).astype(dtype)
        y = exact(forward, x)[0].astype(dtype)
        given, _ = run(in_place(name), layout, dy, y)
        terms = np.abs(dy * y) if forward == "softmax" else np.abs(dy)
        factor = np.abs(y) if forward == "softmax" else np.exp(y)
        expected = exact_gradient(name, dy, y)
        assert_close(given, expected, np.abs(dy) + factor * terms.sum(1, keepdims=True), f"{n}")


@pytest.mark.parametrize("layout", ["rows", "columns", "split"])
@pytest.mark.parametrize("name", FORWARD)
def test_rows_longer_than_the_cache(name, layout, rng, sums):
    x = rng.normal(0, 3, (1, 1 << 20)).astype("float32")
    y, lse = exact(name, x)
    given, stats = run(in_place(name, sums), layout, x)
    assert_close(given, y, np.abs(y), "a million")
    if sums:
        assert_close(stats, lse, np.abs(lse), "a million: stats")


@pytest.mark.parametrize("layout", FORWARD_LAYOUTS)
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("inf_as_zero", [False, True])
def test_special_values_in_every_place(name, layout, inf_as_zero, dtype, sums):
    """NaN and +inf make their row NaN, wherever they stand; no other row notices."""
    for n in (1, 3, 17, 33, 70):
        for bad in (np.nan, np.inf, -np.inf, -1e-40):
            x = np.zeros((n + 1, n), dtype)
            np.fill_diagonal(x, bad)
            given, stats = run(in_place(name, sums), layout, x, inf_as_zero=inf_as_zero)
            y, lse = exact(name, x, inf_as_zero)
            assert_close(given, y, np.abs(y), f"{bad} in {n}")
            if sums:
                assert_close(stats, lse, np.abs(lse), f"{bad} in {n}: stats")


@pytest.mark.parametrize("layout", FORWARD_LAYOUTS)
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("inf_as_zero", [False, True])
def test_rows_of_minus_infinity(name, layout, inf_as_zero, dtype, sums):
    """They become NaN, or zeros where that is asked for, in any lane; a NaN among them wins."""
    lanes = vector_lanes(dtype)
    for n in (1, 2, 31, 65):
        x = np.zeros((2 * lanes + 1, n), dtype)
        x[::3] = -np.inf
        x[6, n // 2] = np.nan
        given, stats = run(in_place(name, sums), layout, x, inf_as_zero=inf_as_zero)
        y, lse = exact(name, x, inf_as_zero)
        zero = inf_as_zero and name == "softmax"
        assert (given[3] == 0).all() if zero else np.isnan(given[3]).all()
        assert np.isnan(given[6]).all()
        assert_close(given, y, np.abs(y), f"{n}")
        if sums:
            assert stats[3] == -np.inf
            assert_close(stats, lse, np.abs(lse), f"{n}: stats")
