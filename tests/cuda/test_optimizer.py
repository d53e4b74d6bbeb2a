"""The engine's kernels on CUDA, against the declared operators' float64 references.

They run in Triton's interpreter, or compiled and executed from their PTX. In the engine they are in
tests/training/test_device.py.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton")

from cuda_backend import FROM_PTX, ON_GPU
from ptx import driver

from opgrad.cpu.programs.optimizer import AdamWStep
from opgrad.cuda import PARTS, optimizer
from opgrad.cuda.execute import Compiled, Program
from opgrad.ops import public_operators

pytestmark = pytest.mark.skipif(ON_GPU, reason="a device's are tested by the engine (tools/gpu --steps training)")
SIZES = (16, 2 * optimizer.BLOCK, 2 * optimizer.BLOCK + 48)
MODES = [(0, True), (1, True), (1, False)]


def arrays_of(rng, count, size):
    """Parameters, gradients, and moments that squares have made."""
    made = [rng.normal(size=size).astype("f4") for _ in range(count)]
    return [*made[:3], *(array**2 for array in made[3:])]


def run(launches, arrays, **numbers):
    """Run launches on these arrays, with these numbers where they take them."""
    own = driver.start(FROM_PTX) if FROM_PTX else None
    if own:
        own.take_back()
        for place, array in enumerate(arrays):
            own.lend(array, f"array {place}")
    filled = [
        replace(
            each, arguments={**each.arguments, **{name: numbers[name] for name in numbers if name in each.arguments}}
        )
        for each in launches
    ]
    addresses = [array.ctypes.data for array in arrays]
    with np.errstate(all="ignore"):
        Compiled(Program(filled), addresses, 0).run(addresses, 0, None)


def reference(name, *lists, **attributes):
    """The results of a declared operator on one array of each list, in float64."""
    given = [[each.astype("f8")] if isinstance(each, np.ndarray) and each.ndim else each for each in lists]
    found = public_operators()[name].reference(*given, **attributes)
    return [each[0] for each in found] if isinstance(found, tuple) else found[0]


def working():
    return np.zeros(4, "f4"), np.zeros(PARTS)


@pytest.mark.parametrize(("mode", "corrects"), MODES)
@pytest.mark.parametrize("most", [None, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_adamw(size, most, mode, corrects, rng):
    p, g, m, s = arrays_of(rng, 4, size)
    given = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6, "weight_decay": 0.1}
    clipped = g if most is None else reference("clip_grad_norm", g, max_norm=most).astype("f4")
    rate, count = np.float64(0.01), np.int64(3)
    expected = reference(
        "adamw_optimizer", rate, count, p, clipped, m, s, **given, adam_mode=mode, correct_bias=corrects
    )
    factors = AdamWStep(0.01, 3, *given.values(), mode, corrects).factors()
    numbers = dict(zip(("rate", "epsilon", "before", "after"), factors, strict=True))
    numbers |= {"alpha": 0.9, "beta": 0.999, "rest_of_alpha": 1 - 0.9, "rest_of_beta": 1 - 0.999, "most": most or 0.0}
    run(optimizer.adamw(size, most is not None), [p, g, m, s, *working()], **numbers)
    np.testing.assert_allclose(g, clipped, rtol=1e-6)
    for found, wanted in zip((p, m, s), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("most", [None, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_sgd(size, most, rng):
    p, g = arrays_of(rng, 2, size)
    clipped = g if most is None else reference("clip_grad_norm", g, max_norm=most).astype("f4")
    expected = reference("sgd_optimizer", np.float64(0.1), p, clipped)
    run(optimizer.sgd(size, most is not None), [p, g, *working()], rate=0.1, most=most or 0.0)
    np.testing.assert_allclose(p, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("parts", [2, PARTS], ids=["several rounds", "one round"])
@pytest.mark.parametrize("size", [16, 5 * optimizer.BLOCK + 48])
def test_sums_of_squares(size, parts, monkeypatch, rng):
    monkeypatch.setattr(optimizer, "PARTS", parts)
    x, sums = rng.normal(size=size).astype("f4"), np.zeros(PARTS)
    x[3] = 1e25  # whose square float32 does not hold
    run(optimizer.squares(size), [x, sums])
    np.testing.assert_allclose(sums.sum(), np.square(x, dtype="f8").sum(), rtol=1e-13)


@pytest.mark.parametrize("given", [np.nan, np.inf, 1e-3])
def test_clipping_hides_no_nan_and_leaves_small_gradients_as_they_are(given):
    p, g = np.ones(48, "f4"), np.full(48, 1e-3, "f4")
    g[3] = given
    run(optimizer.sgd(48, True), [p, g, *working()], rate=0.1, most=1.0)
    if np.isfinite(given):
        np.testing.assert_array_equal(g, np.full(48, 1e-3, "f4"))
    else:
        assert np.isnan(p[3])


def test_sums_of_batches(rng):
    x, y = arrays_of(rng, 2, 1040)
    expected = x * np.float32(0.3) + y
    run(optimizer.scale(1040), [x], factor=0.3)
    run(optimizer.add(1040), [x, y])
    np.testing.assert_array_equal(x, expected)
