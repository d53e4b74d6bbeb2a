"""Arrays of libraries that only have DLPack: NumPy borrows their memory, and the results are NumPy arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from opgrad.call import owners
from opgrad.call.arrays import public_function
from opgrad.contract import Operator

NAME = "DLPack array"


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on the NumPy arrays in the memory of these.

    Raises TypeError for an array that NumPy cannot borrow, and for one in `out`, besides what the operator raises.
    """
    for name, array in owners.arrays_of(op, given).items():
        if name.startswith("out for ") and _is_lent(array):
            raise TypeError(f"{op.name}: {name} is {type(array).__name__}, expected a NumPy array")
    return public_function(op.name)(**owners.over_arrays(op, given, lambda name, array: _borrowed(op, name, array)))


def _is_lent(array: Any) -> bool:
    library = owners.library_of(type(array))
    return library is not None and library.NAME == NAME


def _borrowed(op: Operator, name: str, array: Any) -> Any:
    if not _is_lent(array):
        return array
    try:
        return np.from_dlpack(array)
    except Exception as error:
        kind = type(array).__name__
        raise TypeError(f"{op.name}: {name} is {kind}, which NumPy cannot take by DLPack: {error}") from error
