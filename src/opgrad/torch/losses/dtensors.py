"""Vocabulary-parallel cross-entropy of DTensors: their shards, and where the results lie on the mesh."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from opgrad.torch.functions import narrows_products, widens_softmax
from opgrad.torch.losses import samples
from opgrad.torch.losses.sharded import ClassRange, LossCall, member_of, of_layer, of_logits


def loss(call: LossCall, input: Any, target: Any, dim: int, shift: int) -> Any:
    """The results as DTensors: each sample's where it is, sums as partial ones over the axes that share out samples.

    Raises ValueError unless exactly one axis of the mesh shares out the classes, and no other does in parts.
    """
    dim %= input.dim()
    axis, mesh = _required_axis(call, "input", input, dim), input.device_mesh
    lies = [  # what has no classes
        Replicate() if at == axis else Shard(each.dim - (each.dim > dim)) if isinstance(each, Shard) else each
        for at, each in enumerate(input.placements)
    ]
    labels, dense = _targets(call, target, input.shape, dim, mesh, lies, input.placements, shift)
    call, logits = _with_whole_weight(call), input.to_local().movedim(dim, -1)
    dtype = call.options.dtype or (torch.float32 if widens_softmax(logits) else logits.dtype)
    dtype = dtype if dense is None else torch.promote_types(dtype, dense.dtype)
    own = _class_range(call, mesh, axis, input.shape[dim], logits.shape[-1])
    found = of_logits(logits, labels, dense, own, dtype)
    shape = input.shape[:dim] + input.shape[dim + 1 :]
    return _finished(call, found, labels, dense is not None, mesh, lies, shape, dtype)


def linear_loss(call: LossCall, input: Any, w: Any, b: Any, target: Any, shift: int) -> Any:
    """The results for a layer whose rows one axis of the mesh shares out; input has tokens on other axes."""
    axis, mesh = _required_axis(call, "linear_weight", w, 0), w.device_mesh
    if b is not None and (not isinstance(b, DTensor) or samples.class_axis(b, 0) != axis):
        raise ValueError(f"{call.caller}: linear_bias lies unlike linear_weight, expected a DTensor with Shard(0)")
    if not isinstance(input, DTensor):
        input = DTensor.from_local(input, mesh, [Replicate()] * mesh.ndim, run_check=False)
    features = input.dim() - 1
    lies = [
        each if at != axis and isinstance(each, Shard) and each.dim < features else Replicate()
        for at, each in enumerate(input.placements)
    ]
    x = input.redistribute(mesh, lies).to_local()
    placements = [Partial() if isinstance(lie, Shard) else own for lie, own in zip(lies, w.placements, strict=True)]
    own_w = w.to_local(grad_placements=placements)
    own_b = None if b is None else b.to_local(grad_placements=placements)
    call, shape = _with_whole_weight(call), torch.Size((*input.shape[:-1], w.shape[0]))
    lies_of_logits = [Shard(features) if at == axis else each for at, each in enumerate(lies)]
    labels, dense = _targets(call, target, shape, features, mesh, lies, lies_of_logits, shift)
    dtype = call.options.dtype or (torch.float32 if narrows_products(x) else x.dtype)
    dtype = dtype if dense is None else torch.promote_types(dtype, dense.dtype)
    own = _class_range(call, mesh, axis, w.shape[0], own_w.shape[0])
    found = of_layer(x, own_w, own_b, labels, dense, own, dtype)
    return _finished(call, found, labels, dense is not None, mesh, lies, shape[:-1], dtype)


def _required_axis(call: LossCall, name: str, value: Any, dim: int) -> int:
    axis = samples.class_axis(value, dim)
    if axis is None:
        expected = f"Shard({dim}) on one axis of the mesh, and Shard or Replicate on others"
        raise ValueError(f"{call.caller}: {name} has the placements {value.placements}, expected {expected}")
    return axis


def _class_range(call: LossCall, mesh: Any, axis: int, total: int, classes: int) -> ClassRange:
    size = -(-total // mesh.size(axis))  # as torch.chunk shares them out
    first = min(mesh.get_local_rank(axis) * size, total)
    return ClassRange(call, first, classes, member_of(call.caller, mesh.get_group(axis)))


def _with_whole_weight(call: LossCall) -> LossCall:
    return replace(call, weight=call.weight.full_tensor()) if isinstance(call.weight, DTensor) else call


def _targets(
    call: LossCall, target: Any, shape: torch.Size, dim: int, mesh: Any, lies: Any, lies_of_logits: Any, shift: int
) -> tuple[Tensor, Tensor | None]:
    """This process's labels and, if it is these, probabilities, with the classes last."""
    is_dense, of_samples = target.is_floating_point(), shape[:dim] + shape[dim + 1 :]
    expected, which = (shape, "that of the logits") if is_dense else (of_samples, "that without the classes")
    samples.check_shape(call.caller, "target", target, expected, which)
    if is_dense:
        if not isinstance(target, DTensor):
            target = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
        dense = target.redistribute(mesh, lies_of_logits).to_local().movedim(dim, -1)
        return torch.zeros(dense.shape[:-1], dtype=torch.int64, device=dense.device), dense
    whole = target.full_tensor() if isinstance(target, DTensor) else target
    whole = samples.read_labels(call.caller, whole, shift, call.options.ignore_index)
    every = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return every.redistribute(mesh, lies).to_local(), None


def _finished(
    call: LossCall, found: Any, labels: Tensor, is_dense: bool, mesh: Any, lies: Any, shape: torch.Size,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The results of this process's samples, reduced with those of the others, as DTensors.

    The accuracy, which all processes have, is a tensor.
    """
    groups = [mesh.get_group(index) for index, each in enumerate(lies) if isinstance(each, Shard)]
    options = call.options
    by = samples.divisors(labels, call.weight, is_dense, options)
    if groups and options.reduction == "mean" and options.num_items is None:
        by = _added(groups, *(torch.as_tensor(each) for each in by))
    result = samples.reduced(found, labels, call.weight, is_dense, options, dtype, by)
    if isinstance(result, samples.CrossEntropyOutput) and result.token_accuracy is not None and groups:
        hits, count = _added(groups, *samples.hits_of(found[4], labels, options.ignore_index))
        result = result._replace(token_accuracy=hits.float() / count.clamp(min=1))
    summed = [Partial("sum") if isinstance(each, Shard) else Replicate() for each in lies]
    stride, of_samples = torch.empty(shape, device="meta").stride(), {"lse", "log_prob", "entropy", "predicted_tokens"}
    of_samples |= {"loss", "z_loss"} if options.reduction == "none" else set()

    def each(name: str, value: Any) -> Any:
        if value is None or name == "token_accuracy":
            return value
        if name not in of_samples:
            return DTensor.from_local(value, mesh, summed, run_check=False)
        return DTensor.from_local(value, mesh, lies, run_check=False, shape=shape, stride=stride)

    if isinstance(result, samples.CrossEntropyOutput):
        return samples.CrossEntropyOutput(
            *(each(name, value) for name, value in zip(result._fields, result, strict=True))
        )
    return each("loss", result)


def _added(groups: list[Any], *numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers, each summed over the processes of all groups."""
    both = torch.stack(numbers)
    for group in groups:
        dist.all_reduce(both, group=group)
    return both[0], both[1]
