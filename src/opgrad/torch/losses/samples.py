"""Losses with options on tensors, by samples: the operators with their gradients, and the same in torch functions.

The composition is what transformations of torch.func see, what is recorded and exported, and what the second
derivative is made of.
"""

import torch
from torch import Tensor

from opgrad.ops import loss_operators
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.derivative import pulled_back, wide
from opgrad.torch.formulas import Gradients, Needs, differentiate, onehot
from opgrad.torch.operators import OPERATORS, TensorOperator
from opgrad.torch.schema import REGISTERED

LOSSES = {name: TensorOperator(op) for name, op in loss_operators().items()}
REGISTERED.update(LOSSES)
_loss = OPERATORS["softmax_cross_entropy_loss"]
sample_losses, losses_and_grad = LOSSES["sample_losses"], LOSSES["sample_losses_and_grad"]

Settings = tuple[int | None, float, float, float]  # ignore_index, label_smoothing, softcap, temperature


def settings(options: LossOptions) -> Settings:
    """The operators' attributes."""
    return options.ignore_index, options.label_smoothing, options.softcap, options.temperature


# --- in torch functions --------------------------------------------------------------------------------------------


def scaled(logits: Tensor, softcap: float, temperature: float) -> Tensor:
    """z, in float32 or float64."""
    x = logits.to(wide(logits.dtype))
    if softcap:
        x = torch.tanh(x / softcap) * softcap
    return x if temperature == 1.0 else x / temperature


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
    z = scaled(logits, softcap, temperature)
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
