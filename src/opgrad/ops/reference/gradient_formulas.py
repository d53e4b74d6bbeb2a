"""Gradients as formulas of a library's own functions, by which it differentiates them again.

xp: the library's functions: where, exp, sigmoid, silu, gelu (with whether by tanh), amax, tril, ones_like, bool, repeat
(along an axis), constant (an array without its gradient), and pulled (the gradients of a function of arrays, given that
of its result). Arrays are float32 or float64; the last arguments are attributes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def sink_softmax_grad(xp: Any, dy: Any, y: Any, lse: Any, sink: Any) -> tuple[Any, Any]:
    total = (y * dy).sum(-1, keepdims=True)
    rest = xp.constant(xp.exp(sink[:, None] - lse) + y.sum(-1)) - y.sum(-1)  # the sink's share is 1 less the others
    return y * (dy - total), -(rest * total[..., 0]).sum((0, 2))


def quick_gelu_grad(xp: Any, dy: Any, x: Any, alpha: float = 1.702) -> Any:
    s = xp.sigmoid(alpha * x)
    return dy * s * (1 + alpha * x * (1 - s))


# --- layers, whose gradients are those of their formulas -------------------------------------------------------------


def gated(xp: Any, gate: Any, up: Any, activation: str = "silu", **_: Any) -> Any:
    """gated_linear_unit."""
    return (xp.silu(gate) if activation == "silu" else xp.gelu(gate, activation == "gelu_tanh")) * up


def normalized(
    xp: Any, x: Any, scale: Any, inv_std: Any, axis: Any = -1, bias: Any = None, mean: Any = None, **_: Any
) -> Any:
    """Normalization with the epsilon that the statistics had; that of roots of mean squares has no mean."""
    axes = tuple(range((axis[0] if isinstance(axis, list | tuple) else axis) % x.ndim, x.ndim))
    centered = x if mean is None else x - x.mean(axes, keepdims=True)
    square = (centered * centered).mean(axes, keepdims=True)
    y = centered * (square + xp.constant(inv_std**-2 - square)) ** -0.5 * scale
    return y if bias is None else y + bias


def attended(
    xp: Any, q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None, causal: str = "",
    layout: str = "BHLD", **_: Any,
) -> Any:  # fmt: skip
    """Attention on whole matrices of scores; 0 for a query that sees no key."""
    if layout == "BLHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = (xp.repeat(x, groups, 1) if groups > 1 else x for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = xp.where(mask, s, -float("inf")) if mask.dtype == xp.bool else s + mask
    if causal:
        s = xp.where(xp.tril(xp.ones_like(s)) > 0, s, -float("inf"))
    largest = xp.constant(xp.amax(s, -1, keepdims=True) if s.shape[-1] else s.sum(-1, keepdims=True))
    e = xp.exp(s - xp.where(largest == -float("inf"), 0, largest))
    total = e.sum(-1, keepdims=True)
    y = e / xp.where(total == 0, 1, total) @ v
    return y.swapaxes(1, 2) if layout == "BLHD" else y


def of_layer(value: Callable[..., Any], *arrays: str) -> Callable[..., Any]:
    """The gradients of a layer with respect to these arrays, given its formula."""

    def gradient(xp: Any, dy: Any, **arguments: Any) -> Any:
        # The layer is linear in its bias, which the gradient does not have: any numbers will do.
        values = {"bias": arguments.get("scale"), **arguments}

        def of_arrays(*changed: Any) -> Any:
            return value(xp, **{**arguments, **dict(zip(arrays, changed, strict=True))})

        return tuple(xp.pulled(of_arrays, [values[name] for name in arrays], dy))

    return gradient


SHARED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "softmax_grad": lambda xp, dy, y, axis=-1: y * (dy - (y * dy).sum(axis, keepdims=True)),
        "log_softmax_grad": lambda xp, dy, y, axis=-1: dy - xp.exp(y) * dy.sum(axis, keepdims=True),
        "relu_grad": lambda xp, dy, x: xp.where(x > 0, dy, 0),
        "sigmoid_grad": lambda xp, dy, y: dy * y * (1 - y),
        "tanh_grad": lambda xp, dy, y: dy * (1 - y * y),
        "leaky_relu_grad": lambda xp, dy, y, alpha=0.01: xp.where(y > 0, dy, alpha * dy),
        "quick_gelu_grad": quick_gelu_grad,
        "in_place_accumulator": lambda xp, buffer, value, overwrite=False: value if overwrite else buffer + value,
        "gelu_grad": of_layer(lambda xp, x, **_: xp.gelu(x, False), "x"),
        "fast_gelu_grad": of_layer(lambda xp, x, **_: xp.gelu(x, True), "x"),
        "gated_linear_unit_grad": of_layer(gated, "gate", "up"),
        "layer_normalization_grad": of_layer(normalized, "x", "scale", "bias"),
        "simplified_layer_normalization_grad": of_layer(normalized, "x", "scale"),
        "dropout_grad": lambda xp, dy, mask, ratio=0.5, training_mode=True: xp.where(
            mask, dy / (1 - ratio) if ratio < 1 else dy * 0, 0
        ),
        "fake_quant_grad": lambda xp, dy, mask: xp.where(mask, dy, 0),
        "sink_softmax_grad": sink_softmax_grad,
        "attention_grad": of_layer(attended, "q", "k", "v"),
    }
)
