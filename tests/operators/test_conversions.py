"""What kernels read and write: every storage type, every code, every lane."""

import ml_dtypes
import numpy as np
import pytest
from guards import Placed
from tasks import run_task

from opgrad.cpu.compiler import decorators
from opgrad.cpu.compiler.decorators import kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    at_byte,
    first,
    lanes,
    load,
    load_masked,
    load_one,
    store,
    store_masked,
    store_one,
    store_streaming,
)

# Signalling NaN and overflow are among the numbers here.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SMALL = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
WHOLE = {"int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8), "int32_number": np.dtype(np.int32)}
DTYPES = {**SMALL, **WHOLE, "bool": np.dtype(np.bool_)}
PRECISIONS = ["float32", "float64"]


@kernel
def by_vectors(n, x: Pointer, y: Pointer):
    w, i = lanes(x), 0
    while i + w <= n:
        store(y, i, load(x, i))
        i += w
    if i < n:
        mask = first(x, n - i)
        store_masked(y, i, load_masked(x, i, mask, 1.0), mask)


@kernel
def by_masks(n, x: Pointer, y: Pointer):
    """The first n lanes of one vector."""
    mask = first(x, n)
    store_masked(y, 0, load_masked(x, 0, mask, 1.0), mask)


@kernel
def by_ones(n, x: Pointer, y: Pointer):
    for i in range(n):
        store_one(y, i, load_one(x, i))


@kernel
def by_streams(n, x: Pointer, y: Pointer):
    w = lanes(x)
    for i in range(n // w):
        store_streaming(y, i * w, load(x, i * w))


@kernel
def moved(offset, x: Pointer, y: Pointer):
    store_one(y, 0, load_one(at_byte(x, offset), 0))


def run(made, dtypes, n, x, y):
    task = made.task(dtypes)
    run_task(task, [n, x.ctypes.data, y.ctypes.data])


def converted(x, source, target, made=by_vectors):
    """x, of storage `source`, read and written as `target`."""
    placed = Placed(x.shape, DTYPES.get(target, target))
    run(made, [source, target], x.size, x, placed.array)
    assert placed.untouched()
    return placed.array


def bits(a):
    return np.asarray(a).view(f"u{np.asarray(a).itemsize}")


def assert_same(given, expected):
    """The same bits; any NaN for a NaN."""
    is_nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(given.astype(np.float64)), is_nan)
    np.testing.assert_array_equal(bits(given)[~is_nan], bits(expected)[~is_nan])


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("made", [by_vectors, by_ones], ids=["vectors", "ones"])
def test_every_code_is_read(storage, precision, made):
    kind = DTYPES[storage]
    if kind.itemsize == 4:
        codes = np.random.default_rng(0).integers(-(2**31), 2**31, 10_000).astype(np.int32)
        codes[:6] = [0, 1, -1, 2**31 - 1, -(2**31), 2**24 + 1]
    else:
        codes = np.arange(1 << (8 * kind.itemsize), dtype=f"u{kind.itemsize}")
    x = codes.view(np.uint8) != 0 if storage == "bool" else codes.view(kind)
    assert_same(converted(codes, storage, precision, made), x.astype(precision))


# --- writing -------------------------------------------------------------------------------------------------------


def grid(kind):
    """Every finite number of a small float, and the middles between neighbours."""
    codes = np.arange(1 << (8 * kind.itemsize - 1), dtype=f"u{kind.itemsize}").view(kind).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    largest = codes[-1] + (codes[-1] - codes[-2])
    whole = np.append(codes, largest)
    return np.concatenate([whole, (whole[1:] + whole[:-1]) / 2])


def around(points, dtype):
    """Points, their neighbours in `dtype`, and the negatives of all."""
    points = points.astype(dtype)
    near = np.concatenate([points, np.nextafter(points, dtype(np.inf)), np.nextafter(points, dtype(-np.inf))])
    info = np.finfo(dtype)
    special = [0, np.inf, np.nan, info.max, info.smallest_subnormal, info.smallest_normal]
    near = np.concatenate([near, np.array(special, dtype)])
    return np.concatenate([near, -near])


def random_bits(dtype, count=1_000_000):
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(1).integers(0, 1 << (8 * size), count, np.dtype(f"u{size}")).view(dtype)


@pytest.mark.parametrize("storage", SMALL)
def test_float32_is_rounded_to_small_floats(storage):
    kind = SMALL[storage]
    x = np.concatenate([around(grid(kind), np.float32), random_bits(np.float32), np.linspace(-500, 500, 200_001)])
    x = x.astype(np.float32)
    assert_same(converted(x, "float32", storage), x.astype(kind))


def rounded(x, kind):
    """float64 to the nearest number of `kind`, ties to even, found among all of them."""
    codes = np.arange(1 << (8 * kind.itemsize - 1), dtype=f"u{kind.itemsize}")
    values = codes.view(kind).astype(np.float64)
    finite = int(np.isfinite(values).sum())
    values = np.append(values[:finite], 2 * values[finite - 1] - values[finite - 2])  # what stands for too large
    magnitude = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, magnitude).clip(1, finite)
    below = above - 1
    middle = (values[above] + values[below]) / 2  # exact: it has one bit more
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, below).astype(codes.dtype)
    nan = bits(np.array(np.nan, kind)) & (codes.size - 1)
    code = np.where(np.isnan(x), nan, code) | (np.signbit(x).astype(codes.dtype) << (8 * kind.itemsize - 1))
    return code.astype(codes.dtype).view(kind)


@pytest.mark.parametrize("storage", SMALL)
def test_float64_is_rounded_once(storage):
    kind = SMALL[storage]
    points = grid(kind)
    exponents = np.random.default_rng(2).uniform(-180, 140, 100_000)
    x = np.concatenate([around(points, np.float64), random_bits(np.float64, 200_000), np.exp2(exponents)])
    assert_same(converted(x, "float64", storage), rounded(x, kind))
    # The nearest float32 lies on the middle between two numbers of the small type, which x itself does not.
    middles = points[points.size // 2 + 1 :]
    x = np.concatenate([middles * (1 + 2.0**-40), middles * (1 - 2.0**-40)])
    assert_same(converted(x, "float64", storage), rounded(x, kind))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("storage", WHOLE)
def test_integers_are_rounded_half_to_even_and_saturate(storage, precision):
    kind, dtype = WHOLE[storage], np.dtype(precision).type
    info = np.iinfo(kind)
    halves = np.arange(-600, 600) / 2
    ends = np.array([info.min, info.max, 0], np.float64)[:, None] + np.arange(-5, 6) / 2
    x = np.concatenate([around(halves, dtype), around(ends.ravel(), dtype), random_bits(dtype, 200_000)])
    x = np.concatenate([x, np.random.default_rng(3).uniform(-(2.0**32), 2.0**32, 20_000).astype(dtype)])
    expected = np.clip(np.rint(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)), *ends[:2, 5])
    np.testing.assert_array_equal(converted(x, precision, storage), expected.astype(np.int64).astype(kind))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_booleans_are_what_is_not_zero(precision):
    x = np.array([0, -0.0, 1, -1, 0.1, 1e-320, np.nan, np.inf, 256] * 9).astype(precision)
    y = converted(x, precision, "bool")
    np.testing.assert_array_equal(y, x != 0)
    assert set(bits(y)) == {0, 1}


# --- lanes, tails, addresses ---------------------------------------------------------------------------------------


def expected_of(x, storage):
    return x.astype(DTYPES[storage]) if storage in SMALL or storage == "bool" else np.rint(x).astype(DTYPES[storage])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("storage", DTYPES)
def test_every_lane_and_tail(storage, precision):
    values = np.random.default_rng(4).uniform(0, 100, 200).astype(precision)
    width = decorators.vector_lanes(precision)
    for n in range(width + 1):
        x = values[n : n + n]
        np.testing.assert_array_equal(bits(converted(x, precision, storage, by_masks)), bits(expected_of(x, storage)))
        back = converted(expected_of(x, storage), storage, precision, by_masks)
        np.testing.assert_array_equal(back, expected_of(x, storage).astype(precision))
    for n in (1, width - 1, width + 1, 3 * width + 5):
        x = values[:n]
        for made in (by_vectors, by_ones):
            np.testing.assert_array_equal(bits(converted(x, precision, storage, made)), bits(expected_of(x, storage)))
    x = values[: 4 * width]
    np.testing.assert_array_equal(bits(converted(x, precision, storage, by_streams)), bits(expected_of(x, storage)))


def test_at_byte_moves_by_bytes():
    x, y = np.arange(8, dtype=np.float32), np.zeros(1, np.float32)
    for offset in range(0, 32, 4):
        run(moved, ["float32", "float32"], offset, x, y)
        assert y[0] == offset // 4
