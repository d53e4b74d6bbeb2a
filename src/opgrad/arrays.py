"""The NumPy front end: whose arrays these are, checks once for each signature, layout, allocation.

A signature is the shapes, strides, dtypes and attributes of a call. Its plan is made once and kept; a warm
call finds it, allocates the result and runs.
"""

import ctypes
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from opgrad import layout
from opgrad.contract import DTYPES, Array, Attributes, Operator, Spec, check_arrays, normalise

PLANS = 1024  # signatures kept for each operator; the oldest goes first
CACHE_LINE = 64
ALIGNED_FROM = 1 << 16  # bytes from which a result is worth aligning to a cache line


@dataclass
class Plan:
    """All that a call needs to know beforehand; `words` is what native code reads."""

    operator: Operator
    results: tuple[Spec, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    scratch_bytes: int
    parts_max: int
    words: Any
    explain: Callable[[int, int, int], Exception]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def error(self, scratch: int) -> Exception:
        """The exception for a run that returned a status, from what it left in scratch."""
        status = (ctypes.c_int64 * 4).from_address(scratch)
        return self.explain(status[0], status[1], status[2])


def plan(
    op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None
) -> Plan:
    """Check a signature and lay it out; `out` describes results that the caller brings.

    Raises the operator's TypeError, ValueError or NotImplementedError.
    """
    attributes = dict(op.attributes) | attributes
    inputs = dict(zip(op.arrays, specs, strict=True))
    check_arrays(op, inputs, attributes)
    results = result_specs(op, inputs, attributes)
    if out is not None:
        check_out(op, results, out)
    return _lay_out(op, inputs, attributes, results, out)


def result_specs(op: Operator, inputs: Mapping[str, Spec | None], attributes: Attributes) -> dict[str, Spec]:
    """Shapes and dtypes of the results."""
    shapes = {name: spec.shape for name, spec in inputs.items() if spec is not None}
    specs = {}
    for name, tensor in op.results.items():
        model = inputs[tensor.dtype_of or op.arrays[0]]
        dtype = attributes.get("out_dtype") or (model.dtype if model else DTYPES["float32"])
        specs[name] = Spec(tensor.shape(shapes, attributes) if tensor.shape else (), dtype)
    return specs


def check_out(op: Operator, results: Mapping[str, Spec], out: Sequence[Spec]) -> None:
    for (name, spec), given in zip(results.items(), out, strict=True):
        if given.dtype != spec.dtype:
            raise TypeError(f"{op.name}: out for {name} has dtype {given.dtype.name}, expected {spec.dtype.name}")
        if given.shape != spec.shape:
            raise ValueError(
                f"{op.name}: out for {name} has shape {given.shape}, expected {spec.shape}, {op.results[name].as_in}"
            )


def _lay_out(
    op: Operator,
    inputs: Mapping[str, Spec | None],
    attributes: Attributes,
    results: Mapping[str, Spec],
    out: Sequence[Spec] | None,
) -> Plan:
    """Choose the loops, compile what they need and put the plan together."""
    from opgrad.cpu.execute import Problem, words

    tensors = {**op.inputs, **op.results}
    numbers = {name: number for number, name in enumerate(tensors)}
    given = {**inputs, **dict(zip(results, out or [None] * len(results), strict=True))}
    present = {name: spec for name, spec in given.items() if spec is not None}
    loops = _loops(op, {n: s for n, s in present.items() if tensors[n].role == "element"}, attributes)
    orders = {
        name: _order(loops, tensors[name].role, len(spec.shape)) for name, spec in {**present, **results}.items()
    }
    operands, copies = _operands(loops, tensors, numbers, {**results, **present}, orders, set(present))
    size = sum(spec.dtype.itemsize * int(np.prod(spec.shape)) for spec in {**results, **present}.values())
    shapes = {name: spec.shape for name, spec in {**results, **present}.items()}
    every = {name: operands.get(name) for name in tensors}
    problem = Problem(loops.outer, loops.n, loops.inner, every, attributes, shapes, orders, size)
    program = op.kernel()(problem)
    code = words(program.steps, sum(1 << numbers[name] for name in operands))
    return Plan(
        op,
        tuple(results.values()),
        tuple(_unless_c_order(orders[name]) for name in results),
        copies,
        program.scratch_bytes,
        max((step.parts for step in program.steps), default=1),
        (ctypes.c_int64 * len(code))(*code),
        program.explain or _no_status,
    )


def _no_status(status: int, position: int, value: int) -> Exception:
    return RuntimeError(f"opgrad: a kernel left status {status} ({position}, {value})")


def _unless_c_order(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


def _loops(op: Operator, elements: Mapping[str, Spec], attributes: Attributes) -> layout.Layout:
    """The loops over the arrays that have an entry for each element."""
    if op.kind == "slices":
        return layout.Layout(1, 1, 1, (), {})
    shape = next(iter(elements.values())).shape
    strides = {name: (_strides(spec), spec.dtype.itemsize) for name, spec in elements.items()}
    if op.kind == "elements":
        return layout.elements(shape, strides)
    return layout.rows(shape, attributes["axis"] if op.kind == "rows" else range(1, 2), strides)


def _strides(spec: Spec) -> tuple[int, ...]:
    if spec.strides is not None:
        return spec.strides
    return layout.contiguous(spec.shape, tuple(range(len(spec.shape))), spec.dtype.itemsize)


def _order(loops: layout.Layout, role: str, rank: int) -> tuple[int, ...]:
    """The memory order of an array that is made or copied for these loops."""
    if role == "element" and len(loops.order) == rank:
        return loops.order
    if role == "sample" and len(loops.order) == rank + 1:
        return tuple(axis - (axis > 1) for axis in loops.order if axis != 1)
    return tuple(range(rank))


def _operands(
    loops: layout.Layout,
    tensors: Mapping[str, Any],
    numbers: Mapping[str, int],
    specs: Mapping[str, Spec],
    orders: Mapping[str, tuple[int, ...]],
    present: set[str],
) -> tuple[dict[str, Any], tuple[tuple[int, tuple[int, ...]], ...]]:
    """The operands as kernels see them, and the numbers of those that must be copies."""
    from opgrad.cpu.execute import Operand

    operands, copies = {}, []
    for name, spec in specs.items():
        strides = loops.strides.get(name, layout.Strides(loops.n * loops.inner, loops.inner, fits=True))
        operands[name] = Operand(numbers[name], spec.dtype.name, strides.outer, strides.n)
        packed = layout.contiguous(spec.shape, orders[name], spec.dtype.itemsize)
        moves = [axis for axis, size in enumerate(spec.shape) if size > 1]
        alone = name not in loops.strides and any(_strides(spec)[axis] != packed[axis] for axis in moves)
        if name in present and all(spec.shape) and (alone or not strides.fits):
            copies.append((numbers[name], orders[name]))
    return operands, tuple(copies)


def _packed(array: Array, order: tuple[int, ...]) -> Array:
    """A copy whose axes lie in memory in this order."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def _make(spec: Spec, order: tuple[int, ...] | None) -> Array:
    """A new array; a large one starts a cache line, so that its vectors can be written past the cache."""
    shape = spec.shape if order is None else tuple(spec.shape[axis] for axis in order)
    size = spec.dtype.itemsize
    for length in shape:
        size *= length
    if size < ALIGNED_FROM:
        made = np.empty(shape, spec.dtype)
    else:
        memory = np.empty(size + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        made = memory[start : start + size].view(spec.dtype).reshape(shape)
    return made if order is None else made.transpose(np.argsort(order))


def dispatcher(op: Operator) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """The function behind a public operator: finds the runner of a call's signature and runs it."""
    runners: dict[Any, _Runner] = {}
    lock = threading.Lock()

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(op.parameters, args, strict=False))
        given.update(kwargs)
        runner = None
        if len(given) == len(args) + len(kwargs):
            try:
                runner = runners.get(_key(given))
            except TypeError:  # something that cannot be part of a key, such as a list
                runner = None
        if runner is None:
            given = _bind(op, args, kwargs)
            runner = _find(given)
        return runner(given)

    def _find(given: dict[str, Any]) -> _Runner:
        key = _key(given)
        runner = runners.get(key)
        if runner is None:
            runner = _Runner(op, given)
            with lock:
                if len(runners) >= PLANS:
                    del runners[next(iter(runners))]
                runners[key] = runner
        return runner

    return call


def _key(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The signature of a call."""
    key: list[Any] = []
    for name, value in given.items():
        kind = type(value)
        if kind is np.ndarray:
            key.append((name, value.shape, value.strides, value.dtype))
        elif name == "out" and kind is tuple:
            key.append((name, *[(each.shape, each.strides, each.dtype) for each in value]))
        else:
            key.append((name, value, kind))
    return tuple(key)


def _bind(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, with arrays as NumPy arrays and `shape` as a tuple."""
    try:
        given = inspect.signature(op.reference).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{op.name}: {error}") from None
    for name, value in given.items():
        if name in op.inputs and value is not None:
            given[name] = _as_array(op, name, value)
    if "out" in given:
        given["out"] = _as_out(op, given["out"])
    if "shape" in given:
        normalise(op, shape := {"shape": given["shape"]}, {})
        given["shape"] = shape["shape"]
    return given


def _as_array(op: Operator, name: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{op.name}: {name} is a masked array, expected an array without a mask")
    try:
        return np.asarray(value)
    except Exception as error:
        raise TypeError(f"{op.name}: {name} is {type(value).__name__}, expected an array") from error


def _as_out(op: Operator, out: Any) -> Any:
    """None, an array, or a tuple with an array for each result."""
    several = len(op.results) > 1
    if out is None:
        return None
    arrays = out if several else (out,)
    if not isinstance(arrays, tuple) or len(arrays) != len(op.results):
        raise TypeError(f"{op.name}: out is {type(out).__name__}, expected a tuple of {len(op.results)} arrays")
    for name, array in zip(op.results, arrays, strict=True):
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{op.name}: out for {name} is {type(array).__name__}, expected a NumPy array")
    return tuple(array.view(np.ndarray) for array in arrays) if several else out.view(np.ndarray)


class _Runner:
    """Runs the calls of one signature: allocates results, makes copies where the plan asks for them."""

    def __init__(self, op: Operator, given: Mapping[str, Any]):
        arrays = [given.get(name) for name in op.arrays]
        attributes = {name: given[name] for name in op.attributes if name in given}
        out = given.get("out")
        outputs = out if out is None or isinstance(out, tuple) else (out,)
        self.plan = plan(op, [_spec(a) for a in arrays], attributes, outputs and [_spec(a) for a in outputs])
        self.op = op
        self.free: list[Array] = []  # working memory that is used again

    def __call__(self, given: Mapping[str, Any]) -> Any:
        plan = self.plan
        inputs = [given.get(name) for name in self.op.inputs]
        out = given.get("out")
        if out is None:
            outputs = [_make(*made) for made in zip(plan.results, plan.orders, strict=True)]
        else:
            outputs = list(out) if type(out) is tuple else [out]
            _check_memory(self.op, inputs, outputs)
        arrays = inputs + outputs
        for number, order in plan.copies:
            arrays[number] = _packed(arrays[number], order)
        self._execute(arrays)
        for number, _ in plan.copies:
            if number >= len(inputs):
                np.copyto(outputs[number - len(inputs)], arrays[number])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _execute(self, arrays: list[Any]) -> None:
        plan = self.plan
        threads = plan.parts_max > 1
        if not plan.scratch_bytes:
            _executor()(plan.address, 0, threads, arrays)
            return
        try:
            memory = self.free.pop()
        except IndexError:
            memory = np.empty(plan.scratch_bytes + CACHE_LINE, np.uint8)
        scratch = memory.ctypes.data
        scratch += -scratch % CACHE_LINE
        status = _executor()(plan.address, scratch, threads, arrays)
        error = plan.error(scratch) if status else None
        self.free.append(memory)
        if error:
            raise error


def _spec(array: Array | None) -> Spec | None:
    return None if array is None else Spec(array.shape, array.dtype, array.strides)


def _check_memory(op: Operator, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> None:
    """Refuse results that cannot be written, or that overlap an input or each other in a harmful way."""
    for place, (result, output) in enumerate(zip(op.results, outputs, strict=True)):
        if not output.flags.writeable:
            raise ValueError(f"{op.name}: out for {result} is read-only, expected a writable array")
        if any(stride == 0 and size > 1 for stride, size in zip(output.strides, output.shape, strict=True)):
            raise ValueError(f"{op.name}: out for {result} repeats elements (stride 0), expected distinct ones")
        for name, array in zip(op.inputs, inputs, strict=True):
            if array is not None and np.may_share_memory(array, output):
                _check_overlap(op, result, output, name, array, name in op.in_place.get(result, ()))
        for other in outputs[:place]:
            if np.may_share_memory(output, other) and np.shares_memory(output, other):
                raise ValueError(f"{op.name}: the results in out overlap, expected separate arrays")


def _check_overlap(op: Operator, result: str, output: Array, name: str, array: Array, allowed: bool) -> None:
    same = output.ctypes.data == array.ctypes.data and output.strides == array.strides and output.dtype == array.dtype
    if not (same and allowed) and np.shares_memory(output, array):
        expected = f"{name} itself or separate memory" if allowed else "separate memory"
        raise ValueError(f"{op.name}: out for {result} overlaps {name}, expected {expected}")


@cache
def _executor() -> Any:
    from opgrad.cpu.execute import Executor

    return Executor()
