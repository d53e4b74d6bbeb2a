"""Sums, quotients and shapes: against NumPy, finite differences and facts of the original."""

import numpy as np
import pytest
from accuracy import differences

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
def test_div_grad_reference_is_the_derivative(a, b):
    a, b = rng.normal(size=a), rng.uniform(1, 2, b)
    dy = rng.normal(size=np.broadcast_shapes(a.shape, b.shape))
    da, db = reference("div_grad")(dy, a, b)
    np.testing.assert_allclose(da, differences(lambda moved: moved / b, a, dy), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(db, differences(lambda moved: a / moved, b, dy), rtol=1e-6, atol=1e-8)


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


X = np.ones((2, 3), np.float32)
MISTAKES = [
    ("reduce_sum_training", (X, (2,)), "axes is (2,), expected -2 to 1 for an array of 2 dimensions"),
    ("reduce_sum_training", (np.float32(1), (0,)), "axes is (0,), expected no axes for an array of 0 dimensions"),
    ("reduce_sum_training", (X, (1.5,)), "axes is 1.5, expected an int"),
    ("reduce_sum_training", (X, (0,), 1), "keepdims is 1, expected a bool"),
    ("reduce_sum_training", (X.astype("uint8"), (0,)), "x has dtype uint8, expected one of float32"),
    ("div_grad", (X, X, X[:, :2]), "b has shape (2, 2), expected one that is broadcast with (2, 3), the shape of a"),
    ("div_grad", (X[:1], X, X), "dy has shape (1, 3), expected (2, 3), what a and b are broadcast to"),
    ("div_grad", (X, X.astype("float64"), X), "a has dtype float64, expected float32, the dtype of dy"),
    ("broadcast_gradient_args", ((2,), (3,)), "b_shape is (3,), expected one that is broadcast with (2,), a_shape"),
    ("broadcast_gradient_args", ((2, -1), (3,)), "a_shape is (2, -1), expected sizes of at least 0"),
    ("broadcast_gradient_args", (2, (3,)), "a_shape is 2, expected a tuple of ints"),
    ("zero_gradient", (X, None), "unused is None, expected an array"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISTAKES)
def test_mistakes(name, arguments, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(opgrad, name)(*arguments)
    assert str(caught.value).startswith(f"{name}: {message}")
