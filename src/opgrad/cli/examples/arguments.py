"""Examples, arguments of an operator that follow from its declaration, and the error of results in ulp."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

import opgrad
from opgrad.contract import DTYPES, Array, Operator, Shape, Spec, normalise
from opgrad.ops import public_operators

CACHE_LINE = 64
PERIOD = 999_983  # elements after which random values repeat: a prime, so that rows differ

# Kind of operator -> shapes with what else belongs to them; vectors, tails, other axes, optional arguments. Together
# they take every kernel that plain calls take.
SHAPES: dict[str, list[tuple[tuple[int, ...], dict[str, Any]]]] = {
    "elements": [((1000,), {}), ((3, 5, 7), {}), ((100,), {"overwrite": True, "scale_down": True})],
    "rows": [
        ((33, 120), {}),
        ((50, 10), {}),
        ((20, 25), {}),
        ((9, 1100), {}),
        ((2, 70000), {}),
        ((2, 6, 35), {"axis": 1}),
        ((3, 300, 5), {"axis": 1}),
        ((128, 1024), {"axis": 0}),
    ],
    "classes": [
        ((17, 130), {}),
        ((50, 10), {}),
        ((20, 60), {}),
        ((2, 70000), {}),
        ((3, 21, 4, 5), {"optional": True, "ignore_index": 1, "reduction": "sum"}),
    ],
    "slices": [((50, 24), {"indices": (600,)}), ((4, 9), {"indices": (30,), "axis": 1})],
}
# Shapes for plans alone. Results that are written past the cache may have kernels of their own, and vectors of another
# width; so have columns that are too long to be kept or few, and rows of some vectors.
PLANNED: dict[str, list[tuple[tuple[int, ...], dict[str, Any]]]] = {
    "rows": [
        ((1 << 19, 5000), {}),
        ((1024, 1000, 3136), {"axis": 1}),
        ((2, 30000, 72), {"axis": 1}),
        ((2, 30000, 7), {"axis": 1}),
        ((64, 16, 2), {"axis": 1}),
        ((64, 40), {}),
        ((64, 64), {}),
    ],
    "slices": [((50, 24), {"indices": (600,), "integers": "int32"})],
}


@dataclass(frozen=True)
class Example:
    """Arguments by name, floating-point arrays in float64; `terms` is the length of the longest sum in the results."""

    arguments: Mapping[str, Any]
    terms: int = 1


Cases = Sequence[Any]  # of an operator: shapes, or tuples of what its examples are made of


class ArraySource(Protocol):
    """Where sample arrays come from: random numbers in the arrays of some library."""

    def integers(self, high: int, shape: Shape) -> Any:
        """int64 from 0 to high - 1."""

    def normal(self, shape: Shape, dtype: str) -> Any:
        """Normally distributed."""

    def factors(self, shape: Shape, dtype: str) -> Any:
        """Between 0.5 and 1.5."""


class Numpy:
    """Random NumPy arrays, which start a cache line unless another maker of empty arrays is given."""

    def __init__(self, seed: int, empty: Callable[[Shape, np.dtype[Any]], Array] | None = None):
        self.generator, self.empty = np.random.default_rng(seed), empty or aligned

    def integers(self, high: int, shape: Shape) -> Array:
        return self.generator.integers(0, high, shape)

    def normal(self, shape: Shape, dtype: str) -> Array:
        return _repeated(lambda n: self.generator.standard_normal(n, np.float32), self.empty(shape, DTYPES[dtype]))

    def factors(self, shape: Shape, dtype: str) -> Array:
        return _repeated(lambda n: self.generator.uniform(0.5, 1.5, n), self.empty(shape, DTYPES[dtype]))


def aligned(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new array, not filled, that starts a cache line."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def _repeated(draw: Callable[[int], Array], made: Array) -> Array:
    """The array, filled with random numbers that repeat."""
    flat = made.reshape(-1)
    block = draw(min(flat.size, PERIOD)).astype(made.dtype)
    for start in range(0, flat.size, PERIOD):
        flat[start : start + PERIOD] = block[: flat.size - start]
    return made


def called(op: Operator, given: dict[str, Any]) -> Sequence[Any]:
    results = getattr(opgrad, op.name)(**given)
    return results if isinstance(results, tuple) else (results,)


def arguments(
    op: Operator,
    shape: Shape,
    dtype: str,
    *,
    indices: Shape = (),
    equal: bool = False,
    optional: bool = False,
    seed: int = 0,
    source: Callable[[int], ArraySource] = Numpy,
    forward: Callable[[Operator, dict[str, Any]], Sequence[Any]] = called,
    **attributes: Any,
) -> dict[str, Any]:
    """Arguments of an operator by name, with random arrays.

    op: the operator. shape: the shape of its first array (of gather's x for gather_grad).
    dtype: the dtype of its floating-point arrays. indices: the shape of `indices`, for gather.
    equal: all labels and indices are the same. optional: give the optional arrays too.
    seed: decides the values. source: makes the arrays, from a seed. attributes: passed on.
    forward: computes what a gradient keeps from its forward operator; that operator itself unless told.

    Raises what the operator raises.
    """
    shapes = _shapes(op, shape, indices, optional, attributes)
    axis = 1 if op.kind == "classes" else attributes.get("axis", 0)
    high = shape[axis] if shape and op.kind in ("classes", "slices") else 1  # the number of classes or indices
    made, values = source(seed), dict[str, Any]()
    before = public_operators().get(op.forward) if op.forward else None
    for name in shapes:
        if _is_integer(op, name):
            values[name] = made.integers(1 if equal else high, shapes[name])
        elif before is not None and name in before.results and name not in before.inputs:
            known = {key: value for key, value in attributes.items() if key in before.attributes}
            given = arguments(before, shape, dtype, seed=seed + 1, source=source, forward=forward, **known)
            values[name] = forward(before, given)[list(before.results).index(name)]
        else:
            draw = made.factors if op.inputs[name].role == "alone" else made.normal
            values[name] = draw(shapes[name], dtype)
    return values | attributes


def signature(
    op: Operator, shape: Shape, dtype: str, *, indices: Shape = (), integers: str = "int64", optional: bool = False,
    **attributes: Any,
) -> tuple[list[Spec | None], dict[str, Any]]:  # fmt: skip
    """The signature of `arguments`, without arrays: the Spec of each, None for one left out, and the attributes.

    integers: the dtype of labels and indices.
    """
    shapes = _shapes(op, shape, indices, optional, attributes)
    dtypes = {name: DTYPES[integers if _is_integer(op, name) else dtype] for name in shapes}
    return [Spec(shapes[name], dtypes[name]) if name in shapes else None for name in op.arrays], attributes


def _is_integer(op: Operator, name: str) -> bool:
    return DTYPES[op.inputs[name].dtypes[0]].kind == "i"


def _shapes(op: Operator, shape: Shape, indices: Shape, optional: bool, attributes: dict[str, Any]) -> dict[str, Shape]:
    """The shape of each array, from those that decide about themselves to those that follow.

    The attribute `shape` is added to the attributes if the operator has it.
    """
    if "shape" in op.attributes:
        attributes["shape"] = shape
    names = [name for name in op.inputs if optional or name not in op.optional]
    shapes: dict[str, Shape] = dict.fromkeys(names, ())
    for name in names:
        if op.inputs[name].shape is None:
            shapes[name] = indices if name == "indices" else shape
    normalised = dict(op.attributes) | attributes
    normalise(op, normalised, {"": shape})
    for name in names:
        compute = op.inputs[name].shape
        if compute is not None:
            shapes[name] = compute(shapes, normalised)
    return shapes


def options_of(op: Operator) -> list[tuple[Shape, dict[str, Any]]]:
    """The shapes of an operator's examples, each with the options of `arguments` that belong to it."""
    known = {"optional", "indices", *op.attributes}
    return [
        (shape, {name: value for name, value in options.items() if name in known}) for shape, options in SHAPES[op.kind]
    ]


finfo: Any = ml_dtypes.finfo  # knows bfloat16

COMPUTED = 16.0  # ulp of the arithmetic: two functions of 2 ulp each, and a handful of operations
ROUNDED_ONCE = 0.5  # ulp: what is computed in float32 and stored in half precision


def last_place(dtype: np.dtype[Any], magnitude: Array) -> Array:
    """The distance of neighbouring numbers of this dtype at this magnitude."""
    info = finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(magnitude), float(info.smallest_normal)))
    return np.asarray(np.ldexp(1.0, exponent - 1 - info.nmant))


def error_in_ulp(got: Array, expected: Array) -> float:
    """The largest error of `got` in ulp of its dtype; infinite if NaN or infinity stand elsewhere.

    An ulp is that of the expected value, but never less than that of the root mean square of all of them:
    where a gradient nearly cancels, no absolute accuracy is lost.
    """
    if not got.size:
        return 0.0
    got64, expected64 = got.astype(np.float64), expected.astype(got.dtype).astype(np.float64)
    finite = np.isfinite(expected64)
    same = (got64 == expected64) | (np.isnan(got64) & np.isnan(expected64))
    if not (finite | same).all() or not np.isfinite(got64[finite]).all():
        return math.inf
    exact = expected.astype(np.float64)[finite]
    if not exact.size:
        return 0.0
    typical = math.sqrt(np.mean(np.square(exact)))
    unit = last_place(got.dtype, np.maximum(np.abs(exact), typical))
    return float(np.max(np.abs(got64[finite] - exact) / unit))


def roundings(terms: int) -> float:
    """The error of arithmetic in ulp of its own precision; of a sum in many lanes, the square root of its length."""
    return COMPUTED + math.sqrt(terms) / 2


def tolerance(dtype: str, terms: int) -> float:
    """The tolerance of a result in ulp: the error of arithmetic, or one rounding to a coarser dtype and a bit."""
    arithmetic = roundings(terms)
    if DTYPES[dtype].itemsize > 2:
        return arithmetic
    coarser = finfo(DTYPES[dtype]).nmant - finfo(np.float32).nmant
    return ROUNDED_ONCE + float(arithmetic * 2.0**coarser)


def reference(op: Operator, values: Mapping[str, Any]) -> dict[str, Array]:
    """The results of an operator's reference in float64, by name."""
    return dict(zip(op.results, expected(op, values), strict=True))


def expected(op: Operator, given: Mapping[str, Any]) -> list[Array]:
    """The results of the float64 reference, one behind the other."""
    exact = {name: widened(value) for name, value in given.items() if name not in ("out", "out_dtype")}
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in listed(op.reference(**exact))]


def listed(results: Any) -> list[Any]:
    """The results of a call, lists in them too, as one list."""
    if not isinstance(results, tuple | list):
        return [results]
    return [array for each in results for array in listed(each)]


def widened(value: Any) -> Any:
    """A floating-point array in float64, also each in a list; anything else as it is."""
    if isinstance(value, list):
        return [widened(each) for each in value]
    whole = not isinstance(value, np.ndarray) or value.dtype.kind in "iub"
    return value if whole else value.astype(np.float64)


def random_bytes(rng: np.random.Generator, *shape: int) -> Array:
    """Bytes of packed weights."""
    return rng.integers(0, 256, shape).astype(np.uint8)
