"""Checks a call's signature against the declaration, arranges its arrays, and makes the problem for kernels."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from opgrad.contract.arrangement import Arrangement, Strides, arranged_elements, arranged_rows, contiguous, is_injective
from opgrad.contract.attributes import DTYPES, Attributes, Beside, Shape, Shapes, Spec, dimensions, read_axes
from opgrad.contract.declaration import Operator, Tensor


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
    """The argument of a kernel function: the loops' sizes, the operands by name, the attributes.

    `bytes` counts each operand once. Operands that were not given are None. `orders` are the memory orders of
    their axes, `specs` how they lie in memory.
    """

    outer: int
    n: int
    inner: int
    operands: Mapping[str, Operand | None]
    attributes: Mapping[str, Any]
    specs: Mapping[str, Spec]
    orders: Mapping[str, tuple[int, ...]]
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


@dataclass(frozen=True)
class Pair:
    """A result and another operand that must not overlap. same: whether they may be one and the same memory.

    result_bytes, other_bytes: the bytes that the operands cover, counted from their data pointers.
    """

    result: int
    other: int
    result_bytes: tuple[int, int]
    other_bytes: tuple[int, int]
    same: bool


def check_arrays(op: Operator, specs: Mapping[str, Spec | None], attributes: Attributes) -> None:
    """Raise TypeError or ValueError unless the arrays are what the declaration asks for."""
    for name, tensor in op.inputs.items():
        spec = specs[name]
        if spec is None:
            if name not in op.optional:
                raise TypeError(f"{op.name}: {name} is None, expected an array")
            continue
        _check_dtype(op, name, spec, tensor, specs)
    shapes = {name: spec.shape for name, spec in specs.items() if spec is not None}
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        if len(shape) not in tensor.ranks:
            several = " or ".join(map(str, tensor.ranks))
            allowed = f"at least {tensor.ranks.start}" if tensor.ranks.stop > 64 else several
            raise ValueError(f"{op.name}: {name} has {dimensions(len(shape))}, expected {allowed}")
    normalise(op, attributes, shapes)
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        expected = tensor.shape and tensor.shape(shapes, attributes)
        if expected is not None and shape != expected:
            raise ValueError(f"{op.name}: {name} has shape {shape}, expected {expected}, {tensor.as_in}")


def _check_dtype(op: Operator, name: str, spec: Spec, tensor: Tensor, specs: Mapping[str, Spec | None]) -> None:
    if not spec.dtype.isnative:
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype} in foreign byte order, expected native byte order")
    if spec.dtype.name not in tensor.dtypes:
        expected = ", ".join(tensor.dtypes)
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected one of {expected}")
    model = specs[tensor.dtype_of] if tensor.dtype_of else None
    if model is not None and model.dtype != spec.dtype and spec.dtype.name not in tensor.besides:
        expected = f"{model.dtype.name}, the dtype of {tensor.dtype_of}"
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected {expected}")


def normalise(op: Operator, attributes: Attributes, shapes: Shapes) -> None:
    """Check the attributes, and replace them by what kernels take: an axis by a range, a dtype by np.dtype."""
    beside = Beside(op.results, shapes, attributes)
    for name, value in attributes.items():
        if isinstance(value, str) and type(value) is not str:
            value = attributes[name] = str.__str__(value)  # str() of an enumeration's member may differ
        if name in op.checks:
            attributes[name] = op.checks[name](f"{op.name}: {name}", value, beside)


MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32  # of an array


@dataclass(frozen=True)
class Prepared:
    """A checked signature: the problem for kernels, the results, and the arrays that must be copied for it.

    `copies` holds the operands' numbers with the memory order of the copy.
    """

    operator: Operator
    problem: Problem
    results: Mapping[str, Spec]
    copies: tuple[tuple[int, tuple[int, ...]], ...]


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


def check_out(op: Operator, results: Mapping[str, Spec], out: Sequence[Spec]) -> None:
    """Raise TypeError or ValueError unless the arrays in `out` can hold the results."""
    for (name, spec), given in zip(results.items(), out, strict=True):
        if given.dtype != spec.dtype:
            raise TypeError(f"{op.name}: out for {name} has dtype {given.dtype.name}, expected {spec.dtype.name}")
        if given.shape != spec.shape:
            raise ValueError(
                f"{op.name}: out for {name} has shape {given.shape}, expected {spec.shape}, {op.results[name].as_in}"
            )
        if not is_injective(given.shape, _strides(given), given.dtype.itemsize):
            repeated = any(not stride and size > 1 for stride, size in zip(_strides(given), given.shape, strict=True))
            fault = "repeats elements (stride 0)" if repeated else "overlaps itself"
            raise ValueError(f"{op.name}: out for {name} {fault}, expected distinct elements")


def prepare(
    op: Operator,
    specs: Sequence[Spec | None],
    attributes: Attributes,
    out: Sequence[Spec] | None = None,
    any_stride: bool = False,
) -> Prepared:
    """Check a signature and lay it out; `out` describes results that the caller brings.

    any_stride: kernels take operands whose vectors are not contiguous. Raises the operator's TypeError,
    ValueError or NotImplementedError.
    """
    attributes = dict(op.attributes) | attributes
    inputs = dict(zip(op.arrays, specs, strict=True))
    check_arrays(op, inputs, attributes)
    results = result_specs(op, inputs, attributes)
    if out is not None:
        check_out(op, results, out)
    tensors = {**op.inputs, **op.results}
    present = {name: spec for name, spec in inputs.items() if spec is not None}
    present |= results if out is None else dict(zip(results, out, strict=True))
    made = frozenset(results) if out is None else frozenset[str]()
    loops = _loops(
        op, {name: present[name] for name in present if tensors[name].role == "element"}, made, attributes, any_stride
    )
    orders = {name: _order(loops, tensors[name].role, len(spec.shape)) for name, spec in present.items()}
    placed = {name: _placed(spec, orders[name]) if name in made else _placed(spec) for name, spec in present.items()}
    operands: dict[str, Operand | None] = dict.fromkeys(tensors)
    copies = []
    for number, name in enumerate(tensors):
        if name not in placed:
            continue
        spec, order = placed[name], orders[name]
        operands[name] = _operand(loops, number, name, spec)
        if _is_copied(op, loops, name, spec, order, any_stride):
            copies.append((number, order))
            if op.kind == "strided":  # its kernels read the strides of the copy
                placed[name] = _placed(replace(spec, strides=None), order)
    size = sum(_bytes(spec) for spec in placed.values())
    problem = Problem(loops.outer, loops.n, loops.inner, operands, attributes, placed, orders, size)
    return Prepared(op, problem, results, tuple(copies))


def pairs(prepared: Prepared) -> list[Pair]:
    """The results with every other array that they must not overlap."""
    op, specs, found = prepared.operator, prepared.problem.specs, []
    numbers = {name: number for number, name in enumerate((*op.inputs, *op.results))}
    for result in op.results:
        for name, spec in specs.items():
            if numbers[name] < numbers[result]:
                output = specs[result]
                same = spec.dtype == output.dtype and _strides(spec) == _strides(output)
                same &= name in op.in_place.get(result, ())
                found.append(Pair(numbers[result], numbers[name], covered(output), covered(spec), same))
    return found


def _is_broken(spec: Spec) -> bool:
    """Whether a stride is no whole number of elements."""
    steps = zip(spec.shape, _strides(spec), strict=True)
    return any(stride % spec.dtype.itemsize for size, stride in steps if size > 1)


def _is_dense_last(spec: Spec) -> bool:
    """Whether neighbours along the last axis are neighbours in memory."""
    return not spec.shape or spec.shape[-1] <= 1 or _strides(spec)[-1] == spec.dtype.itemsize


def _placed(spec: Spec, order: tuple[int, ...] = ()) -> Spec:
    """The spec with strides; an array without strides, which is still to be made, gets its axes in this order."""
    return replace(spec, strides=_strides(spec, order))


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


def _loops(
    op: Operator, elements: Mapping[str, Spec], made: Collection[str], attributes: Attributes, any_stride: bool
) -> Arrangement:
    """The loops over the arrays that have an entry for each element. made: those that are still to be made."""
    if op.kind in ("slices", "whole", "strided"):
        return Arrangement(1, 1, 1, (), {})
    shape = next(iter(elements.values())).shape
    strides = {name: (None if name in made else _strides(spec), spec.dtype.itemsize) for name, spec in elements.items()}
    if op.kind == "elements":
        return arranged_elements(shape, strides, any_stride)
    return arranged_rows(shape, range(1, 2) if op.kind == "classes" else attributes["axis"], strides, any_stride)


def _strides(spec: Spec, order: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The strides in bytes; without them, those of an array whose axes lie in this order, by default in C order."""
    if spec.strides is not None:
        return spec.strides
    return contiguous(spec.shape, order or tuple(range(len(spec.shape))), spec.dtype.itemsize)


def _order(loops: Arrangement, role: str, rank: int) -> tuple[int, ...]:
    """The memory order of an array that is made or copied for these loops."""
    if role == "element" and len(loops.order) == rank:
        return loops.order
    if role == "sample" and len(loops.order) == rank + 1:
        return tuple(axis - (axis > 1) for axis in loops.order if axis != 1)
    return tuple(range(rank))


def _operand(loops: Arrangement, number: int, name: str, spec: Spec) -> Operand:
    """An operand as kernels see it."""
    strides = loops.strides.get(name, Strides(loops.n * loops.inner, loops.inner, 1, fits=True))
    return Operand(number, spec.dtype.name, strides.outer, strides.n, strides.inner)


def _is_copied(
    op: Operator, loops: Arrangement, name: str, spec: Spec, order: tuple[int, ...], any_stride: bool
) -> bool:
    """Whether kernels cannot use an array where it lies, and get a copy whose axes lie in this order."""
    if 0 in spec.shape:
        return False
    if op.kind == "blocks":  # threads of a GPU read only whole elements from one to the next
        return any_stride and _is_broken(spec)
    if op.kind == "strided":
        return _is_broken(spec) or not _is_dense_last(spec)
    if name in loops.strides:
        return not loops.strides[name].fits
    packed = contiguous(spec.shape, order, spec.dtype.itemsize)
    return any(_strides(spec)[axis] != packed[axis] for axis, size in enumerate(spec.shape) if size > 1)


Explain = Callable[[int, int], Exception]  # explain(position of a wrong number in memory order, the number)


def wrong_label(problem: Problem, operator: str) -> Explain:
    """The function that makes the error for a label that is out of range."""
    ignore, classes = problem.attributes.get("ignore_index"), problem.n
    expected = f"0 to {classes - 1}" if classes else "no label, as there are 0 classes"
    also = "" if ignore is None else f" or ignore_index {ignore}"
    return _wrong(problem, operator, "labels", lambda position: expected + also)


def wrong_index(problem: Problem, operator: str, size: int, name: str = "indices") -> Explain:
    """The function that makes the error for an index, of the operand of this name, that an axis of this size lacks."""
    expected = f"{-size} to {size - 1}" if size else "no index, as the axis has size 0"
    return _wrong(problem, operator, name, lambda position: expected)


def wrong_maximum(problem: Problem, operator: str) -> Explain:
    """The function that makes the error for the place of a maximum outside of its window's image and channel."""
    windows, plane = (math.prod(shape[2:]) for shape in (problem.specs["indices"].shape, problem.attributes["shape"]))

    def expected(position: int) -> str:
        first = position // windows * plane
        within = f"{first} to {first + plane - 1}" if plane else "no index, as shape has a size of 0"
        return f"{within}, in its image and channel"

    return _wrong(problem, operator, "indices", expected)


def _wrong(problem: Problem, operator: str, name: str, expected: Callable[[int], str]) -> Explain:
    """The function that makes such an error. expected(position) says which numbers are allowed there."""
    shape, order = problem.specs[name].shape, problem.orders[name]

    def explain(position: int, value: int) -> Exception:
        place = position_of(position, shape, order)
        return ValueError(f"{operator}: {name}{place} is {value}, expected {expected(position)}")

    return explain


def position_of(position: int, shape: tuple[int, ...], order: tuple[int, ...]) -> str:
    """`[i, j]` of the element at a position in memory order; nothing for a single number."""
    moved = np.unravel_index(position, [shape[axis] for axis in order])
    found = [int(moved[order.index(axis)]) for axis in range(len(shape))]
    return f"[{', '.join(map(str, found))}]" if found else ""


T = TypeVar("T")
# The types themselves: a class derived from one of them may say anything of its value.
# A library adds its own when it is first met.
PLAIN: set[type] = {bool, int, float, str, type(None)} | {
    np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
}

# Types of values that change, all of whose fields are slots; for each the fields that hold int64 numbers and are no
# part of a plan.
RECORDS: dict[type, tuple[str, ...]] = {}


def record(*numbers: str) -> Callable[[type[T]], type[T]]:
    """Declare a class with slots whose objects are values of attributes; `numbers`: see RECORDS."""

    def declare(kind: type[T]) -> type[T]:
        RECORDS[kind] = numbers
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
