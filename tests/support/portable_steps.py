"""Exported steps of all artifact sets in the repository, batches for them, and what they have to compute."""

from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from artifact_sets import EXAMPLES, SETS, loaded
from lowered_sets import NAMES, batch_inputs
from model_sets import SETS as MODEL_SETS

from opgrad.training import AdamWRule, ArtifactSet, SGDRule
from opgrad.training.export import AdagradRule, LionRule, MomentumRule

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
MODELS = {each.name: each for each in MODEL_SETS}  # with data of their own
FOLDERS = {name: EXAMPLES / name for name in SETS} | {name: ARTIFACTS / name for name in (*NAMES, *MODELS)}
ROWS = 10  # of a batch, where the graphs take any

RULES = {
    "adamw": AdamWRule(weight_decay=0.01),
    "adamw-1": AdamWRule(adam_mode=1, weight_decay=0.01, epsilon=1e-6),
    "adamw-uncorrected": AdamWRule(adam_mode=1, correct_bias=0),
    "sgd": SGDRule(),
    "momentum": MomentumRule(weight_decay=0.01),
    "nesterov": MomentumRule(nesterov=True),
    "lion": LionRule(weight_decay=0.01),
    "adagrad": AdagradRule(weight_decay=0.01),
}


@cache
def client():
    """The module of examples/python."""
    return loaded(EXAMPLES / "python" / "step.py")


def batches(name, count, rows=None, seed=0):
    """Batches of the digits, as many rows as the set's graphs take; or those of the set's own data, again and again."""
    if name in MODELS:
        steps, evaluations = MODELS[name].batches()
        yield from islice(cycle([*steps, *evaluations]), count)
        return
    artifacts = ArtifactSet.load(FOLDERS[name])
    rows = artifacts.batch_rows or rows or ROWS
    inputs = batch_inputs(name)
    order = np.random.default_rng(seed).permutation(len(next(iter(inputs.values()))))
    for start in range(0, count * rows, rows):
        yield {spec.name: inputs[spec.name][order[start : start + rows]] for spec in artifacts.inputs}


# --- the optimizers, in NumPy and float64 ----------------------------------------------------------------------------


def stepped(rule, p, moments, g, rate, step):
    """A parameter and its moments after a step."""
    return FORMULAS[type(rule)](rule, p, moments, g, rate, step)


def _adamw(rule, p, moments, g, rate, step):
    m, v = moments or (0, 0)
    m, v = rule.alpha * m + (1 - rule.alpha) * g, rule.beta * v + (1 - rule.beta) * g * g
    c1, c2 = (1 - rule.alpha**step, 1 - rule.beta**step) if rule.correct_bias else (1, 1)
    decay = 1 - rate * rule.weight_decay
    if rule.adam_mode == 0:
        return p * decay - rate / c1 * m / (np.sqrt(v / c2) + rule.epsilon), (m, v)
    return (p - rate * np.sqrt(c2) / c1 * m / (np.sqrt(v) + rule.epsilon)) * decay, (m, v)


def _momentum(rule, p, moments, g, rate, step):
    g = g + rule.weight_decay * p
    m = rule.momentum * (moments[0] if moments else 0) + g
    return p - rate * (g + rule.momentum * m if rule.nesterov else m), (m,)


def _lion(rule, p, moments, g, rate, step):
    m = moments[0] if moments else np.zeros_like(p)
    direction = np.sign(rule.alpha * m + (1 - rule.alpha) * g) + rule.weight_decay * p
    return p - rate * direction, (rule.beta * m + (1 - rule.beta) * g,)


def _adagrad(rule, p, moments, g, rate, step):
    g = g + rule.weight_decay * p
    total = (moments[0] if moments else 0) + g * g
    return p - rate * g / (np.sqrt(total) + rule.epsilon), (total,)


FORMULAS = {
    AdamWRule: _adamw,
    SGDRule: lambda rule, p, moments, g, rate, step: (p - rate * g, ()),
    MomentumRule: _momentum,
    LionRule: _lion,
    AdagradRule: _adagrad,
}


class Reference:
    """Training with opgrad's gradients and the formulas above."""

    def __init__(self, trainer, rule):
        self.trainer, self.rule, self.steps = trainer, rule, 0
        self.exact = {name: trainer.parameters[name].astype(np.float64) for name in trainer.gradients}
        self.moments = dict.fromkeys(self.exact, ())

    def step(self, batch, rate):
        loss = self.trainer.compute_gradients(batch)
        self.apply({name: each.astype(np.float64) for name, each in self.trainer.gradients.items()}, rate)
        return loss

    def apply(self, gradients, rate):
        """A step along these gradients, which are clipped if the rule says so."""
        self.steps += 1
        if self.rule.max_norm is not None:
            norm = np.sqrt(sum((each**2).sum() for each in gradients.values()))
            gradients = {name: each * min(1, self.rule.max_norm / (norm + 1e-6)) for name, each in gradients.items()}
        for name, g in gradients.items():
            new = stepped(self.rule, self.exact[name], self.moments[name], g, rate, self.steps)
            self.exact[name], self.moments[name] = new
            self.trainer.parameters[name][...] = self.exact[name]
