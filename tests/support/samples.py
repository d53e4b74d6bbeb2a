"""Valid arguments for any declared operator, its reference, and the call itself."""

import numpy as np
import pytest

import opgrad
from opgrad.contract import DTYPES, FLOATS, INTEGERS, normalise, operators
from opgrad.fused import primitive


def for_operators(wanted):
    """Run a test for the operators of which `wanted` holds alone."""
    chosen = [op for op in operators().values() if wanted(op)]
    return pytest.mark.parametrize("op", chosen, ids=[op.name for op in chosen])


def sample(op, shape, dtype, rng, *, optional=True, integer="int64", indices=(5,), size=1.0, **attributes):
    """Keyword arguments of `op` for a first forward array of `shape`.

    Labels and indices are in range; what a gradient takes from its forward operator (an input or an output)
    comes from a sample of that. `size` is the spread of the numbers, `indices` the shape of indices;
    attributes that the operator does not have are left out.
    """
    options = {"optional": optional, "integer": integer, "indices": indices, "size": size}
    known = {}
    if op.forward:
        forward = operators()[op.forward]
        known = sample(forward, shape, dtype, rng, **options, **attributes)
        results = reference(forward, known)
        known |= {name: cast(result, dtype) for name, result in zip(forward.results, results, strict=True)}
        if "x" in known:
            attributes["shape"] = known["x"].shape
    attributes = {name: value for name, value in attributes.items() if name in op.attributes}
    arrays = {name: known[name] for name in op.inputs if name in known}
    for name, tensor in op.inputs.items():
        if name not in arrays and (optional or name not in op.optional):
            lengths = _shape(op, name, tensor, arrays, attributes, indices if name == "indices" else shape)
            arrays[name] = _numbers(op, tensor, lengths, arrays, attributes, dtype, integer, size, rng)
    return arrays | attributes


def _shape(op, name, tensor, arrays, attributes, default):
    if tensor.shape is None:
        return default
    shapes = {name: ()} | {known: array.shape for known, array in arrays.items()}
    return tensor.shape(shapes, _normalised(op, attributes, shapes))


def _normalised(op, attributes, shapes):
    attributes = dict(op.attributes) | attributes
    normalise(op, attributes, shapes)
    return attributes


def _numbers(op, tensor, shape, arrays, attributes, dtype, integer, size, rng):
    if tensor.dtypes == INTEGERS:
        first = next(iter(arrays.values())).shape
        if op.kind == "classes":
            return rng.integers(0, max(first[1], 1), shape).astype(integer)
        length = first[_normalised(op, attributes, {"x": first})["axis"].start]
        return rng.integers(-length, max(length, 1), shape if length else (0,)).astype(integer)
    numbers = rng.uniform(0.5, 2, shape) if tensor.role == "alone" else rng.normal(0, size, shape)
    return cast(numbers, dtype)


def cast(values, dtype):
    """The values in this dtype; what is too large becomes infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(DTYPES[str(dtype)])


def reference(op, arguments):
    """The results of the float64 reference, as a tuple."""
    exact = {
        name: value.astype(np.float64) if is_float(value) else value
        for name, value in arguments.items()
        if name not in ("out", "out_dtype")
    }
    with np.errstate(all="ignore"):
        results = op.reference(**exact)
    return results if isinstance(results, tuple) else (results,)


def is_float(value):
    return isinstance(value, np.ndarray) and value.dtype.name in FLOATS


def call(op, arguments, **more):
    """The results of the public function, as a tuple."""
    results = getattr(opgrad, op.name)(**arguments, **more)
    return results if isinstance(results, tuple) else (results,)


def accepted(op, name):
    """The dtypes that an argument may have, those of the general form included."""
    if op.general is None or name not in ("x", "dy", "y"):
        return op.inputs[name].dtypes
    return primitive.GRADIENT_TYPES if op.forward else primitive.TYPES


def elements(op, arguments):
    """The names of the arrays that have an entry for each element."""
    return [name for name, tensor in op.inputs.items() if tensor.role == "element" and is_float(arguments.get(name))]


def bits(array):
    """The array's bytes, in the order of its elements."""
    return np.ascontiguousarray(array).tobytes()


def losses_and_gradients(op, results):
    """The loss, or None; the gradient, or None."""
    found = dict(zip(op.results, results, strict=True))
    return found.get("loss"), found.get("dlogits")


def positive_zeros(array):
    values = array.astype(np.float64)
    return bool((values == 0).all() and not np.signbit(values).any())
