"""The options of losses on tensors, read and checked in one place, and the type of their results.

Names are those in use: `lse_square_scale` weighs the z-loss, `softcap` bounds logits, `temperature` divides them then,
`shift` pairs each sample with a later label, `num_items` is what a mean divides by.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opgrad.contract import REDUCTIONS

IGNORED = -100  # the label that is ignored by default


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


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss, checked.

    reduction: "none", "sum" or "mean". ignore_index: None: no sample is ignored. num_items: what "mean" divides by in
    place of what it counts. returned: the fields of CrossEntropyOutput that are asked for beside the loss. dtype: of
    the loss; None: that of the logits, or autocast's.
    """

    reduction: str = "mean"
    ignore_index: int | None = IGNORED
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float = 0.0
    temperature: float = 1.0
    num_items: float | Tensor | None = None
    returned: tuple[str, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the plain loss, of integer classes alone, is all that is asked for."""
        return not (self.label_smoothing or self.returned or self.bends or self.lse_square_scale)

    @property
    def bends(self) -> bool:
        """Whether there is a softcap or a temperature."""
        return bool(self.softcap) or self.temperature != 1.0

    @property
    def is_differentiable_beside(self) -> bool:
        """Whether other results than the loss have a gradient."""
        return bool({"z_loss", "lse", "log_prob", "entropy"}.intersection(self.returned))


def read_options(
    name: str,
    reduction: Any = "mean",
    ignore_index: Any = IGNORED,
    label_smoothing: Any = 0.0,
    lse_square_scale: Any = 0.0,
    softcap: Any = None,
    temperature: Any = 1.0,
    num_items: Any = None,
    **returned: bool,
) -> LossOptions:
    """The options of the function `name`. `returned`: of each field of CrossEntropyOutput whether it is asked for.

    Raises TypeError for what is no number, ValueError for a number out of range or an unknown reduction.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{name}: num_items is given with reduction {reduction!r}, expected 'mean', which it divides")
    smoothing = _number(name, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}, expected a number from 0 to 1")
    scale = _number(name, "lse_square_scale", lse_square_scale)
    if not abs(scale) < float("inf"):
        raise ValueError(f"{name}: lse_square_scale is {scale}, expected a finite number")
    cap, divisor = (
        0.0 if softcap is None else _number(name, "softcap", softcap),
        _number(name, "temperature", temperature),
    )
    for option, value, given in (("softcap", cap, softcap), ("temperature", divisor, temperature)):
        if given is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}: {option} is {given}, expected a finite number above 0")
    asked = tuple(field for field, wanted in returned.items() if wanted)
    items = _items(name, num_items)
    return LossOptions(reduction, ignore_index, smoothing, scale, cap, divisor, items, asked)


def _number(name: str, option: str, value: Any) -> float:
    """A number, also one in a tensor, which is read."""
    if isinstance(value, float):  # this is also true of a compiler's symbol for a float
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: {option} is {value!r}, expected a number")
    return float(value)


def _items(name: str, value: Any) -> float | Tensor | None:
    """A count of tokens: a number above 0, or a tensor with one, which is not read: that would wait for the device."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: num_items has shape {tuple(value.shape)}, expected one number")
        return value.detach().reshape(())
    count = _number(name, "num_items", value)
    if not 0 < count < float("inf"):
        raise ValueError(f"{name}: num_items is {count}, expected a finite number above 0")
    return count


def shifted(name: str, target: Tensor, shift: int, ignore_index: int | None) -> Tensor:
    """Labels moved `shift` places to the front of their last axis, and what is ignored behind them.

    So sample i is compared with the label of sample i + shift, and no logits are copied. Raises ValueError, TypeError.
    """
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise TypeError(f"{name}: shift is {shift!r}, expected an int")
    if shift < 0:
        raise ValueError(f"{name}: shift is {shift}, expected an int of at least 0")
    if not shift:
        return target
    if ignore_index is None or target.is_floating_point() or not target.dim():
        what = (
            "class probabilities" if target.is_floating_point() else "no ignore_index" if target.dim() else "one label"
        )
        raise ValueError(
            f"{name}: shift is {shift} with {what}, expected samples with classes, of which some are ignored"
        )
    count = min(shift, target.shape[-1])
    behind = target.new_full((*target.shape[:-1], count), ignore_index)
    return torch.cat([target[..., count:], behind], -1)


def divisors(
    labels: Tensor, weight: Tensor | None, is_dense: bool, options: LossOptions, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    """The divisors of the sums of losses and of squares of lse: 0-dimensional tensors in float64, or 1.

    For "mean" the first divisor is the sum of the weights of the samples that count, or for class probabilities the
    number of these samples. The second one is that number. `num_items` replaces both. A quotient by 0 shall be 0.
    """
    if options.reduction != "mean":
        return 1.0, 1.0
    if options.num_items is not None:
        items = options.num_items
        items = items.to(torch.float64) if isinstance(items, Tensor) else items
        return items, items
    counts = torch.ones_like(labels, dtype=torch.bool)
    if options.ignore_index is not None:
        counts = labels != options.ignore_index
    count = counts.sum().to(torch.float64)
    if weight is None or is_dense:
        return count, count
    inside = labels.clamp(0, max(weight.shape[0] - 1, 0))
    each = weight.detach().to(dtype).index_select(0, inside.flatten()).view(labels.shape)
    return each.masked_fill(~counts, 0).sum(dtype=torch.float64), count
