"""Operators in JAX's own functions: what is differentiated where no kernel computes a derivative.

That is gradients of gradients, and gradients with respect to class weights. Each takes the arrays and the attributes of
its operator by name.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from opgrad.ops.reference import loss_options

Formula = Callable[..., Any]
FORMULAS: dict[str, Formula] = {}


def formula(function: Formula) -> Formula:
    FORMULAS[function.__name__] = function
    return function


@formula
def softmax_grad(dy: Array, y: Array, axis: Any = -1) -> Array:
    return y * (dy - (y * dy).sum(axis, keepdims=True))


@formula
def log_softmax_grad(dy: Array, y: Array, axis: Any = -1) -> Array:
    return dy - jnp.exp(y) * dy.sum(axis, keepdims=True)


@formula
def relu_grad(dy: Array, x: Array) -> Array:
    return jnp.where(x > 0, dy, 0)


@formula
def sigmoid_grad(dy: Array, y: Array) -> Array:
    return dy * y * (1 - y)


@formula
def tanh_grad(dy: Array, y: Array) -> Array:
    return dy * (1 - y * y)


@formula
def quick_gelu_grad(dy: Array, x: Array, alpha: float = 1.702) -> Array:
    s = jax.nn.sigmoid(alpha * x)
    return dy * s * (1 + alpha * x * (1 - s))


@formula
def leaky_relu_grad(dy: Array, y: Array, alpha: float = 0.01) -> Array:
    return jnp.where(y > 0, dy, alpha * dy)


@formula
def in_place_accumulator(buffer: Array, value: Array, overwrite: bool = False) -> Array:
    taken = value.astype(buffer.dtype)
    return taken if overwrite else buffer + taken


@formula
def scale(x: Array, factor: Array, scale_down: bool = False) -> Array:
    number = factor.astype(x.dtype).reshape(())
    return x / number if scale_down else x * number


# --- cross-entropy --------------------------------------------------------------------------------------------------


def wide(dtype: Any) -> Any:
    """The dtype in which factors and sums of this one are formed."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def sample_weights(labels: Array, weight: Array | None, ignore_index: int | None, dtype: Any) -> Array:
    """The weight of each sample's class, 0 for ignored samples and for wrong labels."""
    weight = None if weight is None else weight.astype(dtype)
    found: Array = loss_options.sample_weights(jnp, labels, weight, ignore_index, dtype)
    return found


def over(total: Array) -> Array:
    """1 / total, and 0 where that is 0: the mean over nothing is 0."""
    found: Array = loss_options.over(jnp, total)
    return found


def picked(values: Array, labels: Array) -> Array:
    """What stands at each sample's label, on axis 1; 0 for labels that are no classes."""
    place = jnp.where((labels >= 0) & (labels < values.shape[1]), labels, values.shape[1])
    return jnp.take_along_axis(values, place[:, None], 1, mode="fill", fill_value=0)[:, 0]


def loss_of(
    log_prob: Array, labels: Array, weight: Array | None = None, ignore_index: int | None = None,
    reduction: str = "mean", **_: Any,
) -> Array:  # fmt: skip
    """The loss of log-probabilities."""
    dtype = wide(log_prob.dtype)
    each = sample_weights(labels, weight, ignore_index, dtype)
    losses = jnp.where(each == 0, 0, -each * picked(log_prob.astype(dtype), labels))
    if reduction == "none":
        return losses
    return losses.sum() * (over(each.sum()) if reduction == "mean" else 1)


@formula
def softmax_cross_entropy_loss_only(logits: Array, labels: Array, weight: Array | None = None, **options: Any) -> Array:
    return loss_of(jax.nn.log_softmax(logits.astype(wide(logits.dtype)), 1), labels, weight, **options)


@formula
def softmax_cross_entropy_loss(
    logits: Array, labels: Array, weight: Array | None = None, **options: Any
) -> tuple[Array, Array]:
    log_prob = jax.nn.log_softmax(logits.astype(wide(logits.dtype)), 1)
    return loss_of(log_prob, labels, weight, **options), log_prob


@formula
def softmax_cross_entropy_loss_and_grad(
    logits: Array, labels: Array, weight: Array | None = None, **options: Any
) -> tuple[Array, Array]:
    def total(x: Array) -> tuple[Array, Array]:
        loss = softmax_cross_entropy_loss_only(x, labels, weight, **options)
        return loss.sum(), loss

    dlogits, loss = jax.grad(total, has_aux=True)(logits)
    return loss, dlogits


@formula
def softmax_cross_entropy_loss_grad(
    dy: Array, log_prob: Array, labels: Array, weight: Array | None = None, bias: Array | None = None,
    ignore_index: int | None = None, reduction: str = "mean", **_: Any,
) -> Array:  # fmt: skip
    dtype = wide(log_prob.dtype)
    each = sample_weights(labels, weight, ignore_index, dtype)
    factor = each * (over(each.sum()) if reduction == "mean" else 1)
    factor = (factor * (dy if reduction == "none" else dy.reshape(()))).astype(dtype)[:, None]
    classes = jnp.arange(log_prob.shape[1]).reshape(1, -1, *[1] * (labels.ndim - 1))
    dlogits = factor * (jnp.exp(log_prob.astype(dtype)) - (labels[:, None] == classes))
    dlogits = jnp.where(factor == 0, 0, dlogits)
    return dlogits if bias is None else dlogits + bias


def weighted_losses(
    below: Array, labels: Array, weight: Array | None = None, probabilities: Array | None = None,
    ignore_index: int | None = None, label_smoothing: float = 0.0, **_: Any,
) -> Array:  # fmt: skip
    """The samples' losses sum(weight * q * (lse - z)), given lse - z; linear in weight and in probabilities."""
    w = 1 if weight is None else weight.astype(below.dtype).reshape(-1, *[1] * (below.ndim - 2))
    if probabilities is not None:
        chosen = (w * probabilities.astype(below.dtype) * below).sum(1)
    else:
        chosen = picked(w * below, labels)
    spread = label_smoothing / max(below.shape[1], 1) * (w * below).sum(1) if label_smoothing else 0
    losses = (1 - label_smoothing) * chosen + spread
    return losses if ignore_index is None else jnp.where(labels == ignore_index, 0, losses)
