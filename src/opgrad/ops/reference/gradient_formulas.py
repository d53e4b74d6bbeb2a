"""Gradients as formulas of a library's own functions, by which it differentiates them again.

xp: the library, torch or jax.numpy. The last arguments are attributes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

SHARED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "softmax_grad": lambda xp, dy, y, axis=-1: y * (dy - (y * dy).sum(axis, keepdims=True)),
        "log_softmax_grad": lambda xp, dy, y, axis=-1: dy - xp.exp(y) * dy.sum(axis, keepdims=True),
        "relu_grad": lambda xp, dy, x: xp.where(x > 0, dy, 0),
        "sigmoid_grad": lambda xp, dy, y: dy * y * (1 - y),
        "tanh_grad": lambda xp, dy, y: dy * (1 - y * y),
        "leaky_relu_grad": lambda xp, dy, y, alpha=0.01: xp.where(y > 0, dy, alpha * dy),
        "in_place_accumulator": lambda xp, buffer, value, overwrite=False: value if overwrite else buffer + value,
    }
)
