"""Rows of a table and their optimizers, and bfloat16 weights whose other half the optimizer keeps."""

import ml_dtypes
import numpy as np
import pytest

import opgrad
from opgrad import optim

V, D = 50, 19


def touched(rng, dtype=np.float32, count=30):
    indices = rng.integers(-V, V, count)
    indices[:4] = 3, 3, -V, V - 1
    return indices, rng.normal(size=(count, D)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [5, 300])
def test_sparse_gradient_is_the_dense_one_without_what_is_0(rng, dtype, count):
    indices, dy = touched(rng, dtype, count)
    rows, values = opgrad.gather_grad((V, D), indices, dy, sparse=True)
    dense = opgrad.gather_grad((V, D), indices, dy, sparse=False)
    assert rows.tolist() == np.unique(indices % V).tolist()
    assert rows.dtype == np.int64
    assert values.dtype == dtype
    assert values.tobytes() == dense[rows].tobytes()


def test_sparse_gradient_of_no_index_and_of_tables_of_any_rank(rng):
    rows, values = opgrad.gather_grad((V, 2, 3), np.zeros((0, 4), np.int64), np.zeros((0, 4, 2, 3), "f4"), sparse=True)
    assert (rows.shape, values.shape) == ((0,), (0, 2, 3))
    rows, values = opgrad.gather_grad((V,), np.array([[1, 2], [1, 1]]), np.ones((2, 2), "f4"), sparse=True)
    assert (rows.tolist(), values.tolist()) == ([1, 2], [3, 1])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((V, D), np.array([V]), np.ones((1, D), "f4")), {}, r"indices\[0\] is 50, expected -50 to 49"),
        (((V, D), np.array([1]), np.ones((1, D), "f4")), {"axis": 1}, "expected axis 0"),
        (((V, D), np.array([1]), np.ones((1, D), "f4")), {"out": np.ones((1, D), "f4")}, "no out"),
        (((V, D), np.array([1]), np.ones((2, D), "f4")), {}, "dy has shape"),
        (((V, D), np.array([1.0]), np.ones((1, D), "f4")), {}, "indices has dtype float64"),
    ],
)
def test_what_sparse_refuses(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^gather_grad: .*{message}"):
        opgrad.gather_grad(*arguments, sparse=True, **options)


def states(rng, dtype, count):
    return [rng.random((V, D)).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_steps_touch_those_rows_alone(rng, dtype):
    """They are the dense steps where the gradient is not 0."""
    indices, dy = touched(rng, dtype)
    rows, values = opgrad.gather_grad((V, D), indices, dy, sparse=True)
    wide = values.astype(np.float64)
    rtol = {2: 2**-7, 4: 1e-6, 8: 1e-13}[np.dtype(dtype).itemsize]
    others = np.setdiff1d(np.arange(V), rows)

    def check(run, update, count):
        arrays = states(rng, dtype, count)
        before = [array.copy() for array in arrays]
        exact = update(*(array[rows].astype(np.float64) for array in arrays))
        run(*arrays, rows, values)
        for array, was, wanted in zip(arrays, before, exact, strict=True):
            np.testing.assert_allclose(array[rows].astype(np.float64), wanted, rtol=rtol, atol=rtol)
            assert array[others].tobytes() == was[others].tobytes()

    check(lambda *a: optim.sgd_rows(*a, 0.1), lambda p: [p - 0.1 * wide], 1)

    def adagrad(p, s):
        s = s + wide**2
        return p - 0.1 * wide / (np.sqrt(s) + 1e-3), s

    check(lambda *a: optim.adagrad_rows(*a, 0.1, 1e-3), adagrad, 2)

    def adam(p, m, v):
        m, v = 0.9 * m + 0.1 * wide, 0.99 * v + 0.01 * wide**2
        p = p * (1 - 0.1 * 0.02) - 0.1 / (1 - 0.9**3) * m / (np.sqrt(v / (1 - 0.99**3)) + 1e-4)
        return p, m, v

    check(lambda *a: optim.adam_rows(*a, 0.1, 3, 0.9, 0.99, 1e-4, 0.02), adam, 3)


def test_what_steps_refuse(rng):
    table, values = np.ones((V, D), "f4"), np.ones((2, D), "f4")
    for rows, wrong in {(1, 1): "rising", (0, V): "rising", (-1, 3): "rising", (1, 2, 3): "values has shape"}.items():
        with pytest.raises(ValueError, match=wrong):
            optim.sgd_rows(table, np.array(rows), values, 0.1)
    with pytest.raises(TypeError, match="rows is float64"):
        optim.sgd_rows(table, np.array([1.0, 2.0]), values, 0.1)
    with pytest.raises(ValueError, match="strided"):
        optim.sgd_rows(table[:, ::2], np.array([1, 2]), values[:, ::2], 0.1)
    with pytest.raises(ValueError, match=r"adam_rows: alpha is 1.5, expected 0 to 1"):
        optim.adam_rows(table, table.copy(), table.copy(), np.array([1, 2]), values, 0.1, 1, alpha=1.5)
    with pytest.raises(ValueError, match="step is 0"):
        optim.adam_rows(table, table.copy(), table.copy(), np.array([1, 2]), values, 0.1, 0)
    assert (table == 1).all()


@pytest.mark.parametrize("gradient", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_split_weights_follow_float32_bit_by_bit(rng, gradient, size, kind):
    """The halves put together are the weights of a training in float32, the upper half these rounded to nearest."""
    optimizer = pytest.importorskip("opgrad.training.engine.memory")
    upper, g = rng.normal(size=size).astype(ml_dtypes.bfloat16), np.empty(size, gradient)
    weights, wide = upper.astype(np.float32), np.empty(size, np.float32)
    split = getattr(optim, f"Split{kind}")(upper, g, 1e-3)
    whole = optimizer.started(getattr(optimizer, f"{kind}Rule")(), weights, wide, 1e-3)
    for _ in range(30):
        g[...] = rng.normal(size=size)
        wide[...] = g
        split.step()
        whole.step()
    assert split.weights().tobytes() == weights.tobytes()
    assert (np.abs(upper.astype(np.float64) - weights) <= np.abs(weights) * 2.0**-8).all()


def test_bfloat16_alone_would_stand_still():
    """Steps below half a unit in the last place of bfloat16 add up."""
    weights, g = np.full(64, 1.0, ml_dtypes.bfloat16), np.full(64, 1.0, np.float32)
    split = optim.SplitSGD(weights, g, 2.0**-13)
    for _ in range(1024):
        split.step()
    assert (split.weights() == 0.875).all()
    assert (weights.astype(np.float32) == 0.875).all()


@pytest.mark.parametrize(
    ("parameters", "gradients", "message"),
    [
        (np.ones(4, "f4"), np.ones(4, "f4"), "parameters is float32, expected bfloat16"),
        (np.ones(4, ml_dtypes.bfloat16), np.ones(4, "f8"), "gradients is float64"),
        (np.ones(4, ml_dtypes.bfloat16), np.ones(5, "f4"), "gradients has shape"),
        (np.ones((2, 2), ml_dtypes.bfloat16), np.ones(4, "f4"), "parameters has shape"),
    ],
)
def test_what_split_optimizers_refuse(parameters, gradients, message):
    with pytest.raises((TypeError, ValueError), match=message):
        optim.SplitSGD(parameters, gradients, 0.1)
