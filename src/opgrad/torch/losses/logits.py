"""Cross-entropy on tensors: the gradient is computed in the forward pass, and log_prob is never stored."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native, note_effect
from opgrad.call.libraries.torch_tensors import is_traced, is_transformed
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.autocast import widens_softmax
from opgrad.torch.derivative import wide
from opgrad.torch.formulas import over
from opgrad.torch.losses.options import (
    check_dense,
    check_shape,
    check_tensors,
    check_weight,
    divisors,
    is_class_sharded,
    read_labels,
    read_options,
)
from opgrad.torch.losses.reduced import Found, OnePass, output, reduced, same_for_each, upstream_of
from opgrad.torch.losses.samples import composed, losses_and_grad, sample_losses, settings
from opgrad.torch.operators import ERRORS, OPERATORS, in_words, is_exported
from opgrad.torch.schema import is_recording

NAME = "cross_entropy"
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
    returned = (return_z_loss, return_lse, return_log_prob, return_entropy, return_token_accuracy,
                return_predicted_tokens)  # fmt: skip
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    options = read_options(NAME, reduction, ignore_index, *numbers, returned=returned)
    return of_options(input, target, weight, options, shift, inplace_backward, check)


def of_options(
    input: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shift: int = 0, in_place: bool = False,
    check: bool = False,
) -> Any:  # fmt: skip
    """cross_entropy with checked options."""
    if is_class_sharded(input, min(input.dim() - 1, 1) if isinstance(input, Tensor) else 0):
        from opgrad.torch.losses import dtensors, layer_operators

        call = layer_operators.LossCall(NAME, options, weight=weight)
        call.check(input, target)
        return dtensors.loss(call, input, target, min(input.dim() - 1, 1), shift)
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
    input: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shift: int, in_place: bool, check: bool
) -> Any:
    """The loss, computed in the way that fits its arguments."""
    _check(input, target, weight)
    if input.dim() == 1:
        found = _cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, options, shift, in_place, check)
        # The results for a single row of logits, from the results for a batch of one row.
        if isinstance(found, tuple):
            return type(found)(*[each if each is None or not each.dim() else each.squeeze(0) for each in found])
        return found.squeeze(0) if found.dim() else found
    dtype = options.dtype or (torch.float32 if widens_softmax(input) else input.dtype)
    labels = read_labels(NAME, target, shift, options.ignore_index)
    if target.is_floating_point():
        check_dense(NAME, options)
        dtype = torch.promote_types(dtype, target.dtype)
        dtype = dtype if weight is None else torch.promote_types(dtype, weight.dtype)
        none = torch.zeros(input.shape[:1] + input.shape[2:], dtype=torch.int64, device=input.device)
        return _with_options(input, none, weight, target, _LogitsPass(options, dtype, in_place, check))
    if not options.is_plain:
        return _with_options(input, labels, weight, None, _LogitsPass(options, dtype, in_place, check))
    if options.num_items is None and not _would_underflow(input, options):
        return _plain(input, labels, weight, options, dtype, in_place, check)
    # If the gradient were divided by the number of samples at once, most of it would underflow float16 before a loss
    # scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
    summed = replace(options, reduction="sum", num_items=None)
    total = _plain(input, labels, weight, summed, wide(input.dtype), in_place, check)
    by_weight, _ = divisors(labels, weight, False, options)
    return (total.to(torch.float64) * over(by_weight)).to(dtype)


def _would_underflow(input: Tensor, options: LossOptions) -> bool:
    """Whether the gradient of the mean is computed and kept in float16."""
    is_mean = options.reduction == "mean" and input.dtype == torch.float16
    return is_mean and _needs_gradient(input) and not is_exported()


def _needs_gradient(input: Tensor) -> bool:
    """Whether the gradient is computed with the loss; of a recorded module it is computed when it is asked for."""
    return torch.is_grad_enabled() and input.requires_grad and not is_recording()


def _plain(
    input: Tensor, labels: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype, in_place: bool,
    check: bool,
) -> Tensor:  # fmt: skip
    """The loss of integer classes without options; with its gradient, which is kept, if one is needed."""
    if not _needs_gradient(input):
        return _loss_only(input, labels, weight, options.ignore_index, options.reduction, dtype, check)
    if in_place and not torch.compiler.is_compiling() and not is_transformed():
        return _PlainPass(options, dtype, in_place, check)(input, labels, weight)[0]
    return _PlainPass(options, dtype, check=check).compute((input, labels, weight), ()).loss


@dataclass(frozen=True)
class _PlainPass(OnePass):
    """Integer classes without options, by the operator that computes this loss with its gradient."""

    check: bool = False

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        logits, options = tensors[0], self.options
        settings = (options.ignore_index, options.reduction, self.dtype, logits.dtype, self.check)
        loss, dlogits = _loss_and_grad(*tensors, *settings)
        return Found(loss, [dlogits])


@dataclass(frozen=True)
class _LogitsPass(OnePass):
    """Logits with options. Its tensors are logits, labels, class weights and probabilities; the last may be None."""

    check: bool = False

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        logits, labels, weight, probabilities = tensors
        is_dense, number = probabilities is not None, wide(logits.dtype)
        upstream = upstream_of(labels, weight, is_dense, self.options, logits.dtype)
        square = same_for_each(labels, upstream.of_square, number) if self.options.lse_square_scale else None
        given = (same_for_each(labels, upstream.of_loss, number), None, square, None, None)
        *found, dlogits = losses_and_grad.execute(*tensors, *given, *settings(self.options), self.check)
        loss = reduced(found, labels, weight, is_dense, self.options, self.dtype)
        return Found(loss, [dlogits], upstream.later, found[4])

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        _, labels, weight, probabilities = tensors
        found = sample_losses(*tensors, *settings(self.options), False)
        loss: Tensor = reduced(found, labels, weight, probabilities is not None, self.options, self.dtype)
        return loss


def _with_options(
    logits: Tensor, labels: Tensor, weight: Tensor | None, probabilities: Tensor | None, way: _LogitsPass
) -> Any:
    """The loss, or CrossEntropyOutput, of labels, which all count beside probabilities, with the options of `way`."""
    arguments, options = (logits, labels, weight, probabilities), way.options
    if _computes_gradient(logits, probabilities, options):
        loss, predicted = way(*arguments)
        return output(loss, {"predicted_tokens": predicted}, labels, options) if options.returned else loss
    if is_transformed() or is_recording() or is_exported():
        found = composed(*arguments, settings(options), way.check)
    else:
        found = sample_losses(*arguments, *settings(options), way.check)
    return reduced(found, labels, weight, probabilities is not None, options, way.dtype)


def _computes_gradient(logits: Tensor, probabilities: Tensor | None, options: LossOptions) -> bool:
    """Whether the gradient is computed in the forward pass."""
    tensors = [logits] if probabilities is None else [logits, probabilities]
    if not (torch.is_grad_enabled() and logits.requires_grad) or is_transformed() or is_traced(tensors):
        return False
    if options.reduction == "none" or options.is_differentiable_beside or is_exported():
        return False
    return probabilities is None or not probabilities.requires_grad


def _check(input: Any, target: Any, weight: Any) -> None:
    check_tensors(NAME, ("weight",), input=input, target=target, weight=weight)
    if not input.dim():
        raise ValueError(f"{NAME}: input has 0 dimensions, expected at least 1")
    if is_recording():
        return  # sizes are tensors there, on which Python must not branch; the operator checks them when it runs
    if target.is_floating_point():
        expected, which = input.shape, "input's shape for class probabilities"
    else:
        expected, which = input.shape[: input.dim() > 1] + input.shape[2:], "input's shape without the classes"
    check_shape(NAME, "target", target, expected, which)
    check_shape(NAME, "weight", weight, input.shape[min(input.dim() - 1, 1) :][:1], "the classes")
    check_weight(NAME, weight)
