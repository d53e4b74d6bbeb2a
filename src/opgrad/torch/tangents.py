"""The tangent of every operator, for forward-mode differentiation, in terms of operators and torch functions.

The backward pass multiplies by the transposed Jacobian, forward mode by the Jacobian. Where that is symmetric, as it is
for all elementwise operators and for softmax, the gradient's formula serves both; an argument on which the operator
depends linearly goes through the operator itself.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from opgrad.torch.formulas import (
    Axes,
    directional,
    gather,
    gather_grad,
    log_softmax_grad,
    loss_and_grad,
    loss_grad,
    scale,
    softmax_grad,
    summed,
    total,
    wide,
)
from opgrad.torch.operators import OPERATORS

Tangent = Tensor | None


def symmetric(*names: str) -> None:
    """Give these operators tangents by the formulas of their gradients, argument by argument."""
    for name in names:
        OPERATORS[name].derivative.tangent = _by_gradient(name)


def _by_gradient(name: str) -> Callable[..., Tangent]:
    def by_gradient(given: Mapping[str, Tensor], values: Mapping[str, Any]) -> Tangent:
        return added(*[multiplied(name, argument, t, values) for argument, t in given.items()])

    return by_gradient


def multiplied(operator: str, argument: str, t: Tensor, values: Mapping[str, Any], of: str | None = None) -> Tangent:
    """t times the Jacobian, a symmetric one, of the only result or of that with the name `of`, by an argument."""
    derivative = OPERATORS[operator].derivative
    needs = {name: name == argument for name in derivative.names}
    known = [needs if name == "needs" else derivative.known(name, values) for name in derivative.wanted]
    found = derivative.gradient(*[t if of in (None, name) else None for name in derivative.op.results], *known)
    if argument not in found:
        raise derivative.missing(argument)
    return found[argument]


def tangent(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give an operator its tangent.

    It is called by name with what its parameters name: `t_x`, the tangent of an argument x, None where it has none;
    arguments and results; all of those as `values`.
    """

    def give(formula: Callable[..., Any]) -> Callable[..., Any]:
        wanted, derivative = tuple(inspect.signature(formula).parameters), OPERATORS[name].derivative

        def by_name(given: Mapping[str, Tensor], values: Mapping[str, Any]) -> Any:
            for argument in given:
                if f"t_{argument}" not in wanted:
                    raise derivative.missing(argument)
            known: dict[str, Any] = {f"t_{argument}": given.get(argument) for argument in derivative.op.inputs}
            known |= values
            known["values"] = values
            return formula(**{each: known[each] for each in wanted})

        derivative.tangent = by_name
        return formula

    return give


def added(*parts: Tangent) -> Tangent:
    """The sum of those that there are."""
    given = [part for part in parts if part is not None]
    return sum(given[1:], given[0]) if given else None


# The Jacobian of an elementwise operator is diagonal, and so symmetric.
symmetric("softmax", *(name for name, each in OPERATORS.items() if each.op.kind == "elements" and each.eager))


# --- softmax --------------------------------------------------------------------------------------------------------


@tangent("log_softmax")
def _log_softmax(t_x: Tensor, y: Tensor, axis: Axes) -> Tensor:
    return t_x - total(t_x * y.exp(), axis)


@tangent("softmax_grad")
def _softmax_grad(t_dy: Tangent, t_y: Tangent, dy: Tensor, y: Tensor, axis: Axes) -> Tangent:
    by_y = None if t_y is None else t_y * (dy - total(y * dy, axis)) - y * total(t_y * dy, axis)
    return added(None if t_dy is None else softmax_grad(t_dy, y, axis), by_y)


@tangent("log_softmax_grad")
def _log_softmax_grad(t_dy: Tangent, t_y: Tangent, dy: Tensor, y: Tensor, axis: Axes) -> Tangent:
    by_y = None if t_y is None else -t_y * y.exp() * total(dy, axis)
    return added(None if t_dy is None else log_softmax_grad(t_dy, y, axis), by_y)


# --- cross-entropy --------------------------------------------------------------------------------------------------


@tangent("softmax_cross_entropy_loss")
def _loss(
    t_logits: Tensor,
    log_prob: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    loss = directional(t_logits, log_prob, labels, weight, ignore_index, reduction)
    return loss, _log_softmax(t_logits, log_prob, 1)


@tangent("softmax_cross_entropy_loss_only")
def _loss_only(
    t_logits: Tensor,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
) -> Tensor:
    _, dlogits = loss_and_grad(logits, labels, weight, ignore_index, reduction, None, wide(logits.dtype), False)
    return summed(dlogits * t_logits, reduction)


@tangent("softmax_cross_entropy_loss_and_grad")
def _loss_and_grad(t_logits: Tensor, values: Mapping[str, Any]) -> tuple[Tensor, Tangent]:
    by_dlogits = multiplied("softmax_cross_entropy_loss_and_grad", "logits", t_logits, values, of="dlogits")
    if values["dlogits"].dtype == wide(values["logits"].dtype):
        return summed(values["dlogits"] * t_logits, values["reduction"]), by_dlogits
    names = ("logits", "labels", "weight", "ignore_index", "reduction")
    return _loss_only(t_logits, **{name: values[name] for name in names}), by_dlogits


@tangent("softmax_cross_entropy_loss_grad")
def _loss_grad(t_dy: Tangent, t_log_prob: Tangent, t_bias: Tangent, values: Mapping[str, Any]) -> Tangent:
    by_dy = by_log_prob = None
    if t_dy is not None:
        names = ("ignore_index", "reduction", "out_dtype", "check")
        options = [values[name] for name in names]
        by_dy = loss_grad(t_dy, values["log_prob"], values["labels"], values["weight"], None, *options)
    if t_log_prob is not None:
        by_log_prob = multiplied("softmax_cross_entropy_loss_grad", "log_prob", t_log_prob, values)
    return added(by_dy, by_log_prob, t_bias)


# --- rotary embedding -------------------------------------------------------------------------------------------------


def _turned(name: str, array: str) -> None:
    """Give a rotation, which is linear in its first array, its tangent."""
    operator = OPERATORS[name]

    def turned(given: Mapping[str, Tensor], values: Mapping[str, Any]) -> Tangent:
        for argument in given:
            if argument != array:
                raise operator.derivative.missing(argument)
        found: Tensor = operator.call(given[array], *[values[each] for each in operator.names[1:]])
        return found

    operator.derivative.tangent = turned


_turned("rotary_embedding", "x")
_turned("rotary_embedding_grad", "dy")


# --- gather ---------------------------------------------------------------------------------------------------------


@tangent("gather")
def _gather(t_x: Tensor, indices: Tensor, axis: int) -> Tensor:
    y: Tensor = gather(t_x, indices, axis, False)
    return y


@tangent("gather_grad")
def _gather_grad(t_dy: Tensor, shape: Sequence[int], indices: Tensor, axis: int) -> Tensor:
    dx: Tensor = gather_grad(shape, indices, t_dy, axis, False)
    return dx


# --- accumulation ---------------------------------------------------------------------------------------------------


@tangent("scale")
def _scale(t_x: Tangent, t_factor: Tangent, x: Tensor, factor: Tensor, scale_down: bool, y: Tensor) -> Tangent:
    by_factor = None
    if t_factor is not None:
        by_factor = scale(scale(-y, t_factor, False), factor, True) if scale_down else scale(x, t_factor, False)
    return added(None if t_x is None else scale(t_x, factor, scale_down), by_factor)
