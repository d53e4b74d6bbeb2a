"""How the losses of samples in NumPy arrays become one number, and what their gradients are multiplied by for that."""

from typing import Any, NamedTuple

import numpy as np

from opgrad.contract.dtypes import Array
from opgrad.ops.reference.loss_options import LossOptions, divisors, in_int32, over, shifted


class SampleReduction(NamedTuple):
    """How the losses of samples are reduced.

    by_weight, by_count: what the sums of losses and of squares of lse are multiplied by.
    """

    labels: Array
    options: LossOptions
    by_weight: float
    by_count: float

    def upstream(self, dloss: Array | float) -> dict[str, Any]:
        """The gradients of the samples' losses and squares of lse."""
        given = np.broadcast_to(np.asarray(dloss, np.float64), self.labels.shape)
        found = {"dloss": given * self.by_weight}
        if self.options.lse_square_scale:
            found["dlse_square"] = given * (self.options.lse_square_scale * self.by_count)
        return {name: np.ascontiguousarray(each) for name, each in found.items()}

    def reduced(self, loss: Array) -> Array:
        """One number, or the samples' losses for reduction "none"."""
        if self.options.reduction == "none":
            return loss
        return np.asarray(loss.sum(dtype=np.float64) * self.by_weight).astype(loss.dtype)


def reduction_of(labels: Array, weight: Array | None, options: LossOptions) -> SampleReduction:
    """The reduction of samples with these labels. weight: None for class probabilities, whose samples count alike."""
    weight = None if weight is None else np.asarray(weight)
    both = divisors(np, labels, weight, options, np.float64, lambda array, dtype: np.asarray(array).astype(dtype))
    return SampleReduction(labels, options, float(over(np, both[0])), float(over(np, both[1])))


def moved_labels(name: str, labels: Array, shift: int, ignore_index: int | None, is_dense: bool = False) -> Array:
    """Labels in a dtype that ignore_index fits, moved by `shift`."""
    wide = labels if in_int32(ignore_index) else labels.astype(np.int64)
    moved: Array = shifted(np, name, wide, shift, ignore_index, is_dense)
    return moved


def checked_array(name: str, argument: str, value: Any) -> Array:
    """NumPy's array of an argument. Raises TypeError for another library's."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        library = type(value).__module__.partition(".")[0]
        where = {"torch": "opgrad.torch", "jax": "opgrad.jax", "jaxlib": "opgrad.jax"}.get(library, "numpy.asarray")
        raise TypeError(f"{name}: {argument} is a {type(value).__name__}, expected a NumPy array: use {where}")
    return np.asarray(value)
