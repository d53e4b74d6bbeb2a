"""Attention on JAX arrays: XLA calls the kernels in tiles; what no kernel computes is JAX's derivative of a formula."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from opgrad.contract.lists import only
from opgrad.jax.calls import alike, call
from opgrad.jax.formulas import wide
from opgrad.ops import graph_operators

NAME = "dot_product_attention"
_attention = only(graph_operators()["attention"], ("y", "lse"))
_attention_grad = only(graph_operators()["attention_grad"], ("dq", "dk", "dv"))


def attend(q: Array, k: Array, v: Array, mask: Array | None, scale: float | None, is_causal: bool) -> Array:
    """The result, differentiable with respect to all arrays but a bool mask; they are [B, L, H, D]."""
    given = [q, k, v] if mask is None else [q, k, v, mask]
    y, _ = _function(scale, is_causal)(*alike(given))
    return y


@functools.lru_cache(256)
def _function(scale: float | None, is_causal: bool) -> Callable[..., tuple[Array, Array]]:
    """y and the logarithms of sums of exponentials; these have no gradient, as nobody is given them."""
    options = {"scale": scale, "causal": "top_left" if is_causal else "", "layout": "BLHD"}

    @jax.custom_vjp
    def function(q: Array, k: Array, v: Array, *mask: Array) -> tuple[Array, Array]:
        y, lse = call(_attention, {"q": q, "k": k, "v": v, **_named(mask)}, options, NAME)
        return y, lse

    def forward(*primals: Any) -> tuple[tuple[Array, Array], Any]:
        arrays = tuple(each.value for each in primals)
        y, lse = function(*arrays)
        by_mask = () if len(primals) > 3 and primals[3].perturbed else None
        return (y, lse), (arrays, y, lse, by_mask)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        arrays, y, lse, by_mask = kept
        dy, _ = cotangents
        if type(dy) is jax.custom_derivatives.SymbolicZero:
            return (None,) * len(arrays)
        found = _gradients(scale, is_causal)(dy, y, lse, *arrays)
        if len(arrays) == 3:
            return found
        if by_mask is None:
            return *found, None
        q, k, v, mask = arrays
        _, pull = jax.vjp(lambda mask: _plain(q, k, v, mask, scale=scale, is_causal=is_causal), mask)
        return *found, *pull(dy)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


@functools.lru_cache(256)
def _gradients(scale: float | None, is_causal: bool) -> Callable[..., tuple[Array, ...]]:
    """The gradients of q, k and v, by dy, y, lse, q, k, v and the mask; their derivatives are those of a formula."""
    options = {"scale": scale, "causal": "top_left" if is_causal else "", "layout": "BLHD"}

    @jax.custom_vjp
    def gradients(dy: Array, y: Array, lse: Array, q: Array, k: Array, v: Array, *mask: Array) -> tuple[Array, ...]:
        arrays = {"dy": dy, "q": q, "k": k, "v": v, "y": y, "lse": lse, **_named(mask)}
        return call(_attention_grad, arrays, options, NAME)

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], Any]:
        return gradients(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> tuple[Any, ...]:
        dy, y, lse, q, k, v, *mask = arrays
        floats = mask if mask and mask[0].dtype != bool else []

        def formula(dy: Array, q: Array, k: Array, v: Array, *floats: Array) -> Any:
            every = floats or mask
            _, pull = jax.vjp(lambda *x: _plain(*x, *every, scale=scale, is_causal=is_causal), q, k, v)
            return pull(dy)

        _, pull = jax.vjp(formula, dy, q, k, v, *floats)
        by_dy, *others = pull(tuple(cotangents))
        # The formula computes y and lse from the other arguments, through which their derivatives go.
        return by_dy, jnp.zeros_like(y), jnp.zeros_like(lse), *others, *([None] if mask and not floats else [])

    gradients.defvjp(forward, backward)
    return gradients


def _named(mask: tuple[Array, ...]) -> dict[str, Array]:
    return {"mask": mask[0]} if mask else {}


def _plain(q: Array, k: Array, v: Array, mask: Array | None = None, *, scale: float | None, is_causal: bool) -> Array:
    """The same on whole matrices of scores."""
    kind, dtype, groups = q.dtype, wide(q.dtype), q.shape[2] // max(k.shape[2], 1)
    k, v = (jnp.repeat(each.astype(dtype), groups, axis=2) for each in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q.astype(dtype), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = jnp.ones(s.shape[-2:], bool)
    seen = jnp.tril(seen) if is_causal else seen
    if mask is not None:
        s, seen = (s, seen & mask) if mask.dtype == bool else (s + mask, seen & (mask > -jnp.inf))
    s = jnp.where(seen, s, -jnp.inf)
    largest = jax.lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    e = jnp.where(seen, jnp.exp(jnp.where(seen, s - jnp.where(largest > -jnp.inf, largest, 0), 0)), 0)
    total = e.sum(-1, keepdims=True)
    p = e / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhij,bjhd->bihd", p, v).astype(kind)
