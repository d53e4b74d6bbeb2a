"""The public functions on JAX arrays that are traced, or spread over devices: operators that XLA calls."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opgrad.call.arrays import expanded
from opgrad.call.runners import one_or_tuple
from opgrad.contract import DTYPES, Operator, Shape, Spec
from opgrad.contract.plain import plain
from opgrad.jax.derivative import differentiable


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on JAX arrays, given by parameter name and checked to be such."""
    of, settled = expanded(op, dict(given), _LIBRARY)
    settled = dict(plain(of, settled))
    found = {name: settled[name] for name in of.arrays if settled.get(name) is not None}
    attributes = {name: settled[name] for name in of.attributes if name in settled}
    results = differentiable(of, found, attributes)
    return (of.finish or one_or_tuple)(results)


class _JaxLibrary:
    """`opgrad.contract.libraries.Arrays` for JAX's."""

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
