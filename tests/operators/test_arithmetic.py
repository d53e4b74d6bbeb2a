"""Sums, quotients, shapes and lists of arrays: against NumPy, finite differences and facts of the original."""

import numpy as np
import pytest
from accuracy import check_slopes
from onnx_models import one_node, run

import opgrad
from opgrad.cli.examples.arguments import error_in_ulp, tolerance
from opgrad.contract import reference
from opgrad.contract.signature import MOST_DIMENSIONS

rng = np.random.default_rng(5)

# What onnxruntime-training 1.19.2 gives, axes from the last to the first.
BROADCAST = [
    ((2, 3, 4), (3, 1), [], [2, 0]),
    ((3, 1), (2, 3, 4), [2, 0], []),
    ((1, 1), (1, 1), [], []),
    ((5,), (), [], [0]),
    ((1, 5), (5,), [], [0]),
    ((4, 1, 1), (1, 1, 3), [2], [0]),
    ((0, 1), (1, 3), [1], [0]),
    ((2, 1, 4, 1), (3, 1, 5), [3, 1], [2, 0]),
    ((1, 3), (0, 3), [0], []),
]


@pytest.mark.parametrize("rank", [2, MOST_DIMENSIONS])
def test_quotients_of_as_many_dimensions_as_numpy_has(rank):
    """Beyond 32 dimensions some functions of NumPy 2 refuse what its arrays can have."""
    lead = (1,) * (rank - 2)
    dy, a, b = (np.ones((*lead, 2, 3), np.float32), np.full(3, 6, np.float32), np.full((*lead, 2, 1), 2, np.float32))
    da, db = opgrad.div_grad(dy, a, b)
    np.testing.assert_array_equal(da, np.full(3, 1, np.float32), strict=True)
    np.testing.assert_array_equal(db, np.full(b.shape, -4.5, np.float32), strict=True)


def test_a_result_of_more_dimensions_than_an_array_has():
    x, indices = np.ones((2,) + (1,) * (MOST_DIMENSIONS - 1), np.float32), np.zeros((1, 1), np.int64)
    most = MOST_DIMENSIONS
    with pytest.raises(ValueError, match=f"^gather: y has {most + 1} dimensions, expected at most {most}$"):
        opgrad.gather(x, indices)


@pytest.mark.parametrize(("a", "b", "a_axes", "b_axes"), BROADCAST)
def test_broadcast_axes_as_in_the_original(a, b, a_axes, b_axes):
    for given in ((a, b), (np.array(a, np.int64), np.array(b, np.int32)), (list(a), list(b))):
        found = opgrad.broadcast_gradient_args(*given)
        assert [each.tolist() for each in found] == [a_axes, b_axes]
        assert all(each.dtype == np.int64 for each in found)


def test_arrays_of_one_shape_with_other_numbers_are_another_call():
    for axis in (0, 1):
        x = np.ones((2, 3), np.float32)
        assert opgrad.reduce_sum_training(x, np.array([axis])).shape == ((1, 3), (2, 1))[axis]
        assert opgrad.reduce_sum_training(x, axes=[axis]).shape == ((1, 3), (2, 1))[axis]


@pytest.mark.parametrize("shape", [(300000,), (5, 70000), (70000, 5), (3000, 40, 2), (2, 5000, 130), (17, 3, 900, 11)])
def test_large_sums(shape):
    x = rng.normal(1, 1, shape).astype(np.float32)
    for axes in ((0,), (-1,), (), tuple(range(0, len(shape), 2))):
        exact = reference("reduce_sum_training")(x.astype(np.float64), axes)
        found = opgrad.reduce_sum_training(x, axes)
        assert found.shape == exact.shape
        assert error_in_ulp(found, exact) <= tolerance("float32", x.size)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_are_exact_and_wrap_around(dtype):
    x = np.array([[np.iinfo(dtype).max, 1], [2, -5]], dtype)
    assert opgrad.reduce_sum_training(x, (1,), keepdims=False).tolist() == [np.iinfo(dtype).min, -3]
    large = rng.integers(-(2**30), 2**30, (40, 50, 60)).astype(dtype)
    np.testing.assert_array_equal(opgrad.reduce_sum_training(large, (0, 2)), large.sum((0, 2), dtype, keepdims=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sums_of_what_is_not_finite(value):
    x = np.ones((3, 40), np.float32)
    x[1, 33] = value
    for axes in ((0,), (1,), ()):
        np.testing.assert_array_equal(opgrad.reduce_sum_training(x, axes), x.sum(axes or None, keepdims=True))


@pytest.mark.parametrize(("a", "b"), [((2, 3), (2, 3)), ((2, 3), (3,)), ((), (2, 2)), ((2, 1), (1, 3))])
def test_div_grad_reference_is_the_derivative(a, b, rng):
    given = {"a": rng.normal(size=a), "b": rng.uniform(1, 2, b)}
    dy = rng.normal(size=np.broadcast_shapes(a, b))
    found = dict(zip("ab", reference("div_grad")(dy, **given), strict=True))
    check_slopes(lambda a, b: (dy * a / b).sum(), given, found, rng)


@pytest.mark.parametrize(("a", "b"), [((3000, 130), (130,)), ((3000, 1), (3000, 130)), ((7, 1, 90, 1), (30, 1, 50))])
def test_large_quotients(a, b):
    dy, a, b = (rng.uniform(0.5, 2, each).astype(np.float32) for each in (np.broadcast_shapes(a, b), a, b))
    exact = reference("div_grad")(*map(np.float64, (dy, a, b)))
    for found, wanted in zip(opgrad.div_grad(dy, a, b), exact, strict=True):
        assert error_in_ulp(found, wanted) <= tolerance("float32", dy.size)


def test_zero_divisors_and_what_is_not_a_number():
    dy, a, b = np.ones(4, np.float32), np.array([1, 0, np.nan, 1], np.float32), np.array([0, 0, 1, 2], np.float32)
    da, db = opgrad.div_grad(dy, a, b)
    np.testing.assert_array_equal(da, [np.inf, np.inf, 1, 0.5])
    np.testing.assert_array_equal(db, [-np.inf, np.nan, np.nan, -0.25])


def test_zeros_even_of_what_is_not_a_number():
    x = np.full(70, np.nan, np.float32)
    assert not opgrad.zero_gradient(x, np.array([True])).any()
    opgrad.zero_gradient(x, np.array([True]), out=x)
    assert not x.any()


def test_clipping_scales_to_the_norm_and_spreads_nan():
    clipped = opgrad.clip_grad_norm([np.full(9, 4, np.float32), np.full(7, 4, np.float32)], max_norm=2.0)
    assert float(opgrad.reduce_all_l2(clipped)) == pytest.approx(2.0, rel=1e-6)
    assert all(np.isnan(each).all() for each in opgrad.clip_grad_norm([np.array([np.nan, 1.0]), np.ones(3)]))


def test_the_norm_of_large_numbers_does_not_overflow():
    assert float(opgrad.reduce_all_l2([np.full(4, 1e30, np.float32)])) == pytest.approx(2e30)
    assert float(opgrad.reduce_all_l2([np.full(4, 60000, np.float16)])) == pytest.approx(1.2e5, rel=1e-3)


def test_arrays_of_other_libraries_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(NotImplementedError, match=r"^reduce_all_l2: no kernel for other arrays than NumPy's"):
        opgrad.reduce_all_l2([torch.ones(3)])


def test_hundreds_of_inputs_of_a_node():
    names = [f"array{i}" for i in range(400)]
    feeds = {name: np.full((2, 3, 1), i, np.float32) for i, name in enumerate(names)}
    (norm,) = run(one_node("ReduceAllL2", [(name, "float32") for name in names], [("norm", "float32")]), feeds)
    assert float(norm) == pytest.approx(np.sqrt(6 * np.sum(np.square(np.arange(400.0)))), rel=1e-6)
    many = {"array0": np.ones((1,) * 9, np.float32)}
    with pytest.raises(Exception, match="has 9 dimensions, expected at most 8"):
        run(one_node("ReduceAllL2", [(name, "float32") for name in names], [("norm", "float32")]), feeds | many)


def test_a_split_that_does_not_fit_the_node():
    x, split = np.ones((3, 2), np.float32), np.array([1, 2])
    inputs = [("x", "float32"), ("split", "int64")]
    with pytest.raises(Exception, match="split has 2 entries, expected 1, one for each result"):
        run(one_node("SplitTraining", inputs, [("piece", "float32")]), {"x": x, "split": split})
    with pytest.raises(Exception, match="expected sizes of at least 0 that add up to 3"):
        run(one_node("SplitTraining", inputs, [("a", "float32"), ("b", "float32")]), {"x": x, "split": split + 1})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_long_rows_are_copied_past_the_cache_bit_by_bit(monkeypatch, dtype):
    """Rows that start anywhere, signalling NaN among them; rows of no whole words are copied as any other."""
    monkeypatch.setattr("opgrad.cpu.runtime.plan.streams", lambda size: True)
    size, split = np.dtype(dtype).itemsize, (601, 1200, 0, 3)
    memory = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 256, 5 * 1804 * size + size, np.uint8)
    if dtype == np.float32:
        memory[: 400 * size] = np.tile(np.array([1, 0, 0xA0, 0x7F], np.uint8), 400)
    x = memory[size:].view(dtype).reshape(5, 1804)
    pieces = opgrad.split_training(x, split, axis=1)
    expected = np.split(x, np.cumsum(split)[:-1], axis=1)
    assert [each.tobytes() for each in pieces] == [each.tobytes() for each in expected]
    out = np.empty_like(memory)[size:].view(dtype).reshape(5, 1804), np.empty(4, np.int64)
    joined, _ = opgrad.concat_training(pieces, axis=1, out=out)
    assert joined.tobytes() == x.tobytes()
