"""Losses of linear layers on JAX arrays: the logits of some rows at a time, which are never all stored.

XLA forms the products, in a loop over chunks of rows. With one number as loss, the chunk's gradient takes the place of
its logits, and what follows from it is added up at once; else, and for divergences from a teacher's layer, the backward
pass computes the chunk's logits again.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from opgrad.jax.calls import alike, call
from opgrad.jax.derivative import wide
from opgrad.jax.loss import Targets, divided, sample_losses, target_gradients, with_gradient
from opgrad.ops import graph_operators
from opgrad.ops.reference.loss_options import LossOptions

CHUNK = 32 << 20  # bytes of logits that are computed at a time


class Dense(NamedTuple):
    """A linear layer: (C, H), and (C,) or None."""

    weight: Array
    bias: Array | None = None


def linear_cross_entropy(
    x: Array,
    layer: Dense,
    targets: Targets,
    options: LossOptions,
    reduction: str,
    square: Any,
    num_items: Any,
    bend: Any,
) -> Array:
    """The loss; the arguments are checked. bend: what is done with logits beside what options say, None: nothing."""
    dtype = wide(x.dtype)
    if reduction == "none" or bend is not None:
        losses, lse = _by_jax(options, x, layer, targets, bend)
        if reduction == "none":
            return losses + square * lse * lse
        by_weight, by_count = divided(options, targets, reduction, num_items, dtype)
        return losses.sum() * by_weight + square * (lse * lse).sum() * by_count
    by_weight, by_count = divided(options, targets, reduction, num_items, dtype)
    return _total(options)(*alike((x, layer, targets, by_weight, by_count * square)))


def _rows(layer: Dense, dtype: Any) -> int:
    return max(CHUNK // max(layer.weight.shape[0] * jnp.dtype(dtype).itemsize, 1), 1)


def over_chunks(body: Callable[..., Any], carry: Any, arrays: Any, rows: int) -> tuple[Any, Any]:
    """The result of jax.lax.scan for a body that takes `rows` rows of the arrays at a time, and the rest at the end."""
    count = jax.tree.leaves(arrays)[0].shape[0]
    whole = count // rows * rows
    made = None
    if whole:
        split = jax.tree.map(lambda a: a[:whole].reshape(whole // rows, rows, *a.shape[1:]), arrays)
        carry, made = jax.lax.scan(body, carry, split)
        made = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), made)
    if whole < count or not count:
        carry, last = body(carry, jax.tree.map(lambda a: a[whole:], arrays))
        made = last if made is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), made, last)
    return carry, made


def logits_of(x: Array, weight: Array, bias: Array | None) -> Array:
    """The logits of some rows, in the precision of the loss."""
    found = jnp.matmul(x.astype(weight.dtype), weight.T)
    return found if bias is None else found + bias.astype(weight.dtype)


def _by_jax(options: LossOptions, x: Array, layer: Dense, targets: Targets, bend: Any) -> tuple[Array, Array]:
    """Loss and log-sum-exp of each sample; JAX differentiates the loop, which keeps no logits."""
    dtype = wide(x.dtype)

    @jax.checkpoint
    def of_chunk(layer: Dense, weight: Array | None, x: Array, labels: Array) -> tuple[Array, Array]:
        logits = logits_of(x, layer.weight.astype(dtype), layer.bias)
        found: tuple[Array, Array] = sample_losses(options)(
            logits if bend is None else bend(logits), Targets(labels, weight)
        )
        return found

    def body(carry: Any, part: Any) -> tuple[Any, Any]:
        return carry, of_chunk(layer, targets.weight, *part)

    _, found = over_chunks(body, None, (x, targets.labels), _rows(layer, dtype))
    losses, lse = found
    return losses, lse


class _Sums(NamedTuple):
    """The sums over chunks: of losses, squares of lse, and gradients; None for gradients that are not wanted."""

    losses: Array
    squares: Array
    layer: Dense
    weight: Array | None


@functools.lru_cache(1024)
def _total(options: LossOptions) -> Any:
    """by_weight times the sum of the losses, and by_count times that of the squares of lse."""

    @jax.custom_vjp
    def total(x: Array, layer: Dense, targets: Targets, by_weight: Array, by_count: Array) -> Array:
        losses, lse = _by_jax(options, x, layer, targets, None)
        return losses.sum() * by_weight + (lse * lse).sum() * by_count

    def forward(x: Any, layer: Any, targets: Any, by_weight: Any, by_count: Any) -> tuple[Array, Any]:
        given = jax.tree.map(lambda each: each.value, (x, layer, targets), is_leaf=_is_primal)
        wanted = {"weight": ()} if targets.weight is not None and targets.weight.perturbed else {}
        x, layer, targets = given
        sums, dx = _one_pass(options, x, layer, targets, by_weight.value, by_count.value, wanted)
        found = sums.losses * by_weight.value + sums.squares * by_count.value
        return found, (sums, dx, layer)

    def backward(kept: Any, dtotal: Any) -> tuple[Any, ...]:
        sums, dx, layer = kept
        if isinstance(dtotal, SymbolicZero):
            return (None,) * 5
        by_layer = jax.tree.map(lambda each, like: (each * dtotal).astype(like.dtype), sums.layer, layer)
        by_weight = None if sums.weight is None else sums.weight * dtotal
        targets = Targets(None, by_weight)  # type: ignore[arg-type]
        return (dx * dtotal).astype(dx.dtype), by_layer, targets, dtotal * sums.losses, dtotal * sums.squares

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


def _is_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


def _one_pass(
    options: LossOptions, x: Array, layer: Dense, targets: Targets, by_weight: Array, by_count: Array,
    wanted: Mapping[str, Any],
) -> tuple[_Sums, Array]:  # fmt: skip
    """The sums over all samples, and the gradient with respect to x."""
    dtype = wide(x.dtype)
    weight = layer.weight.astype(dtype)

    def body(sums: _Sums, part: tuple[Array, Array]) -> tuple[_Sums, Array]:
        rows, labels = part
        chosen, logits = Targets(labels, targets.weight), logits_of(rows, weight, layer.bias)
        upstream = {"dloss": jnp.broadcast_to(by_weight, labels.shape)}
        upstream["dlse_square"] = jnp.broadcast_to(by_count, labels.shape)
        losses, lse, dlogits = with_gradient(options, logits, chosen, upstream)
        by_bias = None if sums.layer.bias is None else sums.layer.bias + dlogits.sum(0)
        by_layer = Dense(sums.layer.weight + jnp.matmul(dlogits.T, rows.astype(dtype)), by_bias)
        by_class = sums.weight
        if by_class is not None:
            by_class += target_gradients(options, wanted, logits, chosen, upstream["dloss"])["weight"]
        added = _Sums(sums.losses + losses.sum(), sums.squares + (lse * lse).sum(), by_layer, by_class)
        return added, jnp.matmul(dlogits, weight).astype(x.dtype)

    none = jnp.zeros((), dtype)
    start = Dense(jnp.zeros(weight.shape, dtype), None if layer.bias is None else jnp.zeros(layer.bias.shape, dtype))
    by_class = None if targets.weight is None or not wanted else jnp.zeros_like(targets.weight)
    first = _Sums(none, none, start, by_class)
    first, x = alike((first, x))
    return over_chunks(body, first, (x, targets.labels), _rows(layer, dtype))


# --- divergences from a teacher's layer ------------------------------------------------------------------------------


_divergence_operator = graph_operators()["softmax_divergence_and_grad"]


@functools.lru_cache(1024)
def _divergence(name: str, beta: float, temperature: float) -> Any:
    """The divergence of each row of logits from others, differentiable once, by the logits."""
    options = {"beta": beta, "temperature": temperature}

    @jax.custom_vjp
    def divergence(logits: Array, others: Array) -> Array:
        return forward(logits, others)[0]

    def forward(logits: Array, others: Array) -> tuple[Array, Array]:
        loss, dlogits = call(_divergence_operator, {"logits": logits, "teacher_logits": others}, options, name)
        return loss, dlogits

    def backward(dlogits: Array, dloss: Array) -> tuple[Array, None]:
        return dlogits * dloss[:, None], None

    divergence.defvjp(forward, backward)
    return divergence


def divergences(
    name: str, x: Array, student: Dense, y: Array, teacher: Dense, beta: float, temperature: float
) -> Array:
    """The divergence of each row; the arguments are checked."""
    dtype = wide(x.dtype)
    of = _divergence(name, beta, temperature)

    @jax.checkpoint
    def of_chunk(student: Dense, teacher: Dense, x: Array, y: Array) -> Array:
        pairs = ((x, student), (y, teacher))
        logits, others = (logits_of(rows, each.weight.astype(dtype), each.bias) for rows, each in pairs)
        found: Array = of(logits, others)
        return found

    def body(carry: Any, part: Any) -> tuple[Any, Array]:
        return carry, of_chunk(student, jax.lax.stop_gradient(teacher), *part)

    x, y, student, teacher = alike((x, y, student, teacher))
    rows = max(CHUNK // max(2 * student.weight.shape[0] * jnp.dtype(dtype).itemsize, 1), 1)
    found: Array = over_chunks(body, None, (x, jax.lax.stop_gradient(y)), rows)[1]
    return found
