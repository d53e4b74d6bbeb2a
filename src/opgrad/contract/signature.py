"""Checks a call's signature against the declaration, arranges its arrays, and makes the problem for kernels."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opgrad.contract import arrangement
from opgrad.contract.checks import check_arrays
from opgrad.contract.declaration import Operator
from opgrad.contract.dtypes import DTYPES, Attributes, Spec
from opgrad.contract.problem import Operand, Pair, Problem

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
        if not arrangement.is_injective(given.shape, _strides(given), given.dtype.itemsize):
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
) -> arrangement.Arrangement:
    """The loops over the arrays that have an entry for each element. made: those that are still to be made."""
    if op.kind in ("slices", "whole", "strided"):
        return arrangement.Arrangement(1, 1, 1, (), {})
    shape = next(iter(elements.values())).shape
    strides = {name: (None if name in made else _strides(spec), spec.dtype.itemsize) for name, spec in elements.items()}
    if op.kind == "elements":
        return arrangement.elements(shape, strides, any_stride)
    return arrangement.rows(shape, range(1, 2) if op.kind == "classes" else attributes["axis"], strides, any_stride)


def _strides(spec: Spec, order: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The strides in bytes; without them, those of an array whose axes lie in this order, by default in C order."""
    if spec.strides is not None:
        return spec.strides
    return arrangement.contiguous(spec.shape, order or tuple(range(len(spec.shape))), spec.dtype.itemsize)


def _order(loops: arrangement.Arrangement, role: str, rank: int) -> tuple[int, ...]:
    """The memory order of an array that is made or copied for these loops."""
    if role == "element" and len(loops.order) == rank:
        return loops.order
    if role == "sample" and len(loops.order) == rank + 1:
        return tuple(axis - (axis > 1) for axis in loops.order if axis != 1)
    return tuple(range(rank))


def _operand(loops: arrangement.Arrangement, number: int, name: str, spec: Spec) -> Operand:
    """An operand as kernels see it."""
    strides = loops.strides.get(name, arrangement.Strides(loops.n * loops.inner, loops.inner, 1, fits=True))
    return Operand(number, spec.dtype.name, strides.outer, strides.n, strides.inner)


def _is_copied(
    op: Operator, loops: arrangement.Arrangement, name: str, spec: Spec, order: tuple[int, ...], any_stride: bool
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
    packed = arrangement.contiguous(spec.shape, order, spec.dtype.itemsize)
    return any(_strides(spec)[axis] != packed[axis] for axis, size in enumerate(spec.shape) if size > 1)
