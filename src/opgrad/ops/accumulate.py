"""Small operators that every exported training graph contains."""

from typing import Annotated

import numpy as np

from opgrad.contract import OnnxName, Tensor, elements, like, one_number, operator, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array

X = Annotated[Array, Tensor(FLOATS)]
Value = Annotated[Array, shaped_like("buffer")]
Factor = Annotated[Array, one_number("factor", FLOATS + INTEGERS, role="alone")]


@operator(
    kind="elements",
    results={"sum": like("buffer")},
    in_place={"sum": ("buffer", "value")},
    onnx=OnnxName(
        "InPlaceAccumulatorV2", ("buffer", "value", "overwrite?"), ("updated", "sum?"), overwrites={"sum": "buffer"}
    ),
)
def in_place_accumulator(buffer: X, value: Value, overwrite: bool = False, *, out: Array | None = None) -> Array:
    """Add a gradient to its buffer, or start the buffer anew.

    buffer: the gradient so far, any shape; float32, float64, float16 or bfloat16.
    value: what is added, of the shape of buffer; any of the four dtypes.
    overwrite: take value alone, whatever buffer holds.
    out: where to write; with out=buffer the sum is formed in place.

    Returns the sum, of the shape and dtype of buffer. Raises TypeError, ValueError.

    Formula: sum = value if overwrite else buffer + value. Source: com.microsoft InPlaceAccumulatorV2.

    Example:
    >>> opgrad.in_place_accumulator(np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32))
    array([11., 22.], dtype=float32)
    """
    return value.copy() if overwrite else buffer + value


@operator(onnx=OnnxName("Scale", ("x", "factor"), ("y",), {"scale_down": 0}), **elements("y", "x"))
def scale(x: X, factor: Factor, scale_down: bool = False, *, out: Array | None = None) -> Array:
    """Multiply or divide by one number that stands in an array.

    x: any shape; float32, float64, float16 or bfloat16.
    factor: shape () or (1,); one of the four dtypes, int32 or int64.
    scale_down: divide instead.
    out: where to write; may be x.

    Returns y, of the shape and dtype of x. Raises TypeError, ValueError.

    Formula: y = x / factor if scale_down else x * factor. Source: com.microsoft Scale.

    Example:
    >>> opgrad.scale(np.array([1.0, 2.0], np.float32), np.float32(4.0), scale_down=True)
    array([0.25, 0.5 ], dtype=float32)
    """
    number = np.asarray(factor, dtype=x.dtype).reshape(())
    return x / number if scale_down else x * number
