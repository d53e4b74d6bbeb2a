"""Checks a call's signature against the declaration, arranges its arrays, and makes the problem for kernels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opgrad.contract import arrangement
from opgrad.contract.checks import check_arrays
from opgrad.contract.declaration import Operator, Tensor
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
    numbers = {name: number for number, name in enumerate(tensors)}
    present = {name: spec for name, spec in inputs.items() if spec is not None}
    if out is None:
        loops = _loops(op, _elements(tensors, present), attributes, any_stride)
        orders = {name: _order(loops, tensors[name].role, len(spec.shape)) for name, spec in results.items()}
        out = [_placed(spec, orders[name]) for name, spec in results.items()]
    present |= dict(zip(results, out, strict=True))
    loops = _loops(op, _elements(tensors, present), attributes, any_stride)
    orders = {name: _order(loops, tensors[name].role, len(spec.shape)) for name, spec in present.items()}
    operands, copies = _operands(loops, numbers, present, orders)
    if op.kind == "blocks":
        # Its kernels read and write where an array lies; threads of a GPU only whole elements from one to the next.
        broken = {numbers[name] for name, spec in present.items() if any_stride and _is_broken(spec)}
        copies = tuple(each for each in copies if each[0] in broken)
    if op.kind == "strided":
        apart = {numbers[name] for name, spec in present.items() if _is_broken(spec) or not _is_dense_last(spec)}
        copies = tuple(each for each in copies if each[0] in apart)
        copied = dict(copies)
        present = {
            name: replace(spec, strides=None) if numbers[name] in copied else spec for name, spec in present.items()
        }
    given = {name: _placed(spec, orders[name]) for name, spec in present.items()}
    size = sum(_bytes(spec) for spec in given.values())
    every = {name: operands.get(name) for name in tensors}
    problem = Problem(loops.outer, loops.n, loops.inner, every, attributes, given, orders, size)
    return Prepared(op, problem, results, copies)


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


def _elements(tensors: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The arrays that have an entry for each element."""
    return {name: spec for name, spec in specs.items() if tensors[name].role == "element"}


def _is_broken(spec: Spec) -> bool:
    """Whether a stride is no whole number of elements."""
    steps = zip(spec.shape, _strides(spec), strict=True)
    return any(stride % spec.dtype.itemsize for size, stride in steps if size > 1)


def _is_dense_last(spec: Spec) -> bool:
    """Whether neighbours along the last axis are neighbours in memory."""
    return not spec.shape or spec.shape[-1] <= 1 or _strides(spec)[-1] == spec.dtype.itemsize


def _placed(spec: Spec, order: tuple[int, ...]) -> Spec:
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
    op: Operator, elements: Mapping[str, Spec], attributes: Attributes, any_stride: bool
) -> arrangement.Arrangement:
    """The loops over the arrays that have an entry for each element."""
    if op.kind in ("slices", "whole", "strided"):
        return arrangement.Arrangement(1, 1, 1, (), {})
    shape = next(iter(elements.values())).shape
    strides = {name: (_strides(spec), spec.dtype.itemsize) for name, spec in elements.items()}
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


def _operands(
    loops: arrangement.Arrangement,
    numbers: Mapping[str, int],
    specs: Mapping[str, Spec],
    orders: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Any], tuple[tuple[int, tuple[int, ...]], ...]]:
    """The operands as kernels see them, and the numbers of those that must be copies."""
    operands, copies = {}, []
    for name, spec in specs.items():
        strides = loops.strides.get(name, arrangement.Strides(loops.n * loops.inner, loops.inner, 1, fits=True))
        operands[name] = Operand(numbers[name], spec.dtype.name, strides.outer, strides.n, strides.inner)
        packed = arrangement.contiguous(spec.shape, orders[name], spec.dtype.itemsize)
        moves = [axis for axis, size in enumerate(spec.shape) if size > 1]
        alone = name not in loops.strides and any(_strides(spec)[axis] != packed[axis] for axis in moves)
        if all(spec.shape) and (alone or not strides.fits):
            copies.append((numbers[name], orders[name]))
    return operands, tuple(copies)
