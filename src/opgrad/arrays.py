"""The NumPy front end: whose arrays these are, checks once for each signature, layout, allocation.

A signature is the shapes, strides, dtypes and attributes of a call. Its plan is made once and kept; a warm
call finds it, allocates the result and runs.
"""

import ctypes
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


def plan(op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None) -> Plan:
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
    """Raise TypeError or ValueError unless the arrays in `out` can hold the results."""
    for (name, spec), given in zip(results.items(), out, strict=True):
        if given.dtype != spec.dtype:
            raise TypeError(f"{op.name}: out for {name} has dtype {given.dtype.name}, expected {spec.dtype.name}")
        if given.shape != spec.shape:
            raise ValueError(
                f"{op.name}: out for {name} has shape {given.shape}, expected {spec.shape}, {op.results[name].as_in}"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(_strides(given), given.shape, strict=True)):
            raise ValueError(f"{op.name}: out for {name} repeats elements (stride 0), expected distinct ones")


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
    brought = dict(zip(results, out, strict=True)) if out else {}
    present = {name: spec for name, spec in {**inputs, **brought}.items() if spec is not None}
    loops = _loops(op, {n: s for n, s in present.items() if tensors[n].role == "element"}, attributes)
    orders = {name: _order(loops, tensors[name].role, len(spec.shape)) for name, spec in {**present, **results}.items()}
    operands, copies = _operands(loops, numbers, {**results, **present}, orders, set(present))
    size = sum(spec.dtype.itemsize * int(np.prod(spec.shape)) for spec in {**results, **present}.values())
    shapes = {name: spec.shape for name, spec in {**results, **present}.items()}
    every = {name: operands.get(name) for name in tensors}
    problem = Problem(loops.outer, loops.n, loops.inner, every, attributes, shapes, orders, size)
    program = op.kernel()(problem)
    code = words(program.steps, _pairs(op, numbers, present) if out else ())
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


def _pairs(op: Operator, numbers: Mapping[str, int], present: Mapping[str, Spec]) -> list[Any]:
    """The results in `out` with every other array that they must not overlap."""
    from opgrad.cpu.execute import Pair

    pairs = []
    for result in op.results:
        for name, spec in present.items():
            if numbers[name] < numbers[result]:
                output = present[result]
                same = spec.dtype == output.dtype and _strides(spec) == _strides(output)
                same &= name in op.in_place.get(result, ())
                pairs.append(Pair(numbers[result], numbers[name], _covered(output), _covered(spec), same))
    return pairs


def _covered(spec: Spec) -> tuple[int, int]:
    """The bytes that an array covers, counted from its data pointer."""
    if 0 in spec.shape:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(spec.shape, _strides(spec), strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + spec.dtype.itemsize


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
        try:
            runner = runners[_key(args, kwargs)]
        except (KeyError, TypeError):
            given = _bind(op, args, kwargs)
            if not _is_plain(op, args, kwargs, given):
                args, kwargs = (), given
            runner = find(args, kwargs, given)
        return runner(args, kwargs)

    def find(args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> _Runner:
        key = _key(args, kwargs)
        runner = runners.get(key)
        if runner is None:
            runner = _Runner(op, args, given)
            with lock:
                if len(runners) >= PLANS:
                    del runners[next(iter(runners))]
                runners[key] = runner
        return runner

    return call


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The signature of a call; TypeError if something in it cannot be part of a key, such as a list.

    Arrays give three or more entries, all else a value and its type, so the two are never confused.
    """
    key: list[Any] = [(a.shape, a.strides, a.dtype) if type(a) is np.ndarray else (a, type(a)) for a in args]
    for name, value in kwargs.items():
        kind = type(value)
        if kind is np.ndarray:
            key.append((name, value.shape, value.strides, value.dtype))
        elif kind is tuple and name == "out" and all(type(each) is np.ndarray for each in value):
            key.append((name, kind, *[(each.shape, each.strides, each.dtype) for each in value]))
        else:
            key.append((name, value, kind))
    return tuple(key)


def _is_plain(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the call's own arguments can be used, because binding converted none of them."""
    return all(given[name] is value for name, value in (*zip(op.parameters, args, strict=False), *kwargs.items()))


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
    if all(type(array) is np.ndarray for array in arrays):
        return out
    return tuple(array.view(np.ndarray) for array in arrays) if several else out.view(np.ndarray)


class _Runner:
    """Runs the calls of one signature: allocates results, makes copies where the plan asks for them."""

    def __init__(self, op: Operator, args: tuple[Any, ...], given: Mapping[str, Any]):
        from opgrad.cpu.execute import OVERLAP, caller, threads_for

        arrays = [given.get(name) for name in op.arrays]
        attributes = {name: given[name] for name in op.attributes if name in given}
        outputs = _as_tuple(given.get("out"))
        self.op = op
        self.plan = plan(op, [_spec(a) for a in arrays], attributes, outputs and [_spec(a) for a in outputs])
        positions = dict(zip(op.parameters, range(len(args)), strict=False))
        self.sources = [(positions.get(name), name) for name in op.arrays]
        self.out_position = positions.get("out")
        self.present = sum(1 << number for number, array in enumerate([*arrays, *op.results]) if array is not None)
        self.execute = caller(len(arrays) + len(op.results))
        self.threads_for, self.overlap = threads_for, OVERLAP
        self.free: list[tuple[Array, int]] = []  # working memory that is used again, with its address

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        plan = self.plan
        arrays: list[Any] = [kwargs.get(name) if place is None else args[place] for place, name in self.sources]
        inputs = len(arrays)
        out = kwargs.get("out")
        if out is None:
            arrays += [_make(spec, order) for spec, order in zip(plan.results, plan.orders, strict=True)]
        else:
            arrays += _as_tuple(out)
            _check_writable(self.op, arrays[inputs:])
            if plan.copies:
                _check_overlap(self.op, arrays)
        results = arrays[inputs:]
        for number, order in plan.copies:
            arrays[number] = _packed(arrays[number], order)
        self._execute(arrays, trusted=out is None)
        for number, _ in plan.copies:
            if number >= inputs:
                np.copyto(results[number - inputs], arrays[number])
        return results[0] if len(results) == 1 else tuple(results)

    def _execute(self, arrays: list[Any], trusted: bool) -> None:
        plan = self.plan
        run, context = self.threads_for(plan.parts_max)
        space = self._working_memory() if plan.scratch_bytes else None
        scratch = space[1] if space else 0
        status = self.execute(plan.address, scratch, run, context, trusted, self.present, *arrays)
        error = plan.error(scratch) if status > 0 else None
        if space:
            self.free.append(space)
        if error:
            raise error
        if status == self.overlap:
            _check_overlap(self.op, arrays)
            self._execute(arrays, trusted=True)

    def _working_memory(self) -> tuple[Array, int]:
        try:
            return self.free.pop()
        except IndexError:
            memory = np.empty(self.plan.scratch_bytes + CACHE_LINE, np.uint8)
            return memory, memory.ctypes.data + -memory.ctypes.data % CACHE_LINE


def _as_tuple(out: Any) -> Any:
    return out if out is None or type(out) is tuple else (out,)


def _spec(array: Array | None) -> Spec | None:
    return None if array is None else Spec(array.shape, array.dtype, array.strides)


def _check_writable(op: Operator, outputs: Sequence[Array]) -> None:
    for result, output in zip(op.results, outputs, strict=True):
        if not output.flags.writeable:
            raise ValueError(f"{op.name}: out for {result} is read-only, expected a writable array")


def _check_overlap(op: Operator, arrays: Sequence[Array | None]) -> None:
    """Raise ValueError if a result overlaps another array in a way that is not allowed."""
    names = [*op.arrays, *op.results]
    for place in range(len(op.arrays), len(arrays)):
        output, result = arrays[place], names[place]
        for name, array in zip(names[:place], arrays, strict=False):
            if array is None or output is None or not np.shares_memory(array, output):
                continue
            allowed = name in op.in_place.get(result, ())
            same = array.ctypes.data == output.ctypes.data and array.strides == output.strides
            if not (allowed and same and array.dtype == output.dtype):
                expected = f"{name} itself or separate memory" if allowed else "separate memory"
                raise ValueError(f"{op.name}: out for {result} overlaps {name}, expected {expected}")
