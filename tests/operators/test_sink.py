"""Softmax with a sink: as a longer softmax, at the limits."""

import numpy as np
import pytest

import opgrad


def given(rng, dtype, shape=(2, 3, 5, 70)):
    return (rng.normal(0, 3, size).astype(dtype) for size in (shape, shape[1:2], shape))


def test_it_is_the_softmax_of_one_score_more(rng):
    x, sink, _ = given(rng, "float64")
    beside = np.broadcast_to(sink[:, None, None], (*x.shape[:3], 1))
    whole = opgrad.softmax(np.concatenate([x, beside], -1))
    np.testing.assert_allclose(opgrad.sink_softmax(x, sink)[0], whole[..., :-1], rtol=1e-13)


def test_hidden_scores_and_threads(threads, rng):
    x, sink, dy = given(rng, "float32")
    x[0, 0, 0], x[:, 1, :, ::2], x[0, 2, 1], sink[2] = -np.inf, -np.inf, -np.inf, -np.inf
    y, lse = opgrad.sink_softmax(x, sink)
    assert (y[0, 0, 0] == 0).all()
    assert (y[0, 2, 1] == 0).all()
    assert lse[0, 0, 0] == pytest.approx(sink[0])
    assert lse[0, 2, 1] == -np.inf
    dx, dsink = threads(lambda: opgrad.sink_softmax_grad(dy, y, lse, sink))
    assert np.isfinite(dx).all()
    assert dsink[2] == 0
