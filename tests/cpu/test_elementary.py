"""exp, log, sigmoid and tanh on vectors, against higher precision, over the whole range."""

import numpy as np
import pytest
from tasks import run_task

from opgrad.cpu.compiler.decorators import kernel
from opgrad.cpu.compiler.simd import Pointer, first, lanes, load, load_masked, store, store_masked
from opgrad.cpu.kernels.numerics import elementary
from opgrad.ops.reference import post_ops

WIDER = {"float32": np.float64, "float64": np.longdouble}
ULP = {"sigmoid": 2.75, "tanh": 2.75}  # a quotient of two rounded sums; 2 for the others


def on_arrays(formula):
    """The kernel y = formula(x) over whole arrays."""

    @kernel
    def apply(n, x: Pointer, y: Pointer):
        w, i = lanes(x), 0
        while i + w <= n:
            store(y, i, formula(load(x, i)))
            i += w
        if i < n:
            mask = first(x, n - i)
            store_masked(y, i, formula(load_masked(x, i, mask, 1.0)), mask)

    return apply


def evaluate(formula, x):
    y = np.empty_like(x)
    task = on_arrays(formula).task([x.dtype.name] * 2)
    run_task(task, [x.size, x.ctypes.data, y.ctypes.data])
    return y


EXACT = {"exp": np.exp, "exp_up_to_zero": np.exp, "exp2_up_to_one": np.exp2}
EXACT |= {"log": np.log, "sigmoid": lambda x: post_ops.VALUES["logistic"](x, 0.0, 0.0), "tanh": np.tanh}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0]


def numbers(name, dtype, rng):
    """Numbers all over the range in which the function is defined, dense where it changes its method."""
    info = np.finfo(dtype)
    tiny, large = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max))
    highest, lowest = np.log(float(info.max)), np.log(float(info.smallest_subnormal))
    spread = np.exp2(rng.uniform(max(tiny, -1000), large - 1, 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate([spread, rng.uniform(lowest * 1.1, highest * 1.1, 40_000), rng.normal(0, 1, 20_000), SPECIAL])
    if name == "exp_up_to_zero":
        x = -np.abs(x)
    if name == "exp2_up_to_one":
        x = np.minimum(x / np.log(2), 1)
    if name == "log":
        x = np.concatenate([np.abs(x), rng.uniform(0.5, 2, 40_000), 1 + np.exp2(rng.uniform(-50, -1, 1000))])
        x = x[(x >= float(info.smallest_normal)) | np.isnan(x)]
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def errors(given, exact):
    """The errors in units of the last place of the exact result; infinities and NaN must be equal."""
    rounded = exact.astype(given.dtype)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(given[special], rounded[special])
    return np.abs(given[~special].astype(exact.dtype) - exact[~special]) / np.spacing(np.abs(rounded[~special]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_error_in_ulp(name, dtype, rng):
    if np.finfo(WIDER[dtype]).nmant <= np.finfo(dtype).nmant:
        pytest.skip("no wider floating dtype here to compare with")
    x = numbers(name, dtype, rng)
    with np.errstate(all="ignore"):
        found = errors(evaluate(getattr(elementary, name), x), EXACT[name](x.astype(WIDER[dtype])))
    assert found.max() <= ULP.get(name, 2.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exact_points_and_signs(dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf], dtype)
    assert evaluate(elementary.exp, x).tolist() == [1, 1, np.inf, 0]
    assert evaluate(elementary.sigmoid, x).tolist() == [0.5, 0.5, 1, 0]
    hyperbolic = evaluate(elementary.tanh, x)
    assert hyperbolic.tolist() == [0, 0, 1, -1]
    assert np.signbit(hyperbolic).tolist() == [False, True, False, True]
    assert evaluate(elementary.log, np.ones(3, dtype)).tolist() == [0, 0, 0]
