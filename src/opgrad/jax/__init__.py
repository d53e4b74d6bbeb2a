"""JAX: differentiable functions that work under jit, grad and vmap, on the CPU.

Each is a jax.custom_vjp around jax.pure_callback: XLA hands the arrays to the NumPy kernels on the host, so a call
costs a copy in and out, and a compiled program waits for it. On other devices XLA moves the arrays to the host and
back. Derivatives are of the first order, in reverse.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import Array

import opgrad

Shape: Any = jax.ShapeDtypeStruct


def softmax(x: Array, axis: int = -1) -> Array:
    """Probabilities from logits over one axis.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16. Returns y, like x. Raises TypeError,
    ValueError. Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: jax.nn.softmax.
    """
    found: Array = _row_function("softmax", axis)(x)
    return found


def log_softmax(x: Array, axis: int = -1) -> Array:
    """Logarithms of the softmax probabilities over one axis.

    Shapes, dtypes and what is raised are those of softmax. Formula: y = x - max(x) - log(sum(exp(x - max(x)))).
    Source: jax.nn.log_softmax.
    """
    found: Array = _row_function("log_softmax", axis)(x)
    return found


def embedding(indices: Array, table: Array) -> Array:
    """The rows of a table that indices name, with a gradient that is summed in the same order every time.

    indices: any shape; int32 or int64 in [-V, V). table: shape (V, D1, …); float32, float64, float16 or bfloat16.
    Returns y of shape indices.shape + table.shape[1:]. Raises TypeError; an index out of range is a ValueError, which
    XLA raises as its own error. Formula: y[i] = table[indices[i]]. Source: ONNX Gather.
    """
    found: Array = _embedding(indices, table)
    return found


def cross_entropy(logits: Array, labels: Array, weight: Array | None = None, **options: Any) -> Array:
    """The loss of opgrad.cross_entropy, with its gradient computed in the same pass where one is wanted.

    logits: shape (N, C) or (N, C, D1, …, Dk). labels: classes, or probabilities, which get no gradient. weight: shape
    (C,), without a gradient. options: the other keywords of opgrad.cross_entropy; Python's numbers.

    Returns the loss, () or of the samples' shape for reduction "none"; float32, or float64 for float64. Raises what
    opgrad.cross_entropy raises, wrong labels by way of XLA. Formula and source: there.
    """
    found: Array = _cross_entropy(_key(options))(logits, labels, weight)
    return found


def linear_cross_entropy(
    x: Array, linear_weight: Array, labels: Array, linear_bias: Array | None = None, weight: Array | None = None,
    **options: Any,
) -> Array:  # fmt: skip
    """The loss of opgrad.linear_cross_entropy, whose logits are never stored.

    x: shape (N, H). linear_weight: shape (C, H). labels: shape (N,). linear_bias: shape (C,). weight: shape (C,),
    without a gradient. options: the other keywords of opgrad.linear_cross_entropy; Python's numbers.

    Returns the loss, () or (N,) for reduction "none". Raises what that function raises. Formula and source: there.
    """
    found: Array = _linear_cross_entropy(_key(options))(x, linear_weight, labels, linear_bias, weight)
    return found


# --- calls of NumPy functions --------------------------------------------------------------------------------------


def _call(function: Callable[..., Any], results: Any, *arrays: Any) -> Any:
    """The function's results, of these shapes and dtypes; arrays may be None."""
    given = [array for array in arrays if array is not None]

    def on_host(*values: Any) -> Any:
        taken = iter(values)
        return function(*[None if array is None else np.asarray(next(taken)) for array in arrays])

    return jax.pure_callback(on_host, results, *given, vmap_method="sequential")


def _like(x: Any) -> Any:
    return Shape(x.shape, x.dtype)


def _wide(x: Any) -> Any:
    return np.float64 if x.dtype == np.float64 else np.float32


def _key(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


@cache
def _row_function(name: str, axis: int) -> Any:
    forward, backward = partial(getattr(opgrad, name), axis=axis), partial(getattr(opgrad, f"{name}_grad"), axis=axis)

    @jax.custom_vjp
    def function(x: Array) -> Any:
        return _call(forward, _like(x), x)

    def keep(x: Array) -> tuple[Any, Any]:
        y = function(x)
        return y, y

    def slope(y: Array, dy: Array) -> tuple[Any]:
        return (_call(backward, _like(y), dy, y),)

    function.defvjp(keep, slope)
    return function


@jax.custom_vjp
def _embedding(indices: Array, table: Array) -> Any:
    result = Shape((*indices.shape, *table.shape[1:]), table.dtype)
    return _call(lambda indices, table: opgrad.gather(table, indices), result, indices, table)


def _keep_indices(indices: Array, table: Array) -> tuple[Any, Any]:
    return _embedding(indices, table), (indices, table)


def _table_gradient(kept: Any, dy: Array) -> tuple[None, Any]:
    indices, table = kept
    return None, _call(partial(opgrad.gather_grad, table.shape), _like(table), indices, dy)


_embedding.defvjp(_keep_indices, _table_gradient)


def _loss_shape(labels: Any, x: Any, options: dict[str, Any]) -> Any:
    """That of the loss; of dense labels the samples are those of logits."""
    samples = labels.shape if np.issubdtype(labels.dtype, np.integer) else (*labels.shape[:1], *labels.shape[2:])
    return Shape(samples if options.get("reduction") == "none" else (), _wide(x))


def _scaled(gradient: Any, dloss: Array, axis: int = 1) -> Any:
    """The gradient times that of the loss, where there is one for each sample along its other axes than `axis`."""
    factor = dloss if not dloss.ndim else jax.numpy.expand_dims(dloss, axis)
    return (gradient * factor).astype(gradient.dtype)


@cache
def _cross_entropy(key: tuple[tuple[str, Any], ...]) -> Any:
    options = dict(key)

    @jax.custom_vjp
    def function(logits: Array, labels: Array, weight: Array | None) -> Any:
        def on_host(*arrays: Any) -> Any:
            return opgrad.cross_entropy(*arrays, **options).loss

        return _call(on_host, _loss_shape(labels, logits, options), logits, labels, weight)

    def keep(logits: Array, labels: Array, weight: Array | None) -> tuple[Any, Any]:
        def on_host(*arrays: Any) -> Any:
            found, dlogits = opgrad.cross_entropy_and_grad(*arrays, **options)
            return found.loss, dlogits

        shapes = _loss_shape(labels, logits, options), _like(logits)
        loss, dlogits = _call(on_host, shapes, logits, labels, weight)
        return loss, dlogits

    def slope(dlogits: Array, dloss: Array) -> tuple[Any, None, None]:
        return _scaled(dlogits, dloss), None, None

    function.defvjp(keep, slope)
    return function


@cache
def _linear_cross_entropy(key: tuple[tuple[str, Any], ...]) -> Any:
    options = dict(key)

    @jax.custom_vjp
    def function(x: Array, w: Array, labels: Array, b: Array | None, weight: Array | None) -> Any:
        def on_host(*arrays: Any) -> Any:
            return opgrad.linear_cross_entropy(*arrays, **options).loss

        return _call(on_host, _loss_shape(labels, x, options), x, w, labels, b, weight)

    def keep(*arrays: Any) -> tuple[Any, Any]:
        return function(*arrays), arrays

    def slope(arrays: Any, dloss: Array) -> tuple[Any, ...]:
        x, w, _, b, _ = arrays

        def on_host(dloss: Any, *arrays: Any) -> Any:
            _, dx, dw, db = opgrad.linear_cross_entropy_and_grad(*arrays, **options, dloss=dloss)
            return (dx, dw) if db is None else (dx, dw, db)

        shapes = (_like(x), _like(w)) if b is None else (_like(x), _like(w), _like(b))
        dx, dw, *db = _call(on_host, shapes, dloss, *arrays)
        return dx, dw, None, db[0] if db else None, None

    function.defvjp(keep, slope)
    return function
