"""Gradients as formulas of a library's own functions, by which it differentiates them again.

xp: the library, torch or jax.numpy. The last arguments are attributes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def _softmax_grad(xp: Any, dy: Any, y: Any, axis: Any = -1) -> Any:
    return y * (dy - (y * dy).sum(axis, keepdims=True))


def _log_softmax_grad(xp: Any, dy: Any, y: Any, axis: Any = -1) -> Any:
    return dy - xp.exp(y) * dy.sum(axis, keepdims=True)


def _relu_grad(xp: Any, dy: Any, x: Any) -> Any:
    return xp.where(x > 0, dy, 0)


def _sigmoid_grad(xp: Any, dy: Any, y: Any) -> Any:
    return dy * y * (1 - y)


def _tanh_grad(xp: Any, dy: Any, y: Any) -> Any:
    return dy * (1 - y * y)


def _leaky_relu_grad(xp: Any, dy: Any, y: Any, alpha: float = 0.01) -> Any:
    return xp.where(y > 0, dy, alpha * dy)


def _in_place_accumulator(xp: Any, buffer: Any, value: Any, overwrite: bool = False) -> Any:
    return value if overwrite else buffer + value


SHARED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "softmax_grad": _softmax_grad,
        "log_softmax_grad": _log_softmax_grad,
        "relu_grad": _relu_grad,
        "sigmoid_grad": _sigmoid_grad,
        "tanh_grad": _tanh_grad,
        "leaky_relu_grad": _leaky_relu_grad,
        "in_place_accumulator": _in_place_accumulator,
    }
)
