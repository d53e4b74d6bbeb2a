"""Softmax, activations and lookups on tensors: opgrad's operators with torch's argument names and autocast rules."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native, note_effect
from opgrad.call.libraries.torch_tensors import is_direct, is_transformed
from opgrad.contract.arrangement import room_for
from opgrad.torch.door import run
from opgrad.torch.operators import OPERATORS, TensorOperator, is_exported, worded
from opgrad.torch.schema import is_recording

HALF = (torch.float16, torch.bfloat16)


def widens_softmax(x: Tensor) -> bool:
    """Whether autocast wants the softmax of this tensor in float32."""
    return isinstance(x, Tensor) and x.dtype in HALF and torch.is_autocast_enabled(x.device.type)


def narrows_products(x: Tensor) -> bool:
    """Whether autocast wants matrix products with this tensor in its own dtype, which is half precision."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product as autocast gives them: in its own dtype, unless they are of float64."""
    if not torch.is_autocast_enabled(tensors[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def widest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors as autocast gives them to an operation that takes one dtype: in the wider one."""
    if x.dtype == y.dtype or not torch.is_autocast_enabled(x.device.type):
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def autocast_layer(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """A linear layer as autocast wants it, and the dtype of a loss of its results."""
    if not narrows_products(x):
        return x, w, b, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), torch.float32


_softmax, _log_softmax = OPERATORS["softmax"], OPERATORS["log_softmax"]
_relu, _sigmoid, _tanh = OPERATORS["relu"], OPERATORS["sigmoid"], OPERATORS["tanh"]
_quick_gelu, _leaky_relu, _gather = OPERATORS["quick_gelu"], OPERATORS["leaky_relu"], OPERATORS["gather"]

Axis = int | tuple[int, ...]


@native
def softmax(input: Tensor, dim: Axis | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Probabilities from logits.

    input: any shape; float32, float64, float16 or bfloat16, on the CPU or on CUDA.
    dim: the axis, or tuple of adjacent axes, over which the probabilities sum to 1; None: the last one.
    _stacklevel: without effect.
    dtype: what input is converted to first, as in torch.nn.functional.softmax; None: its own, but float32 for half
        precision under autocast.

    Returns y, of the shape and strides of input (as torch.empty_like gives them). Differentiable twice.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or device.

    Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: torch.nn.functional.softmax.
    """
    return _over_rows(_softmax, _widened(input, dtype), dim)


@native
def log_softmax(
    input: Tensor, dim: Axis | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Logarithms of the softmax probabilities.

    input, dim, _stacklevel, dtype: as for softmax.

    Returns y, of the shape and strides of input. Differentiable twice. Raises TypeError for a wrong dtype, ValueError
    for a wrong axis or device.

    Formula: y = x - max(x) - log(sum(exp(x - max(x)))). Source: torch.nn.functional.log_softmax.
    """
    return _over_rows(_log_softmax, _widened(input, dtype), dim)


def _over_rows(operator: Callable[..., Tensor], x: Tensor, axis: Axis | None) -> Tensor:
    """The operator on tensors of any shape: a single number is a row of one."""
    axis = -1 if axis is None else axis
    if isinstance(x, Tensor) and not x.dim():
        return operator(x.reshape(1), axis).reshape(())
    return operator(x, axis)


@native
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Rectified linear unit.

    input: any shape; float32, float64, float16 or bfloat16.
    inplace: write y to input, and return it.

    Returns y, of the shape, dtype and strides of input; NaN stays NaN. The gradient at 0 and at NaN is 0. Raises
    TypeError; RuntimeError for a leaf that requires grad with inplace.

    Formula: y = max(x, 0). Source: torch.nn.functional.relu.
    """
    return replace(_relu, input) if inplace else _relu(input)


@native
def sigmoid(input: Tensor) -> Tensor:
    """Logistic function.

    input: any shape; float32, float64, float16 or bfloat16.

    Returns y, of the shape, dtype and strides of input. Differentiable twice. Raises TypeError.

    Formula: y = 1 / (1 + exp(-x)). Source: torch.sigmoid.
    """
    return _sigmoid(input)


@native
def tanh(input: Tensor) -> Tensor:
    """Hyperbolic tangent.

    input: any shape; float32, float64, float16 or bfloat16.

    Returns y, of the shape, dtype and strides of input. Differentiable twice. Raises TypeError.

    Formula: y = tanh(x). Source: torch.tanh.
    """
    return _tanh(input)


@native
def quick_gelu(x: Tensor, alpha: float = 1.702) -> Tensor:
    """Gelu approximated by a sigmoid; with alpha=1 it is SiLU.

    x: any shape; float32, float64, float16 or bfloat16. alpha: the factor inside the sigmoid.

    Returns y, of the shape, dtype and strides of x. Differentiable twice. Raises TypeError.

    Formula: y = x * sigmoid(alpha * x). Source: com.microsoft QuickGelu.
    """
    return _quick_gelu(x, alpha)


@native
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """Rectified linear unit with a slope for negative inputs.

    input: any shape; float32, float64, float16 or bfloat16.
    negative_slope: the slope where input is negative.
    inplace: write y to input, and return it.

    Returns y, of the shape, dtype and strides of input. Differentiable twice. Raises TypeError; RuntimeError for a
    leaf that requires grad with inplace.

    Formula: y = x where x > 0 else alpha * x. Source: torch.nn.functional.leaky_relu.
    """
    return replace(_leaky_relu, input, negative_slope) if inplace else _leaky_relu(input, negative_slope)


@native
def gather(x: Tensor, indices: Tensor, axis: int = 0, *, check: bool = False) -> Tensor:
    """The slices of x along one axis that indices name, as ONNX's Gather has it; torch.gather is something else.

    x: any shape; float32, float64, float16 or bfloat16. A single number, of shape (), takes a single index and gives a
        single number, as for torch.index_select.
    indices: any shape; int32 or int64 in [-s, s) where s is the size of axis; negative ones count from the end.
    axis: the axis of x that indices pick from.
    check: on CUDA, wait for the device and raise for indices out of range; the CPU always checks.

    Returns y of shape x.shape[:axis] + indices.shape + x.shape[axis+1:], contiguous. The gradient is summed in
    float32 (float64 for float64), always in the same order. Differentiable twice.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or an index out of range.

    Formula: y[.., j, ..] = x[.., indices[j], ..]. Source: ONNX Gather.
    """
    if isinstance(x, Tensor) and isinstance(indices, Tensor) and not x.dim():
        if indices.numel() != 1:
            raise ValueError(
                f"gather: indices has shape {tuple(indices.shape)}, expected one index for a single number"
            )
        return _gather(x.reshape(1), indices.reshape(1), axis, check).reshape(())
    return _gather(x, indices, axis, check)


@native
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    check: bool = False,
) -> Tensor:
    """The rows of an embedding table that indices name.

    input: any shape; int32 or int64 indices in [-V, V); negative ones count from the end.
    weight: shape (V, D1, …); float32, float64, float16 or bfloat16.
    padding_idx: the row that receives no gradient; None: none.
    max_norm, norm_type: the largest norm of a row, and which norm; the rows that input names are scaled down to it
        in weight itself. None: any.
    scale_grad_by_freq: False.
    sparse: give the gradient with respect to weight as a sparse tensor of the rows that input names, each once, rising,
        as torch.optim.SparseAdam, SGD and Adagrad take it: what it takes depends on input, not on V.
    check: as for gather.

    Returns y of shape input.shape + weight.shape[1:]. The gradient with respect to weight is summed in
    float32 (float64 for float64), always in the same order. Differentiable twice, with sparse once.
    Raises TypeError for a wrong dtype, ValueError for an index or padding_idx out of range, NotImplementedError for
    scale_grad_by_freq, and for sparse under torch.compile and torch.func.

    Formula: y[i] = weight[input[i]]. Source: torch.nn.functional.embedding.
    """
    if scale_grad_by_freq:
        raise NotImplementedError(
            "embedding: scale_grad_by_freq is True, expected False: torch.nn.functional.embedding has it"
        )
    if max_norm is not None:
        note_effect()
        torch.embedding_renorm_(weight.detach(), input.detach().contiguous(), max_norm, norm_type)
    is_sparse = sparse and weight.requires_grad and torch.is_grad_enabled() and not is_recording()
    words = {"gather": "embedding", "indices": "input", "x": "weight"}
    found: Tensor = worded(words, _sparse_rows if is_sparse else _rows, input, weight, padding_idx, check)
    return found


def _rows(input: Tensor, weight: Tensor, padding_idx: int | None, check: bool) -> Tensor:
    """The rows of weight, without a gradient for that of the padding."""
    y = _gather(weight, input, 0, check)
    if padding_idx is None:
        return y
    rows, recording = weight.shape[0], is_recording()
    if not recording:
        check_padding(padding_idx, rows)
    if not (y.requires_grad or recording or is_transformed()):
        return y
    # A compiler fuses the selection with the next operations, and a transformation can differentiate it.
    traced = recording or torch.compiler.is_compiling() or is_transformed()
    if traced and is_exported():
        return y  # the difference is in the gradient alone, which an exported model does not have
    is_padding = ((input - padding_idx) % rows == 0).view(*input.shape, *[1] * (weight.dim() - 1))
    if traced:
        return torch.where(is_padding, y.detach(), y)
    note_effect()  # native code would make the node without its hook
    y.register_hook(lambda dy: dy.masked_fill(is_padding, 0))
    return y


def _widened(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in the dtype asked for; half precision becomes float32 under autocast, as torch has it on CUDA."""
    if dtype is not None:
        return x.to(dtype)
    return x.float() if widens_softmax(x) else x


# --- in place --------------------------------------------------------------------------------------------------------


def replace(operator: TensorOperator, x: Tensor, *attributes: Any) -> Tensor:
    """Write operator(x, …) to x and return it; what autograd has to know is computed beside x, and copied."""
    if not isinstance(x, Tensor) or is_direct((x,)):
        given = dict(zip(operator.names, (x, *attributes), strict=False))
        return cast(Tensor, run(operator.op, {**given, "out": x}))
    return x.copy_(operator(x.clone(), *attributes))  # the clone is what the backward pass reads


# --- sparse gradients ------------------------------------------------------------------------------------------------


_gather_grad = OPERATORS["gather_grad"]


def check_padding(padding_idx: int, rows: int) -> None:
    """Raise ValueError unless padding_idx is a row of a table of so many."""
    if not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, expected {-rows} to {rows - 1}")


def _sparse_rows(input: Tensor, weight: Tensor, padding_idx: int | None, check: bool) -> Tensor:
    """The rows, with a sparse gradient of the table.

    Raises NotImplementedError under torch.compile and torch.func, which have no sparse gradients.
    """
    if torch.compiler.is_compiling() or is_transformed():
        raise NotImplementedError("embedding: sparse is True, expected False under torch.compile and torch.func")
    if padding_idx is not None:
        check_padding(padding_idx, weight.shape[0])
    return _looked_up(input, weight, padding_idx, check)


class _SparseEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, check: bool) -> Tensor:
        ctx.save_for_backward(input)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return cast(Tensor, _gather(weight, input, 0, check))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (input,), (count, *row) = ctx.saved_tensors, ctx.shape
        named, dy = input.remainder(count).flatten(), dy.reshape(-1, *row)
        if ctx.padding_idx is not None:
            counts = named != ctx.padding_idx % count
            named, dy = named[counts], dy[counts]
        rows, places = named.unique(return_inverse=True)
        values = _gather_grad((room_for(len(rows)), *row), places, dy, 0)[: len(rows)]
        found = torch.sparse_coo_tensor(rows[None].long(), values, ctx.shape, is_coalesced=True, check_invariants=False)
        return None, found, None, None


_looked_up: Callable[[Tensor, Tensor, int | None, bool], Tensor] = _SparseEmbedding.apply
