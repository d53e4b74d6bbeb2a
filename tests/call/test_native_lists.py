"""Native calls of operators on lists of arrays, of plans, and with values in arrays and tuples."""

import gc
import weakref

import numpy as np
import pytest
from callers import is_native
from planned import softmax_plan
from samples import bits

import opgrad
from opgrad.call import entries

pytestmark = pytest.mark.skipif(not entries.SUPPORTED, reason="this Python has no native calls")
X = np.linspace(-1, 1, 500).astype("float32").reshape(2, 250)


# --- lists of arrays -------------------------------------------------------------------------------------------------


def _lists(count, rng):
    shapes = [(3, 4), (5,), (), (2, 2, 2)]
    return [[rng.random(shapes[i % 4], dtype=np.float32) for i in range(count)] for _ in range(4)]


@pytest.mark.parametrize("count", [1, 3, 64])
def test_lists_of_arrays(count, rng):
    """Allocating, in place, and into other memory; few operands and many."""
    w, g, m, v = _lists(count, rng)
    lr, step = np.float32([0.1]), np.int64([3])
    expected = [[bits(each) for each in group] for group in opgrad.adamw_optimizer(lr, step, w, g, m, v)]
    out = tuple([np.empty_like(each) for each in group] for group in (w, m, v))
    own = tuple([each.copy() for each in group] for group in (w, m, v))
    for _ in range(3):
        found = opgrad.adamw_optimizer(lr, step, w, g, m, v)
        assert [[bits(each) for each in group] for group in found] == expected
        opgrad.adamw_optimizer(lr, step, w, g, m, v, out=out)
        assert [[bits(each) for each in group] for group in out] == expected
        own = tuple([each.copy() for each in group] for group in (w, m, v))
        found = opgrad.adamw_optimizer(lr, step, own[0], g, own[1], own[2], out=own)
        assert [[bits(each) for each in group] for group in own] == expected
        assert all(a is b for one, other in zip(found, own, strict=True) for a, b in zip(one, other, strict=True))
    assert is_native(opgrad.adamw_optimizer, lr, step, w, g, m, v)
    assert is_native(opgrad.adamw_optimizer, lr, step, w, g, m, v, out=out)
    assert is_native(opgrad.adamw_optimizer, lr, step, own[0], g, own[1], own[2], out=own)


def test_lists_that_change(rng):
    w, g, *_ = _lists(12, rng)
    lr = np.float32([0.5])
    for _ in range(3):
        opgrad.sgd_optimizer(lr, w, g)
    for changed in (w[:-1], [*w, w[0]], [*w[:-1], w[0]], [each.astype("float64") for each in w], tuple(w)):
        grads = [np.ones_like(each) for each in changed]
        for new, old in zip(opgrad.sgd_optimizer(lr, changed, grads), changed, strict=True):
            np.testing.assert_allclose(new, old - 0.5, rtol=1e-6)
    w.append(w[0])
    with pytest.raises(ValueError, match="gradients has 12 arrays, expected 13"):
        opgrad.sgd_optimizer(lr, w, g)
    with pytest.raises((TypeError, ValueError), match="sgd_optimizer"):
        opgrad.sgd_optimizer(lr, [*w[:-2], None], g)


@pytest.mark.parametrize("count", [2, 40])
def test_lists_that_share_memory(count):
    memory = np.arange(8.0 * count + 8, dtype=np.float32)
    w = [memory[8 * i : 8 * i + 8] for i in range(count)]
    g, lr = [np.ones(8, np.float32) for _ in w], np.float32([1])
    for _ in range(3):
        opgrad.sgd_optimizer(lr, w, g, out=[np.empty_like(each) for each in w])
        opgrad.sgd_optimizer(lr, w, g, out=[each.copy() for each in w][::-1])
    shifted = [memory[8 * i + 4 : 8 * i + 12] for i in range(count)]
    before = memory.copy()
    with pytest.raises(ValueError, match=r"out for new_weights\[\d+\] overlaps"):
        opgrad.sgd_optimizer(lr, w, g, out=shifted)
    with pytest.raises(ValueError, match=r"out for new_weights\[\d+\] overlaps"):
        opgrad.sgd_optimizer(lr, w, g, out=w[::-1])
    np.testing.assert_array_equal(memory, before)
    opgrad.sgd_optimizer(lr, w, g, out=list(w))
    np.testing.assert_array_equal(memory[: 8 * count], before[: 8 * count] - 1)


def test_a_value_in_an_array_is_no_operand():
    """An attribute may come in an array, whose value is not part of what is compared."""
    alpha = np.array(0.5)
    for value in (0.5, 0.25, 0.75, 0.5):
        alpha[()] = value
        expected = np.where(X > 0, X, X * np.float32(value))
        for _ in range(3):
            np.testing.assert_array_equal(opgrad.leaky_relu(X, alpha), expected)
    for axis in ((1,), (0, 1), tuple(range(2))):
        for _ in range(3):
            np.testing.assert_allclose(opgrad.softmax(X, axis).sum(axis), 1, rtol=1e-5)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans():
    y, bias = np.empty_like(X), np.linspace(0, 1, 250).astype("float32")
    plan = softmax_plan(X.shape, "float32", post_ops=[opgrad.post_ops.add(bias)])
    assert is_native(plan, X, out=y)
    np.testing.assert_array_equal(y, opgrad.softmax(X, post_ops=[opgrad.post_ops.add(bias)]))
    bias[:] = 0
    assert plan(X, out=y) is y
    np.testing.assert_array_equal(y, opgrad.softmax(X, post_ops=[opgrad.post_ops.add(bias)]))
    in_place = opgrad.plan(opgrad.relu, X, out=y)
    np.copyto(y, X)
    for _ in range(3):
        assert in_place(y, out=y) is y
    assert is_native(in_place, y, out=y)
    np.testing.assert_array_equal(y, np.maximum(X, 0))
    kept = weakref.ref(plan)
    del plan
    gc.collect()
    assert kept() is None
