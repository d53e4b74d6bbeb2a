"""The checks that the losses on tensors share; messages name the function that was called and its argument."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.ops.reference import loss_options
from opgrad.ops.reference.loss_options import LossOptions

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
