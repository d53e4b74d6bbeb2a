"""A loss, reduced from the samples' losses; and a loss that is one number, with its gradients in one pass.

Where other results than the loss are differentiable, and for reduction "none", the gradient is computed in the
backward pass, when the gradients of all results are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_private import is_batched
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.derivative import pulled_back
from opgrad.torch.formulas import over, scale_in_place, scaled
from opgrad.torch.losses.options import CrossEntropyOutput, divisors

Samples = Sequence[Any]  # what sample_losses returns; None for what is not asked for
Gradients = Sequence[Tensor | None]


def reduced(
    found: Samples, labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype,
    by: tuple[Tensor | float, Tensor | float] | None = None,
) -> Any:  # fmt: skip
    """The loss of the samples' losses, reduced, or CrossEntropyOutput. by: the divisors, where others count, too."""
    loss, lse = found[0], found[1]
    z_loss = options.lse_square_scale * lse * lse if options.lse_square_scale or "z_loss" in options.returned else None
    if options.reduction != "none":
        by_weight, by_count = by or divisors(labels, weight, is_dense, options)
        loss = loss.sum(dtype=torch.float64) * over(by_weight)
        z_loss = None if z_loss is None else z_loss.sum(dtype=torch.float64) * over(by_count)
    total = (loss if z_loss is None else loss + z_loss).to(dtype)
    if not options.returned:
        return total
    known: dict[str, Any] = dict(zip(("loss", "lse", "log_prob", "entropy", "predicted_tokens"), found, strict=True))
    return output(total, known | {"z_loss": None if z_loss is None else z_loss.to(dtype)}, labels, options)


def shaped(found: Samples, shape: Sequence[int]) -> Samples:
    """The results of samples in this shape."""
    return [each if each is None else each.reshape(shape) for each in found]


def output(loss: Tensor, known: dict[str, Tensor | None], labels: Tensor, options: LossOptions) -> CrossEntropyOutput:
    """The loss with the other results that are asked for, of those that are known."""
    if "token_accuracy" in options.returned:
        hits, count = hits_of(cast(Tensor, known["predicted_tokens"]), labels, options.ignore_index)
        known = {**known, "token_accuracy": hits.to(torch.float32) / count.clamp(min=1)}
    return CrossEntropyOutput(loss, **{name: known[name] for name in options.returned})


def hits_of(predicted: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """The number of right predictions among the samples that count, and the number of these samples."""
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    return ((predicted == labels) & counts).sum(), counts.sum()


# --- one number, with its gradients --------------------------------------------------------------------------------


class Found(NamedTuple):
    """A loss with its gradients, which still have to be multiplied by a factor; and the predicted classes."""

    loss: Tensor
    gradients: Gradients
    factor: Tensor | float = 1.0
    predicted: Tensor | None = None


@dataclass(frozen=True)
class OnePass:
    """The computation of a loss that is one number, with its gradients.

    dtype: of the loss. in_place: whether gradients are multiplied in place, as the user allows one backward pass alone.
    hands_out: whether they are multiplied in place and returned without keeping a reference, so that autograd takes
    over their memory; another backward pass computes them again.
    """

    options: LossOptions
    dtype: torch.dtype
    in_place: bool = False
    hands_out: ClassVar[bool] = False

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        """The loss and its gradients with respect to the first tensors, None for those that are not needed."""
        raise NotImplementedError

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        """The loss by operators that are differentiable any number of times."""
        raise NotImplementedError

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss and the predicted classes; None if they are not known."""
        return _fused(replace(self, options=replace(self.options, returned=())), *tensors)


class _Fused(torch.autograd.Function):
    """The loss of `OnePass`, whose gradients are computed with it and multiplied in the backward pass."""

    @staticmethod
    def forward(ctx: Any, way: OnePass, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = way.compute(tensors, ctx.needs_input_grad[1:])
        ctx.way, ctx.factor, ctx.count = way, found.factor, len(tensors)
        ctx.set_materialize_grads(False)
        if found.predicted is not None:
            ctx.mark_non_differentiable(found.predicted)
        ctx.grads, ctx.spent = found.gradients if way.hands_out else None, False
        ctx.save_for_backward(*([] if way.in_place else tensors), *([] if way.hands_out else found.gradients))
        return found.loss, found.predicted

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Any) -> Any:
        nothing = (None,) * ctx.count
        if dloss is None:
            return None, *nothing
        if ctx.way.in_place:
            what = "gradient of the gradient (create_graph=True)" if torch.is_grad_enabled() else ""
            what = "batch of gradients (is_grads_batched=True)" if is_batched(dloss) else what
            what = "second backward pass" if ctx.spent else what
            ctx.spent = True
            if what:
                raise RuntimeError(f"cross_entropy: inplace_backward=True allows no {what}; leave it False for that")
            found = _multiplied_in_place(ctx.saved_tensors, dloss * ctx.factor)
        elif torch.is_grad_enabled():
            found = again(ctx, dloss)
        elif ctx.way.hands_out:
            found = _handed_out(ctx, dloss * ctx.factor)
        else:
            found = _multiplied(ctx.saved_tensors[ctx.count :], dloss * ctx.factor)
        return None, *found, *nothing[len(found) :]


_fused: Callable[..., tuple[Tensor, Tensor | None]] = _Fused.apply


def _handed_out(ctx: Any, factor: Tensor) -> Gradients:
    """The gradients times the factor; computed again where they have been given away."""
    grads: Gradients = ctx.grads
    if grads is None:
        grads = ctx.way.compute(ctx.saved_tensors, ctx.needs_input_grad[1:]).gradients
    if is_batched(factor):
        return _multiplied(grads, factor)
    ctx.grads = None
    return _multiplied_in_place(grads, factor)


def _multiplied_in_place(grads: Gradients, factor: Tensor) -> Gradients:
    """The gradients times the factor, in their own memory."""
    if factor.dim() or factor.is_cuda or float(factor) != 1.0:
        return [None if each is None else scale_in_place(each, factor) for each in grads]
    return grads


def _multiplied(grads: Gradients, factor: Tensor) -> Gradients:
    """The gradients times the factor, in new memory."""
    if is_batched(factor):
        return [None if each is None else each * factor for each in grads]
    return [None if each is None else scaled(each, factor) for each in grads]


def again(ctx: Any, dloss: Tensor) -> Gradients:
    """The gradients of `ctx.way`, computed from the saved tensors so that they are differentiable themselves."""
    tensors = list(ctx.saved_tensors[: ctx.count])
    wanted = [index for index in range(ctx.count) if ctx.needs_input_grad[1 + index]]

    def loss(*now: Tensor) -> Tensor:
        moved = dict(zip(wanted, now, strict=True))
        found: Tensor = ctx.way.differentiable([moved.get(index, each) for index, each in enumerate(tensors)])
        return found

    found = dict(zip(wanted, pulled_back(loss, [tensors[index] for index in wanted], [dloss]), strict=True))
    return [found.get(index) for index in range(ctx.count)]


class ReducedUpstream(NamedTuple):
    """The gradients of each sample's loss and square of lse, without a common factor that comes `later`."""

    of_loss: Tensor | float
    of_square: Tensor | float
    later: Tensor | float


def upstream_of(
    labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype
) -> ReducedUpstream:
    """The factors of the samples in the reduction. dtype: of the gradient."""
    by_weight, by_count = divisors(labels, weight, is_dense, options)
    inverse, of_square = over(by_weight), options.lse_square_scale * over(by_count)
    if dtype == torch.float16:
        # If the gradient were divided by the number of samples here, most of it would underflow float16 before a loss
        # scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
        return ReducedUpstream(1.0, of_square * by_weight, inverse)
    return ReducedUpstream(inverse, of_square, 1.0)


def same_for_each(labels: Tensor, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """The same number for each sample."""
    made = torch.empty(labels.shape, dtype=dtype, device=labels.device)
    return made.copy_(value) if isinstance(value, Tensor) else made.fill_(value)
