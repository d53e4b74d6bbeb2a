"""Optimizers against float64, reading an optimizer's model, rows of a table, bfloat16 weights in two halves."""

import itertools

import ml_dtypes
import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, optimizer_model
from samples import refused

import opgrad
from opgrad import optim
from opgrad.training import AdamWRule, SGDRule
from opgrad.training.engine.memory import FlatOptimizer, GradientNorm
from opgrad.training.files.artifact_set import read_rule


def in_float64(p, gradients, rates, rule):
    """SGD, or AdamW as in the papers and the documentation of both modes, step by step."""
    p, m, v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = gradient.astype(np.float64)
        if isinstance(rule, SGDRule):
            p = p - rate * g
            continue
        m = rule.alpha * m + (1 - rule.alpha) * g
        v = rule.beta * v + (1 - rule.beta) * g**2
        first = 1 - rule.alpha**step if rule.correct_bias else 1.0
        second = 1 - rule.beta**step if rule.correct_bias else 1.0
        if rule.adam_mode == 0:
            p = p - rate * rule.weight_decay * p
            p = p - rate * (m / first) / (np.sqrt(v / second) + rule.epsilon)
        else:
            p = p - rate * np.sqrt(second) / first * m / (np.sqrt(v) + rule.epsilon)
            p = p - rate * rule.weight_decay * p
    return p


MODES = itertools.product([(0, 1), (1, 1), (1, 0)], [1e-8, 1e-3], [0.0, 0.1])
RULES = [SGDRule(), *(AdamWRule(0.9, 0.99, epsilon, decay, *mode) for mode, epsilon, decay in MODES)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_against_float64(rule):
    """Of rates that change; gradients are left as they are."""
    random = np.random.default_rng(7)
    parameters = random.uniform(0.5, 1.5, 70_001).astype(np.float32)
    gradients = random.normal(0, 0.1, (5, parameters.size)).astype(np.float32)
    rates = [0.01, 0.005, 0.1, 0.02, 0.01]
    expected = in_float64(parameters, gradients, rates, rule)
    current = np.empty_like(parameters)
    optimizer = FlatOptimizer(rule, parameters, current, 1.0)
    for rate, gradient in zip(rates, gradients, strict=True):
        current[...] = gradient
        optimizer.learning_rate = rate
        optimizer.step()
    assert optimizer.steps == 5
    np.testing.assert_array_equal(current, gradients[-1])
    np.testing.assert_allclose(parameters, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 4097, 400_003])
@pytest.mark.parametrize("rule", [AdamWRule(), SGDRule(), AdamWRule(max_norm=0.01), SGDRule(max_norm=0.01)])
def test_every_element_is_updated_once(rule, size, threads):
    """Every element moves as if it were alone, with any number of threads, and nothing beside them is touched."""
    random = np.random.default_rng(size)
    values, gradient = random.uniform(0.5, 1.5, size + 2).astype(np.float32), random.normal(size=size + 2)

    def compute():
        memory, gradients = values.copy(), gradient.astype(np.float32)
        FlatOptimizer(rule, memory[1:-1], gradients[1:-1], 0.125).step()
        return memory, gradients

    memory, gradients = threads(compute)
    g = gradient.astype(np.float32)[1:-1].astype(np.float64)
    if rule.max_norm is not None and size:
        g *= min(1, rule.max_norm / (np.sqrt((g**2).sum()) + 1e-6))
    np.testing.assert_allclose(gradients[1:-1], g, rtol=1e-6)
    np.testing.assert_allclose(memory[1:-1], in_float64(values[1:-1], [g], [0.125], rule), rtol=1e-6)
    assert (memory[0], memory[-1]) == (values[0], values[-1])


@pytest.mark.parametrize("rule", [AdamWRule(), AdamWRule(adam_mode=1, weight_decay=0.1), SGDRule()])
def test_float64_parameters(rule):
    random = np.random.default_rng(7)
    parameters, gradients = random.uniform(0.5, 1.5, 1001), random.normal(size=1001)
    expected = in_float64(parameters, [gradients], [0.01], rule)
    FlatOptimizer(rule, parameters, gradients, 0.01).step()
    np.testing.assert_allclose(parameters, expected, rtol=1e-14)


@pytest.mark.parametrize("size", [0, 1, 33, 4096, 1_000_003])
def test_the_norm_is_summed_in_float64(size):
    gradients = np.random.default_rng(size).normal(size=size).astype(np.float32)
    if size:
        gradients[0] = 1e25  # its square exceeds float32
    expected = np.sqrt((gradients.astype(np.float64) ** 2).sum())
    np.testing.assert_allclose(GradientNorm(gradients).measure(), expected, rtol=1e-14)


def test_gradients_that_are_not_numbers_are_not_hidden_by_clipping():
    for wrong in (np.nan, np.inf):
        parameters, gradients = np.ones(40, np.float32), np.ones(40, np.float32)
        gradients[3] = wrong
        FlatOptimizer(SGDRule(max_norm=1.0), parameters, gradients, 0.1).step()
        assert np.isnan(parameters[3])
    parameters, gradients = np.ones(40, np.float32), np.full(40, 1e-3, np.float32)
    FlatOptimizer(SGDRule(max_norm=1.0), parameters, gradients, 0.1).step()
    np.testing.assert_array_equal(gradients, np.float32(1e-3))


def test_arrays_that_do_not_fit():
    good, other = np.zeros(8, np.float32), np.zeros(9, np.float32)
    with pytest.raises(TypeError, match="has dtype float16, expected float32 or float64"):
        FlatOptimizer(SGDRule(), np.zeros(8, np.float16), np.zeros(8, np.float16), 0.1)
    with pytest.raises(TypeError, match="has dtype float64, expected float32 or float64, the same"):
        FlatOptimizer(SGDRule(), good, np.zeros(8), 0.1)
    refused(ValueError, r"has shape \(9,\), expected \(8,\)", FlatOptimizer, AdamWRule(), good, other, 0.1)
    refused(ValueError, "read-only or strided", FlatOptimizer, SGDRule(), np.zeros(16, np.float32)[::2], good, 0.1)


def test_rules_are_read_from_the_optimizer_model():
    assert read_rule(onnx.load(EXAMPLES / "digits" / "optimizer_model.onnx")) == AdamWRule(
        np.float32(0.9), np.float32(0.999), np.float32(1e-6), 0.0, 1, 1
    )
    assert read_rule(optimizer_model("AdamWOptimizer")) == AdamWRule(0.9, 0.999, 1e-8, 0.01, 0, 1)
    assert read_rule(optimizer_model("SGDOptimizerV2")) == SGDRule()
    clipping = optimizer_model("InplaceClipGradNorm", "AdamWOptimizer")
    assert read_rule(clipping) == AdamWRule(max_norm=1.0)
    clipping.graph.node[0].attribute.append(onnx.helper.make_attribute("max_norm", 0.5))
    assert read_rule(clipping) == AdamWRule(max_norm=0.5)


def test_optimizer_models_without_a_meaning_here():
    refused(NotImplementedError, "has the nodes Lamb, expected one AdamWOptimizer", read_rule, optimizer_model("Lamb"))
    refused(NotImplementedError, "has the nodes none", read_rule, optimizer_model())
    refused(ValueError, "adam_mode is 2, expected 0 or 1", read_rule, optimizer_model("AdamWOptimizer", adam_mode=2))
    refused(ValueError, "correct_bias is 0, expected 1", read_rule, optimizer_model("AdamWOptimizer", correct_bias=0))


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
        refused(ValueError, wrong, optim.sgd_rows, table, np.array(rows), values, 0.1)
    refused(TypeError, "rows is float64", optim.sgd_rows, table, np.array([1.0, 2.0]), values, 0.1)
    refused(ValueError, "strided", optim.sgd_rows, table[:, ::2], np.array([1, 2]), values[:, ::2], 0.1)
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
    upper, g = rng.normal(size=size).astype(ml_dtypes.bfloat16), np.empty(size, gradient)
    weights, wide = upper.astype(np.float32), np.empty(size, np.float32)
    split = getattr(optim, f"Split{kind}")(upper, g, 1e-3)
    whole = FlatOptimizer({"SGD": SGDRule, "AdamW": AdamWRule}[kind](), weights, wide, 1e-3)
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
    refused((TypeError, ValueError), message, optim.SplitSGD, parameters, gradients, 0.1)
