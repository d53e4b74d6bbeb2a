"""AdamW and SGD against float64, and reading an optimizer model."""

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, optimizer_model

from opgrad.training import AdamWRule, SGDRule, read_rule


def adamw_in_float64(p: np.ndarray, gradients: list[np.ndarray], rate: float, rule: AdamWRule) -> np.ndarray:
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
def test_adamw_against_float64(adam_mode: int, correct_bias: int, epsilon: float, weight_decay: float) -> None:
    rule = AdamWRule(0.9, 0.99, epsilon, weight_decay, adam_mode, correct_bias)
    random = np.random.default_rng(7)
    parameters = random.uniform(0.5, 1.5, 70_001).astype(np.float32)
    gradients = random.normal(0, 0.1, (5, parameters.size)).astype(np.float32)
    expected = adamw_in_float64(parameters, list(gradients), 0.01, rule)
    current = np.empty_like(parameters)
    optimizer = rule.start(parameters, current, 0.01)
    for gradient in gradients:
        current[...] = gradient
        optimizer.step()
    np.testing.assert_allclose(parameters, expected, rtol=1e-6)


def test_sgd_against_float64() -> None:
    random = np.random.default_rng(7)
    parameters = random.uniform(0.5, 1.5, 70_001).astype(np.float32)
    gradients = random.normal(0, 0.1, parameters.size).astype(np.float32)
    expected = parameters - 0.01 * gradients.astype(np.float64) - 0.005 * gradients.astype(np.float64)
    optimizer = SGDRule().start(parameters, gradients, 0.01)
    optimizer.step()
    optimizer.learning_rate = 0.005
    optimizer.step()
    np.testing.assert_allclose(parameters, expected, rtol=1e-6)


def test_rules_are_read_from_the_optimizer_model() -> None:
    assert read_rule(onnx.load(EXAMPLES / "digits" / "optimizer_model.onnx")) == AdamWRule(
        np.float32(0.9), np.float32(0.999), np.float32(1e-6), 0.0, 1, 1
    )
    assert read_rule(optimizer_model("AdamWOptimizer")) == AdamWRule(0.9, 0.999, 1e-8, 0.01, 0, 1)
    assert read_rule(optimizer_model("SGDOptimizerV2")) == SGDRule()


def test_optimizer_models_without_a_meaning_here() -> None:
    with pytest.raises(NotImplementedError, match="has the nodes Lamb, expected one AdamWOptimizer"):
        read_rule(optimizer_model("Lamb"))
    with pytest.raises(NotImplementedError, match="has the nodes none"):
        read_rule(optimizer_model())
    with pytest.raises(ValueError, match="adam_mode is 2, expected 0 or 1"):
        read_rule(optimizer_model("AdamWOptimizer", adam_mode=2))
    with pytest.raises(ValueError, match="correct_bias is 0, expected 1"):
        read_rule(optimizer_model("AdamWOptimizer", correct_bias=0))
