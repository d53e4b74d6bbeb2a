"""Sparse initializers, which become dense as onnxruntime makes them."""

import math

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

MOST = 2**31  # bytes of a dense one, the most that a model's file holds


def make_dense(model: onnx.ModelProto, what: str) -> None:
    """Replace the sparse initializers of a model by dense ones, in place.

    what: the caller and the model's name, for messages. Raises ValueError for one that is damaged or too large.
    """
    for sparse in model.graph.sparse_initializer:
        model.graph.initializer.append(_dense(sparse, f"{what}: the sparse initializer {sparse.values.name!r}"))
    del model.graph.sparse_initializer[:]


def _dense(sparse: onnx.SparseTensorProto, what: str) -> onnx.TensorProto:
    for name, tensor in (("values", sparse.values), ("indices", sparse.indices)):
        if uses_external_data(tensor):
            raise ValueError(f"{what} has its {name} in another file, expected in the model")
    dims = tuple(sparse.dims)
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is damaged: {error}") from None
    fits = indices.dtype == np.int64 and values.ndim == 1 and all(size >= 0 for size in dims)
    if not fits or indices.shape not in ((len(values),), (len(values), len(dims))):
        raise ValueError(
            f"{what} has values {list(values.shape)} and {indices.dtype} indices {list(indices.shape)} for the shape "
            f"{list(dims)}, expected an int64 index, or one for each axis, of each value"
        )
    if math.prod(dims) * values.itemsize > MOST:
        raise ValueError(f"{what} has the shape {list(dims)}, expected at most {MOST:,} bytes")
    bounds = np.array(dims if indices.ndim == 2 else (math.prod(dims),), np.int64)
    if np.any(indices < 0) or np.any(indices >= bounds):
        raise ValueError(f"{what} has an index outside of its shape {list(dims)}")
    array = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        array[tuple(indices.T)] = values
    else:
        array.reshape(-1)[indices] = values
    return numpy_helper.from_array(array, sparse.values.name)
