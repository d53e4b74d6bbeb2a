"""Softmax with a bias before it, and the gradient of softmax with dropout behind it."""

import numpy as np
import pytest
from graph_cases import call, check_close

import opgrad
from opgrad.cli.examples import expected as reference
from opgrad.cli.examples.arguments import tolerance
from opgrad.ops import graph_operators

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("bias_shape", "axis", "inner"),
    [
        ((2, 1, 1, 5), 3, True),
        ((2, 3, 1, 5), -1, True),
        ((1, 1, 4, 5), 3, False),
        ((4, 5), -1, False),
        ((3, 4, 5), -1, False),
        ((5,), 3, True),
        ((5,), 3, False),
        ((1, 1, 1, 5), 3, True),
        ((2, 3, 4, 5), 3, True),
        ((2, 3, 4, 5), 3, False),
        ((2, 1, 4, 5), 2, True),
        ((3, 4, 5), 1, False),
    ],
)
def test_the_bias_repeats_as_it_broadcasts(bias_shape, axis, inner, rng):
    x, bias = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=bias_shape)
    axes = tuple(range(axis % 4, 4))
    expected = opgrad.softmax(x + bias, axes)
    np.testing.assert_allclose(opgrad.bias_softmax(x, bias, axis, inner), expected, rtol=1e-13)


def test_additive_masks():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    mask = np.array([[0, -INF, 0], [-INF, -INF, -INF]], np.float32)
    y = opgrad.bias_softmax(x, mask)
    np.testing.assert_allclose(y[0], [1 / (1 + np.e**2), 0, 1 / (1 + np.e**-2)], rtol=1e-6)
    assert np.isnan(y[1]).all()
    assert np.isnan(opgrad.bias_softmax(x, np.array([0, NAN, 0], np.float32))).all()


@pytest.mark.parametrize("shape", [(3, 100_000), (3000, 33), (40_000, 3), (700, 300)])
def test_many_rows_and_long_ones(shape, rng):
    x, bias = rng.normal(0, 3, shape).astype("f4"), rng.normal(size=shape[1]).astype("f4")
    op = graph_operators()["bias_softmax"]
    rounded = {"x": x + bias, "bias": np.zeros(shape[1])}
    check_close(call(op, {"x": x, "bias": bias}), reference(op, rounded), shape[1])


@pytest.mark.parametrize("shape", [(3, 100_000), (3000, 33), (40_000, 3), (700, 300)])
def test_gradients_of_many_rows_and_long_ones(shape, rng):
    """Held against the terms of the difference, which may cancel."""
    x, dy = rng.normal(0, 3, shape).astype("f4"), rng.normal(size=shape).astype("f4")
    mask, y = x > -1, opgrad.softmax(x)
    exact = graph_operators()["softmax_dropout_grad"].reference(dy.astype("f8"), mask, y.astype("f8"), 0.4)
    g = np.where(mask, np.abs(dy) / 0.6, 0)
    terms = y * (g + (y * g).sum(1, keepdims=True))
    error = np.abs(opgrad.softmax_dropout_grad(dy, mask, y, 0.4) - exact)
    assert np.all(error <= tolerance("float32", shape[1]) * np.finfo("f4").eps * terms)


def test_the_gradient_is_that_of_the_parts(rng):
    x, dy = rng.normal(size=(6, 50)), rng.normal(size=(6, 50))
    y = opgrad.softmax(x)
    _, mask = opgrad.dropout(y, 0.1, seed=3)
    expected = opgrad.softmax_grad(opgrad.dropout_grad(dy, mask, 0.1), y)
    np.testing.assert_allclose(opgrad.softmax_dropout_grad(dy, mask, y, 0.1), expected, rtol=1e-12, atol=1e-16)


def test_what_was_dropped_counts_for_nothing():
    dy, y = np.array([[NAN, 1, INF]], np.float32), np.array([[0.5, 0.25, 0.25]], np.float32)
    dx = opgrad.softmax_dropout_grad(dy, np.array([[False, True, False]]), y, 0.5)
    np.testing.assert_array_equal(dx, [[-0.25, 0.375, -0.125]])
    np.testing.assert_array_equal(opgrad.softmax_dropout_grad(dy, np.zeros((1, 3), bool), y, 1.0), 0)
