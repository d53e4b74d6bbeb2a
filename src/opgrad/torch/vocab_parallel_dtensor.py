"""Vocabulary-parallel cross-entropy of a DTensor: its shards, and where the results lie on the mesh."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from opgrad.torch import shards
from opgrad.torch.functions import autocasts
from opgrad.torch.shard_losses import Options, VocabParallelLoss, result, shifted


def loss(options: Options, input: Any, target: Any, dim: int, group: Any, vocab_range: Any) -> Any:
    """The results as DTensors: each sample's where it is, sums as partial ones over the axes that share out samples.

    Raises ValueError unless exactly one axis of the mesh shares out the classes, and no other does in parts.
    """
    if group is not None or vocab_range is not None:
        raise ValueError(f"{options.who}: group or vocab_range is given beside a DTensor, expected its mesh alone")
    dim %= input.dim()
    axis = _class_axis(options, input, dim)
    mesh, classes = input.device_mesh, input.shape[dim]
    of_samples = [
        _of_sample(each, dim) if place != axis else Replicate() for place, each in enumerate(input.placements)
    ]
    if target.shape != input.shape[:dim] + input.shape[dim + 1 :]:
        found, wanted = tuple(target.shape), tuple(input.shape[:dim] + input.shape[dim + 1 :])
        raise ValueError(f"{options.who}: target has shape {found}, expected {wanted}, input's without the classes")
    labels = _local(shifted(options, _whole(target)), mesh, of_samples)
    if isinstance(options.weight, DTensor):
        options = replace(options, weight=options.weight.full_tensor())
    logits = input.to_local().movedim(dim, -1)
    size = -(-classes // mesh.size(axis))  # as torch.chunk shares them out
    first = min(mesh.get_local_rank(axis) * size, classes)
    shard = options.shard(mesh.get_group(axis), first, logits.shape[-1])
    rows = shards.of_logits(
        logits.reshape(labels.numel(), shard.classes),
        labels.reshape(-1),
        options.own_weight(first, shard.classes),
        shard,
    )
    groups = tuple(mesh.get_group(place) for place, each in enumerate(of_samples) if isinstance(each, Shard))
    found = result(options, rows, labels, torch.float32 if autocasts(logits) else logits.dtype, groups)
    return _placed(options, found, mesh, of_samples, target.shape)


def _class_axis(options: Options, input: Any, dim: int) -> int:
    """The axis of the mesh that shares out the classes."""
    axes = [place for place, each in enumerate(input.placements) if each.is_shard(dim)]
    if len(axes) != 1 or any(each.is_partial() for each in input.placements):
        expected = f"Shard({dim}) on one axis of the mesh, and Shard or Replicate on others"
        raise ValueError(f"{options.who}: input has the placements {input.placements}, expected {expected}")
    return axes[0]


def _of_sample(placement: Placement, dim: int) -> Placement:
    """The placement of what has no classes."""
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim - (placement.dim > dim))


def _whole(target: Any) -> Tensor:
    return target.full_tensor() if isinstance(target, DTensor) else target


def _local(target: Tensor, mesh: Any, placements: Any) -> Tensor:
    """This process's part of a tensor that every process has."""
    whole = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements).to_local()


def _placed(options: Options, found: Any, mesh: Any, of_samples: list[Placement], shape: torch.Size) -> Any:
    """The results as DTensors."""
    summed = [Partial("sum") if isinstance(each, Shard) else Replicate() for each in of_samples]
    stride = torch.empty(shape, device="meta").stride()

    def each(name: str, value: Any) -> Any:
        if value is None or name == "token_accuracy":
            return value
        if options.reduction != "none" and name in ("loss", "z_loss"):
            return DTensor.from_local(value, mesh, summed, run_check=False)
        return DTensor.from_local(value, mesh, of_samples, run_check=False, shape=shape, stride=stride)

    if isinstance(found, VocabParallelLoss):
        return VocabParallelLoss(*(each(name, value) for name, value in zip(found._fields, found, strict=True)))
    return each("loss", found)
