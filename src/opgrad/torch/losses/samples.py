"""What losses on tensors share: their options, the losses of samples, their reduction, and gradients in the same pass.

The losses of samples are operators with gradients, and a composition of torch functions: it is what transformations of
torch.func see, what is recorded and exported, and what the second derivative is made of.

Where other results than the loss are differentiable, and for reduction "none", the gradient is computed in the
backward pass, when the gradients of all results are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_private import is_batched
from opgrad.ops import loss_operators
from opgrad.ops.reference import loss_options
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.formulas import Gradients, Needs, differentiate, onehot, scale_in_place, scaled
from opgrad.torch.operators import OPERATORS, TensorOperator, pulled_back, wide


class CrossEntropyOutput(NamedTuple):
    """A loss and what else was asked for; None for what was not.

    loss: as without other results. z_loss: what the z-loss adds to it, reduced likewise.
    lse, log_prob, entropy: of each sample, float32 or float64, differentiable; 0 for ignored samples.
    token_accuracy: the share of the samples that count whose largest logit is that of their class; 0 if there is none.
    predicted_tokens: the class with the largest logit; -1 for ignored samples.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    lse: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def read_options(caller: str, *options: Any, returned: tuple[bool, ...] = (), **named: Any) -> LossOptions:
    """The options of the function `caller`; `returned` says of each field behind the loss whether it is asked for.

    A tensor with the number of items is not read: that would wait for the device.
    """

    def is_left(option: str, value: Any) -> bool:
        return option == "num_items" and isinstance(value, Tensor)

    named |= {"returned": tuple(compress(CrossEntropyOutput._fields[1:], returned)), "is_left": is_left}
    return loss_options.read_options(caller, *options, **named)


def read_labels(caller: str, target: Tensor, shift: Any, ignore_index: int | None) -> Tensor:
    """Labels, in a dtype that the operators take and ignore_index fits, moved by `shift`; probabilities as they are."""
    is_dense = target.is_floating_point()
    labels = target.int() if target.dtype == torch.uint8 else target
    labels = labels if is_dense or loss_options.in_int32(ignore_index) else labels.long()
    found: Tensor = loss_options.shifted(torch, caller, labels, shift, ignore_index, is_dense)
    return found


def divisors(
    labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions
) -> tuple[Tensor | float, Tensor | float]:
    """The divisors of the sums of losses and of squares of lse: 0-dimensional tensors in float64, or numbers."""
    weight = None if weight is None or is_dense else weight.detach()
    places = labels if weight is None else labels.long()
    both = loss_options.divisors(torch, places, weight, options, torch.float64, Tensor.to)
    by_weight, by_count = (each.detach().to(torch.float64) if isinstance(each, Tensor) else each for each in both)
    return by_weight, by_count


# --- checks ----------------------------------------------------------------------------------------------------------


LABELS = (torch.int32, torch.int64, torch.uint8)


def check_tensors(caller: str, optional: Sequence[str] = (), **tensors: Any) -> None:
    """Raise TypeError for what is no tensor; those that are optional may be None."""
    for argument, value in tensors.items():
        if not isinstance(value, Tensor) and (value is not None or argument not in optional):
            raise TypeError(f"{caller}: {argument} is {type(value).__name__}, expected a PyTorch tensor")


def check_target(caller: str, target: Tensor) -> None:
    if not target.is_floating_point() and target.dtype not in LABELS:
        raise TypeError(f"{caller}: target has dtype {target.dtype}, expected int32, int64 or uint8, or a float")


def check_weight(caller: str, weight: Tensor | None) -> None:
    """Raise NotImplementedError for class weights that require grad."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{caller}: weight requires grad, and the loss has no gradient for it: detach it")


def check_shape(caller: str, argument: str, value: Tensor | None, expected: Sequence[int], which: str = "") -> None:
    """Raise ValueError for another shape than this one; None for a tensor that is not given."""
    if value is not None and value.shape != (shape := tuple(expected)):
        found = f"{caller}: {argument} has shape {tuple(value.shape)}, expected {shape}"
        raise ValueError(f"{found}, {which}" if which else found)


def check_dense(caller: str, options: LossOptions) -> None:
    """Raise ValueError for a class that is ignored beside class probabilities."""
    if options.ignore_index is not None and options.ignore_index >= 0:
        raise ValueError(f"{caller}: ignore_index is {options.ignore_index}, expected none for class probabilities")


def check_labels(caller: str, labels: Tensor, classes: int, ignore_index: int | None) -> None:
    """Raise ValueError for a label out of range, on the CPU."""
    if labels.device.type == "cpu":
        loss_options.check_labels(caller, "target", labels.numpy(), classes, ignore_index)


def class_axis(value: Any, dim: int) -> int | None:
    """The axis of a DTensor's mesh that shares out the classes, which lie along `dim`; None unless exactly one does."""
    axes = [index for index, each in enumerate(value.placements) if each.is_shard(dim)]
    if len(axes) != 1 or any(each.is_partial() for each in value.placements):
        return None
    return axes[0]


def is_class_sharded(value: Any, dim: int) -> bool:
    """Whether it is a DTensor whose classes, along `dim`, one axis of its mesh shares out."""
    return type(value) is not Tensor and hasattr(value, "device_mesh") and class_axis(value, dim) is not None


LOSSES = {name: TensorOperator(op) for name, op in loss_operators().items()}
_loss = OPERATORS["softmax_cross_entropy_loss"]
sample_losses, losses_and_grad = LOSSES["sample_losses"], LOSSES["sample_losses_and_grad"]

Settings = tuple[int | None, float, float, float]  # ignore_index, label_smoothing, softcap, temperature


def settings(options: LossOptions) -> Settings:
    """The operators' attributes."""
    return options.ignore_index, options.label_smoothing, options.softcap, options.temperature


# --- in torch functions --------------------------------------------------------------------------------------------


def targets(like: Tensor, labels: Tensor, weight: Tensor | None, probabilities: Tensor | None, share: float) -> Tensor:
    """weight * q, of the shape of `like`; `share` is what labels are smoothed by."""
    q = onehot(labels, like.shape[1], like.dtype) if probabilities is None else probabilities.to(like.dtype)
    if share:
        q = q * (1 - share) + share / max(like.shape[1], 1)
    return q if weight is None else q * weight.to(like.dtype).view(-1, *[1] * (like.dim() - 2))


def composed(
    logits: Tensor, labels: Tensor, weight: Tensor | None, probabilities: Tensor | None, settings: Settings,
    check: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The results of sample_losses; a label out of range is refused, or makes NaN, as by the operator of the loss."""
    ignore_index, smoothing, softcap, temperature = settings
    z = loss_options.bent(torch, logits.to(wide(logits.dtype)), softcap, temperature)
    nll, log_p = _loss(z, labels, None, ignore_index, "none", None, None, check)
    target, p = targets(z, labels, weight, probabilities, smoothing), log_p.exp()
    below = -torch.where((target == 0) & log_p.isinf(), 0, log_p)  # 0 * inf is NaN; finite ones are target's gradient
    slack = -torch.where(p == 0, 0, log_p)
    results = ((target * below).sum(1), z.logsumexp(1), -nll, (p * slack).sum(1))
    predicted = logits.detach().argmax(1) if z.shape[1] else torch.full_like(labels, -1, dtype=torch.int64)
    if ignore_index is None:
        return *results, predicted
    ignored = labels == ignore_index
    kept = [torch.where(ignored, 0, each) for each in results]
    return kept[0], kept[1], kept[2], kept[3], predicted.masked_fill(ignored, -1)


# --- the operators' gradients --------------------------------------------------------------------------------------


def _sample_losses(
    dloss: Tensor | None, dlse: Tensor | None, dlog_prob: Tensor | None, dentropy: Tensor | None,
    dpredicted: Tensor | None, needs: Needs, logits: Tensor, labels: Tensor, weight: Tensor | None,
    probabilities: Tensor | None, ignore_index: int | None, label_smoothing: float, softcap: float, temperature: float,
) -> Gradients:  # fmt: skip
    options = (ignore_index, label_smoothing, softcap, temperature)
    found: Gradients = {"probabilities": None}
    if needs["logits"]:
        by_loss = torch.zeros_like(labels, dtype=wide(logits.dtype)) if dloss is None else dloss
        upstream = (by_loss, dlse, None, dlog_prob, dentropy)
        *_, found["logits"] = losses_and_grad(logits, labels, weight, probabilities, *upstream, *options, False)
    if needs["probabilities"] and probabilities is not None and dloss is not None:
        (found["probabilities"],) = pulled_back(
            lambda q: composed(logits, labels, weight, q, options)[0], [probabilities], [dloss]
        )
    return found


def _losses_and_gradient(
    logits: Tensor, labels: Tensor, weight: Tensor | None, probabilities: Tensor | None, dloss: Tensor | None,
    dlse: Tensor | None, dlse_square: Tensor | None, dlog_prob: Tensor | None, dentropy: Tensor | None,
    ignore_index: int | None, label_smoothing: float, softcap: float, temperature: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of sample_losses_and_grad."""
    options = (ignore_index, label_smoothing, softcap, temperature)

    def samples(x: Tensor) -> tuple[Tensor, ...]:
        loss, lse, log_prob, entropy, _ = composed(x, labels, weight, probabilities, options)
        return loss, lse, log_prob, entropy, lse * lse

    dloss = torch.ones_like(labels, dtype=wide(logits.dtype)) if dloss is None else dloss
    slopes = pulled_back(samples, [logits], [dloss, dlse, dlog_prob, dentropy, dlse_square])
    return *samples(logits)[:4], None, *slopes


sample_losses.differentiate(_sample_losses)
differentiate(losses_and_grad, _losses_and_gradient)


Samples = Sequence[Any]  # what sample_losses returns; None for what is not asked for
Several = Sequence[Tensor | None]


def reduced(
    found: Samples, labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype,
    by: tuple[Tensor | float, Tensor | float] | None = None,
) -> Any:  # fmt: skip
    """The loss of the samples' losses, reduced, or CrossEntropyOutput. by: the divisors, where others count, too."""
    loss, lse = found[0], found[1]
    z_loss = options.lse_square_scale * lse * lse if options.lse_square_scale or "z_loss" in options.returned else None
    if options.reduction != "none":
        by_weight, by_count = by or divisors(labels, weight, is_dense, options)
        loss = loss.sum(dtype=torch.float64) * loss_options.over(torch, by_weight)
        z_loss = None if z_loss is None else z_loss.sum(dtype=torch.float64) * loss_options.over(torch, by_count)
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
    gradients: Several
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
            # Where the gradients have been given away, they are computed again.
            grads = ctx.grads or ctx.way.compute(ctx.saved_tensors, ctx.needs_input_grad[1:]).gradients
            if is_batched(dloss):
                found = _multiplied(grads, dloss * ctx.factor)
            else:
                ctx.grads = None
                found = _multiplied_in_place(grads, dloss * ctx.factor)
        else:
            found = _multiplied(ctx.saved_tensors[ctx.count :], dloss * ctx.factor)
        return None, *found, *nothing[len(found) :]


_fused: Callable[..., tuple[Tensor, Tensor | None]] = _Fused.apply


def _multiplied_in_place(grads: Several, factor: Tensor) -> Several:
    """The gradients times the factor, in their own memory."""
    if factor.dim() or factor.is_cuda or float(factor) != 1.0:
        return [None if each is None else scale_in_place(each, factor) for each in grads]
    return grads


def _multiplied(grads: Several, factor: Tensor) -> Several:
    """The gradients times the factor, in new memory."""
    if is_batched(factor):
        return [None if each is None else each * factor for each in grads]
    return [None if each is None else scaled(each, factor) for each in grads]


def again(ctx: Any, dloss: Tensor) -> Several:
    """The gradients of `ctx.way`, computed from the saved tensors so that they are differentiable themselves."""
    tensors = list(ctx.saved_tensors[: ctx.count])
    wanted = [index for index in range(ctx.count) if ctx.needs_input_grad[1 + index]]

    def loss(*now: Tensor) -> Tensor:
        moved = dict(zip(wanted, now, strict=True))
        found: Tensor = ctx.way.differentiable([moved.get(index, each) for index, each in enumerate(tensors)])
        return found

    found = dict(zip(wanted, pulled_back(loss, [tensors[index] for index in wanted], [dloss]), strict=True))
    return [found.get(index) for index in range(ctx.count)]


def upstream_of(
    labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """The gradients of each sample's loss and square of lse, without a common factor that comes later; that factor.

    dtype: of the gradient.
    """
    by_weight, by_count = divisors(labels, weight, is_dense, options)
    inverse = loss_options.over(torch, by_weight)
    of_square = options.lse_square_scale * loss_options.over(torch, by_count)
    if dtype == torch.float16:
        # If the gradient were divided by the number of samples here, most of it would underflow float16 before a loss
        # scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
        return 1.0, of_square * by_weight, inverse
    return inverse, of_square, 1.0


def same_for_each(labels: Tensor, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """The same number for each sample."""
    made = torch.empty(labels.shape, dtype=dtype, device=labels.device)
    return made.copy_(value) if isinstance(value, Tensor) else made.fill_(value)
