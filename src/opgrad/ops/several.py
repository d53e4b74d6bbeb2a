"""Operators on any number of arrays."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import (
    IN_GRAPHS,
    Axis,
    FloatDtypes,
    OnnxName,
    Operator,
    Tensor,
    flag,
    integers,
    one_number,
    operator,
    several,
)
from opgrad.contract.attributes import BYTES, FLOATS, INTEGERS, Array, Attributes, Shape, Shapes

MOVABLE = (*FLOATS, *INTEGERS, *BYTES, "bool")  # what is copied, not computed with


def _beside(shapes: Shapes, attributes: Attributes, index: int) -> Shape:
    """The shape of the first array, but for the axis along which they are joined."""
    axis = attributes["axis"].start
    own, first = shapes[f"arrays[{index}]"], shapes["arrays[0]"]
    return (*first[:axis], own[axis], *first[axis + 1 :]) if len(own) == len(first) else first


def _joined(shapes: Shapes, attributes: Attributes) -> Shape:
    axis = attributes["axis"].start
    first = shapes["arrays[0]"]
    return (*first[:axis], sum(shape[axis] for shape in shapes.values()), *first[axis + 1 :])


def _piece(shapes: Shapes, attributes: Attributes, index: int) -> Shape:
    axis, lengths, shape = attributes["axis"].start, attributes["split"], shapes["x"]
    if any(length < 0 for length in lengths) or sum(lengths) != shape[axis]:
        raise ValueError(
            f"split_training: split is {lengths}, expected sizes of at least 0 that add up to {shape[axis]}"
        )
    if index >= len(lengths):
        raise ValueError(f"split_training: split has {len(lengths)} entries, expected one for each result")
    return (*shape[:axis], lengths[index], *shape[axis + 1 :])


def _own(shapes: Shapes, attributes: Attributes, index: int) -> Shape:
    return shapes[f"arrays[{index}]"]


def _scaled(shapes: Shapes, attributes: Attributes, index: int) -> Shape:
    if not attributes["fuse_outputs"]:
        return _own(shapes, attributes, index)
    return (sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "scale"),)


def _fused(op: Operator, given: Mapping[str, Any], count: int) -> int:
    return 1 if flag(f"{op.name}: fuse_outputs", given.get("fuse_outputs", False)) else count


Joined = Annotated[
    Sequence[Array],
    Tensor(
        MOVABLE, _beside, "the shape of arrays[0] but for axis", dtype_of="arrays[0]", ranks=range(1, 65), several=True
    ),
]
Split = Annotated[Array, Tensor(MOVABLE, ranks=range(1, 65))]
Moved = Annotated[Sequence[Array], Tensor(MOVABLE, several=True)]
Numbers = Annotated[Sequence[Array], Tensor(FLOATS, dtype_of="arrays[0]", several=True)]
Scale = Annotated[Array, one_number("scale", ("float32",))]


@operator(
    support=IN_GRAPHS,
    results={
        "y": Tensor(MOVABLE, _joined, "the joined shape"),
        "lengths": Tensor(("int64",), lambda shapes, _: (len(shapes),), "one entry for each array"),
    },
    onnx=OnnxName("ConcatTraining", ("arrays*",), ("y", "lengths?"), {"axis": 0}),
    general=several(),
)
def concat_training(arrays: Joined, axis: Axis = 0, *, out: Any = None) -> tuple[Array, Array]:
    """Join arrays along an axis and tell how long each of them is there.

    arrays: a list of arrays of one dtype, of the same shape but for axis; floats, int32, int64, int8, uint8, bool.
    axis: along which they are joined.
    out: where to write, a tuple for both results; must not overlap the arrays.

    Returns (y, lengths): the joined array, and int64 [number of arrays].

    Formula: y = arrays joined along axis; lengths[i] = size of arrays[i] along axis.
    Source: com.microsoft ConcatTraining.

    Example:
    >>> opgrad.concat_training([np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)])
    (array([1., 2., 3.], dtype=float32), array([2, 1]))
    """
    return np.concatenate(arrays, axis), np.array([array.shape[axis] for array in arrays])


@operator(
    support=IN_GRAPHS,
    results={"pieces": Tensor(MOVABLE, _piece, "the shape of x but for axis", dtype_of="x", several=True)},
    onnx=OnnxName("SplitTraining", ("x", "split"), ("pieces*",), {"axis": 0}, types={"split": ("int64",)}),
    general=several(lambda op, given, count: len(integers(f"{op.name}: split", given["split"]))),
)
def split_training(x: Split, split: tuple[int, ...], axis: Axis = 0, *, out: Any = None) -> list[Array]:
    """Part an array along an axis.

    x: of any shape; floats, int32, int64, int8, uint8, bool. split: the sizes of the pieces, which add up to x's size.
    axis: along which x is parted.
    out: where to write, a list with an array for each piece; must not overlap x.

    Returns a list of arrays of x's dtype, as many as split has entries.

    Formula: pieces[i] = the next split[i] slices of x along axis. Source: com.microsoft SplitTraining.

    Example:
    >>> opgrad.split_training(np.array([1.0, 2.0, 3.0], np.float32), [2, 1])
    [array([1., 2.], dtype=float32), array([3.], dtype=float32)]
    """
    return np.split(x, np.cumsum(split)[:-1], axis)


@operator(
    support=IN_GRAPHS,
    results={"copies": Tensor(MOVABLE, _own, "the shape of the array", dtype_of="arrays[]", several=True)},
    onnx=OnnxName("PassThrough", ("arrays*",), ("copies*",)),
    general=several(lambda op, given, count: count),
)
def pass_through(arrays: Moved, *, out: Any = None) -> list[Array]:
    """Copies of arrays; in a graph it makes the nodes behind it wait until all of them are there.

    arrays: a list of arrays of any shapes; floats, int32, int64, int8, uint8, bool.
    out: where to write, a list with an array for each; must not overlap the arrays.

    Returns a list of arrays.

    Formula: copies[i] = arrays[i]. Source: com.microsoft PassThrough.

    Example:
    >>> opgrad.pass_through([np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)])
    [array([1., 2.], dtype=float32), array([3.], dtype=float32)]
    """
    return [array.copy() for array in arrays]


@operator(
    support=IN_GRAPHS,
    results={"finite": Tensor(("bool",), lambda shapes, _: (), "one bool")},
    onnx=OnnxName("IsAllFinite", ("arrays*",), ("finite",), {"isinf_only": 0, "isnan_only": 0}),
    general=several(),
)
def is_all_finite(
    arrays: Numbers, isinf_only: bool = False, isnan_only: bool = False, *, out: Array | None = None
) -> Array:
    """Whether all elements of all arrays are finite numbers.

    arrays: a list of arrays of one dtype: float32, float64, float16 or bfloat16.
    isinf_only: look for infinities alone, not for NaN.
    isnan_only: look for NaN alone, not for infinities. Both together are refused.

    Returns a bool array of shape ().

    Formula: finite = no element of arrays is infinite or NaN. Source: com.microsoft IsAllFinite.

    Example:
    >>> opgrad.is_all_finite([np.array([1.0, 2.0], np.float32), np.array([np.inf], np.float32)])
    array(False)
    """
    nan = not isinf_only and any(np.isnan(array).any() for array in arrays)
    infinite = not isnan_only and any(np.isinf(array).any() for array in arrays)
    return np.array(not (nan or infinite))


@operator(
    support=IN_GRAPHS,
    results={"scaled": Tensor(FLOATS, _scaled, "the shape of the array", dtype_of="arrays[]", several=True)},
    onnx=OnnxName("MixedPrecisionScale", ("scale", "arrays*"), ("scaled*",), {"to": None, "fuse_outputs": 0}),
    general=several(_fused),
)
def mixed_precision_scale(
    scale: Scale, arrays: Numbers, fuse_outputs: bool = False, *, out_dtype: FloatDtypes = None, out: Any = None
) -> list[Array]:
    """Multiply arrays by one number and give them another dtype.

    scale: float32 of shape () or (1,).
    arrays: a list of arrays of one dtype: float32, float64, float16 or bfloat16.
    fuse_outputs: put all results one behind the other into one array of one dimension.
    out_dtype: the dtype of the results, one of the four; None: that of the arrays.
    out: where to write, a list with an array for each result; must not overlap the arrays.

    Returns a list of arrays, with fuse_outputs of one array.

    Formula: scaled[i] = scale * arrays[i], rounded once. Source: com.microsoft MixedPrecisionScale.

    Example:
    >>> opgrad.mixed_precision_scale(np.float32(0.5), [np.array([1.0, 3.0], np.float32)], out_dtype=np.float16)
    [array([0.5, 1.5], dtype=float16)]
    """
    factor = scale.reshape(())
    scaled = [array * factor for array in arrays]
    return [np.concatenate([each.ravel() for each in scaled])] if fuse_outputs else scaled


@operator(
    support=IN_GRAPHS,
    results={"norm": Tensor(("float32",), lambda shapes, _: (), "one number")},
    onnx=OnnxName("ReduceAllL2", ("arrays*",), ("norm",)),
    general=several(),
)
def reduce_all_l2(arrays: Numbers, *, out: Array | None = None) -> Array:
    """The Euclidean norm of all elements of all arrays.

    arrays: a list of arrays of one dtype: float32, float64, float16 or bfloat16.

    Returns a float32 array of shape (). The squares are summed in float64, so none of them overflows.

    Formula: norm = sqrt(sum over all arrays of x * x). Source: com.microsoft ReduceAllL2.

    Example:
    >>> opgrad.reduce_all_l2([np.array([3.0], np.float32), np.array([0.0, 4.0], np.float32)])
    array(5., dtype=float32)
    """
    return np.sqrt(np.sum([np.sum(np.square(array)) for array in arrays]))
