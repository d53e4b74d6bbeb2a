"""Softmax and log-softmax within 4 ulp of the exact value, whatever the row looks like, in every layout."""

import itertools

import numpy as np
import pytest
from samples import cast

import opgrad

# Of float64 the sum over a vector's lanes, and its inverse, have no wider arithmetic to go to.
LIMITS = {"float32": 4.0, "float64": 6.0}
WIDER = {"float32": np.float64, "float64": np.longdouble}
NAMES = ["softmax", "log_softmax"]
LAYOUTS = ["rows", "columns", "interleaved"]  # of which short rows are tiles, and few long rows are split
LENGTHS = [1, 2, 3, 5, 8, 17, 33, 47, 48, 49, 64, 95, 96, 97, 130, 1000, 4097]
names = pytest.mark.parametrize("name", NAMES)
# How far one entry is above the others, and how far all are below 0.
HEIGHTS = [*itertools.product((1, 5, 12, 17, 20, 40, 80, 87, 90, 100, 104), (0, 80))]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    if np.finfo(WIDER[request.param]).nmant <= np.finfo(request.param).nmant:
        pytest.skip("no wider floating dtype here to compare with")
    return request.param


def exact(x, wider):
    """Softmax and log-softmax in wider arithmetic; the largest elements apart, so that no digit of 1 + tiny is lost."""
    x = x.astype(wider)
    d = x - x.max(1, keepdims=True)
    largest = d == 0
    rest = np.where(largest, 0, np.exp(d)).sum(1, keepdims=True)
    others = largest.sum(1, keepdims=True) - 1
    return {"softmax": np.exp(d) / (rest + others + 1), "log_softmax": d - np.log1p(rest + others)}


def unit(values, dtype):
    """The distance of neighbouring numbers of the dtype at these values, at least the smallest denormal."""
    info = np.finfo(dtype)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.abs(values))
    smallest = info.minexp - info.nmant
    return np.ldexp(np.ones_like(values), np.maximum(exponent - 1 - info.nmant, smallest))


def computed(name, x, layout):
    """The operator on rows x in a layout."""
    function = getattr(opgrad, name)
    if layout == "rows":
        return function(x, axis=1)
    if layout == "columns":
        return function(np.ascontiguousarray(x.T), axis=0).T
    pairs = max(8, -(-len(x) // 2))
    several = np.resize(x, (2 * pairs, x.shape[1])).reshape(pairs, 2, -1).swapaxes(1, 2)
    return function(np.ascontiguousarray(several), axis=1).swapaxes(1, 2).reshape(2 * pairs, -1)[: len(x)]


def check(name, x, note):
    """Hold the operator on rows x, in every layout, against its limit."""
    expected = exact(x, WIDER[x.dtype.name])[name]
    finite = np.isfinite(expected)
    ulp = unit(expected[finite], x.dtype)
    for layout in LAYOUTS:
        given = computed(name, x, layout).astype(expected.dtype)
        np.testing.assert_array_equal(given[~finite], expected[~finite])
        found = np.zeros(x.shape)
        found[finite] = np.abs(given[finite] - expected[finite]) / ulp
        row = np.argmax(found.max(1))
        assert found[row].max() <= LIMITS[x.dtype.name], f"{layout}, {note}, row {row}: {found[row].max():.3f} ulp"


def rows_for(n):
    return max(3, min(300, 60_000 // n))


def normal(rng, n, sizes):
    """Rows whose numbers have these deviations, one after the other."""
    return rng.normal(0, np.resize(sizes, (rows_for(n), 1)), (rows_for(n), n))


def one_dominant(rng, n):
    rows = max(rows_for(n), 2 * len(HEIGHTS))
    above, below = np.resize(HEIGHTS, (rows, 2)).T
    x = rng.normal(0, 1, (rows, n))
    x[:, n // 2] = above + rng.normal(0, 3, rows)
    return [x - below[:, None]]


def two_values(rng, n):
    """Equal terms are all rounded the same way, so that their errors add up."""
    x = np.broadcast_to(-rng.uniform(0, 100, (rows_for(n), 1)), (rows_for(n), n)).copy()
    x[:, -1] = rng.uniform(0, 20, len(x))
    return [x]


def tiny(rng, n):
    """Alone, beside a large number, and beside one far below."""
    x = rng.normal(0, 1e-3, (rows_for(n), n)) * np.exp2(rng.integers(-100, 0, (rows_for(n), n)))
    large = rng.uniform(1, 90, (len(x), 1))
    return [x, *(np.concatenate([first, x[:, 1:]], 1) for first in (large, -large))]


def equal(rng, n):
    return [np.broadcast_to(rng.normal(0, 100, (rows_for(n), 1)), (rows_for(n), n))]


@names
@pytest.mark.parametrize("offset", [0, -300, 90, 255, -256, 5000, -1e6])
def test_random_logits(name, offset, dtype, rng):
    for n in LENGTHS:
        check(name, (normal(rng, n, [0.1, 1, 4, 40]) + offset).astype(dtype), f"{n}")


@names
@pytest.mark.parametrize("kind", [one_dominant, two_values, tiny, equal], ids=lambda kind: kind.__name__)
def test_rows_of_one_kind(name, kind, dtype, rng):
    for n in LENGTHS:
        for number, x in enumerate(kind(rng, n)):
            check(name, x.astype(dtype), f"{n}, {number}")


@names
@pytest.mark.parametrize("n", [65_536, 150_000])
def test_long_rows(name, n, dtype, rng):
    rows = [  # two arrays of so few rows that each is split
        rng.normal(0, 3, n),
        rng.standard_cauchy(n),
        rng.pareto(1.5, n),
        np.full(n, rng.normal(0, 30)),
        rng.normal(0, 3, n) + 1000,
        np.where(np.arange(n) == 7, 0, rng.normal(0, 1, n) - 80),
        np.where(np.arange(n) == n - 1, 11, rng.normal(0, 1, n)),
        np.where(np.arange(n) % 2, -np.inf, rng.normal(0, 1, n)),
    ]
    for first in (0, 4):
        check(name, np.array(rows[first : first + 4]).astype(dtype), f"{n}, from {first}")


@pytest.mark.parametrize("scale", [1, 0.5], ids=["alone", "with attributes"])
@pytest.mark.parametrize(("accumulation", "ulp"), [("strict", 2), ("any", 4)])
def test_accumulation(accumulation, ulp, scale, rng):
    """All digits of the sums are kept, or most of them; so they are beside other attributes."""
    for n in (3, 64, 130, 1000, 70_000):
        x = (rng.normal(0, 4, (rows_for(n), n)) + 90).astype(np.float32)
        expected = exact(x, np.float64)["softmax"]
        if scale == 1:
            y = opgrad.softmax(x, accumulation=accumulation)
        else:
            given = {"logit_scale": scale, "where": np.ones(x.shape, bool), "stats": True}
            y, _ = opgrad.softmax(x / np.float32(scale), accumulation=accumulation, **given)
        assert np.max(np.abs(y - expected) / unit(expected, np.float32)) <= ulp, n


def test_largest_probability_is_1(dtype):
    """Where nothing else counts it is 1, not a neighbour of 1, and its logarithm what the others leave."""
    for n in (1, 2, 33, 100, 5000):
        x = np.full((5, n), -np.inf, dtype)
        x[:, 0] = [0.3, -7.7, 88.1, 300.3, -1e6]
        assert opgrad.softmax(x)[:, 0].tolist() == opgrad.softmax(x, logit_scale=0.5)[:, 0].tolist() == [1] * 5
        assert opgrad.log_softmax(x)[:, 0].tolist() == [0] * 5
        assert (opgrad.softmax(np.ascontiguousarray(x.T), axis=0)[0] == 1).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@names
@pytest.mark.one_in(2)
def test_results_of_16_bits(name, dtype, rng):
    """Within 1 ulp of the dtype."""
    digits, least = {"float16": (10, -14), "bfloat16": (7, -126)}[dtype]
    for n in [*LENGTHS, 65_536]:
        x = cast(normal(rng, n, [0.1, 4, 40]), dtype)
        expected = exact(x.astype(np.float64), np.float64)[name]
        _, exponent = np.frexp(np.abs(expected))
        ulp = np.ldexp(1.0, np.maximum(exponent - 1, least) - digits)
        for layout in LAYOUTS:
            given = computed(name, x, layout).astype(np.float64)
            assert (np.abs(given - expected) <= ulp).all(), f"{layout}, {n}"
