"""Cross-entropy on tensors: the gradient is computed in the forward pass, and log_prob is never stored."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.interop.torch_calls import native, note_effect
from opgrad.interop.torch_private import is_batched
from opgrad.interop.torch_tensors import is_transformed
from opgrad.torch.autocast import widens_softmax
from opgrad.torch.formulas import over, sample_weights, scale_in_place, wide
from opgrad.torch.losses.options import LossOptions, divisors, read_options, shifted
from opgrad.torch.losses.reduced import loss_of_samples
from opgrad.torch.losses.shards import is_class_sharded
from opgrad.torch.operators import OPERATORS, is_exported
from opgrad.torch.renamed_errors import ERRORS, in_words
from opgrad.torch.schema import is_recording

_loss_only = OPERATORS["softmax_cross_entropy_loss_only"]
_loss_and_grad = OPERATORS["softmax_cross_entropy_loss_and_grad"]


@native
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    *, lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None, return_z_loss: bool = False, return_lse: bool = False,
    return_log_prob: bool = False, return_entropy: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, inplace_backward: bool = False, check: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy between softmax(input) over the classes and labels or class probabilities.

    input: logits of shape (C,), (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16. Any strides.
        A DTensor that is sharded along the classes is computed as by vocab_parallel_cross_entropy.
    target: classes in [0, C), of shape (), (N,) or (N, D1, …, Dk); int32, int64 or uint8. Or probabilities, a
        floating-point tensor of input's shape.
    weight: shape (C,), any of the four dtypes; a factor for the samples of each class; None: all 1.
    size_average, reduce: what PyTorch had for reduction once; None: reduction says it.
    ignore_index: samples with this class have loss and gradient 0 and do not count.
    reduction: "none" (a loss for each sample), "sum", or "mean" (sum divided by the sum of the samples' weights,
        or by the number of samples for probabilities; 0 if that is 0).
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    lse_square_scale: this times the square of each sample's log-sum-exp is added to its loss, without its weight; for
        "mean", divided by the number of samples that count.
    softcap: logits are softcap * tanh(input / softcap); None: input. temperature: they are divided by it then.
    shift: sample i is compared with the target `shift` places behind it on the last axis of target; the last ones
        are ignored.
    num_items: what "mean" divides by; a number, or a tensor with one, which is not waited for; None: what counts.
    return_…: also return fields of CrossEntropyOutput.
    inplace_backward: scale the stored gradient in place and hand it out: one tensor of input's size less in the
        backward pass, which can then run once only. Without effect under torch.compile and torch.func, and where
        the gradient is not stored.
    check: on CUDA, wait for the device and raise for classes out of range instead of giving NaN; the CPU always
        checks.

    Returns the loss, of the samples' shape for "none", else (); in input's dtype, or float32 for half precision
    under autocast; probabilities of a wider dtype, and weight beside them, give theirs. With other results asked for,
    a CrossEntropyOutput. Differentiable twice. With integer classes alone a call that needs a gradient computes it at
    once, and keeps that alone: neither input nor log-probabilities. With options it keeps input, too, for gradients
    of gradients; where other results are differentiable, or for "none", it keeps input instead.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option or class.

    Formula: loss_i = -weight[target_i] * log_softmax(z)[i, target_i] + lse_square_scale * lse_i ** 2, where z are the
    logits. Source: torch.nn.functional.cross_entropy; label smoothing as there.
    """
    if size_average is not None or reduce is not None:
        note_effect()  # every such call warns
        reduction = _reduction(size_average, reduce)
    returned = {
        "z_loss": return_z_loss, "lse": return_lse, "log_prob": return_log_prob, "entropy": return_entropy,
        "token_accuracy": return_token_accuracy, "predicted_tokens": return_predicted_tokens,
    }  # fmt: skip
    bent = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    options = read_options("cross_entropy", reduction, ignore_index, *bent, **returned)
    return of_options(input, target, weight, options, shift, inplace_backward, check)


def of_options(
    input: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shift: int = 0, in_place: bool = False,
    check: bool = False,
) -> Any:  # fmt: skip
    """cross_entropy with checked options."""
    if is_class_sharded(input, min(input.dim() - 1, 1) if isinstance(input, Tensor) else 0):
        from opgrad.torch.losses import vocab_parallel

        return vocab_parallel.of_dtensor(input, target, weight, options, shift)
    try:
        return _cross_entropy(input, target, weight, options, shift, in_place, check)
    except ERRORS as error:
        single = isinstance(input, Tensor) and input.dim() == 1
        raise in_words(error, SINGLE if single else WORDS) from None


WORDS = {name: "cross_entropy" for name in OPERATORS if name.startswith("softmax_cross_entropy_loss")}
WORDS |= dict.fromkeys(("sample_losses", "sample_losses_and_grad"), "cross_entropy")
WORDS |= {"logits": "input", "labels": "target"}
SINGLE = {"labels[0]": "target", **WORDS}


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that size_average and reduce stand for; None for one of them stands for True."""
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
    options: LossOptions,
    shift: int,
    in_place: bool,
    check: bool,
) -> Any:
    """The loss, computed in the way that fits its arguments."""
    recording = is_recording()
    _check(input, target, weight, recording)
    if input.dim() == 1:
        found = _cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, options, shift, in_place, check)
        return _of_one(found)
    dtype = options.dtype or (torch.float32 if widens_softmax(input) else input.dtype)
    labels = target.int() if target.dtype == torch.uint8 else target
    labels = shifted("cross_entropy", labels, shift, options.ignore_index)
    if target.is_floating_point():
        if options.ignore_index is not None and options.ignore_index >= 0:
            ignored = options.ignore_index
            raise ValueError(f"cross_entropy: ignore_index is {ignored}, expected none for class probabilities")
        dtype = torch.promote_types(dtype, target.dtype)
        dtype = dtype if weight is None else torch.promote_types(dtype, weight.dtype)
        return loss_of_samples(input, None, weight, target, options, dtype, in_place, check)
    if not options.is_plain:
        return loss_of_samples(input, labels, weight, None, options, dtype, in_place, check)
    if options.num_items is not None:
        number = wide(input.dtype)
        total = _plain(input, labels, weight, options.ignore_index, "sum", number, in_place, check, recording)
        by_items, _ = divisors(labels, weight, False, options, number)
        return (total.to(torch.float64) * over(by_items)).to(dtype)
    return _plain(input, labels, weight, options.ignore_index, options.reduction, dtype, in_place, check, recording)


def _of_one(found: Any) -> Any:
    """The results for a single row of logits, from the results for a batch of one row."""
    if isinstance(found, tuple):
        return type(found)(*[each if each is None or not each.dim() else each.squeeze(0) for each in found])
    return found.squeeze(0) if found.dim() else found


def _plain(
    input: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    dtype: torch.dtype,
    in_place: bool,
    check: bool,
    recording: bool,
) -> Tensor:
    """The loss of integer classes without options."""
    if not (torch.is_grad_enabled() and input.requires_grad) or recording:
        # A recorded module may be trained or not, so the loss is recorded alone; its backward pass computes it again.
        return _loss_only(input, labels, weight, ignore_index, reduction, dtype, check)
    if reduction == "mean" and input.dtype == torch.float16 and not is_exported():
        # If the gradient were divided by the number of samples here, most of it would underflow float16 before a loss
        # scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
        total = _differentiable(in_place, input, labels, weight, ignore_index, "sum", torch.float32, check)
        counted = sample_weights(labels, weight, ignore_index, torch.float32).sum(dtype=torch.float64)
        return (total * over(counted)).to(dtype)
    return _differentiable(in_place, input, labels, weight, ignore_index, reduction, dtype, check)


def _check(input: Any, target: Any, weight: Any, recording: bool) -> None:
    for name, value in (("input", input), ("target", target), ("weight", weight)):
        if not isinstance(value, Tensor) and (value is not None or name != "weight"):
            raise TypeError(f"cross_entropy: {name} is {type(value).__name__}, expected a PyTorch tensor")
    if not input.dim():
        raise ValueError("cross_entropy: input has 0 dimensions, expected at least 1")
    if recording:
        return  # sizes are tensors there, on which Python must not branch; the operator checks them when it runs
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
    ignore_index: int | None,
    reduction: str,
    dtype: torch.dtype,
    check: bool,
) -> Tensor:
    """The loss in this dtype; its gradient is computed at once and kept."""
    arguments = (input, labels, weight, ignore_index, reduction, dtype, input.dtype, check)
    if in_place and not torch.compiler.is_compiling() and not is_transformed():
        return _in_place(*arguments)
    loss, _ = _loss_and_grad(*arguments)
    return cast(Tensor, loss)


class _InPlace(torch.autograd.Function):
    """The fused loss whose stored gradient is scaled in place and returned in the backward pass."""

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
