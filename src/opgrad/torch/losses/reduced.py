"""A loss with options, reduced from the samples' losses; if only the loss is wanted, with its gradient in one pass.

Where other results than the loss are differentiable, and for reduction "none", the gradient is computed in the
backward pass, when the gradients of all results are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.interop.torch_private import is_batched
from opgrad.interop.torch_tensors import is_traced, is_transformed
from opgrad.torch.formulas import over, scale_in_place, scaled, wide
from opgrad.torch.losses.options import CrossEntropyOutput, LossOptions, divisors
from opgrad.torch.losses.samples import composed, losses_and_grad, sample_losses, settings
from opgrad.torch.operators import is_exported
from opgrad.torch.schema import is_recording

Samples = Sequence[Tensor]  # what sample_losses returns


def loss_of_samples(
    logits: Tensor,
    labels: Tensor | None,
    weight: Tensor | None,
    probabilities: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    in_place: bool,
    check: bool,
) -> Any:
    """The loss in this dtype, or CrossEntropyOutput. labels: None for probabilities alone, with which all count."""
    if labels is None:
        samples = logits.shape[:1] + logits.shape[2:]
        labels = torch.zeros(samples, dtype=torch.int64, device=logits.device)
    arguments = (logits, labels, weight, probabilities)
    if _computes_gradient(logits, probabilities, options):
        loss, predicted = _fused(*arguments, options, dtype, in_place, check)
        return _output(loss, {"predicted_tokens": predicted}, labels, options) if options.returned else loss
    if is_transformed() or is_recording() or is_exported():
        found = composed(*arguments, settings(options), check)
    else:
        found = sample_losses(*arguments, *settings(options), check)
    return reduced(found, labels, weight, probabilities is not None, options, dtype)


def _computes_gradient(logits: Tensor, probabilities: Tensor | None, options: LossOptions) -> bool:
    """Whether the gradient is computed in the forward pass."""
    tensors = [logits] if probabilities is None else [logits, probabilities]
    if not (torch.is_grad_enabled() and logits.requires_grad) or is_transformed() or is_traced(tensors):
        return False
    if options.reduction == "none" or options.is_differentiable_beside or is_exported():
        return False
    return probabilities is None or not probabilities.requires_grad


def reduced(
    found: Samples, labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype,
    by: tuple[Tensor | float, Tensor | float] | None = None,
) -> Any:  # fmt: skip
    """The loss of the samples' losses, reduced, or CrossEntropyOutput. by: the divisors, where others count, too."""
    loss, lse = found[0], found[1]
    z_loss = options.lse_square_scale * lse * lse if options.lse_square_scale or "z_loss" in options.returned else None
    if options.reduction != "none":
        by_weight, by_count = by or divisors(labels, weight, is_dense, options, lse.dtype)
        loss = loss.sum(dtype=torch.float64) * over(by_weight)
        z_loss = None if z_loss is None else z_loss.sum(dtype=torch.float64) * over(by_count)
    total = (loss if z_loss is None else loss + z_loss).to(dtype)
    if not options.returned:
        return total
    known: dict[str, Any] = dict(zip(("loss", "lse", "log_prob", "entropy", "predicted_tokens"), found, strict=True))
    return _output(total, known | {"z_loss": None if z_loss is None else z_loss.to(dtype)}, labels, options)


def _output(loss: Tensor, known: dict[str, Tensor | None], labels: Tensor, options: LossOptions) -> CrossEntropyOutput:
    if "token_accuracy" in options.returned:
        accuracy = accuracy_of(cast(Tensor, known["predicted_tokens"]), labels, options.ignore_index)
        known = {**known, "token_accuracy": accuracy}
    return CrossEntropyOutput(loss, **{name: known[name] for name in options.returned})


def accuracy_of(predicted: Tensor, labels: Tensor, ignore_index: int | None) -> Tensor:
    """The share of the samples that count whose class is the predicted one; 0 if there is none."""
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    hits = ((predicted == labels) & counts).sum()
    return hits.to(torch.float32) / counts.sum().clamp(min=1)


class _Fused(torch.autograd.Function):
    """The reduced loss, with its gradient computed and kept, and the predicted classes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        probabilities: Tensor | None,
        options: LossOptions,
        dtype: torch.dtype,
        in_place: bool,
        check: bool,
    ) -> Any:
        is_dense, number = probabilities is not None, wide(logits.dtype)
        by_weight, by_count = divisors(labels, weight, is_dense, options, number)
        inverse, of_square = over(by_weight), options.lse_square_scale * over(by_count)
        now: Any = inverse
        later: Any = 1.0
        if logits.dtype == torch.float16:
            # If the gradient were divided by the number of samples here, most of it would underflow float16 before a
            # loss scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
            now, later, of_square = 1.0, inverse, of_square * by_weight
        square = _of_each(labels, of_square, number) if options.lse_square_scale else None
        upstream = (_of_each(labels, now, number), None, square, None, None)
        attributes = (*settings(options), check)
        *found, dlogits = losses_and_grad.execute(logits, labels, weight, probabilities, *upstream, *attributes)
        ctx.arguments = (labels, weight, probabilities, replace(options, returned=()), dtype)
        ctx.in_place, ctx.spent, ctx.later = in_place, False, later
        ctx.save_for_backward(dlogits, *([] if in_place else [logits]))
        ctx.mark_non_differentiable(found[4])
        ctx.set_materialize_grads(False)
        return reduced(tuple(found), labels, weight, is_dense, ctx.arguments[3], dtype), found[4]

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *others: Any) -> Any:
        nothing = (None,) * 7
        if dloss is None:
            return None, *nothing
        dlogits, *kept = ctx.saved_tensors
        if ctx.in_place:
            if ctx.spent or torch.is_grad_enabled() or is_batched(dloss):
                raise RuntimeError(
                    "cross_entropy: inplace_backward=True allows one backward pass, of one gradient, and no gradient of"
                    " it; leave it False for that"
                )
            ctx.spent = True
            return scale_in_place(dlogits, dloss * ctx.later), *nothing
        if torch.is_grad_enabled():
            return _again(kept[0], ctx.arguments, dloss), *nothing
        factor = dloss * ctx.later
        return dlogits * factor if is_batched(dloss) else scaled(dlogits, factor), *nothing


_fused: Callable[..., Any] = _Fused.apply


def _of_each(labels: Tensor, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """The same number for each sample."""
    if isinstance(value, Tensor):
        return value.to(dtype).expand(labels.shape).contiguous()
    return torch.full(labels.shape, value, dtype=dtype, device=labels.device)


def _again(logits: Tensor, arguments: Any, dloss: Tensor) -> Tensor:
    """The gradient, computed so that it is differentiable itself."""
    labels, weight, probabilities, options, dtype = arguments
    found = sample_losses(logits, labels, weight, probabilities, *settings(options), False)
    loss = reduced(found, labels, weight, probabilities is not None, options, dtype)
    (dlogits,) = torch.autograd.grad(loss, logits, dloss, create_graph=True)
    return dlogits
