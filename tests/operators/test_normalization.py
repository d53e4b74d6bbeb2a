"""Normalization: references against finite differences and facts of the original, special values, large shapes."""

import numpy as np
import pytest

import opgrad
from opgrad.cli.examples.arguments import error_in_ulp, tolerance
from opgrad.contract import reference

rng = np.random.default_rng(3)


def test_batch_norm_as_the_original_computes_it():
    """Numbers of onnxruntime-training 1.19.2: the variance is divided by the count in the running one, too."""
    x = np.array([[[1, 2], [4, 8]], [[3, 6], [0, 2]]], np.float32)
    one = np.ones(2, np.float32)
    y, new_mean, new_var, mean, inv_std = opgrad.batch_norm_internal(
        x, one, 0 * one, 0 * one, one, epsilon=0.5, momentum=0.75
    )
    np.testing.assert_array_equal(mean, [3, 3.5])
    np.testing.assert_array_equal(new_mean, [0.75, 0.875])
    np.testing.assert_array_equal(new_var, [0.75 + 3.5 / 4, 0.75 + 8.75 / 4])
    np.testing.assert_allclose(inv_std, [0.5, 9.25**-0.5], rtol=1e-7)
    np.testing.assert_allclose(y[0, 0], [-1, -0.5], rtol=1e-7)


def test_inference_uses_the_running_statistics():
    x = rng.normal(size=(5, 3, 7)).astype(np.float32)
    scale, bias, mean, var = (rng.uniform(0.5, 2, 3).astype(np.float32) for _ in range(4))
    y, *statistics = opgrad.batch_norm_internal(x, scale, bias, mean, var, training_mode=False)
    for found, wanted in zip(statistics, (mean, var, mean, 1 / np.sqrt(var + 1e-5)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    exact = (x - mean[:, None]) / np.sqrt(var + 1e-5)[:, None] * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_an_empty_batch_leaves_the_running_statistics():
    one, var = np.ones(3, np.float32), np.full(3, 2, np.float32)
    y, new_mean, new_var, mean, inv_std = opgrad.batch_norm_internal(np.empty((0, 3, 4), "f"), one, one, one, var, 0.25)
    assert y.shape == (0, 3, 4)
    assert (new_mean == 1).all()
    assert (new_var == 2).all()
    assert (mean == 0).all()
    assert (inv_std == 2).all()
    dx, dscale, dbias = opgrad.batch_normalization_grad(y, y, one, mean, inv_std)
    assert dx.shape == y.shape
    assert not dscale.any()
    assert not dbias.any()


LARGE_ROWS = [(5000, 70), (1100, 900), (40, 40000), (3, 300000), (200000, 9)]


@pytest.mark.parametrize("shape", LARGE_ROWS, ids=str)
def test_large_rows(shape):
    x, dy = rng.normal(3, 1, shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    scale = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    found = opgrad.layer_normalization(x, scale)
    check(found, reference("layer_normalization")(*map(np.float64, (x, scale))), max(shape))
    _, mean, inv_std = found
    grads = opgrad.layer_normalization_grad(dy, x, scale, mean, inv_std)
    check(grads, reference("layer_normalization_grad")(*map(np.float64, (dy, x, scale, mean, inv_std))), max(shape))


LARGE_CHANNELS = [(20000, 30), (3000, 40, 5), (64, 40, 20, 20), (40, 5, 60, 70), (2, 2, 400, 500), (70000, 3, 2)]


@pytest.mark.parametrize("shape", LARGE_CHANNELS, ids=str)
def test_large_channels(shape):
    x, dy = rng.normal(3, 1, shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    scale, bias, mean, var = (rng.uniform(0.5, 2, shape[1]).astype(np.float32) for _ in range(4))
    terms = x.size // shape[1]
    found = opgrad.batch_norm_internal(x, scale, bias, mean, var)
    check(found, reference("batch_norm_internal")(*map(np.float64, (x, scale, bias, mean, var))), terms)
    *_, mean, inv_std = found
    grads = opgrad.batch_normalization_grad(dy, x, scale, mean, inv_std)
    check(grads, reference("batch_normalization_grad")(*map(np.float64, (dy, x, scale, mean, inv_std))), terms)


def check(found, exact, terms):
    for array, wanted in zip(found, exact, strict=True):
        assert error_in_ulp(array, wanted) <= tolerance(array.dtype.name, terms)


@pytest.mark.parametrize("shape", [(4, 100), (3, 5), (2, 20, 30)], ids=str)
def test_a_mean_far_from_zero_costs_no_digits(shape):
    """Squares are summed around the mean: numbers around 1000 that differ by 1 keep their variance."""
    x = rng.integers(-2, 3, shape).astype(np.float32) + 1000
    scale = np.ones(shape[-1], np.float32)
    exact = reference("layer_normalization")(x.astype(np.float64), scale.astype(np.float64))
    for array, wanted in zip(opgrad.layer_normalization(x, scale), exact, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-4)
    one = np.ones(shape[1], np.float32)
    exact = reference("batch_norm_internal")(*map(np.float64, (x, one, one, one, one)))
    for array, wanted in zip(opgrad.batch_norm_internal(x, one, one, one, one), exact, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_in_its_row_or_channel(value):
    x = rng.normal(size=(4, 50)).astype(np.float32)
    x[1, 37] = value
    y, _, _ = opgrad.layer_normalization(x, np.ones(50, np.float32))
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2, 3]]).all()
    x = rng.normal(size=(4, 3, 40)).astype(np.float32)
    x[2, 1, 39] = value
    one = np.ones(3, np.float32)
    y, *_ = opgrad.batch_norm_internal(x, one, one, one, one)
    assert np.isnan(y[:, 1]).all()
    assert np.isfinite(y[:, [0, 2]]).all()


def test_a_row_of_one_element_has_no_gradient():
    x, dy, one = rng.normal(size=(5, 1)), rng.normal(size=(5, 1)), np.ones(1)
    _, mean, inv_std = opgrad.layer_normalization(x, one)
    assert not opgrad.layer_normalization_grad(dy, x, one, mean, inv_std)[0].any()


def test_statistics_are_float32_for_half_precision():
    for dtype, wanted in (("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        results = opgrad.layer_normalization(np.ones((2, 3), dtype), np.ones(3, dtype))
        assert [each.dtype.name for each in results] == [dtype, wanted, wanted]


def test_statistics_in_any_dtype():
    x, dy = (rng.normal(size=(6, 40)).astype(np.float16) for _ in range(2))
    scale = np.ones(40, np.float16)
    _, mean, inv_std = opgrad.layer_normalization(x, scale)
    wide = opgrad.layer_normalization_grad(dy, x, scale, mean.astype(np.float64), inv_std.astype(np.float64))
    for array, other in zip(opgrad.layer_normalization_grad(dy, x, scale, mean, inv_std), wide, strict=True):
        np.testing.assert_allclose(array, other, rtol=2e-3, atol=1e-3)
