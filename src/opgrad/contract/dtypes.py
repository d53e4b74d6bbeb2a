"""The dtypes that operators use, and `Spec`, the description of an array that is checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
BYTES = ("int8", "uint8")
INTEGERS = ("int32", "int64")
DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16", *BYTES, *INTEGERS, "bool")} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *FLOAT8)
}

Array = NDArray[Any]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Attributes = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """The description of an array that is checked: shape, dtype, and strides in bytes, None for C order."""

    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape | None = None
