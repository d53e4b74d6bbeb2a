"""The options of losses on tensors, and the type of their results."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opgrad.ops.reference import loss_options
from opgrad.ops.reference.loss_options import LossOptions


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


def read_options(name: str, *options: Any, returned: tuple[bool, ...] = (), **named: Any) -> LossOptions:
    """The options of the function `name`; `returned` says of each field behind the loss whether it is asked for.

    A tensor with the number of items is not read: that would wait for the device.
    """
    named |= {"returned": tuple(compress(CrossEntropyOutput._fields[1:], returned)), "is_left": _is_left}
    return loss_options.read_options(name, *options, **named)


def _is_left(option: str, value: Any) -> bool:
    return option == "num_items" and isinstance(value, Tensor)


def read_labels(name: str, target: Tensor, shift: Any, ignore_index: int | None) -> Tensor:
    """Labels, in a dtype that the operators take and ignore_index fits, moved by `shift`; probabilities as they are."""
    is_dense = target.is_floating_point()
    labels = target.int() if target.dtype == torch.uint8 else target
    labels = labels if is_dense or loss_options.in_int32(ignore_index) else labels.long()
    found: Tensor = loss_options.shifted(torch, name, labels, shift, ignore_index, is_dense)
    return found


def divisors(
    labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions
) -> tuple[Tensor | float, Tensor | float]:
    """The divisors of the sums of losses and of squares of lse: 0-dimensional tensors in float64, or numbers."""
    weight = None if weight is None or is_dense else weight.detach()
    places = labels if weight is None else labels.long()
    by_weight, by_count = loss_options.divisors(torch, places, weight, options, torch.float64, Tensor.to)
    return _exact(by_weight), _exact(by_count)


def _exact(number: Tensor | float) -> Tensor | float:
    return number.detach().to(torch.float64) if isinstance(number, Tensor) else number


# --- checks ----------------------------------------------------------------------------------------------------------


LABELS = (torch.int32, torch.int64, torch.uint8)


def check_tensors(name: str, optional: Sequence[str] = (), **tensors: Any) -> None:
    """Raise TypeError for what is no tensor; those that are optional may be None."""
    for argument, value in tensors.items():
        if not isinstance(value, Tensor) and (value is not None or argument not in optional):
            raise TypeError(f"{name}: {argument} is {type(value).__name__}, expected a PyTorch tensor")


def check_target(name: str, target: Tensor) -> None:
    if not target.is_floating_point() and target.dtype not in LABELS:
        raise TypeError(f"{name}: target has dtype {target.dtype}, expected int32, int64 or uint8, or a float")


def check_weight(name: str, weight: Tensor | None) -> None:
    """Raise NotImplementedError for class weights that require grad."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name}: weight requires grad, and the loss has no gradient for it: detach it")


def check_shape(name: str, argument: str, value: Tensor | None, expected: Sequence[int], which: str = "") -> None:
    """Raise ValueError for another shape than this one; None for a tensor that is not given."""
    if value is not None and value.shape != (shape := tuple(expected)):
        found = f"{name}: {argument} has shape {tuple(value.shape)}, expected {shape}"
        raise ValueError(f"{found}, {which}" if which else found)


def check_dense(name: str, options: LossOptions) -> None:
    """Raise ValueError for a class that is ignored beside class probabilities."""
    if options.ignore_index is not None and options.ignore_index >= 0:
        raise ValueError(f"{name}: ignore_index is {options.ignore_index}, expected none for class probabilities")


def check_labels(name: str, labels: Tensor, classes: int, ignore_index: int | None) -> None:
    """Raise ValueError for a label out of range, on the CPU."""
    if labels.device.type == "cpu":
        loss_options.check_labels(name, "target", labels.numpy(), classes, ignore_index)


def class_axis(value: Any, dim: int) -> int | None:
    """The axis of a DTensor's mesh that shares out the classes, which lie along `dim`; None unless exactly one does."""
    axes = [place for place, each in enumerate(value.placements) if each.is_shard(dim)]
    if len(axes) != 1 or any(each.is_partial() for each in value.placements):
        return None
    return axes[0]


def is_class_sharded(value: Any, dim: int) -> bool:
    """Whether it is a DTensor whose classes, along `dim`, one axis of its mesh shares out."""
    return type(value) is not Tensor and hasattr(value, "device_mesh") and class_axis(value, dim) is not None
