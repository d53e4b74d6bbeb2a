"""The losses with options, by samples: the reference by finite differences, the CPU's kernels by the reference."""

import itertools
import re

import numpy as np
import pytest
import sample_losses as cases
from accuracy import check_slopes
from guards import Placed
from sample_losses import LOSSES, OPTIONS, UPSTREAM, WITH_GRADIENT

import opgrad
from opgrad.call import losses as sample_loss
from opgrad.call.arrays import public_function
from opgrad.contract import FLOATS

ROWS, COLUMNS = (17, 131), (3, 21, 2, 17)


def run(op, given):
    return public_function(op.name)(**cases.of(op, given))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradient_of_the_reference(options, rng):
    """Of the sum of each result, and of the square of lse, times its gradient, in float64."""
    given = cases.arguments((3, 4, 2), "float64", rng, **options | {"upstream": True})

    def total(logits):
        loss, lse, log_prob, entropy, _ = LOSSES.reference(**cases.of(LOSSES, given) | {"logits": logits})
        return sum((given[name] * each).sum() for name, each in zip(UPSTREAM, (loss, lse, lse**2, log_prob, entropy)))  # noqa: B905

    *_, dlogits = WITH_GRADIENT.reference(**cases.of(WITH_GRADIENT, given))
    check_slopes(total, {"logits": given["logits"]}, {"logits": dlogits}, rng)


@pytest.mark.parametrize("shape", [ROWS, COLUMNS], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.one_in(2)
def test_kernels(options, shape, rng):
    for dtype in FLOATS if shape is ROWS and not options else ("float32",):
        given = cases.arguments(shape, dtype, rng, **options)
        cases.check(WITH_GRADIENT, cases.of(WITH_GRADIENT, given), run(WITH_GRADIENT, given))
        if dtype == "float32":
            cases.check(LOSSES, cases.of(LOSSES, given), run(LOSSES, given))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 31, 32, 33, 64, 2049, 70001])
def test_lengths_of_rows(length, rng):
    given = cases.arguments((2, length), "float32", rng, **OPTIONS["smoothed"] | {"ignore_index": None})
    cases.check(WITH_GRADIENT, given, run(WITH_GRADIENT, given))


def test_results_lie_where_they_should(rng):
    """In place of the logits, beside memory that stays as it is, from arrays that cannot be written."""
    given = cases.arguments((5, 37), "float32", rng)
    expected = run(WITH_GRADIENT, given)
    guarded = [Placed(each.shape, each.dtype.name) for each in expected]
    for each in given.values():
        each.flags.writeable = False
    found = sample_loss.sample_losses_and_grad(**given, out=tuple(each.array for each in guarded))
    for mine, other, guard in zip(found, expected, guarded, strict=True):
        assert np.array_equal(mine, other)
        assert guard.untouched()
    logits = given["logits"].copy()
    (*_, dlogits) = sample_loss.sample_losses_and_grad(logits, given["labels"], out=(*expected[:-1], logits))
    assert dlogits is logits
    assert np.array_equal(dlogits, expected[-1])


@pytest.mark.parametrize("inner", [(), (3,)], ids=["rows", "columns"])
def test_infinite_and_ignored_rows(inner):
    logits = np.random.default_rng(0).normal(size=(6, 70, *inner)).astype(np.float32)
    logits[0, 1], logits[1], logits[2, 0], logits[3, 2], logits[3, 65] = -np.inf, -np.inf, 9, np.inf, np.inf
    logits[2, 66], logits[2, 68] = np.nan, np.nan
    labels = np.broadcast_to(np.array([0, 1, 1, 1, 9, 2]).reshape(6, *[1] * len(inner)), (6, *inner)).copy()
    for options in ({}, {"dentropy": np.ones(labels.shape, np.float32)}):
        found = sample_loss.sample_losses_and_grad(logits, labels, ignore_index=9, **options)
        cases.check(WITH_GRADIENT, {"logits": logits, "labels": labels, "ignore_index": 9, **options}, found)
        *results, _, dlogits = found
        assert all(np.isfinite(each[0]).all() and np.isnan(each[1:4]).all() for each in (*results, dlogits))
        assert not any(each[4].any() for each in (*results, dlogits))
        assert not np.signbit(dlogits[4]).any()


def test_threads_leave_the_bits(rng, threads):
    given = cases.arguments((300, 500), "float32", rng, **OPTIONS["smoothed"])
    threads(lambda: run(WITH_GRADIENT, given))


def test_refuses():
    logits, labels = np.zeros((2, 3), np.float32), np.array([0, 1])
    for options, message in [
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5, expected a number from 0 to 1"),
        ({"softcap": -1.0}, "softcap is -1.0, expected a number of at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0, expected a number above 0"),
        ({"dloss": np.zeros(3, np.float32)}, r"dloss has shape \(3,\), expected \(2,\)"),
        ({"labels": np.array([0, 3])}, r"labels\[1\] is 3, expected 0 to 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample_loss.sample_losses_and_grad(**{"logits": logits, "labels": labels} | options)
    empty = sample_loss.sample_losses_and_grad(logits[:0], labels[:0])
    assert [each.shape for each in empty] == [(0,)] * 5 + [(0, 3)]


# --- the functions on NumPy arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_is_cross_entropy_of_logits(reduction, rng, monkeypatch):
    monkeypatch.setattr("opgrad.call.losses.CHUNK", 400)  # a few rows at a time
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 4), (13, 4), (13,)))
    labels, weight = rng.integers(0, 13, 9), rng.uniform(0.5, 2, 13).astype(np.float32)
    labels[2] = -100
    options = {"ignore_index": -100, "reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.2}
    options |= {"softcap": 4.0, "temperature": 0.9, "shift": 1}
    dloss = rng.normal(size=9 if reduction == "none" else ()).astype(np.float32)
    output, dlogits = opgrad.cross_entropy_and_grad(x @ w.T + b, labels, weight, **options, dloss=dloss)
    mine, dx, dw, db = opgrad.linear_cross_entropy_and_grad(x, w, labels, b, weight, **options, dloss=dloss)
    alone = opgrad.linear_cross_entropy(x, w, labels, b, weight, **options)
    for found in (mine, alone, opgrad.cross_entropy(x @ w.T + b, labels, weight, **options)):
        for name, each, expected in zip(output._fields, found, output, strict=True):
            np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for found, expected in [(dx, dlogits @ w), (dw, dlogits.T @ x), (db, dlogits.sum(0))]:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_numpy_functions_refuse():
    logits, labels = np.zeros((2, 3), np.float32), np.array([0, 1])
    for options, message in [
        ({"reduction": "max"}, "reduction is 'max', expected one of none, mean, sum"),
        ({"num_items": 3, "reduction": "sum"}, "num_items is 3 with reduction 'sum'"),
        ({"softcap": 0.0}, "softcap is 0.0, expected a finite number above 0"),
        ({"shift": -1}, "shift is -1, expected an int of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            opgrad.cross_entropy(logits, labels, **options)
    for function, shape in itertools.product((opgrad.cross_entropy, opgrad.cross_entropy_and_grad), [(), (1, 3), (2,)]):
        with pytest.raises(ValueError, match=rf"weight has shape {re.escape(str(shape))}, expected \(3,\)"):
            function(logits, labels, weight=np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\) and linear_weight \(5, 4\)"):
        opgrad.linear_cross_entropy(logits, np.zeros((5, 4), np.float32), labels)


@pytest.mark.parametrize("ignore_index", [2**32, 1 - 2**32, 2**31])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_label_beyond_int32_is_no_class(shift, ignore_index, rng):
    x, w, labels = rng.normal(size=(4, 3)), rng.normal(size=(5, 3)), np.array([0, 1, 0, 4])
    given, small = {"ignore_index": ignore_index, "shift": shift}, labels.astype(np.int32)
    for loss in (
        lambda labels: opgrad.cross_entropy_and_grad(x @ w.T, labels, **given)[1],
        lambda labels: opgrad.linear_cross_entropy_and_grad(x, w, labels, **given)[1],
        lambda labels: opgrad.linear_jsd_and_grad(x, w, x, 2 * w, labels, **given)[1],
    ):
        np.testing.assert_array_equal(loss(small), loss(labels))
    with pytest.raises(ValueError, match=r"^linear_jsd: ignore_index is 9223372036854775808, expected a 64-bit"):
        opgrad.linear_jsd(x, w, x, 2 * w, labels, ignore_index=2**63)
