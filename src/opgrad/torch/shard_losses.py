"""The loss of rows whose classes are split over processes: its options, and what it is made of the rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opgrad.contract import REDUCTIONS
from opgrad.torch.formulas import wide
from opgrad.torch.shards import Rows, Scale, Shard

FORMULAS = ("torch", "megatron")


class VocabParallelLoss(NamedTuple):
    """The results that a call asked for beside the loss; None: those that it did not.

    lse: the log-sum-exp of each token. z_loss: the part of the loss that lse_square_scale adds. log_prob: the
    log-probability of each target. entropy: of each token's softmax. token_accuracy: the share of tokens that count
    whose target has the largest logit.
    """

    loss: Tensor
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """How the loss is made of what the rows come to; `who` is the caller, for messages."""

    who: str
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    smoothing_formula: str
    lse_square_scale: float
    softcap: float | None
    temperature: float
    shift: int
    num_items: Any
    wanted: frozenset[str]

    def check(self) -> None:
        """Raise ValueError for an option that has no meaning."""
        known = {
            "reduction": (self.reduction in REDUCTIONS, ", ".join(REDUCTIONS)),
            "label_smoothing": (0 <= self.label_smoothing <= 1, "a number from 0 to 1"),
            "smoothing_formula": (self.smoothing_formula in FORMULAS, " or ".join(FORMULAS)),
            "softcap": (self.softcap is None or self.softcap >= 0, "a number of at least 0, or None"),
            "temperature": (self.temperature > 0, "a number above 0"),
            "shift": (self.shift in (0, 1), "0 or 1"),
        }
        for name, (holds, expected) in known.items():
            if not holds:
                raise ValueError(f"{self.who}: {name} is {getattr(self, name)!r}, expected {expected}")
        if self.weight is not None and self.smoothing_formula == "megatron":
            raise ValueError(f"{self.who}: weight is given, expected none with Megatron's formula")

    def shard(self, group: Any, first: int, classes: int) -> Shard:
        scale = Scale(float(self.softcap or 0.0), float(self.temperature))
        return Shard(group, first, classes, scale, "entropy" in self.wanted)

    def own_weight(self, first: int, classes: int) -> Tensor | None:
        """The weights of a shard's classes."""
        return None if self.weight is None else self.weight[first : first + classes].contiguous()


def shifted(options: Options, target: Tensor) -> Tensor:
    """The target of each place."""
    if not options.shift:
        return target.contiguous()
    last = torch.full_like(target[..., :1], options.ignore_index)
    return torch.cat([target[..., 1:], last[..., : target.shape[-1]]], -1)


def result(options: Options, rows: Rows, labels: Tensor, dtype: torch.dtype, groups: tuple[Any, ...] = ()) -> Any:
    """The loss, alone or with what was asked for; `groups`: those that have the other rows of the whole."""
    flat, total = labels.reshape(-1), rows.total
    counts = flat != options.ignore_index
    wrong = counts & ((flat < 0) | (flat >= total))
    if flat.device.type == "cpu" and bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise ValueError(f"{options.who}: target is {int(flat[place])} at {place}, expected 0 to {total - 1}")
    # What does not count is left out first: then its gradients are 0, whatever its logits are.
    lse, target, sums, mean = (torch.where(counts, each, 0.0) for each in rows[:4])
    target = torch.where(wrong, torch.nan, target)
    picked = torch.where(counts & ~wrong, flat, 0).long()
    weights = counts.double() if options.weight is None else counts * options.weight.double()[picked]
    losses = weights * (lse - target)
    if options.label_smoothing:
        losses = _smoothed(options, losses, lse, sums, counts, total)
    log_prob, z_losses = target - lse, options.lse_square_scale * lse.square()
    over = _divisors(options, weights, counts, groups)
    loss, z_loss = (_reduced(options, each, by, labels) for each, by in zip((losses, z_losses), over, strict=True))
    found = {"lse": lse, "log_prob": log_prob, "entropy": lse - mean}
    extra = {name: each.view(labels.shape).to(wide(dtype)) for name, each in found.items()}
    extra |= {"z_loss": z_loss.to(dtype), "token_accuracy": _accuracy(rows, target, counts, groups)}
    value = (loss + z_loss).to(dtype)
    return VocabParallelLoss(value, **{name: extra[name] for name in options.wanted}) if options.wanted else value


def _smoothed(options: Options, losses: Tensor, lse: Tensor, sums: Tensor, counts: Tensor, total: Any) -> Tensor:
    smoothing = options.label_smoothing
    if options.smoothing_formula == "megatron":
        smoothing = smoothing * total / (total - 1)
    every = total if options.weight is None else options.weight.double().sum()
    return (1 - smoothing) * losses + smoothing / total * (lse * every - sums)


def _divisors(options: Options, weights: Tensor, counts: Tensor, groups: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the sums of the losses and of the z-losses are divided by."""
    if options.num_items is not None:
        return options.num_items, options.num_items
    if options.reduction != "mean":
        return 1.0, 1.0
    both = torch.stack([weights.sum(), counts.double().sum()])
    for group in groups:
        dist.all_reduce(both, group=group)
    return both[0], both[1]


def _reduced(options: Options, losses: Tensor, by: Any, labels: Tensor) -> Tensor:
    if options.reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    if isinstance(by, Tensor):
        return torch.where(by == 0, total * 0.0, total / torch.where(by == 0, 1.0, by))
    return total / by


def _accuracy(rows: Rows, target: Tensor, counts: Tensor, groups: tuple[Any, ...]) -> Tensor:
    hits = torch.stack([(counts & (target >= rows.largest)).sum(), counts.sum()]).double()
    for group in groups:
        dist.all_reduce(hits, group=group)
    return (hits[0] / hits[1].clamp(min=1)).float().detach()
