"""Layers of language models on JAX arrays: activations, normalization, gated units, dropout, softmax with a sink.

XLA calls the kernels of a layer's value and of its gradient. Gradients of gradients are those of the layer's formula in
JAX's functions.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import gelu, silu

from opgrad.jax.calls import alike, call
from opgrad.jax.formulas import wide
from opgrad.ops import graph_operators

Values = Mapping[str, Any]  # a call's arrays, results and attributes by name
Formula = Callable[..., Array]


def _normalized(x: Array, scale: Array, bias: Array | None = None, *, axis: int, epsilon: float, rms: bool) -> Array:
    axes, number = tuple(range(axis % x.ndim, x.ndim)), wide(x.dtype)
    centered = x.astype(number)
    if not rms:
        centered = centered - centered.mean(axes, keepdims=True)
    y = centered * jax.lax.rsqrt((centered**2).mean(axes, keepdims=True) + epsilon) * scale.astype(number)
    return (y if bias is None else y + bias.astype(number)).astype(x.dtype)


def _gated(gate: Array, up: Array, activation: str) -> Array:
    return (silu(gate) if activation == "silu" else gelu(gate, activation == "gelu_tanh")) * up


def _dropped(x: Array, mask: Array, ratio: float, **_: Any) -> Array:
    return jnp.where(mask, x / (1 - ratio) if ratio < 1 else x * 0, 0).astype(x.dtype)


def _with_sink(x: Array, sink: Array) -> Array:
    z = x.astype(wide(x.dtype))
    beside = jnp.broadcast_to(sink.astype(z.dtype)[:, None, None], (*z.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([z, beside], -1), -1)[..., :-1].astype(x.dtype)


# For each operator the layer's value, by its arrays, and by results and attributes that the function names.
FORMULAS: dict[str, Formula] = {
    "gelu": lambda x: gelu(x, False),
    "fast_gelu": lambda x: gelu(x, True),
    "layer_normalization": functools.partial(_normalized, rms=False),
    "simplified_layer_normalization": functools.partial(_normalized, rms=True),
    "gated_linear_unit": _gated,
    "dropout": _dropped,
    "sink_softmax": _with_sink,
}
NOT_DIFFERENTIATED = ("seed",)


def layer(name: str, who: str, arrays: Values, **options: Any) -> Array:
    """The first result of an operator, differentiable with respect to its arrays, but for a seed.

    who: the function that errors name. Arrays are given by name, those left out as None.
    """
    given = {each: array for each, array in arrays.items() if array is not None}
    function = _layer(name, who, tuple(given), tuple(sorted(options.items())))
    found: Array = function(*alike(list(given.values())))[0]
    return found


@functools.lru_cache(1024)
def _layer(name: str, who: str, names: tuple[str, ...], attributes: tuple[tuple[str, Any], ...]) -> Any:
    forward_of, backward_of = (graph_operators()[each] for each in (name, f"{name}_grad"))
    options, results = dict(attributes), tuple(forward_of.results)
    floats = [each for each in names if each not in NOT_DIFFERENTIATED]

    @jax.custom_vjp
    def function(*arrays: Array) -> tuple[Array, ...]:
        return call(forward_of, dict(zip(names, arrays, strict=True)), options, who)

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], Any]:
        found = function(*arrays)
        return found, dict(zip((*names, *results), (*arrays, *found), strict=True))

    def backward(known: dict[str, Array], cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
        found = dict(zip(floats, gradients(cotangents[0], known), strict=True))
        return tuple(found.get(each) for each in names)

    @jax.custom_vjp
    def gradients(dy: Array, known: dict[str, Array]) -> tuple[Array, ...]:
        given = {each: {"dy": dy, **known}[each] for each in backward_of.arrays}
        shared = {each: value for each, value in options.items() if each in backward_of.attributes}
        made = dict(zip(backward_of.results, call(backward_of, given, shared, who), strict=True))
        return tuple(made[f"d{each}"].astype(known[each].dtype) for each in floats)

    def gradients_forward(dy: Array, known: dict[str, Array]) -> tuple[tuple[Array, ...], Any]:
        return gradients(dy, known), (dy, known)

    def gradients_backward(kept: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
        dy, known = kept
        constant = {"mask": known["mask"]} if "mask" in known else {}

        def formula(dy: Array, *arrays: Array) -> Any:
            def value(*now: Array) -> Array:
                return FORMULAS[name](**dict(zip(floats, now, strict=True)), **constant, **options)

            return jax.vjp(value, *arrays)[1](dy)

        _, pull = jax.vjp(formula, dy, *[known[each] for each in floats])
        by_dy, *slopes = pull(tuple(cotangents))
        # The formula computes results from the arrays, through which their derivatives go.
        found = dict(zip(floats, slopes, strict=True))
        return by_dy, {each: found.get(each, _nothing(value)) for each, value in known.items()}

    function.defvjp(forward, backward)
    gradients.defvjp(gradients_forward, gradients_backward)
    return function


def _nothing(value: Array) -> Any:
    """The gradient of what has none."""
    return jnp.zeros_like(value) if jnp.issubdtype(value.dtype, jnp.inexact) else None
