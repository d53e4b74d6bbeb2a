"""One step of an optimizer as a formula of ONNX values, a function for each rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.optimizer import adamw_step, clip_factor, corrections, sgd_step
from opgrad.training.export.rules import AdagradRule, LionRule, MomentumRule, StepRule
from opgrad.training.files.rules import AdamWRule, SGDRule


@dataclass(frozen=True)
class Slot:
    """A parameter, or all of them behind each other, with its moments and its gradient; all of one element type."""

    parameter: Value
    moments: tuple[Value, ...]
    gradient: Value


New = tuple[Value, ...]
"""The parameter after a step, and its moments."""


def stepped(rule: StepRule, slots: Sequence[Slot], rate: Value, count: Value) -> list[New]:
    """Parameters and moments after a step along gradients that are clipped, together, if the rule says so.

    rate, count: of shape (); the learning rate, and the number of this step, from 1.
    """
    slots = _clipped(slots, rule.max_norm)
    if isinstance(rule, AdamWRule):
        scalars = (rate, *corrections(rate, count, (rule.alpha, rule.beta), bool(rule.correct_bias)))
        return [_adamw(rule, slot, scalars) for slot in slots]
    return [UPDATES[type(rule)](rule, slot, rate) for slot in slots]


def _clipped(slots: Sequence[Slot], max_norm: float | None) -> Sequence[Slot]:
    if max_norm is None:
        return slots
    squares = reduce(add, ((each.gradient * each.gradient).sum(keepdims=False) for each in slots))
    factor = clip_factor(squares, max_norm)
    return [Slot(each.parameter, each.moments, each.gradient * factor) for each in slots]


def _sgd(rule: SGDRule, slot: Slot, rate: Value) -> New:
    return (sgd_step(slot.parameter, slot.gradient, rate),)


def _adamw(rule: AdamWRule, slot: Slot, scalars: tuple[Value, Value, Value]) -> New:
    first, second = slot.moments
    names = ("alpha", "beta", "epsilon", "weight_decay", "adam_mode")
    settings = {name: getattr(rule, name) for name in names}
    return adamw_step(slot.parameter, first, second, slot.gradient, scalars, **settings)


def _momentum(rule: MomentumRule, slot: Slot, rate: Value) -> New:
    gradient = _with_decay(slot, rule.weight_decay)
    moment = slot.moments[0] * rule.momentum + gradient
    direction = gradient + moment * rule.momentum if rule.nesterov else moment
    return sgd_step(slot.parameter, direction, rate), moment


def _lion(rule: LionRule, slot: Slot, rate: Value) -> New:
    p, g, (m,) = slot.parameter, slot.gradient, slot.moments
    direction = (m * rule.alpha + g * (1 - rule.alpha)).apply("Sign")
    if rule.weight_decay:
        direction = direction + p * rule.weight_decay
    return sgd_step(p, direction, rate), m * rule.beta + g * (1 - rule.beta)


def _adagrad(rule: AdagradRule, slot: Slot, rate: Value) -> New:
    gradient = _with_decay(slot, rule.weight_decay)
    total = slot.moments[0] + gradient * gradient
    return sgd_step(slot.parameter, gradient / (total.apply("Sqrt") + rule.epsilon), rate), total


def _with_decay(slot: Slot, decay: float) -> Value:
    return slot.gradient + slot.parameter * decay if decay else slot.gradient


UPDATES: dict[type, Callable[..., Any]] = {
    SGDRule: _sgd,
    MomentumRule: _momentum,
    LionRule: _lion,
    AdagradRule: _adagrad,
}
