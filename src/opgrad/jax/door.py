"""JAX arrays: operators run at once on arrays that hold numbers; on traced arrays XLA runs them when it computes.

XLA also runs them on arrays that lie on several devices.
"""

from collections.abc import Mapping
from typing import Any

import jax

from opgrad.call import owners
from opgrad.call.libraries import jax_arrays
from opgrad.call.libraries.jax_arrays import NAME as NAME
from opgrad.contract import Operator
from opgrad.jax import operators


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
        return operators.run(op, given)
    return jax_arrays.run(op, given, found)
