"""What the losses of samples in NumPy arrays share: how they become one number, and linear layers in chunks of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from opgrad.contract.attributes import Array
from opgrad.ops.reference.loss_options import LossOptions, divisors, in_int32, over, shifted

CHUNK = 32 << 20  # bytes of logits that are computed at a time


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


def precision_of(x: Array) -> np.dtype[Any]:
    """The dtype in which a layer is computed."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def logits_of(x: Array, w: Array, b: Array | None) -> Array:
    found: Array = x @ w.T
    return found if b is None else found + b


def layer_gradients(
    x: Array, w: Array, b: Array | None, kept: Array, compute: Callable[[Array, Array], Array | None], layers: int = 1
) -> tuple[Array, Array, Array | None]:
    """The gradients of a linear layer, of which the logits of some rows at a time are computed.

    kept: the rows that count. compute: given rows and their logits, stores the rows' results and returns the gradient
    with respect to the logits, or None. layers: how many layers' logits there are at a time.
    """
    number, bias = precision_of(x), None if b is None else np.asarray(b).astype(precision_of(x))
    wide = w.astype(number, copy=False)
    dx, dw, db = np.zeros(x.shape, number), np.zeros(w.shape, number), np.zeros(len(w), number)
    count = max(CHUNK // max(layers * len(w) * number.itemsize, 1), 1)
    for start in range(0, len(kept), count):
        rows = kept[start : start + count]
        part = x[rows].astype(number)
        dlogits = compute(rows, logits_of(part, wide, bias))
        if dlogits is not None:
            dx[rows] = dlogits @ wide
            dw += dlogits.T @ part
            db += dlogits.sum(0)
    dx, dw, db = (each.astype(x.dtype, copy=False) for each in (dx, dw, db))
    return dx, dw, None if b is None else db
