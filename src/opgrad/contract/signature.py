"""Checks a call's signature against the declaration, arranges its arrays, and makes the problem for kernels.

A message names the operator and the argument, says what the argument is, and what was expected.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from opgrad.contract.arrangement import Arrangement, Strides, arranged_elements, arranged_rows, contiguous, is_injective
from opgrad.contract.attributes import DTYPES, Attributes, Beside, Shape, Shapes, Spec, dimensions, read_axes
from opgrad.contract.declaration import Operator


@dataclass(frozen=True)
class Operand:
    """An array argument or result: its number, dtype and strides in elements."""

    number: int
    dtype: str
    outer: int = 0
    n: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Problem:
    """A checked call as kernels see it: the loops' sizes, the operands by name, the attributes.

    Operands that were not given are None. `specs` say how they lie in memory, `orders` in which order their axes do.
    `results` are those that the declaration asks for. `copies` holds the numbers of operands that kernels cannot use
    where they lie, with the memory order of the copy. `bytes` counts each operand once.
    """

    operator: Operator
    outer: int
    n: int
    inner: int
    operands: Mapping[str, Operand | None]
    attributes: Mapping[str, Any]
    specs: Mapping[str, Spec]
    orders: Mapping[str, tuple[int, ...]]
    results: Mapping[str, Spec]
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    bytes: int

    @property
    def is_general(self) -> bool:
        """Whether the call has attributes, or dtypes, that plain calls lack (opgrad.ops.reference.primitive)."""
        return "post_ops" in self.attributes

    @property
    def shapes(self) -> dict[str, Shape]:
        """The operands' shapes by name."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def listed(self, parameter: str) -> list[str]:
        """The names of the arrays in the list that the call gives, or returns, under this name."""
        return [name for name in self.operands if name.startswith(f"{parameter}[")]

    def __getitem__(self, name: str) -> Any:
        return self.operands[name]


def prepare(
    op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None,
    any_stride: bool = False,
) -> Problem:  # fmt: skip
    """Check a signature and lay it out; `out` describes results that the caller brings.

    any_stride: kernels take operands whose vectors are not contiguous. Raises the operator's TypeError,
    ValueError or NotImplementedError.
    """
    attributes = dict(op.attributes) | attributes
    inputs = dict(zip(op.arrays, specs, strict=True))
    check_arrays(op, inputs, attributes)
    results = result_specs(op, inputs, attributes)
    given = {name: spec for name, spec in inputs.items() if spec is not None}
    if out is not None:
        _check_out(op, results, out)
        given |= zip(results, out, strict=True)
    tensors, present = {**op.inputs, **op.results}, results | given
    layouts = {
        name: (_strides(spec) if name in given else None, spec.dtype.itemsize)
        for name, tensor in tensors.items()
        if tensor.role == "element" and (spec := present.get(name)) is not None
    }
    if op.kind in ("slices", "whole", "strided"):
        loops = Arrangement(1, 1, 1, (), {})
    elif op.kind == "elements":
        loops = arranged_elements(present[next(iter(layouts))].shape, layouts, any_stride)
    else:
        reduced = range(1, 2) if op.kind == "classes" else attributes["axis"]
        loops = arranged_rows(present[next(iter(layouts))].shape, reduced, layouts, any_stride)
    operands: dict[str, Operand | None] = dict.fromkeys(tensors)
    placed, orders, copies = dict[str, Spec](), dict[str, tuple[int, ...]](), []
    for number, (name, tensor) in enumerate(tensors.items()):
        if name not in present:
            continue
        spec, rank = present[name], len(present[name].shape)
        order = tuple(range(rank))  # of an array that is made or copied for these loops
        if tensor.role == "element" and len(loops.order) == rank:
            order = loops.order
        elif tensor.role == "sample" and len(loops.order) == rank + 1:
            order = tuple(axis - (axis > 1) for axis in loops.order if axis != 1)
        spec = replace(spec, strides=_strides(spec, () if name in given else order))
        strides = loops.strides.get(name, Strides(loops.n * loops.inner, loops.inner, 1, fits=True))
        operands[name] = Operand(number, spec.dtype.name, strides.outer, strides.n, strides.inner)
        if _is_copied(op, loops, name, spec, order, any_stride):
            copies.append((number, order))
            if op.kind == "strided":  # its kernels read the strides of the copy
                spec = replace(spec, strides=contiguous(spec.shape, order, spec.dtype.itemsize))
        placed[name], orders[name] = spec, order
    size, sizes = sum(map(_bytes, placed.values())), (loops.outer, loops.n, loops.inner)
    return Problem(op, *sizes, operands, attributes, placed, orders, results, tuple(copies), size)


def check_arrays(op: Operator, specs: Mapping[str, Spec | None], attributes: Attributes) -> None:
    """Raise TypeError or ValueError unless the arrays are what the declaration asks for."""
    for name, tensor in op.inputs.items():
        spec = specs[name]
        if spec is None:
            if name not in op.optional:
                raise TypeError(f"{op.name}: {name} is None, expected an array")
            continue
        has = f"{op.name}: {name} has dtype {spec.dtype.name}"
        if not spec.dtype.isnative:
            raise TypeError(
                f"{op.name}: {name} has dtype {spec.dtype} in foreign byte order, expected native byte order"
            )
        if spec.dtype.name not in tensor.dtypes:
            raise TypeError(f"{has}, expected one of {', '.join(tensor.dtypes)}")
        model = specs[tensor.dtype_of] if tensor.dtype_of else None
        if model is not None and model.dtype != spec.dtype and spec.dtype.name not in tensor.besides:
            raise TypeError(f"{has}, expected {model.dtype.name}, the dtype of {tensor.dtype_of}")
    shapes = {name: spec.shape for name, spec in specs.items() if spec is not None}
    for name, shape in shapes.items():
        ranks = op.inputs[name].ranks
        if len(shape) not in ranks:
            allowed = f"at least {ranks.start}" if ranks.stop > 64 else " or ".join(map(str, ranks))
            raise ValueError(f"{op.name}: {name} has {dimensions(len(shape))}, expected {allowed}")
    normalise(op, attributes, shapes)
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        expected = tensor.shape and tensor.shape(shapes, attributes)
        if expected is not None and shape != expected:
            raise ValueError(f"{op.name}: {name} has shape {shape}, expected {expected}, {tensor.as_in}")


def normalise(op: Operator, attributes: Attributes, shapes: Shapes) -> None:
    """Check the attributes, and replace them by what kernels take: an axis by a range, a dtype by np.dtype."""
    beside = Beside(op.results, shapes, attributes)
    for name, value in attributes.items():
        if isinstance(value, str) and type(value) is not str:
            value = attributes[name] = str.__str__(value)  # str() of an enumeration's member may differ
        if name in op.checks:
            attributes[name] = op.checks[name](f"{op.name}: {name}", value, beside)


MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32  # of an array


def result_specs(op: Operator, inputs: Mapping[str, Spec | None], attributes: Attributes) -> dict[str, Spec]:
    """Shapes and dtypes of the results."""
    shapes = {name: spec.shape for name, spec in inputs.items() if spec is not None}
    asked = attributes.get("out_dtype")
    dtypes = asked if isinstance(asked, tuple) else (asked,) * len(op.results)
    specs = {}
    for (name, tensor), dtype in zip(op.results.items(), dtypes, strict=True):
        model = inputs[tensor.dtype_of or op.arrays[0]] if op.arrays else None
        own = model.dtype if model and model.dtype.name in tensor.dtypes else DTYPES[tensor.dtypes[0]]
        shape = tensor.shape(shapes, attributes) if tensor.shape else ()
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"{op.name}: {name} has {len(shape)} dimensions, expected at most {MOST_DIMENSIONS}")
        specs[name] = Spec(shape, dtype or own)
    return specs


def _check_out(op: Operator, results: Mapping[str, Spec], out: Sequence[Spec]) -> None:
    """Raise TypeError or ValueError unless the arrays in `out` can hold the results."""
    for (name, spec), given in zip(results.items(), out, strict=True):
        what, strides = f"{op.name}: out for {name}", _strides(given)
        if given.dtype != spec.dtype:
            raise TypeError(f"{what} has dtype {given.dtype}, expected {spec.dtype}")
        if given.shape != spec.shape:
            raise ValueError(f"{what} has shape {given.shape}, expected {spec.shape}, {op.results[name].as_in}")
        if not is_injective(given.shape, strides, given.dtype.itemsize):
            repeated = any(not stride and size > 1 for stride, size in zip(strides, given.shape, strict=True))
            fault = "repeats elements (stride 0)" if repeated else "overlaps itself"
            raise ValueError(f"{what} {fault}, expected distinct elements")


def _strides(spec: Spec, order: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The strides in bytes; without them, those of an array whose axes lie in this order, by default in C order."""
    if spec.strides is not None:
        return spec.strides
    return contiguous(spec.shape, order or tuple(range(len(spec.shape))), spec.dtype.itemsize)


def _is_copied(
    op: Operator, loops: Arrangement, name: str, spec: Spec, order: tuple[int, ...], any_stride: bool
) -> bool:
    """Whether kernels cannot use an array where it lies, and get a copy whose axes lie in this order."""
    if 0 in spec.shape:
        return False
    item, moving = spec.dtype.itemsize, [axis for axis, size in enumerate(spec.shape) if size > 1]
    strides = _strides(spec)
    is_broken = any(strides[axis] % item for axis in moving)  # a stride is no whole number of elements
    if op.kind == "blocks":  # threads of a GPU read only whole elements from one to the next
        return any_stride and is_broken
    if op.kind == "strided":
        last = len(spec.shape) - 1
        return is_broken or (last in moving and strides[last] != item)
    if name in loops.strides:
        return not loops.strides[name].fits
    packed = contiguous(spec.shape, order, item)
    return any(strides[axis] != packed[axis] for axis in moving)


def _bytes(spec: Spec) -> int:
    """The bytes that are read if each element is read once, repeated elements included."""
    moving = (size for size, stride in zip(spec.shape, _strides(spec), strict=True) if stride or not size)
    return spec.dtype.itemsize * math.prod(moving)


def covered(spec: Spec) -> tuple[int, int]:
    """The bytes that an array covers, counted from its data pointer."""
    if 0 in spec.shape:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(spec.shape, _strides(spec), strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + spec.dtype.itemsize


# --- error messages for labels and indices that are out of range, for every backend ----------------------------------

Explain = Callable[[int, int], Exception]  # explain(position of a wrong number in memory order, the number)


def wrong_label(problem: Problem) -> Explain:
    """The function that makes the error for a label that is out of range."""
    ignore, classes = problem.attributes.get("ignore_index"), problem.n
    expected = f"0 to {classes - 1}" if classes else "no label, as there are 0 classes"
    also = "" if ignore is None else f" or ignore_index {ignore}"
    return _wrong(problem, "labels", lambda position: expected + also)


def wrong_index(problem: Problem, size: int, name: str = "indices") -> Explain:
    """The function that makes the error for an index, of the operand of this name, that an axis of this size lacks."""
    expected = f"{-size} to {size - 1}" if size else "no index, as the axis has size 0"
    return _wrong(problem, name, lambda position: expected)


def wrong_maximum(problem: Problem) -> Explain:
    """The function that makes the error for the place of a maximum outside of its window's image and channel."""
    windows, plane = (math.prod(shape[2:]) for shape in (problem.specs["indices"].shape, problem.attributes["shape"]))

    def expected(position: int) -> str:
        first = position // windows * plane
        within = f"{first} to {first + plane - 1}" if plane else "no index, as shape has a size of 0"
        return f"{within}, in its image and channel"

    return _wrong(problem, "indices", expected)


def _wrong(problem: Problem, name: str, expected: Callable[[int], str]) -> Explain:
    """The function that makes such an error. expected(position) says which numbers are allowed there."""
    shape, order = problem.specs[name].shape, problem.orders[name]

    def explain(position: int, value: int) -> Exception:
        place = position_of(position, shape, order)
        return ValueError(f"{problem.operator.name}: {name}{place} is {value}, expected {expected(position)}")

    return explain


def position_of(position: int, shape: tuple[int, ...], order: tuple[int, ...]) -> str:
    """`[i, j]` of the element at a position in memory order; nothing for a single number."""
    moved = np.unravel_index(position, [shape[axis] for axis in order])
    found = [int(moved[order.index(axis)]) for axis in range(len(shape))]
    return f"[{', '.join(map(str, found))}]" if found else ""


# --- plain values, which never change, so that they can be part of a plan's key --------------------------------------

# A number may be passed in an array or in any object with `__float__` or `__index__`. If such an object were hashed
# itself, it would find the plan of the number that it held before.
T = TypeVar("T")
# The types themselves: a class derived from one of them may say anything of its value.
# A library adds its own when it is first met.
PLAIN: set[type] = {bool, int, float, str, type(None)} | {
    np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
}

# Types of values that change, all of whose fields are slots; for each the fields that are no part of a plan.
RECORDS: dict[type, tuple[str, ...]] = {}


def record(*apart: str) -> Callable[[type[T]], type[T]]:
    """Declare a class with slots whose objects are values of attributes; `apart`: see RECORDS."""

    def declare(kind: type[T]) -> type[T]:
        RECORDS[kind] = apart
        return kind

    return declare


def fields(kind: type) -> list[str]:
    """The fields of a record in the order in which they lie in its objects: CPython sorts slots."""
    return sorted(kind.__slots__)  # type: ignore[attr-defined]


def is_plain(value: Any) -> bool:
    """Whether a value is plain, so that it never changes."""
    if type(value) in PLAIN or isinstance(value, np.dtype | type):
        return True
    return isinstance(value, tuple) and all(is_plain(each) for each in value)


def plain(op: Operator, given: Mapping[str, Any], names: Iterable[str] | None = None) -> Mapping[str, Any]:
    """A call's arguments with plain values for attributes, as the contract reads them; raises what it raises.

    names: of the attributes, if they are not the operator's own.
    """
    attributes = op.attributes if names is None else names
    changing: Attributes = {name: given[name] for name in attributes if name in given and not is_plain(given[name])}
    if not changing:
        return given
    axis = {"axis": read_axes(f"{op.name}: axis", changing.pop("axis"))} if "axis" in changing else {}
    normalise(op, changing, {})
    return {**given, **changing, **axis}
