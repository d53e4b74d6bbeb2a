"""Operators in JAX's own functions: what is differentiated where no kernel computes a derivative.

That is gradients of gradients, and gradients with respect to class weights and masks. Each takes the arrays and the
attributes of its operator by name.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from opgrad.ops.reference import loss_options
from opgrad.ops.reference.gradient_formulas import SHARED

Formula = Callable[..., Any]
FORMULAS: dict[str, Formula] = {name: functools.partial(results, jnp) for name, results in SHARED.items()}


def formula(function: Formula) -> Formula:
    FORMULAS[function.__name__] = function
    return function


def wide(dtype: Any) -> Any:
    """The dtype in which factors and sums of this one are formed."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


@formula
def quick_gelu_grad(dy: Array, x: Array, alpha: float = 1.702) -> Array:
    s = jax.nn.sigmoid(alpha * x)
    return dy * s * (1 + alpha * x * (1 - s))


@formula
def in_place_accumulator(buffer: Array, value: Array, overwrite: bool = False) -> Array:
    taken = value.astype(buffer.dtype)
    return taken if overwrite else buffer + taken


@formula
def scale(x: Array, factor: Array, scale_down: bool = False) -> Array:
    number = factor.astype(x.dtype).reshape(())
    return x / number if scale_down else x * number


@formula
def sink_softmax_grad(dy: Array, y: Array, lse: Array, sink: Array) -> tuple[Array, Array]:
    total = (y * dy).sum(-1, keepdims=True)
    share = jax.lax.stop_gradient(jnp.exp(sink.astype(lse.dtype)[:, None] - lse) + y.sum(-1)) - y.sum(-1)
    return y * (dy - total), -(share * total[..., 0]).sum((0, 2))  # the sink's share is 1 less the others


# --- layers, and attention, of which the gradient is the formula's -------------------------------------------------


def pulled(name: str, *arrays: str) -> Callable[[Formula], Formula]:
    """Give the gradient of an operator, with respect to these arrays, the gradient of a formula for its result."""

    def give(value: Formula) -> Formula:
        def gradient(dy: Array, **given: Any) -> tuple[Array, ...]:
            def of(*now: Array) -> Array:
                found: Array = value(**{**given, **dict(zip(arrays, now, strict=True))})
                return found

            # The layer is linear in an array that the gradient does not know: any numbers will do.
            missing = {each: given["scale"] if each == "bias" else dy for each in arrays if each not in given}
            made, pull = jax.vjp(of, *[given[each] if each in given else missing[each] for each in arrays])
            found: tuple[Array, ...] = pull(dy.astype(made.dtype))
            return found

        FORMULAS[f"{name}_grad"] = gradient
        return value

    return give


@pulled("gelu", "x")
def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, False)


@pulled("fast_gelu", "x")
def _fast_gelu(x: Array) -> Array:
    return jax.nn.gelu(x, True)


@pulled("gated_linear_unit", "gate", "up")
def _gated(gate: Array, up: Array, activation: str) -> Array:
    return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, activation == "gelu_tanh")) * up


@pulled("dropout", "x")
def _dropped(mask: Array, ratio: float, x: Array, **_: Any) -> Array:
    return jnp.where(mask, x / (1 - ratio) if ratio < 1 else x * 0, 0).astype(x.dtype)


@pulled("simplified_layer_normalization", "x", "scale")
@pulled("layer_normalization", "x", "scale", "bias")
def _normalized(
    x: Array, scale: Array, inv_std: Array, axis: int, bias: Array | None = None, mean: Array | None = None
) -> Array:
    """Normalization with the epsilon that the statistics had."""
    axes, number = tuple(range(axis % x.ndim, x.ndim)), wide(x.dtype)
    centered = x.astype(number)
    if mean is not None:
        centered = centered - centered.mean(axes, keepdims=True)
    square = (centered**2).mean(axes, keepdims=True)
    epsilon = jax.lax.stop_gradient(inv_std**-2 - square)
    y = centered * jax.lax.rsqrt(square + epsilon) * scale.astype(number)
    return y if bias is None else y + bias.astype(number)


@pulled("attention", "q", "k", "v")
def attended(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, scale: float | None, causal: str, **_: Any
) -> Array:
    """Attention on whole matrices of scores; arrays are [B, L, H, D]."""
    dtype, groups = wide(q.dtype), q.shape[2] // max(k.shape[2], 1)
    k, v = (jnp.repeat(each.astype(dtype), groups, axis=2) for each in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q.astype(dtype), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = jnp.ones(s.shape[-2:], bool)
    seen = jnp.tril(seen) if causal else seen
    if mask is not None:
        s, seen = (s, seen & mask) if mask.dtype == bool else (s + mask, seen & (mask > -jnp.inf))
    s = jnp.where(seen, s, -jnp.inf)
    largest = jax.lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    e = jnp.where(seen, jnp.exp(jnp.where(seen, s - jnp.where(largest > -jnp.inf, largest, 0), 0)), 0)
    total = e.sum(-1, keepdims=True)
    return jnp.einsum("bhij,bjhd->bihd", e / jnp.where(total > 0, total, 1), v)


# --- cross-entropy --------------------------------------------------------------------------------------------------


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
