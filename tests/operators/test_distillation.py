"""Divergences of softmax distributions on NumPy and JAX arrays: gradients, chunks, values at the limits."""

import numpy as np
import pytest

import opgrad
from opgrad.cli.examples.arguments import error_in_ulp, finfo, roundings, tolerance, widened
from opgrad.contract import FLOATS, reference

N, H, K, C = 20, 6, 9, 50
OPTIONS = [{}, {"beta": 1.0, "reduction": "sum"}, {"beta": 0.0, "temperature": 2.0, "num_items": 7.0}]


def layers(rng, dtype="float64"):
    shapes = (N, H), (C, H), (N, K), (C, K), (C,), (C,)
    x, w, y, v, b, c = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return (x, w, y, v), {"student_bias": b, "teacher_bias": c}


def whole(given, biases, beta=0.5, temperature=1.0, reduction="mean", num_items=None, labels=None):
    """The same with all logits stored."""
    x, w, y, v = given
    logits, others = x @ w.T + biases["student_bias"], y @ v.T + biases["teacher_bias"]
    counts = np.ones(N, bool) if labels is None else labels != -100
    by = 1 if reduction == "sum" else 1 / (num_items or max(counts.sum(), 1))
    operator = reference("softmax_divergence_and_grad")
    losses, dlogits = operator(logits, others, counts * by, beta, temperature)
    return (losses * counts).sum() * by, dlogits @ w, dlogits.T @ x, dlogits.sum(0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_a_layer_in_chunks_is_the_whole_layer(options, rows, rng, monkeypatch):
    monkeypatch.setattr("opgrad.call.losses.CHUNK", rows * 2 * C * 8)
    given, biases = layers(rng)
    labels = np.where(np.arange(N) % 5 == 2, -100, 1)
    found = opgrad.linear_jsd_and_grad(*given, labels, **biases, **options)
    for got, exact in zip(found, whole(given, biases, **options, labels=labels), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-10, atol=1e-13)
    np.testing.assert_array_equal(opgrad.linear_jsd(*given, labels, **biases, **options), found[0])


def test_kl_div_and_samples(rng):
    given, biases = layers(rng)
    each = opgrad.linear_kl_div(*given, **biases, reduction="none")
    assert each.shape == (N,)
    loss, *grads = opgrad.linear_kl_div_and_grad(*given, **biases)
    np.testing.assert_allclose(each.mean(), loss)
    np.testing.assert_allclose(loss, whole(given, biases, beta=0)[0])
    upstream = rng.normal(size=N)
    _, *weighted = opgrad.linear_kl_div_and_grad(*given, **biases, reduction="none", dloss=upstream.astype("f4"))
    assert [one.shape for one in weighted] == [one.shape for one in grads]
    assert opgrad.linear_jsd_and_grad(*given)[3] is None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradient_is_the_derivative(beta, rng):
    logits, others, way = (rng.normal(size=(3, 8)) for _ in range(3))
    operator, step = reference("softmax_divergence_and_grad"), 1e-6
    _, dlogits = operator(logits, others, None, beta, 1.7)
    above, below = (operator(logits + sign * step * way, others, None, beta, 1.7)[0] for sign in (1, -1))
    np.testing.assert_allclose((dlogits * way).sum(1), (above - below) / (2 * step), rtol=1e-7, atol=1e-9)


def test_a_student_near_its_teacher(rng):
    logits, step = rng.normal(0, 2, (4, 300)).astype("f4"), rng.normal(size=(4, 300)) / 64
    others = (logits + step).astype("f4")
    unit = 2**-23 * 2 * 64 * roundings(300)  # terms of the order of d, a logarithm of a ratio, sum to d * d / 2
    for beta in (0.01, 0.5, 0.99):
        loss, dlogits = opgrad.softmax_divergence_and_grad(logits, others, beta=beta)
        exact, slope = reference("softmax_divergence_and_grad")(widened(logits), widened(others), beta=beta)
        np.testing.assert_allclose(loss, exact, rtol=unit)
        np.testing.assert_allclose(dlogits, slope, rtol=0, atol=unit * abs(slope).max())


def test_a_student_sure_of_what_its_teacher_rules_out(rng):
    logits, others = (rng.normal(0, 4, (60, 300)).astype("f4") for _ in range(2))
    places = np.arange(60), logits.argmax(1)
    logits[places] += 3
    others[places] -= 20
    _, dlogits = opgrad.softmax_divergence_and_grad(logits, others, beta=1.0)
    _, exact = reference("softmax_divergence_and_grad")(widened(logits), widened(others), beta=1.0)
    for found, wanted in zip(dlogits, exact, strict=True):
        assert error_in_ulp(found, wanted) <= tolerance("float32", 300)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_at_the_limits(beta, dtype, rng):
    logits, others = (rng.normal(0, 2, (6, 130)).astype(dtype) for _ in range(2))
    (logits if beta == 1 else others)[0, ::3] = -np.inf
    logits[1, :40], others[1, :40] = -np.inf, -np.inf
    logits[2], others[2] = 3e4, -3e4
    others[3, 7], logits[4, 2], logits[5] = np.nan, np.inf, -np.inf
    loss, dlogits = opgrad.softmax_divergence_and_grad(logits, others, beta=beta)
    with np.errstate(all="ignore"):
        exact, slope = reference("softmax_divergence_and_grad")(widened(logits), widened(others), beta=beta)
    unit = float(finfo(np.dtype("f8" if dtype == "float64" else "f4")).eps) * 40 * tolerance("float32", 130)
    np.testing.assert_allclose(loss, exact, rtol=unit, atol=unit)
    rounded = float(finfo(dlogits.dtype).eps)
    np.testing.assert_allclose(dlogits.astype("f8"), slope, rtol=unit + rounded, atol=unit + rounded)
    assert np.isnan(loss[3:]).all()
    assert loss[2] == 0


def test_in_place_and_threads(threads, rng):
    logits, others = (rng.normal(size=(300, 700)).astype("f4") for _ in range(2))

    def compute():
        own = logits.copy()
        return opgrad.softmax_divergence_and_grad(own, others, out=(np.empty(300, "f4"), own))

    for found, expected in zip(threads(compute), opgrad.softmax_divergence_and_grad(logits, others), strict=True):
        assert found.tobytes() == expected.tobytes()


REFUSED = [
    ({"beta": 2}, "beta is 2, expected a number from 0 to 1"),
    ({"temperature": 0}, "temperature is 0, expected a finite number above 0"),
    ({"reduction": "all"}, "reduction is 'all', expected one of"),
    ({"labels": np.zeros(3, int)}, r"labels has shape \(3,\) and dtype int64, expected \(20,\) and integers"),
    ({"teacher_bias": np.zeros(3)}, r"teacher_bias has shape \(3,\), expected \(50,\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[each[1] for each in REFUSED])
def test_refused(change, message, rng):
    given, _ = layers(rng)
    with pytest.raises(ValueError, match=message):
        opgrad.linear_jsd(*given, **change)
    with pytest.raises(ValueError, match="teacher_input has 3 rows and teacher_weight 50 classes, expected 20 and 50"):
        opgrad.linear_jsd(*given[:2], given[2][:3], given[3])


@pytest.mark.parametrize("options", [*OPTIONS, {"reduction": "none"}], ids=str)
def test_jax(options, rng, monkeypatch):
    """Compiled, and with the defaults at once, too."""
    jax = pytest.importorskip("jax")
    import opgrad.jax

    monkeypatch.setattr(opgrad.jax.loss, "CHUNK", 7 * 2 * C * 4)
    given, biases = layers(rng, "float32")
    labels = np.where(np.arange(N) % 5 == 2, -100, 1)
    upstream = np.linspace(1, 2, N, dtype="f4") if options.get("reduction") == "none" else 1.0

    def of(x, w, b):
        both = {"student_bias": b, "teacher_bias": biases["teacher_bias"]}
        return (opgrad.jax.linear_jsd(x, w, *given[2:], labels, **both, **options) * upstream).sum()

    arguments = given[0], given[1], biases["student_bias"]
    value, grads = jax.jit(jax.value_and_grad(of, (0, 1, 2)))(*arguments)
    loss, *exact = opgrad.linear_jsd_and_grad(*given, labels, **biases, **options, dloss=upstream)
    np.testing.assert_allclose(value, (loss * upstream).sum(), rtol=1e-5)
    for got, wanted in zip(grads, exact, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * abs(wanted).max())
    if not options:
        np.testing.assert_allclose(of(*arguments), value, rtol=1e-6)
        kl = opgrad.jax.linear_kl_div(*given, **biases)
        np.testing.assert_allclose(kl, opgrad.linear_kl_div(*given, **biases), rtol=1e-5)
