"""The options of losses on JAX arrays, read and checked in one place; messages name the function that was called."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from opgrad.contract import REDUCTIONS
from opgrad.jax.formulas import wide
from opgrad.jax.loss import IGNORED, Options, bent

INT32 = 1 << 31


def is_array(value: Any) -> bool:
    """Whether a number is an array of JAX or NumPy, which may be traced, and no number of Python."""
    return isinstance(value, jax.Array | np.ndarray)


def read(
    name: str, labels: Array, ignore_index: int | None, reduction: str, label_smoothing: float, softcap: Any,
    temperature: Any, num_items: Any, lse_square_scale: Any,
) -> Options:  # fmt: skip
    """The options for kernels; numbers in arrays are left to JAX's arithmetic. Raises TypeError, ValueError."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if num_items is not None and (reduction != "mean" or not _is_positive(name, "num_items", num_items)):
        what = f"{num_items} with reduction {reduction!r}"
        raise ValueError(f"{name}: num_items is {what}, expected a number above 0 with 'mean'")
    if softcap is not None and not _is_positive(name, "softcap", softcap):
        raise ValueError(f"{name}: softcap is {softcap}, expected a finite number above 0")
    if not _is_positive(name, "temperature", temperature):
        raise ValueError(f"{name}: temperature is {temperature}, expected a finite number above 0")
    if not is_array(lse_square_scale) and not abs(float(lse_square_scale)) < float("inf"):
        raise ValueError(f"{name}: lse_square_scale is {lse_square_scale}, expected a finite number")
    if is_array(label_smoothing) and isinstance(label_smoothing, jax.core.Tracer):
        raise TypeError(f"{name}: label_smoothing is traced, expected a number that is known when it is traced")
    ignored = None if ignore_index is None else operator.index(ignore_index)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        if ignored is not None and ignored >= 0:
            raise ValueError(f"{name}: ignore_index is {ignored}, expected none for class probabilities")
        ignored = None
    by_jax = is_array(softcap) or is_array(temperature)
    bend = (0.0, 1.0) if by_jax else (float(softcap or 0.0), float(temperature))
    return Options(name, ignored, float(label_smoothing), *bend)


def _is_positive(name: str, what: str, value: Any) -> bool:
    """Whether a number is finite and above 0; a number in an array is not checked, since that would wait for it."""
    if is_array(value):
        if value.size != 1:
            raise ValueError(f"{name}: {what} has shape {value.shape}, expected one number")
        return True
    return 0 < float(value) < float("inf")


def bend_by_jax(softcap: Any, temperature: Any) -> Callable[[Array], Array] | None:
    """What bounds and divides logits where one of the two numbers is in an array; None where kernels do it."""
    if not (is_array(softcap) or is_array(temperature)):
        return None
    bound, divisor = (each.reshape(()) if is_array(each) else each for each in (softcap, temperature))
    return lambda logits: bent(logits.astype(wide(logits.dtype)), bound, divisor)


def check_layer(name: str, labels: Array, x: Any, w: Any, b: Any, weight: Any) -> None:
    """Raise TypeError or ValueError unless a linear layer's arrays fit together."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name}: x has shape {x.shape} and linear_weight {w.shape}, expected (N, H) and (C, H)")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels has dtype {labels.dtype.name}, expected integers")
    for what, array, expected in (("labels", labels, x.shape[:1]), ("linear_bias", b, w.shape[:1])):
        if array is not None and array.shape != expected:
            raise ValueError(f"{name}: {what} has shape {array.shape}, expected {expected}")
    if weight is not None and weight.shape != w.shape[:1]:
        raise ValueError(f"{name}: weight has shape {weight.shape}, expected {w.shape[:1]}, the number of classes")
    if w.dtype != x.dtype:
        raise TypeError(f"{name}: linear_weight has dtype {w.dtype.name}, expected {x.dtype.name}, the dtype of x")


def read_labels(name: str, labels: Any, shift: int, ignore_index: int | None) -> tuple[Array, int | None]:
    """The labels, of 32 or 64 bits and moved, or probabilities as they are; and the label that is ignored."""
    found = jnp.asarray(labels)
    if isinstance(shift, bool) or not hasattr(shift, "__index__") or shift < 0 or (shift and not found.ndim):
        raise ValueError(f"{name}: shift is {shift!r}, expected an int of at least 0, and samples")
    if jnp.issubdtype(found.dtype, jnp.floating):
        if shift:
            raise ValueError(f"{name}: labels are class probabilities, expected no shift")
        return found, ignore_index
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name}: labels has dtype {found.dtype.name}, expected integers or probabilities")
    found = _signed(found)
    if not shift:
        return found, ignore_index
    ignored = IGNORED if ignore_index is None else ignore_index
    ends = jnp.full((*found.shape[:-1], min(shift, found.shape[-1])), ignored, found.dtype)
    return jnp.concatenate([found[..., shift:], ends], -1), ignored


def _signed(labels: Array) -> Array:
    """Labels as kernels take them: int32 or int64. What int32 cannot hold is no class either way."""
    if labels.dtype in (jnp.int32, jnp.int64):
        return labels
    if labels.dtype in (jnp.uint32, jnp.uint64):
        return jnp.minimum(labels, jnp.asarray(INT32 - 1, labels.dtype)).astype(jnp.int32)
    return labels.astype(jnp.int32)
