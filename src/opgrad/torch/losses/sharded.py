"""The losses of samples whose classes are split over the processes of a group, with one all-gather.

Each process computes the statistics of its classes for each row, and gathers those of all processes. It combines them
in the order of the ranks, in float64, so that every process has the same bits. The results are those that
`sample_losses` returns for unsplit classes, and they are reduced in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.autocast import autocast_layer
from opgrad.torch.flops import count_flops
from opgrad.torch.losses.layer_operators import layer_statistics
from opgrad.torch.losses.reduced import shaped
from opgrad.torch.losses.shard_operators import shard_copy, shard_gather, shard_statistics
from opgrad.torch.losses.statistics import ClassPart, composed_statistics, samples_of_parts

FORMULAS = ("torch", "megatron")


@dataclass(frozen=True)
class LossCall:
    """The loss that is wanted, and by whom. weight: of all classes. formula: how labels are smoothed."""

    who: str
    options: LossOptions
    formula: str = "torch"
    weight: Tensor | None = None


class Member(NamedTuple):
    """A process's rank in its group, the number of processes there, and the group's name, as operators know it."""

    rank: int
    processes: int
    group: str


@dataclass(frozen=True)
class ClassRange:
    """The classes of one process, those from `first` on, of all that its group has together."""

    call: LossCall
    first: int
    classes: int
    member: Member

    @property
    def part(self) -> ClassPart:
        weight = self.call.weight
        own = None if weight is None else weight[self.first : self.first + self.classes].contiguous()
        return ClassPart.of(self.call.options, own, self.first)


def member_of(who: str, group: Any) -> Member:
    """What this process is in a group; None: in the default one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{who}: there is no process group, expected torch.distributed to be initialised")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{who}: this process is not in the group, expected one of its own")
    return Member(rank, dist.get_world_size(group), group.group_name)


def class_axis(value: Any, dim: int) -> int | None:
    """The axis of a DTensor's mesh that shares out the classes, which lie along `dim`; None unless exactly one does."""
    axes = [place for place, each in enumerate(value.placements) if each.is_shard(dim)]
    if len(axes) != 1 or any(each.is_partial() for each in value.placements):
        return None
    return axes[0]


def is_class_sharded(value: Any, dim: int) -> bool:
    """Whether it is a DTensor whose classes, along `dim`, one axis of its mesh shares out."""
    return type(value) is not Tensor and hasattr(value, "device_mesh") and class_axis(value, dim) is not None


# --- the samples' results --------------------------------------------------------------------------------------------


def of_logits(
    logits: Tensor, labels: Tensor, probabilities: Tensor | None, own: ClassRange, dtype: torch.dtype
) -> Sequence[Any]:
    """The results of logits [..., classes of the process], in the shape of the labels [...] of all classes.

    With probabilities, which have the logits' shape, all samples count; the results are differentiable in both.
    """
    x, y = logits.reshape(labels.numel(), own.classes), labels.reshape(-1)
    if probabilities is None:
        found = shard_statistics(x, y, *own.part)
    else:
        found = composed_statistics(x, y, own.part, probabilities.reshape(x.shape))
    return shaped(_gathered(found, y, own, probabilities is not None, dtype), labels.shape)


def of_layer(
    input: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, probabilities: Tensor | None, own: ClassRange,
    dtype: torch.dtype,
) -> Sequence[Any]:  # fmt: skip
    """The same for the logits of a linear layer, in autocast's dtype; with probabilities they are stored."""
    x, y = input.reshape(labels.numel(), input.shape[-1]), labels.reshape(-1)
    x, w, b, _ = autocast_layer(x, w, b)
    if probabilities is not None:
        logits = functional.linear(shard_copy(x, own.member.group), w, b)
        return of_logits(logits, labels, probabilities, own, dtype)
    if not torch.compiler.is_compiling():
        count_flops()
    found = layer_statistics(x, w, b, y, *own.part, own.call.options.ignore_index, None, own.member.group)
    return shaped(_gathered(found, y, own, False, dtype), labels.shape)


def _gathered(
    statistics: Tensor, labels: Tensor, own: ClassRange, is_dense: bool, dtype: torch.dtype
) -> Sequence[Tensor | None]:
    """The results over the classes of all processes, from the statistics of this one's."""
    call, options = own.call, own.call.options
    ignored, smoothing = None if is_dense else options.ignore_index, options.label_smoothing
    parts, total = shard_gather(statistics, labels, own.first, own.classes, ignored, *own.member, call.who)
    if smoothing and call.formula == "megatron":
        smoothing = smoothing * total.double() / (total.double() - 1)
    return samples_of_parts(parts, labels, own.part, total, call.weight, options, dtype, smoothing, is_dense)
