"""Dropout and its gradient: the decisions, both ends of the ratio, and what onnxruntime-training 1.19.2 gave."""

import inspect

import numpy as np
import pytest

import opgrad
from opgrad.ops.reference.dropout import keep_mask

MASK = np.array([[1, 0, 1, 1]] * 3, bool)
NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), np.int32(-5), np.array([9])])
@pytest.mark.parametrize("shape", [(1000,), (3, 5, 7), (130, 1000)])
def test_decisions_are_philox_of_the_place_in_c_order(shape, seed):
    x = np.ones(shape, np.float32)
    y, mask = opgrad.dropout(x, 0.3, seed=seed)
    np.testing.assert_array_equal(mask, keep_mask(shape, 0.3, int(np.asarray(seed).reshape(())), 0))
    np.testing.assert_array_equal(y, np.where(mask, np.float32(1 / 0.7), 0))
    turned, _ = opgrad.dropout(np.asfortranarray(x), 0.3, seed=seed)
    np.testing.assert_array_equal(turned, y)


def test_nothing_is_dropped():
    x = np.array([NAN, INF, -0.0, 3], np.float32)
    for given in ({"ratio": 0.0}, {"training_mode": False}, {"ratio": 1.0, "training_mode": False}):
        y, mask = opgrad.dropout(x, **given, seed=1)
        assert y.tobytes() == x.tobytes()
        assert mask.all()
        dx = opgrad.dropout_grad(x, np.zeros(4, bool), **given)
        assert dx.tobytes() == x.tobytes()


def test_everything_is_dropped():
    x = np.array([NAN, INF, 0, 3], np.float32)
    y, mask = opgrad.dropout(x, 1.0, seed=1)
    np.testing.assert_array_equal(y, 0)
    assert not mask.any()
    np.testing.assert_array_equal(opgrad.dropout_grad(x, np.ones(4, bool) & mask, 1.0), 0)


def test_nan_and_infinity_are_dropped():
    dy = np.array([NAN, INF, NAN, -INF], np.float32)
    mask = np.array([False, False, True, True])
    for dx in (opgrad.dropout_grad(dy, mask, 0.5), opgrad.fake_quant_grad(dy, mask)):
        np.testing.assert_array_equal(dx, [0, 0, NAN, -INF])


@pytest.mark.parametrize(("given", "expected"), [({}, [4, 0, 4, 4]), ({"ratio": 0.25}, [8 / 3, 0, 8 / 3, 8 / 3])])
def test_agrees_with_the_original(given, expected):
    dx = opgrad.dropout_grad(np.full((3, 4), 2, np.float32), MASK, **given)
    np.testing.assert_allclose(dx, [expected] * 3, rtol=1e-7)


def test_seeds_share_a_plan():
    x = np.ones(64, np.float32)
    opgrad.dropout(x, 0.125, seed=0)
    runners = inspect.getclosurevars(opgrad.dropout._python).nonlocals["runners"].values
    before = len(runners)
    for seed in range(1, 10):
        opgrad.dropout(x, 0.125, seed=seed)
    assert len(runners) == before
