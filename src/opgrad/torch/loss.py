"""Cross-entropy on tensors: the gradient is computed in the forward pass, and log_prob is never stored."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.contract import REDUCTIONS
from opgrad.interop.torch_calls import native, note_effect
from opgrad.interop.torch_tensors import is_transformed
from opgrad.torch.derivative import is_batched
from opgrad.torch.formulas import over, sample_weights, scale_in_place, wide
from opgrad.torch.functions import autocasts
from opgrad.torch.operators import OPERATORS, is_exported
from opgrad.torch.schema import is_recording
from opgrad.torch.words import ERRORS, in_words

_loss, _loss_only = OPERATORS["softmax_cross_entropy_loss"], OPERATORS["softmax_cross_entropy_loss_only"]
_loss_and_grad, _log_softmax = OPERATORS["softmax_cross_entropy_loss_and_grad"], OPERATORS["log_softmax"]


@native
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    *, inplace_backward: bool = False, check: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy between softmax(input) over the classes and labels or class probabilities.

    input: logits of shape (C,), (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16. Any strides.
    target: classes in [0, C), of shape (), (N,) or (N, D1, …, Dk); int32, int64 or uint8. Or probabilities, a
        floating-point tensor of input's shape.
    weight: shape (C,), any of the four dtypes; a factor for the samples of each class; None: all 1.
    size_average, reduce: what PyTorch had for reduction once; None: reduction says it.
    ignore_index: samples with this class have loss and gradient 0 and do not count.
    reduction: "none" (a loss for each sample), "sum", or "mean" (sum divided by the sum of the samples' weights,
        or by the number of samples for probabilities; 0 if that is 0).
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    inplace_backward: scale the stored gradient in place and hand it out: one tensor of input's size less in the
        backward pass, which can then run once only. Without effect under torch.compile and torch.func.
    check: on CUDA, wait for the device and raise for classes out of range instead of giving NaN; the CPU always
        checks.

    Returns the loss, of the samples' shape for "none", else (); in input's dtype, or float32 for half precision
    under autocast; probabilities of a wider dtype, and weight beside them, give theirs. Differentiable twice. With
    integer classes and no smoothing a call that needs a gradient computes it at once, and keeps that alone: neither
    input nor log-probabilities.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option or class.

    Formula: loss_i = -weight[target_i] * log_softmax(input)[i, target_i]. Source: torch.nn.functional.cross_entropy.
    """
    if size_average is not None or reduce is not None:
        note_effect()  # every such call warns
        reduction = _reduction(size_average, reduce)
    if isinstance(label_smoothing, Tensor):
        label_smoothing = label_smoothing.item()
    try:
        return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, inplace_backward, check)
    except ERRORS as error:
        single = isinstance(input, Tensor) and input.dim() == 1
        raise in_words(error, SINGLE if single else WORDS) from None


WORDS = {name: "cross_entropy" for name in OPERATORS if name.startswith("softmax_cross_entropy_loss")}
WORDS |= {"logits": "input", "labels": "target"}
SINGLE = {"labels[0]": "target", **WORDS}


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    """What the two arguments that came before `reduction` stand for; None for one of them stands for True."""
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(
                f"cross_entropy: {name} is {value!r}, expected a bool or None; ignore_index comes behind it"
            )
    reduction = "none" if reduce is False else "mean" if size_average is not False else "sum"
    warnings.warn(f"cross_entropy: size_average and reduce are deprecated, use reduction={reduction!r}", stacklevel=3)
    return reduction


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    inplace_backward: bool,
    check: bool,
) -> Tensor:
    """The loss, by the way that its arguments ask for."""
    recording = is_recording()
    _check(input, target, weight, reduction, label_smoothing, recording)
    if input.dim() == 1:
        options = (ignore_index, reduction, label_smoothing, inplace_backward, check)
        loss = _cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, *options)
        return loss.squeeze(0) if reduction == "none" else loss
    dtype = torch.float32 if autocasts(input) else input.dtype
    if target.is_floating_point():
        if ignore_index >= 0:
            raise ValueError(f"cross_entropy: ignore_index is {ignore_index}, expected none for class probabilities")
        return _from_probabilities(input, target, weight, reduction, label_smoothing, dtype)
    labels = target.int() if target.dtype == torch.uint8 else target
    if label_smoothing:
        return _smoothed(input, labels, weight, ignore_index, reduction, label_smoothing, dtype, check)
    if not (torch.is_grad_enabled() and input.requires_grad) or recording:
        # A recorded module may be trained or not: the loss alone is differentiable, too, by computing it anew.
        return _loss_only(input, labels, weight, ignore_index, reduction, dtype, check)
    if reduction == "mean" and input.dtype == torch.float16 and not is_exported():
        # Divided by the number of samples, most of a gradient is less than float16 holds, before a scaled loss can
        # save it: so the gradient of the sum is kept, and the division left to the factor.
        arguments = (input, labels, weight, ignore_index, "sum", torch.float32, check)
        total = _differentiable(inplace_backward, *arguments)
        counted = sample_weights(labels, weight, ignore_index, torch.float32).sum(dtype=torch.float64)
        return (total * over(counted).float()).to(dtype)
    return _differentiable(inplace_backward, input, labels, weight, ignore_index, reduction, dtype, check)


def _check(input: Any, target: Any, weight: Any, reduction: str, label_smoothing: float, recording: bool) -> None:
    for name, value in (("input", input), ("target", target), ("weight", weight)):
        if not isinstance(value, Tensor) and (value is not None or name != "weight"):
            raise TypeError(f"cross_entropy: {name} is {type(value).__name__}, expected a PyTorch tensor")
    if not input.dim():
        raise ValueError("cross_entropy: input has 0 dimensions, expected at least 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing is {label_smoothing}, expected a number from 0 to 1")
    if recording:
        return  # sizes are tensors there, of which Python shall not decide; the operator checks them when it runs
    if target.is_floating_point():
        expected, which = input.shape, "input's shape for class probabilities"
    else:
        expected, which = input.shape[: input.dim() > 1] + input.shape[2:], "input's shape without the classes"
    if target.shape != expected:
        raise ValueError(f"cross_entropy: target has shape {tuple(target.shape)}, expected {tuple(expected)}, {which}")
    if weight is None:
        return
    if weight.shape != (classes := input.shape[min(input.dim() - 1, 1)],):
        raise ValueError(f"cross_entropy: weight has shape {tuple(weight.shape)}, expected {(classes,)}, the classes")
    if weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("cross_entropy: weight requires grad, and the loss has no gradient for it: detach it")


def _differentiable(
    in_place: bool,
    input: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    dtype: torch.dtype,
    check: bool,
) -> Tensor:
    """The loss in this dtype, with its gradient computed and kept."""
    arguments = (input, labels, weight, ignore_index, reduction, dtype, input.dtype, check)
    if in_place and not torch.compiler.is_compiling() and not is_transformed():
        return _in_place(*arguments)
    loss, _ = _loss_and_grad(*arguments)
    return cast(Tensor, loss)


class _InPlace(torch.autograd.Function):
    """The fused loss whose gradient is handed out where it was stored."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, dlogits = _loss_and_grad(*arguments)
        ctx.save_for_backward(dlogits)
        ctx.spent = False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if ctx.spent or torch.is_grad_enabled() or is_batched(dloss):
            what = "second backward pass" if ctx.spent else "gradient of the gradient (create_graph=True)"
            what = "batch of gradients (is_grads_batched=True)" if is_batched(dloss) else what
            raise RuntimeError(f"cross_entropy: inplace_backward=True allows no {what}; leave it False for that")
        ctx.spent = True
        (dlogits,) = ctx.saved_tensors
        return scale_in_place(dlogits, dloss), *[None] * 7


_in_place: Callable[..., Tensor] = _InPlace.apply


def _smoothed(
    input: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    dtype: torch.dtype,
    check: bool,
) -> Tensor:
    """The loss of the labels and that of all classes, in the ratio of 1 - smoothing to smoothing."""
    sums = wide(input.dtype)
    loss, log_prob = _loss(input, labels, weight, ignore_index, reduction, sums, dtype, check)
    spread = -_over_classes(log_prob, weight, sums).masked_fill(labels == ignore_index, 0)
    if reduction != "none":
        spread = spread.sum()
    if reduction == "mean":
        counted = sample_weights(labels, weight, ignore_index, sums).sum(dtype=torch.float64)
        spread = spread * over(counted).to(sums)
    return ((1 - smoothing) * loss + smoothing / max(input.shape[1], 1) * spread).to(dtype)


def _from_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float, dtype: torch.dtype
) -> Tensor:
    classes = input.shape[1]
    if smoothing:
        target = target * (1 - smoothing) + smoothing / max(classes, 1)
    product = _log_softmax(input.to(dtype), 1) * target
    dtype = product.dtype if weight is None else torch.promote_types(product.dtype, weight.dtype)
    loss = -_over_classes(product.to(dtype), weight, wide(dtype))
    if reduction == "mean":
        loss = loss.sum() / max(loss.numel(), 1)
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def _over_classes(x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum over the classes, on axis 1, weighted; in this dtype."""
    if weight is not None:
        x = x * weight.to(x.dtype).view(-1, *[1] * (x.dim() - 2))
    return x.sum(1, dtype=dtype)
