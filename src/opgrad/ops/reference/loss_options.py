"""What the losses of NumPy, PyTorch and JAX share: their options, labels that are moved, and what a mean is divided by.

Names are those in use: `lse_square_scale` weighs the z-loss, `softcap` bounds logits, `temperature` divides them then,
`shift` pairs each sample with a later label, `num_items` is what a mean divides by. Functions that compute take the
library as their first argument: `numpy`, `torch` or `jax.numpy`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrad.contract.attributes import REDUCTIONS, integer

IGNORED = -100  # the label that is ignored by default


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss, checked.

    reduction: "none", "sum" or "mean". ignore_index: None: no sample is ignored. num_items: what "mean" divides by in
    place of what it counts. returned: the names of other results that are asked for. dtype: of the loss; None: that of
    the logits, or autocast's. name: the function that is called.
    """

    reduction: str = "mean"
    ignore_index: int | None = IGNORED
    label_smoothing: float = 0.0
    lse_square_scale: Any = 0.0
    softcap: Any = 0.0
    temperature: Any = 1.0
    num_items: Any = None
    returned: tuple[str, ...] = ()
    dtype: Any = None
    name: str = ""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the operators that compute the samples' losses."""
        names = ("ignore_index", "label_smoothing", "softcap", "temperature")
        return {name: getattr(self, name) for name in names}

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
    name: str, reduction: Any = "mean", ignore_index: Any = IGNORED, label_smoothing: Any = 0.0,
    lse_square_scale: Any = 0.0, softcap: Any = None, temperature: Any = 1.0, num_items: Any = None,
    returned: tuple[str, ...] = (), is_left: Callable[[str, Any], bool] = lambda option, value: False,
) -> LossOptions:  # fmt: skip
    """The options of the function `name`.

    is_left: whether a number, given with its option's name, stands in an array that is not to be read now.
    Raises TypeError for what is no number, ValueError for a number out of range or an unknown reduction.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if num_items is not None and reduction != "mean":
        what = f"num_items is {num_items} with reduction {reduction!r}"
        raise ValueError(f"{name}: {what}, expected 'mean', which it divides")
    smoothing = _number(name, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}, expected a number from 0 to 1")

    def read(option: str, value: Any, is_positive: bool = True) -> Any:
        if is_left(option, value):
            if math.prod(value.shape) != 1:
                raise ValueError(f"{name}: {option} has shape {tuple(value.shape)}, expected one number")
            return value.reshape(())
        number = _number(name, option, value)
        if not abs(number) < float("inf") or (is_positive and number <= 0):
            raise ValueError(f"{name}: {option} is {value}, expected a finite number{' above 0' * is_positive}")
        return number

    square = read("lse_square_scale", lse_square_scale, is_positive=False)
    cap = 0.0 if softcap is None else read("softcap", softcap)
    items = None if num_items is None else read("num_items", num_items)
    divisor = read("temperature", temperature)
    ignored = read_ignore_index(name, ignore_index)
    return LossOptions(reduction, ignored, smoothing, square, cap, divisor, items, returned, name=name)


def read_ignore_index(name: str, value: Any) -> int | None:
    """An integer of 64 bits, or None. Raises TypeError, ValueError."""
    return None if value is None else integer(f"{name}: ignore_index", value)


def _number(name: str, option: str, value: Any) -> float:
    """A number, also one in an array, which is read."""
    if isinstance(value, float):  # this is also true of a compiler's symbol for a float
        return value
    if hasattr(value, "item") and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: {option} is {value!r}, expected a number")
    return float(value)


def bent(library: Any, logits: Any, softcap: Any, temperature: Any) -> Any:
    """The logits that the softmax is taken of: bounded by softcap, None or 0 for none, and divided by temperature.

    Both may be arrays of JAX with one number, which may be traced.
    """
    if softcap is not None and (not isinstance(softcap, int | float) or softcap):
        logits = library.tanh(logits / softcap) * softcap
    return logits if isinstance(temperature, float) and temperature == 1.0 else logits / temperature


def check_share(name: str, option: str, value: Any) -> float:
    """A share, a number of Python from 0 to 1. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {option} is {value!r}, expected a number")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {option} is {value}, expected a number from 0 to 1")
    return float(value)


# --- labels --------------------------------------------------------------------------------------------------------


def in_int32(label: int | None) -> bool:
    """Whether int32 labels can be compared with this one; PyTorch cuts off what is beyond, and NumPy and JAX raise."""
    return label is None or -(2**31) <= label < 2**31


def shifted(library: Any, name: str, labels: Any, shift: Any, ignore_index: int | None, is_dense: bool) -> Any:
    """Labels moved `shift` places to the front of their last axis, and what is ignored behind them.

    So sample i is compared with the label of sample i + shift, and no logits are copied. is_dense: whether the labels
    are class probabilities, which are not moved. Raises ValueError, TypeError.
    """
    if isinstance(shift, bool) or not hasattr(shift, "__index__"):
        raise TypeError(f"{name}: shift is {shift!r}, expected an int")
    if shift < 0:
        raise ValueError(f"{name}: shift is {shift}, expected an int of at least 0")
    if not shift:
        return labels
    if is_dense or ignore_index is None or not labels.ndim:
        what = "class probabilities" if is_dense else "no ignore_index" if labels.ndim else "one label"
        expected = "samples with classes, of which some are ignored"
        raise ValueError(f"{name}: shift is {shift} with {what}, expected {expected}")
    count = min(shift, labels.shape[-1])
    return library.concatenate([labels[..., count:], library.full_like(labels[..., :count], ignore_index)], -1)


def check_labels(name: str, argument: str, labels: np.ndarray[Any, Any], classes: int, ignored: int | None) -> None:
    """Raise ValueError for a label that is neither a class nor ignored, naming the first one and where it stands."""
    wrong = (labels < 0) | (labels >= classes)
    if ignored is not None:
        wrong &= labels != ignored
    if wrong.any():
        place = tuple(int(each) for each in np.argwhere(wrong)[0])
        also = "" if ignored is None else f" or ignore_index {ignored}"
        where = ", ".join(map(str, place))
        raise ValueError(f"{name}: {argument}[{where}] is {labels[place]}, expected 0 to {classes - 1}{also}")


def check_layer(name: str, labels: Any, is_integer: bool, x: Any, w: Any, b: Any, weight: Any) -> None:
    """Raise TypeError or ValueError unless a linear layer's arrays, x (N, H) and w (C, H), fit together."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name}: x has shape {x.shape} and linear_weight {w.shape}, expected (N, H) and (C, H)")
    if not is_integer:
        raise TypeError(f"{name}: labels has dtype {labels.dtype.name}, expected integers")
    for argument, array, size in (("labels", labels, len(x)), ("linear_bias", b, len(w)), ("weight", weight, len(w))):
        if array is not None and np.shape(array) != (size,):
            raise ValueError(f"{name}: {argument} has shape {np.shape(array)}, expected {(size,)}")
    if w.dtype != x.dtype:
        raise TypeError(f"{name}: linear_weight has dtype {w.dtype.name}, expected {x.dtype.name}, the dtype of x")


# --- reduction -----------------------------------------------------------------------------------------------------


def sample_weights(library: Any, labels: Any, weight: Any, ignore_index: int | None, dtype: Any) -> Any:
    """The weight of each sample's class, 1 without weights; 0 for ignored samples, and for labels that are no classes.

    weight: None, or of this dtype; the operator, which is called later, refuses weights of another rank.
    """
    if weight is None or weight.ndim != 1:
        each = library.ones_like(labels, dtype=dtype)
    elif not weight.shape[0]:
        each = library.zeros_like(labels, dtype=dtype)
    else:
        is_class = (labels >= 0) & (labels < weight.shape[0])
        each = library.where(is_class, weight[library.where(is_class, labels, 0)], 0)
    return each if ignore_index is None else library.where(labels == ignore_index, 0, each)


def divisors(
    library: Any, labels: Any, weight: Any, options: LossOptions, exact: Any, convert: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """What the sums of losses and of squares of lse are divided by; a quotient by 0 shall be 0 (`over`).

    For "mean" the first divisor is the sum of the weights of the samples that count, without weights their number. The
    second one is that number. `num_items` replaces both. exact: the dtype of these sums, to which `convert` converts.
    weight: None for class probabilities, too, whose samples all have the same weight.
    """
    if options.reduction != "mean":
        return 1.0, 1.0
    if options.num_items is not None:
        return options.num_items, options.num_items
    counts = library.ones_like(labels) if options.ignore_index is None else labels != options.ignore_index
    count = convert(counts.sum(), exact)
    if weight is None:
        return count, count
    return sample_weights(library, labels, convert(weight, exact), options.ignore_index, exact).sum(), count


def over(library: Any, total: Any) -> Any:
    """1 / total, and 0 where that is 0: the mean over nothing is 0."""
    if isinstance(total, int | float):
        return 1 / total if total else 0.0
    return library.where(total == 0, 0, 1 / library.where(total == 0, 1, total))
