"""The options of losses on JAX arrays, read and checked in one place; messages name the function that was called."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from opgrad.call.libraries.jax_private import is_traced
from opgrad.jax.formulas import wide
from opgrad.jax.loss import Statics, bent
from opgrad.ops.reference.loss_options import IGNORED, in_int32, read_ignore_index, read_options, shifted

INT32 = 1 << 31


def is_array(value: Any) -> bool:
    """Whether a number is an array of JAX or NumPy, which may be traced, and no number of Python."""
    return isinstance(value, jax.Array | np.ndarray)


def read(
    name: str, labels: Array, ignore_index: int | None, reduction: str, label_smoothing: float, softcap: Any,
    temperature: Any, num_items: Any, lse_square_scale: Any,
) -> Statics:  # fmt: skip
    """The options for kernels; numbers in arrays are left to JAX's arithmetic. Raises TypeError, ValueError."""
    if is_traced(label_smoothing):
        raise TypeError(f"{name}: label_smoothing is traced, expected a number that is known when it is traced")
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    chosen = read_options(name, reduction, ignore_index, *numbers, is_left=_is_left)
    ignored = chosen.ignore_index
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        if ignored is not None and ignored >= 0:
            raise ValueError(f"{name}: ignore_index is {ignored}, expected none for class probabilities")
        ignored = None
    by_jax = is_array(softcap) or is_array(temperature)
    bend = (0.0, 1.0) if by_jax else (chosen.softcap, chosen.temperature)
    return Statics(name, ignored, chosen.label_smoothing, *bend)


def _is_left(option: str, value: Any) -> bool:
    return is_array(value) and option != "label_smoothing"


def bend_by_jax(softcap: Any, temperature: Any) -> Callable[[Array], Array] | None:
    """What bounds and divides logits where one of the two numbers is in an array; None where kernels do it."""
    if not (is_array(softcap) or is_array(temperature)):
        return None
    bound, divisor = (each.reshape(()) if is_array(each) else each for each in (softcap, temperature))
    return lambda logits: bent(logits.astype(wide(logits.dtype)), bound, divisor)


def read_labels(name: str, labels: Any, shift: int, ignore_index: int | None) -> tuple[Array, int | None]:
    """The labels, of 32 or 64 bits and moved, or probabilities as they are; and the label that is ignored."""
    found = jnp.asarray(labels)
    is_dense = jnp.issubdtype(found.dtype, jnp.floating)
    if not is_dense and not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name}: labels has dtype {found.dtype.name}, expected integers or probabilities")
    found, ignore_index = found if is_dense else _signed(found), read_ignore_index(name, ignore_index)
    if not is_dense and found.dtype == jnp.int32 and not in_int32(ignore_index):
        ignore_index = None  # no label is it
    ignored = IGNORED if shift and not is_dense and ignore_index is None else ignore_index
    return shifted(jnp, name, found, shift, ignored, is_dense), ignored


def _signed(labels: Array) -> Array:
    """Labels as kernels take them: int32 or int64. What int32 cannot hold is no class either way."""
    if labels.dtype in (jnp.int32, jnp.int64):
        return labels
    if labels.dtype in (jnp.uint32, jnp.uint64):
        return jnp.minimum(labels, jnp.asarray(INT32 - 1, labels.dtype)).astype(jnp.int32)
    return labels.astype(jnp.int32)
