"""The optimizers of an exported step: those of optimizer models, and further ones, which only exported steps have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from opgrad.base.arguments import naming, require
from opgrad.training.files.artifact_set import AdamWRule, SGDRule


def _check(rule: object, decays: Sequence[str], others: Sequence[str]) -> None:
    """Raise ArgumentError unless decays are in [0, 1) and the others are numbers from 0 on."""
    with naming(type(rule).__name__):
        for name in (*decays, *others):
            value = getattr(rule, name)
            require(name not in decays or 0 <= value < 1, name, value, "a number from 0 to below 1")
            require(0 <= value < math.inf, name, value, "a number from 0 on")


@dataclass(frozen=True)
class MomentumRule:
    """Gradient descent with momentum, PyTorch's: `m = momentum * m + g; p -= learning_rate * m`.

    momentum: the decay of m, which starts at 0. nesterov: `p -= learning_rate * (g + momentum * m)`.
    weight_decay: times p, added to g. max_norm: the largest norm of all gradients together; None: any.

    Source: On the importance of initialization and momentum in deep learning, Sutskever et al., ICML 2013.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self, ["momentum"], ["weight_decay"])


@dataclass(frozen=True)
class LionRule:
    """Lion: `p -= learning_rate * (sign(alpha * m + (1 - alpha) * g) + weight_decay * p)`, with the moment m.

    Then `m = beta * m + (1 - beta) * g`; it starts at 0.

    alpha, beta: the decay of the moment in the step, and in the moment. weight_decay: the decay of the parameters.
    max_norm: the largest norm of all gradients together; None: any.

    Source: Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675.
    """

    alpha: float = 0.9
    beta: float = 0.99
    weight_decay: float = 0.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self, ["alpha", "beta"], ["weight_decay"])


@dataclass(frozen=True)
class AdagradRule:
    """Adagrad, PyTorch's: `s += g * g; p -= learning_rate * g / (sqrt(s) + epsilon)`.

    epsilon: what keeps the denominator from 0. weight_decay: times p, added to g.
    max_norm: the largest norm of all gradients together; None: any.

    Source: Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, JMLR 12 (2011).
    """

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self, [], ["epsilon", "weight_decay"])


StepRule = AdamWRule | SGDRule | MomentumRule | LionRule | AdagradRule

NAMES: Mapping[type, str] = {
    AdamWRule: "adamw",
    SGDRule: "sgd",
    MomentumRule: "momentum",
    LionRule: "lion",
    AdagradRule: "adagrad",
}
MOMENTS: Mapping[type, tuple[str, ...]] = {
    AdamWRule: ("momentum0", "momentum1"),
    SGDRule: (),
    **dict.fromkeys((MomentumRule, LionRule, AdagradRule), ("momentum0",)),
}
"""What each keeps of a parameter, under the names that checkpoints have."""


def rule(name: str, **attributes: object) -> StepRule:
    """A rule by its name, `nesterov` being momentum's, with these attributes.

    Raises ValueError for another name, an attribute that the rule does not have, or a value without meaning.
    """
    kinds = {known: kind for kind, known in NAMES.items()} | {"nesterov": MomentumRule}
    require(name in kinds, "optimizer", name, f"one of {', '.join(sorted(kinds))}")
    kind = kinds[name]
    known = [each.name for each in fields(kind)]
    if wrong := [each for each in attributes if each not in known]:
        raise ValueError(f"{name} takes no {', '.join(wrong)}, expected {', '.join(known)}")
    given = {"nesterov": True} if name == "nesterov" else {}
    made: StepRule = kind(**given, **attributes)
    return made
