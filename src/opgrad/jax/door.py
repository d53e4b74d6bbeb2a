"""JAX arrays: operators run at once on arrays that hold numbers; on traced arrays XLA runs them when it computes.

XLA also runs them on arrays that lie on several devices.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opgrad.call import owners
from opgrad.call.arrays import expanded
from opgrad.call.libraries import jax_arrays
from opgrad.call.libraries.jax_arrays import NAME as NAME
from opgrad.call.runners import one_or_tuple
from opgrad.contract import DTYPES, Operator, Shape, Spec
from opgrad.contract.signature import plain
from opgrad.jax.derivative import differentiable


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays given by parameter name.

    Raises TypeError for `out`, for attributes that are traced and for float64 without jax_enable_x64, ValueError for
    arrays on several devices of which none is spread over them, NotImplementedError for devices that have no kernels,
    besides what the operator raises.
    """
    library = owners.library_of(jax.Array)
    assert library is not None
    found = jax_arrays.check(op, given, library)
    if jax_arrays.is_traced(found.values()) or jax_arrays.is_spread(found.values()):
        return _traced(op, given)
    return jax_arrays.run(op, given, found)


def _traced(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays that are traced or spread, given by parameter name and checked to be JAX's."""
    of, settled = expanded(op, dict(given), _LIBRARY)
    settled = dict(plain(of, settled))
    found = {name: settled[name] for name in of.arrays if settled.get(name) is not None}
    attributes = {name: settled[name] for name in of.attributes if name in settled}
    results = differentiable(of, found, attributes)
    return (of.finish or one_or_tuple)(results)


class _JaxLibrary:
    """`opgrad.contract.declaration.Arrays` for JAX's."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def spec(self, array: Any) -> Spec:
        return Spec(tuple(np.shape(array)), np.dtype(jnp.result_type(array)))

    def broadcast(self, array: Any, shape: Shape, like: Any) -> Any:
        number = isinstance(array, int | float) and not isinstance(array, bool)
        found = jnp.asarray(array, jnp.result_type(float)) if number else jnp.asarray(array)
        return found if found.shape == shape else jnp.broadcast_to(found, shape)

    def state(self, seed: int, offset: int, like: Any) -> Any:
        return jnp.asarray(np.array((seed, offset), np.int64).view(np.int32))  # as JAX has no int64 by itself

    def total(self, array: Any, axes: tuple[int, ...], shape: Shape, dtype: str) -> Any:
        summed = array.astype(jnp.result_type(float)).sum(axes).reshape(shape) if axes else array
        return summed.astype(DTYPES[dtype])


_LIBRARY = _JaxLibrary()
