"""The options of losses on tensors, and the type of their results."""

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
