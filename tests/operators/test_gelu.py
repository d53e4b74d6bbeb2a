"""Gelu and its approximation: tails, special values, derivatives, and what onnxruntime-training 1.19.2 gave."""

import numpy as np
import pytest
from graph_cases import call, check_close

import opgrad
from opgrad.cli.examples import expected as reference
from opgrad.cli.examples.arguments import last_place
from opgrad.ops import graph_operators

NAN, INF = np.nan, np.inf


def exact(name, *arrays):
    return graph_operators()[name].reference(*(array.astype(np.float64) for array in arrays))


@pytest.mark.parametrize("name", ["gelu", "fast_gelu", "gelu_grad", "fast_gelu_grad"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_below_zero_every_digit_counts(name, dtype):
    """The error is held against the result itself, which 1 + erf(x / sqrt(2)) would lose from -6 on."""
    low = -13.0 if name in ("gelu", "gelu_grad") else -9.4
    low = low if dtype == "float32" else 2.5 * low if "fast" not in name else 2 * low
    x = np.linspace(low, -1.5, 4001).astype(dtype)
    arrays = (np.ones_like(x), x) if name.endswith("grad") else (x,)
    expected = exact(name, *arrays)
    got = getattr(opgrad, name)(*arrays)
    # An ulp of x changes exp(-x * x / 2) by x * x ulp in what the float64 reference knows, too.
    allowed = 8.0 if dtype == "float32" else 8.0 + 4 * x**2
    assert np.all(np.abs(got - expected) <= allowed * last_place(np.dtype(dtype), expected))
    assert np.all(got < 0)


@pytest.mark.parametrize("name", ["gelu", "fast_gelu"])
def test_special_values(name, dtype):
    y = getattr(opgrad, name)(np.array([INF, -INF, NAN, 0.0, -0.0], dtype))
    np.testing.assert_array_equal(y.astype(np.float64), [INF, NAN, NAN, 0, 0])
    assert np.signbit(y[3:]).tolist() == [False, True]
    x, dy = np.array([[INF, -INF, NAN, 0, 1, 1, 60, -60], [1, 1, 1, 2, INF, NAN, 3, 3]], dtype)
    dx = getattr(opgrad, f"{name}_grad")(dy, x).astype(np.float64)
    np.testing.assert_array_equal(dx, [NAN, NAN, NAN, 1, INF, NAN, 3, 0])


X = np.array([[-8, -3, -1, 0], [1, 2, 5, 0.5]], np.float32)
BIAS = np.array([0, 0.5, -0.5, 1], np.float32)
# dy is 2; the last digits of the approximation's tail are lost there, its value at -8 altogether.
FROM_1_19_2 = {
    "gelu_grad": [
        -8.083633859946177e-14, -0.023891419172286987, -0.16663089394569397, 1.0,
        2.166630983352661, 2.1704635620117188, 2.000014066696167, 1.7349902391433716,
    ],
    "fast_gelu_grad": [
        0.0, -0.023168444633483887, -0.16592812538146973, 1.0,
        2.1659281253814697, 2.1721982955932617, 2.0000040531158447, 1.7347397804260254,
    ],
    "bias_gelu_grad_dx": [
        -8.083633859946177e-14, -0.07522216439247131, -0.2549384534358978, 2.166630983352661,
        2.166630983352661, 2.0752222537994385, 2.0001368522644043, 2.2549386024475098,
    ],
    "bias_fast_gelu_grad_dx": [
        0.0, -0.07590329647064209, -0.25542140007019043, 2.1659281253814697,
        2.1659281253814697, 2.0759034156799316, 2.000058174133301, 2.2554214000701904,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_1_19_2)
def test_agrees_with_the_original(name):
    dy = np.full_like(X, 2.0)
    dx = getattr(opgrad, name)(dy, X, *([BIAS] if "bias" in name else []))
    np.testing.assert_allclose(dx.ravel(), FROM_1_19_2[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["gelu_grad", "fast_gelu_grad", "bias_gelu_grad_dx", "bias_fast_gelu_grad_dx"])
@pytest.mark.parametrize("shape", [(600, 700), (1, 300_001), (300_001, 1)])
def test_many_parts_and_long_rows(name, shape, rng):
    op = graph_operators()[name]
    arguments = {"dy": rng.normal(size=shape).astype("f4"), "x": rng.normal(0, 3, shape).astype("f4")}
    if "bias" in op.inputs:
        arguments["bias"] = rng.normal(size=shape[-1:]).astype("f4")
    check_close(call(op, arguments), reference(op, arguments), 1)


def test_the_largest_gradients_do_not_overflow_on_the_way():
    most = np.finfo(np.float32).max
    dx = opgrad.gelu_grad(np.full(4, most), np.array([40, -40, -18.7, -3], np.float32))
    np.testing.assert_allclose(dx, [most, 0, -2.945e-37, -4.065e36], rtol=1e-3)
