"""Softmax, activations and lookups on tensors: opgrad's operators with torch's argument names and autocast rules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opgrad.interop.torch import is_transformed
from opgrad.torch.operators import OPERATORS

HALF = (torch.float16, torch.bfloat16)

_softmax, _log_softmax = OPERATORS["softmax"], OPERATORS["log_softmax"]
_relu, _sigmoid, _tanh = OPERATORS["relu"], OPERATORS["sigmoid"], OPERATORS["tanh"]
_quick_gelu, _leaky_relu, _gather = OPERATORS["quick_gelu"], OPERATORS["leaky_relu"], OPERATORS["gather"]

Axis = int | tuple[int, ...]


def softmax(x: Tensor, axis: Axis = -1, *, dim: Axis | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Probabilities from logits.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16, on the CPU or on CUDA.
    axis: the axis, or tuple of adjacent axes, over which the probabilities sum to 1; `dim` is another name for it.
    dtype: what x is converted to first, as in torch.nn.functional.softmax; None: x's own, but float32 for half
        precision under autocast.

    Returns y, of the shape and strides of x (as torch.empty_like gives them). Differentiable twice.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or device.

    Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: torch.nn.functional.softmax.
    """
    return _softmax(_widened(x, dtype), _either("softmax", "axis", axis, -1, "dim", dim))


def log_softmax(x: Tensor, axis: Axis = -1, *, dim: Axis | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithms of the softmax probabilities.

    x, axis, dim, dtype: as for softmax.

    Returns y, of the shape and strides of x. Differentiable twice. Raises TypeError for a wrong dtype, ValueError
    for a wrong axis or device.

    Formula: y = x - max(x) - log(sum(exp(x - max(x)))). Source: torch.nn.functional.log_softmax.
    """
    return _log_softmax(_widened(x, dtype), _either("log_softmax", "axis", axis, -1, "dim", dim))


def relu(x: Tensor) -> Tensor:
    """Rectified linear unit.

    x: any shape; float32, float64, float16 or bfloat16.

    Returns y, of the shape, dtype and strides of x; NaN stays NaN. The gradient at 0 is 0. Raises TypeError.

    Formula: y = max(x, 0). Source: torch.nn.functional.relu.
    """
    return _relu(x)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function.

    x: any shape; float32, float64, float16 or bfloat16.

    Returns y, of the shape, dtype and strides of x. Differentiable twice. Raises TypeError.

    Formula: y = 1 / (1 + exp(-x)). Source: torch.sigmoid.
    """
    return _sigmoid(x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent.

    x: any shape; float32, float64, float16 or bfloat16.

    Returns y, of the shape, dtype and strides of x. Differentiable twice. Raises TypeError.

    Formula: y = tanh(x). Source: torch.tanh.
    """
    return _tanh(x)


def quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    """Gelu approximated by a sigmoid; with alpha=1 it is SiLU.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the factor inside the sigmoid.

    Returns y, of the shape, dtype and strides of x. Differentiable twice. Raises TypeError.

    Formula: y = x * sigmoid(alpha * x). Source: com.microsoft QuickGelu.
    """
    return _quick_gelu(x, alpha)


def leaky_relu(x: Tensor, alpha: float = 0.01, *, negative_slope: float | None = None) -> Tensor:
    """Rectified linear unit with a slope for negative inputs.

    x: any shape; float32, float64, float16 or bfloat16.
    alpha: the slope where x is negative; `negative_slope` is torch's name for it.

    Returns y, of the shape, dtype and strides of x. Differentiable twice. Raises TypeError.

    Formula: y = x where x > 0 else alpha * x. Source: torch.nn.functional.leaky_relu.
    """
    return _leaky_relu(x, _either("leaky_relu", "alpha", alpha, 0.01, "negative_slope", negative_slope))


def gather(x: Tensor, indices: Tensor, axis: int = 0, *, check: bool = False) -> Tensor:
    """The slices of x along one axis that indices name, as ONNX's Gather has it; torch.gather is something else.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16.
    indices: any shape; int32 or int64 in [-s, s) where s is the size of axis; negative ones count from the end.
    axis: the axis of x that indices pick from.
    check: on CUDA, wait for the device and raise for indices out of range; the CPU always checks.

    Returns y of shape x.shape[:axis] + indices.shape + x.shape[axis+1:], contiguous. The gradient is summed in
    float32 (float64 for float64), always in the same order. Differentiable twice.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or an index out of range.

    Formula: y[.., j, ..] = x[.., indices[j], ..]. Source: ONNX Gather.
    """
    return _gather(x, indices, axis, check)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *, check: bool = False) -> Tensor:
    """The rows of an embedding table that indices name.

    input: any shape; int32 or int64 indices in [-V, V); negative ones count from the end.
    weight: shape (V, D1, …); float32, float64, float16 or bfloat16.
    padding_idx: the row that receives no gradient; None: none.
    check: as for gather.

    Returns y of shape input.shape + weight.shape[1:]. The gradient with respect to weight is dense, and summed in
    float32 (float64 for float64), always in the same order. Differentiable twice.
    Raises TypeError for a wrong dtype, ValueError for an index or padding_idx out of range.

    Formula: y[i] = weight[input[i]]. Source: torch.nn.functional.embedding.
    """
    y = _gather(weight, input, 0, check)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, expected {-rows} to {rows - 1}")
    if padding_idx is None or not (y.requires_grad or is_transformed()):
        return y
    is_padding = ((input - padding_idx) % rows == 0).view(*input.shape, *[1] * (weight.dim() - 1))
    if torch.compiler.is_compiling() or is_transformed():
        # A compiler joins the selection with what it computes next, and transformations see what it is made of.
        return torch.where(is_padding, y.detach(), y)
    return _padded(y, is_padding)


class _Padding(torch.autograd.Function):
    """y itself, whose gradient is 0 where padding stands: cheaper than clearing a row of the table's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, is_padding: Tensor) -> Tensor:
        ctx.save_for_backward(is_padding)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (is_padding,) = ctx.saved_tensors
        return dy.masked_fill(is_padding, 0), None


_padded: Callable[[Tensor, Tensor], Tensor] = _Padding.apply


def _either(name: str, ours: str, value: Any, default: Any, theirs: str, other: Any) -> Any:
    """The value of an argument that has two names."""
    if other is None:
        return value
    if value != default:
        raise TypeError(f"{name}: {ours} is {value!r} and {theirs} is {other!r}, expected one of the two")
    return other


def _widened(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in the dtype asked for; half precision becomes float32 under autocast, as torch has it on CUDA."""
    if dtype is not None:
        return x.to(dtype)
    return x.float() if autocasts(x) else x


def autocasts(x: Tensor) -> bool:
    """Whether autocast wants this tensor's softmax in float32."""
    return isinstance(x, Tensor) and x.dtype in HALF and torch.is_autocast_enabled(x.device.type)
