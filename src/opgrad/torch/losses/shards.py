"""The losses of samples whose classes are split over the processes of a group, with one all-gather.

Each process computes four numbers for each row (opgrad.ops.vocab_parallel), more for some options, and gathers those of
all processes. It combines them in the order of the ranks, in float64, so that every process has the same bits. The
results are those that `sample_losses` returns for unsplit classes, and they are reduced in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.torch.autocast import narrows_products
from opgrad.torch.flops import count_flops
from opgrad.torch.formulas import wide
from opgrad.torch.losses import shard_operators
from opgrad.torch.losses.options import LossOptions

FORMULAS = ("torch", "megatron")


@dataclass(frozen=True)
class Call:
    """The loss that is wanted, and by whom. weight: of all classes. formula: how labels are smoothed."""

    who: str
    options: LossOptions
    formula: str = "torch"
    weight: Tensor | None = None

    @property
    def predicts(self) -> bool:
        return bool({"predicted_tokens", "token_accuracy"}.intersection(self.options.returned))


class Place(NamedTuple):
    """A process's rank in its group, the number of processes there, and the group's name, as operators know it."""

    rank: int
    processes: int
    group: str


@dataclass(frozen=True)
class Shard:
    """The classes of one process, those from `first` on, of all that its group has together."""

    call: Call
    first: int
    classes: int
    place: Place

    @property
    def given(self) -> tuple[Any, ...]:
        """What the operators of the statistics take behind the labels; weight is that of the shard's classes."""
        options, weight = self.call.options, self.call.weight
        own = None if weight is None else weight.detach()[self.first : self.first + self.classes].contiguous()
        of_moment = "entropy" in options.returned
        return own, self.first, options.softcap, options.temperature, of_moment, self.call.predicts


class Rows(NamedTuple):
    """Of each row, over the classes of all processes, in float64: differentiable, but for the predicted class.

    target: the label's z, or sum(weight * q * z) for probabilities q, with mass = sum(weight * q). sum: of weight * z.
    mean: of z under the softmax. mean, mass and predicted: None where nothing asks for them. total: how many classes.
    """

    lse: Tensor
    target: Tensor
    sum: Tensor
    mean: Tensor | None
    mass: Tensor | None
    predicted: Tensor | None
    total: Tensor


def place_of(who: str, group: Any) -> Place:
    """This process's place in a group; None: the default one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{who}: there is no process group, expected torch.distributed to be initialised")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{who}: this process is not in the group, expected one of its own")
    return Place(rank, dist.get_world_size(group), group.group_name)


def class_axis(value: Any, dim: int) -> int | None:
    """The axis of a DTensor's mesh that shares out the classes, which lie along `dim`; None unless exactly one does."""
    axes = [place for place, each in enumerate(value.placements) if each.is_shard(dim)]
    if len(axes) != 1 or any(each.is_partial() for each in value.placements):
        return None
    return axes[0]


def is_class_sharded(value: Any, dim: int) -> bool:
    """Whether it is a DTensor whose classes, along `dim`, one axis of its mesh shares out."""
    return type(value) is not Tensor and hasattr(value, "device_mesh") and class_axis(value, dim) is not None


# --- rows ------------------------------------------------------------------------------------------------------------


def merged(parts: Tensor, shard: Shard, is_dense: bool, total: Tensor) -> Rows:
    """The rows over all classes, combined from the statistics [processes, statistics, rows] in rank order."""
    m = parts[:, 0].detach().amax(0)
    shift = torch.where(m == -torch.inf, 0.0, m)
    of_moment, end = shard.given[4], 4 + shard.given[4]
    s, target, sums, moment, mass = (torch.zeros_like(m) for _ in range(5))
    for part in parts.unbind():
        scale = (part[0].detach() - shift).exp()
        s, target, sums = s + part[1] * scale, target + part[2], sums + part[3]
        moment = moment + part[4] * scale if of_moment else moment
        mass = mass + part[end] if is_dense else mass
    predicted = _predicted(parts.detach(), end + is_dense) if shard.call.predicts else None
    mean = moment / s if of_moment else None
    return Rows(m + s.log(), target, sums, mean, mass if is_dense else None, predicted, total)


def _predicted(parts: Tensor, place: int) -> Tensor:
    """The first of the largest classes: of the first process whose largest logit is the largest of all."""
    largest = parts[:, place + 1] if parts.shape[1] > place + 1 else parts[:, 0]
    which = largest.max(0)[1].unsqueeze(0)
    return parts[:, place].gather(0, which).squeeze(0)


def gathered(statistics: Tensor, labels: Tensor, shard: Shard, is_dense: bool) -> Rows:
    """The rows of all shards; those that do not count are set aside first, so that their gradients are 0."""
    ignored = None if is_dense else shard.call.options.ignore_index
    parts, total = shard_operators.shard_gather(
        statistics, labels, shard.first, shard.classes, ignored, *shard.place, shard.call.who
    )
    if ignored is not None:
        silent = torch.zeros_like(parts[:, :1])
        silent = torch.cat([silent, silent + 1, *[silent] * (parts.shape[1] - 2)], 1)
        parts = torch.where(labels == ignored, silent, parts)
    return merged(parts, shard, is_dense, total)


def of_logits(logits: Tensor, labels: Tensor, shard: Shard) -> Rows:
    """What rows [N, classes of the shard] come to, labels [N] being classes of all shards."""
    return gathered(shard_operators.shard_statistics(logits, labels, *shard.given), labels, shard, False)


def of_probabilities(logits: Tensor, labels: Tensor, probabilities: Tensor, shard: Shard) -> Rows:
    """The same for target probabilities of the shard's classes, of logits' shape; differentiable in both."""
    given: Any = (*shard.given, probabilities)
    found = shard_operators.composed_statistics(logits, labels, *given)
    return gathered(found, labels, shard, True)


def of_linear(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, shard: Shard) -> Rows:
    """The same for the logits x [N, H] @ w [classes of the shard, H]^T + b; dx is summed over the group."""
    if not torch.compiler.is_compiling():
        count_flops()
    found = shard_operators.shard_linear_statistics(
        x, w, b, labels, *shard.given, shard.call.options.ignore_index, shard.place.group
    )
    return gathered(found, labels, shard, False)


# --- samples ---------------------------------------------------------------------------------------------------------


def samples(rows: Rows, labels: Tensor, shard: Shard, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """What `sample_losses` returns: loss in float64, lse, log_prob, entropy and the predicted class.

    Entropy and predicted class are None where they are not asked for.
    """
    ignored = None if rows.mass is not None else shard.call.options.ignore_index
    counts = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    wrong = counts & ((labels < 0) | (labels >= rows.total))
    target = torch.where(wrong, torch.nan, rows.target)
    picked = torch.where(counts & ~wrong, labels, 0).long()
    if rows.mass is not None:
        losses = rows.mass * rows.lse - target
    elif shard.call.weight is None:
        losses = rows.lse - target
    else:
        losses = shard.call.weight.detach().double()[picked] * (rows.lse - target)
    if shard.call.options.label_smoothing:
        losses = _smoothed(losses, rows, shard)
    entropy = None if rows.mean is None else rows.lse - rows.mean
    each: Callable[[Tensor], Tensor] = lambda value: torch.where(counts, value, 0.0)  # noqa: E731
    floats = [
        None if value is None else each(value).to(wide(dtype)) for value in (rows.lse, target - rows.lse, entropy)
    ]
    predicted = None
    if rows.predicted is not None:
        known = counts & (rows.predicted >= 0) & ~rows.lse.detach().isnan()
        predicted = torch.where(known, rows.predicted, -1.0).long()
    return each(losses), *floats, predicted


def _smoothed(losses: Tensor, rows: Rows, shard: Shard) -> Tensor:
    smoothing: Any = shard.call.options.label_smoothing
    total = rows.total.double()  # a number beside an integer tensor would be float32
    if shard.call.formula == "megatron":
        smoothing = smoothing * total / (total - 1)
    every = total if shard.call.weight is None else shard.call.weight.detach().double().sum()
    return (1 - smoothing) * losses + smoothing / total * (rows.lse * every - rows.sum)


# --- the results of a call -------------------------------------------------------------------------------------------


def of_shard(logits: Tensor, labels: Tensor, probabilities: Tensor | None, shard: Shard, dtype: torch.dtype) -> Any:
    """The results of logits [..., classes of the shard], labels [...] and perhaps probabilities as logits, flat."""
    x, y = logits.reshape(labels.numel(), shard.classes), labels.reshape(-1)
    if probabilities is None:
        return samples(of_logits(x, y, shard), y, shard, dtype)
    return samples(of_probabilities(x, y, probabilities.reshape(x.shape), shard), y, shard, dtype)


def of_layer(
    input: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, probabilities: Tensor | None, shard: Shard,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The same for the logits of a linear layer, in autocast's dtype; with probabilities they are stored."""
    x, y = input.reshape(labels.numel(), input.shape[-1]), labels.reshape(-1)
    if narrows_products(x):
        half = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(half), w.to(half), None if b is None else b.to(half)
    if probabilities is None:
        return samples(of_linear(x, w, b, y, shard), y, shard, dtype)
    logits = functional.linear(shard_operators.shard_copy(x, shard.place.group), w, b)
    return of_shard(logits, labels, probabilities, shard, dtype)


def in_shape(found: Any, shape: torch.Size, options: LossOptions) -> Any:
    """The fields of samples in the samples' shape."""
    if isinstance(found, Tensor):
        return found.reshape(shape) if options.reduction == "none" else found
    fields = found._asdict()
    for name in of_samples(options):
        fields[name] = None if fields[name] is None else fields[name].reshape(shape)
    return type(found)(**fields)


def of_samples(options: LossOptions) -> tuple[str, ...]:
    """The fields of CrossEntropyOutput that each sample has its own of."""
    fields = ("lse", "log_prob", "entropy", "predicted_tokens")
    return (*fields, "loss", "z_loss") if options.reduction == "none" else fields
