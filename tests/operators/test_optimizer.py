"""AdamW and SGD against float64, and reading an optimizer model."""

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, optimizer_model

import opgrad
from opgrad.training import AdamWRule, SGDRule
from opgrad.training.engine.memory import GradientNorm, started
from opgrad.training.files.artifact_set import read_rule


def adamw_in_float64(p, gradients, rate, rule):
    """AdamW as in the papers and the documentation of both modes, step by step."""
    p, m, v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
    for step, gradient in enumerate(gradients, 1):
        g = gradient.astype(np.float64)
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
@pytest.mark.parametrize(("adam_mode", "correct_bias"), [(0, 1), (1, 1), (1, 0)])
def test_adamw_against_float64(adam_mode, correct_bias, epsilon, weight_decay):
    rule = AdamWRule(0.9, 0.99, epsilon, weight_decay, adam_mode, correct_bias)
    random = np.random.default_rng(7)
    parameters = random.uniform(0.5, 1.5, 70_001).astype(np.float32)
    gradients = random.normal(0, 0.1, (5, parameters.size)).astype(np.float32)
    expected = adamw_in_float64(parameters, list(gradients), 0.01, rule)
    current = np.empty_like(parameters)
    optimizer = started(rule, parameters, current, 0.01)
    for gradient in gradients:
        current[...] = gradient
        optimizer.step()
    np.testing.assert_allclose(parameters, expected, rtol=1e-6)


def test_sgd_against_float64():
    random = np.random.default_rng(7)
    parameters = random.uniform(0.5, 1.5, 70_001).astype(np.float32)
    gradients = random.normal(0, 0.1, (5, parameters.size)).astype(np.float32)
    rates = [0.01, 0.005, 0.1, 0.02, 0.01]
    expected = parameters - np.tensordot(rates, gradients.astype(np.float64), 1)
    current = np.empty_like(parameters)
    optimizer = started(SGDRule(), parameters, current, 1.0)
    for rate, gradient in zip(rates, gradients, strict=True):
        current[...] = gradient
        optimizer.learning_rate = rate
        optimizer.step()
    assert optimizer.steps == 5
    np.testing.assert_array_equal(current, gradients[-1])
    np.testing.assert_allclose(parameters, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 4097, 400_003])
@pytest.mark.parametrize("rule", [AdamWRule(), SGDRule(), AdamWRule(max_norm=0.01), SGDRule(max_norm=0.01)])
def test_every_element_is_updated_once(rule, size):
    """Every element moves as if it were alone, with any number of threads, and nothing beside them is touched."""
    random = np.random.default_rng(size)
    values, gradient = random.uniform(0.5, 1.5, size + 2).astype(np.float32), random.normal(size=size + 2)
    results = []
    for threads in (1, 2):
        before = opgrad.get_num_threads()
        opgrad.set_num_threads(threads)
        try:
            memory, gradients = values.copy(), gradient.astype(np.float32)
            optimizer = started(rule, memory[1:-1], gradients[1:-1], 0.125)
            optimizer.step()
        finally:
            opgrad.set_num_threads(before)
        results.append((memory, gradients))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    memory, gradients = results[0]
    g = gradient.astype(np.float32)[1:-1].astype(np.float64)
    if rule.max_norm is not None and size:
        g *= min(1, rule.max_norm / (np.sqrt((g**2).sum()) + 1e-6))
    np.testing.assert_allclose(gradients[1:-1], g, rtol=1e-6)
    start = values[1:-1].astype(np.float64)
    expected = start - 0.125 * g if isinstance(rule, SGDRule) else adamw_in_float64(start, [g], 0.125, rule)
    np.testing.assert_allclose(memory[1:-1], expected, rtol=1e-6)
    assert (memory[0], memory[-1]) == (values[0], values[-1])


@pytest.mark.parametrize("rule", [AdamWRule(), AdamWRule(adam_mode=1, weight_decay=0.1), SGDRule()])
def test_float64_parameters(rule):
    random = np.random.default_rng(7)
    parameters, gradients = random.uniform(0.5, 1.5, 1001), random.normal(size=1001)
    if isinstance(rule, SGDRule):
        expected = parameters - 0.01 * gradients
    else:
        expected = adamw_in_float64(parameters, [gradients], 0.01, rule)
    started(rule, parameters, gradients, 0.01).step()
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
        started(SGDRule(max_norm=1.0), parameters, gradients, 0.1).step()
        assert np.isnan(parameters[3])
    parameters, gradients = np.ones(40, np.float32), np.full(40, 1e-3, np.float32)
    started(SGDRule(max_norm=1.0), parameters, gradients, 0.1).step()
    np.testing.assert_array_equal(gradients, np.float32(1e-3))


def test_arrays_that_do_not_fit():
    good, other = np.zeros(8, np.float32), np.zeros(9, np.float32)
    with pytest.raises(TypeError, match="has dtype float16, expected float32 or float64"):
        started(SGDRule(), np.zeros(8, np.float16), np.zeros(8, np.float16), 0.1)
    with pytest.raises(TypeError, match="has dtype float64, expected float32 or float64, the same"):
        started(SGDRule(), good, np.zeros(8), 0.1)
    with pytest.raises(ValueError, match=r"has shape \(9,\), expected \(8,\)"):
        started(AdamWRule(), good, other, 0.1)
    with pytest.raises(ValueError, match="read-only or strided"):
        started(SGDRule(), np.zeros(16, np.float32)[::2], good, 0.1)


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
    with pytest.raises(NotImplementedError, match="has the nodes Lamb, expected one AdamWOptimizer"):
        read_rule(optimizer_model("Lamb"))
    with pytest.raises(NotImplementedError, match="has the nodes none"):
        read_rule(optimizer_model())
    with pytest.raises(ValueError, match="adam_mode is 2, expected 0 or 1"):
        read_rule(optimizer_model("AdamWOptimizer", adam_mode=2))
    with pytest.raises(ValueError, match="correct_bias is 0, expected 1"):
        read_rule(optimizer_model("AdamWOptimizer", correct_bias=0))
