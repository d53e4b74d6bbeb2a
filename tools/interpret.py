"""Runs kernels in Python, one vector at a time, with operations in NumPy, so that a debugger can step through them.

    python tools/interpret.py PROGRAM.py ARG…
    python -m pdb tools/interpret.py PROGRAM.py ARG…

A script may `import interpret` instead, before opgrad. What kernels are made of is replaced before a kernel is
imported, and calls go through Python; native functions that others call, as onnxruntime's nodes do, stay compiled. Each
load and store is checked against the memory that a call was given: one outside raises IndexError with the address,
where a compiled kernel would read or write somebody else's bytes. A kernel runs some thousand times slower than
compiled.

Results agree with compiled ones within the operators' tolerances, not always to the bit: a product that is added is
rounded twice here where float64 holds no exact product, and numbers that Numba makes float64 stay float32.
"""

import bisect
import ctypes
import functools
import operator
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from opgrad.cpu.compiler import parameters, simd, words
from opgrad.cpu.compiler.target import vector_lanes
from opgrad.cpu.compiler.words import CACHE_LINE


class Region(NamedTuple):
    """A range of bytes that a kernel may access, and the name of its owner."""

    start: int
    stop: int
    name: str


class Regions:
    """The memory of the calls that run now; without any, as inside of onnxruntime, nothing is checked."""

    def __init__(self) -> None:
        self._sorted: list[Region] = []

    @contextmanager
    def allowed(self, regions: Sequence[Region]) -> Iterator[None]:
        """Within this context, kernels may access these regions."""
        before = self._sorted
        self._sorted = sorted({*before, *regions})
        try:
            yield
        finally:
            self._sorted = before

    def add(self, region: Region) -> None:
        """Allow one more region until the call ends."""
        bisect.insort(self._sorted, region)

    def check(self, address: int, size: int) -> None:
        """Raise IndexError unless these bytes lie inside one region."""
        if not self._sorted or size <= 0:
            return
        for region in self._sorted[: bisect.bisect(self._sorted, (address + 1,))][::-1]:
            if region.start <= address and address + size <= region.stop:
                return
        near = min(self._sorted, key=lambda each: max(each.start - address, address - each.stop))
        has, place = near.stop - near.start, address - near.start
        raise IndexError(f"a kernel touches {size} bytes at {place} of {near.name}, which has {has}")


REGIONS = Regions()


def bytes_at(address: int, size: int) -> Any:
    """The bytes at an address, as memory that NumPy can read and write."""
    REGIONS.check(address, size)
    return (ctypes.c_uint8 * size).from_address(address)


def region_of(array: np.ndarray, name: str) -> Region:
    """The bytes that an array's elements lie in."""
    start, stop = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
    return Region(int(start), int(stop), name)


# How elements stand in memory: floats, then numbers that kernels compute with as floats, then indices.
STORAGE: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int32_number": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.uint8,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
}
INDICES = ("int64", "int32", "int16")


class CheckedPointer:
    """An address of elements, with the precision in which a kernel computes with them, and with its vectors' lanes."""

    def __init__(self, address: int, storage: str, bits: int, lanes: int = 0):
        self.address, self.storage, self.bits = address, storage, bits
        self.dtype = np.dtype(STORAGE[storage])
        self.element = np.dtype(f"{'i' if storage in INDICES else 'f'}{bits // 8}")
        self.lanes = lanes or vector_lanes(f"float{bits}")

    def __add__(self, elements: int) -> "CheckedPointer":
        return self.at_byte(int(elements) * self.dtype.itemsize)

    def at_byte(self, offset: int) -> "CheckedPointer":
        return CheckedPointer(self.address + int(offset), self.storage, self.bits, self.lanes)

    def read(self, i: int, count: int) -> np.ndarray:
        """`count` elements from element i on, in the precision of the computation."""
        raw = self.stored(i, count)
        if self.storage == "bool":
            raw = raw != 0
        return raw.astype(self.element)

    def stored(self, i: int, count: int) -> np.ndarray:
        """The same elements as they stand in memory, to read or to write."""
        size = self.dtype.itemsize
        return np.frombuffer(bytes_at(self.address + int(i) * size, count * size), self.dtype)

    def write(self, i: int, values: np.ndarray) -> None:
        """Write elements from element i on, rounded once."""
        self.stored(i, len(values))[:] = self._rounded(values)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        if self.storage == "bool":
            return values != 0
        if self.storage in INDICES:
            return values.astype(np.int64).astype(self.dtype)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            near = np.where(np.isnan(values), 0, np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max))
            return near.astype(self.dtype)
        if self.dtype.itemsize <= 2 and values.dtype == np.float64:
            values = _to_odd(values)
        return values.astype(self.dtype)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32 rounded to odd, so that a second rounding gives the value rounded once."""
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != values) & (bits & 1 == 0)
    step = np.where(np.abs(values) > np.abs(near.astype(np.float64)), 1, -1).astype(np.int32)
    return np.where(inexact, bits + step, bits).view(np.float32)


class Vector:
    """Lanes of one dtype: float32, float64, integers as wide, or the truth values of a mask."""

    def __init__(self, lanes: np.ndarray):
        self.lanes = lanes

    @property
    def bits(self) -> int:
        """The precision that helpers are chosen by."""
        return 8 * self.lanes.dtype.itemsize

    @property
    def element(self) -> np.dtype:
        """The dtype of a lane, as a pointer has that of an element."""
        return self.lanes.dtype

    def __repr__(self) -> str:
        return f"Vector({self.lanes})"

    def __neg__(self) -> "Vector":
        return Vector(-self.lanes)

    def __rshift__(self, count: Any) -> "Vector":
        """Brings in zeros, whatever the sign."""
        unsigned = np.dtype(f"u{self.lanes.dtype.itemsize}")
        shifted = self.lanes.view(unsigned) >> lanes_of(count, self).astype(unsigned)
        return Vector(shifted.view(self.lanes.dtype))


def lanes_of(value: Any, like: Vector) -> np.ndarray:
    """A vector's lanes, or a number in all of them."""
    if isinstance(value, Vector):
        return value.lanes
    dtype = like.lanes.dtype
    number = np.int64(value).astype(dtype) if dtype.kind == "i" else dtype.type(value)
    return np.full(len(like.lanes), number, dtype)


def lifted(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A binary operation on a vector and a vector, or a number and a vector."""

    def operate(a: Any, b: Any) -> Any:
        like = a if isinstance(a, Vector) else b
        if not isinstance(like, Vector):
            return apply(a, b)
        return Vector(apply(lanes_of(a, like), lanes_of(b, like)))

    return operate


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Floats as they divide, integers towards zero."""
    return np.trunc(a / b).astype(a.dtype) if a.dtype.kind == "i" else a / b


PAIRS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": _divide}
PAIRS |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
for name, apply in PAIRS.items():
    setattr(Vector, f"__{name}__", lifted(apply))
    setattr(Vector, f"__r{name}__", lifted(lambda a, b, apply=apply: apply(b, a)))
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Vector, f"__{name}__", lifted(getattr(operator, name)))
Vector.__hash__ = None  # type: ignore[assignment]


FUNCTIONS: dict[int, Callable[..., int]] = {}  # interpreted kernels by the addresses that plans hold
STACK: list[Any] = []  # the blocks of the kernels that run now


def _loads(kind: Any) -> Callable[[int, int], Any]:
    size = ctypes.sizeof(kind)
    return lambda address, index: kind.from_buffer(bytes_at(int(address) + int(index) * size, size)).value


def _stores(kind: Any) -> Callable[[int, int, Any], None]:
    size = ctypes.sizeof(kind)

    def store(address: int, index: int, value: Any) -> None:
        place = kind.from_buffer(bytes_at(int(address) + int(index) * size, size))
        place.value = float(value) if kind is ctypes.c_double else int(value)

    return store


def _copy_bytes(target: int, source: int, count: int) -> None:
    if count > 0:
        data = bytes(bytes_at(int(source), int(count)))
        ctypes.memmove(bytes_at(int(target), int(count)), data, int(count))


def _stack_words(count: int) -> int:
    block = (ctypes.c_int64 * (count + 8))()
    STACK.append(block)
    address = ctypes.addressof(block)
    address += -address % CACHE_LINE
    REGIONS.add(Region(address, address + 8 * count, "a kernel's stack"))
    return address


def _call_address(address: int, *arguments: int) -> int:
    """Run a kernel without native code between, so that the caller gets its exceptions."""
    return FUNCTIONS[int(address)](*map(int, arguments))


WORD_OPERATIONS: dict[str, Callable[..., Any]] = {
    "load_word": _loads(ctypes.c_int64),
    "load_i32": _loads(ctypes.c_int32),
    "load_f64": _loads(ctypes.c_double),
    "store_word": _stores(ctypes.c_int64),
    "store_i32": _stores(ctypes.c_int32),
    "store_u8": _stores(ctypes.c_uint8),
    "store_f64": _stores(ctypes.c_double),
    "copy_bytes": _copy_bytes,
    "stack_words": _stack_words,
    "call_address": _call_address,
}


MANTISSA = {32: 23, 64: 52}
SQRT_HALF = {32: 0x3F3504F3, 64: 0x3FE6A09E667F3BCD}


def _zeros(p: CheckedPointer) -> Vector:
    return Vector(np.zeros(p.lanes, p.element))


def _load_masked(p: CheckedPointer, i: int, mask: Vector, fill: float) -> Vector:
    lanes = lanes_of(fill, _zeros(p))
    for begin, end in _runs(mask.lanes):
        lanes[begin:end] = p.read(int(i) + begin, end - begin)
    return Vector(lanes)


def _store_masked(p: CheckedPointer, i: int, v: Vector, mask: Vector) -> None:
    for begin, end in _runs(mask.lanes):
        p.write(int(i) + begin, v.lanes[begin:end])


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """The neighbouring lanes for which a mask holds, as begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _store_streaming(p: CheckedPointer, i: int, v: Vector) -> None:
    address = p.address + int(i) * p.dtype.itemsize
    aligned = min(CACHE_LINE, p.lanes * p.dtype.itemsize)
    if address % aligned:
        raise IndexError(f"a kernel streams to address {address}, expected one aligned to {aligned} bytes")
    p.write(i, v.lanes)


def _to_line(p: CheckedPointer, i: int) -> int:
    left, size = -(p.address + int(i) * p.dtype.itemsize) % CACHE_LINE, p.dtype.itemsize
    return -1 if left % size else left // size


def _transpose_in(tile: CheckedPointer, stride: int, x: CheckedPointer, row: int, rows: int, columns: int) -> None:
    size = x.lanes // 2
    block = np.zeros((size, size), x.element)
    for r in range(min(size, rows)):
        block[r, : min(size, columns)] = x.read(r * row, min(size, columns))
    for c in range(size):
        tile.write(c * stride, block[:, c])


def _transpose_out(y: CheckedPointer, row: int, tile: CheckedPointer, stride: int, rows: int, columns: int) -> None:
    size = y.lanes // 2
    block = np.stack([tile.read(c * stride, size) for c in range(size)], axis=1)
    for r in range(min(size, rows)):
        y.write(r * row, block[r, : min(size, columns)])


def _fma(a: Any, b: Any, c: Any) -> Vector:
    like = next(each for each in (a, b, c) if isinstance(each, Vector))
    x, y, z = (lanes_of(each, like) for each in (a, b, c))
    if like.bits == 32:
        return Vector((x.astype(np.float64) * y + z).astype(np.float32))
    product = x * y
    with np.errstate(all="ignore"):
        # What the product of float64 was rounded by: Dekker's splitting (1971).
        whole = [v * 134217729.0 for v in (x, y)]
        a, c = (high - (high - v) for high, v in zip(whole, (x, y), strict=True))
        b, d = x - a, y - c
        lost = ((a * c - product) + a * d + b * c) + b * d
        total = product + z
        back = total - product
        correction = lost + ((product - (total - back)) + (z - back))
        return Vector(np.where(np.isfinite(total + correction), total + correction, total))


def _polynomial(v: Vector, coefficients: Sequence[float]) -> Vector:
    result = Vector(lanes_of(coefficients[0], v))
    for each in coefficients[1:]:
        result = _fma(result, v, each)
    return result


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a > b, a, b)


def _select(mask: Vector, a: Any, b: Any) -> Vector:
    like = a if isinstance(a, Vector) else b
    return Vector(np.where(mask.lanes, lanes_of(a, like), lanes_of(b, like)))


def _scale_by_power(v: Vector, n: Vector) -> Vector:
    finite = np.clip(np.nan_to_num(n.lanes, nan=0.0), -5000, 5000).astype(np.int32)
    return Vector(np.where(np.isnan(n.lanes), n.lanes, np.ldexp(v.lanes, finite)))


def _split(v: Vector) -> tuple[np.ndarray, np.ndarray]:
    """Exponents, and mantissas in [sqrt(1/2), sqrt(2))."""
    word = np.dtype(f"i{v.bits // 8}")
    bits = v.lanes.view(word)
    exponent = (bits - word.type(SQRT_HALF[v.bits])) >> MANTISSA[v.bits]
    return exponent, (bits - (exponent << MANTISSA[v.bits])).view(v.lanes.dtype)


def _folded(lanes: np.ndarray, combine: Callable[[Any, Any], Any]) -> Any:
    """The lower half combined with the upper until one lane is left."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = combine(lanes[:half], lanes[half:])
    return lanes[0]


def _progression(p: CheckedPointer, start: int, step: int) -> Vector:
    with np.errstate(over="ignore"):
        return Vector(np.int64(start) + np.arange(p.lanes // 4, dtype=np.int64) * np.int64(step))


def _word_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low = np.uint64(0xFFFFFFFF)
    return ((a.view(np.uint64) & low) * (b.view(np.uint64) & low)).view(np.int64)


def _one(p: CheckedPointer, i: int) -> Any:
    """An element as a number; an integer has all its bits, whatever the precision of the kernel's vectors."""
    return int(p.stored(i, 1)[0]) if p.storage in INDICES else p.read(i, 1)[0]


def _store_one(p: CheckedPointer, i: int, x: Any) -> None:
    if p.storage in INDICES:
        p.stored(i, 1)[0] = int(x)
    else:
        p.write(i, np.array([x]).astype(p.element))


def _nothing(*_: Any) -> None:
    """What only asks the processor for something."""


VECTOR_OPERATIONS: dict[str, Callable[..., Any]] = {
    "lanes": lambda p: p.lanes,
    "line": lambda p: CACHE_LINE // p.dtype.itemsize,
    "is_fine": lambda p: p.dtype.itemsize * 8 >= p.bits,
    "at_byte": CheckedPointer.at_byte,
    "address_of": lambda p: p.address,
    "to_line": _to_line,
    "prefetch": _nothing,
    "prefetch_line": _nothing,
    "each_row": lambda operands, row: tuple(data + row * step for data, step in operands),
    "load": lambda p, i: Vector(p.read(i, p.lanes)),
    "load_masked": _load_masked,
    "load_one": _one,
    "store": lambda p, i, v: p.write(i, v.lanes),
    "store_masked": _store_masked,
    "store_streaming": _store_streaming,
    "store_one": _store_one,
    "transpose_block_in": _transpose_in,
    "transpose_block_out": _transpose_out,
    "full": lambda p, value: Vector(lanes_of(value, _zeros(p))),
    "like": lambda v, value: Vector(lanes_of(value, v)),
    "number": lambda p, value: p.element.type(value),
    "first": lambda p, count: Vector(np.arange(p.lanes) < int(count)),
    "index": lambda p, i: Vector((int(i) + np.arange(p.lanes)).astype(f"i{p.bits // 8}")),
    "select": _select,
    "maximum": lifted(_maximum),
    "fma": _fma,
    "polynomial": _polynomial,
    "round_even": lambda v: Vector(np.rint(v.lanes)),
    "absolute": lambda v: Vector(np.abs(v.lanes)),
    "sqrt": lambda v: Vector(np.sqrt(v.lanes)),
    "copy_sign": lambda v, sign: Vector(np.copysign(v.lanes, sign.lanes)),
    "interleave": lambda a, b: tuple(map(Vector, np.split(np.stack([a.lanes, b.lanes], axis=1).reshape(-1), 2))),
    "add_each": lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
    "add_products": lambda sums, factors, v: tuple(_fma(x, v, s) for x, s in zip(factors, sums, strict=True)),
    "scale_by_power": _scale_by_power,
    "scales_at_once": lambda v: False,
    "exponent_of": lambda v: Vector(_split(v)[0].astype(v.lanes.dtype)),
    "mantissa_of": lambda v: Vector(_split(v)[1]),
    "power_of": lambda v: Vector((v.lanes.view(f"i{v.bits // 8}") << MANTISSA[v.bits]).view(v.lanes.dtype)),
    "first_lane": lambda v: v.lanes[0],
    "reduce_add": lambda v: _folded(v.lanes, operator.add),
    "reduce_add_wide": lambda v, w: _folded(v.lanes.astype(np.float64) + w.lanes, operator.add),
    "reduce_max": lambda v: _folded(v.lanes, _maximum),
    "progression": _progression,
    "word_product": lifted(_word_product),
    "interleave_words": lambda *each: Vector(np.stack([v.lanes.astype(np.int32) for v in each], axis=1).reshape(-1)),
}


def _on_each(one: Callable[..., Any]) -> Callable[..., Any]:
    return lambda several, *rest: tuple(one(each, *rest) for each in several)


def _on_pairs(store: Callable[..., None]) -> Callable[..., None]:
    def each(pointers: Sequence[CheckedPointer], i: int, values: Sequence[Any], *mask: Vector) -> None:
        for p, value in zip(pointers, values, strict=True):
            store(p, i, value, *mask)

    return each


VECTOR_OPERATIONS |= {each: _on_each(VECTOR_OPERATIONS[one]) for one, each in simd.ON_EACH.items()}
VECTOR_OPERATIONS |= {each: _on_pairs(VECTOR_OPERATIONS[one]) for one, each in simd.ON_PAIRS.items()}

_callbacks: list[Any] = []  # kept, since plans hold their addresses


def task(kernel: parameters.Parameters, dtypes: Sequence[str], lanes: int) -> int:
    """The address of a kernel for pointers of these dtypes: calling it runs the kernel's Python function.

    lanes: the elements of its vectors; as many as `vector_lanes` says if it is 0.

    An exception reaches the caller of `run`. It cannot pass through native code: where that calls the address, as
    onnxruntime's threads do, the exception goes to sys.unraisablehook, which prints it.
    """

    def run(arguments: int, part: int) -> int:
        before = len(STACK)
        try:
            with np.errstate(all="ignore"):
                kernel.function(*_given(kernel, list(dtypes), arguments, part, lanes))
        finally:
            del STACK[before:]
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(run)
    _callbacks.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value or 0
    FUNCTIONS[address] = run
    return address


def _given(kernel: parameters.Parameters, dtypes: list[str], arguments: int, part: int, lanes: int) -> Iterator[Any]:
    """The values of a kernel's parameters, from the words of its arguments as a compiled task reads them."""

    def load(address: int, index: int) -> int:  # unchecked: arguments lie on a stack that belongs to no region
        return ctypes.c_int64.from_address(address + 8 * index).value

    start = parameters.UNITS_HEADER if kernel.takes_units or kernel.takes_private else 0
    if start:
        begin = part * load(arguments, parameters.PER_PART)
        yield range(begin, min(begin + load(arguments, parameters.PER_PART), load(arguments, parameters.UNITS)))
    if kernel.takes_part:
        yield part
    private = 0
    if kernel.takes_private:  # the first slot: parts run one after the other
        private = load(arguments, start + parameters.PRIVATE)
        start += parameters.PRIVATE_HEADER
    bits = 64 if "float64" in dtypes else 32
    storages, places = iter(dtypes), count(start)

    def value(kind: Any) -> Any:
        """One parameter, from the next words."""
        if inside := parameters.fields(kind):
            return kind(*map(value, inside)) if isinstance(kind, type) else tuple(map(value, inside))
        word = load(arguments, next(places))
        if kind in parameters.POINTERS:
            return CheckedPointer(word + (private if kind is parameters.Private else 0), next(storages), bits, lanes)
        return np.int64(word).view(np.float64) if kind is parameters.Float else word

    yield from map(value, kernel.parameters.values())


def run(plan: Any, operands: Sequence[Any]) -> list[int] | None:
    """Run a plan on arrays, None for one left out: kernels may touch these, the plan and its working memory alone.

    Returns what a kernel reports that could not do its work, as working memory begins then. Of operands that are given
    as addresses the extents are not known: then nothing is checked.
    """
    from opgrad.cpu.runtime.plan import Plan, run_steps

    addresses = np.array([each.ctypes.data if isinstance(each, np.ndarray) else each or 0 for each in operands])
    scratch = np.zeros(plan.scratch_bytes + CACHE_LINE, np.uint8)
    start = scratch.ctypes.data + -scratch.ctypes.data % CACHE_LINE if plan.scratch_bytes else 0
    tables = [np.ctypeslib.as_array(each) for each in plan.tables]
    named = dict(zip(plan.problem.operands, operands, strict=True))
    named |= {"working memory": scratch, "the operands": addresses, "the plan": np.ctypeslib.as_array(plan.words)}
    arrays = [(name, array) for name, array in named.items() if isinstance(array, np.ndarray) and array.size]
    regions = [region_of(array, name) for name, array in [*arrays, *(("a table", table) for table in tables)]]
    known = all(each is None or isinstance(each, np.ndarray) for each in operands)
    with REGIONS.allowed(regions if known else []):
        status = run_steps(words.at(Plan, plan.address), addresses.ctypes.data, start, 0, 0)
    place = start - scratch.ctypes.data
    return scratch[place : place + 24].view(np.int64).tolist() if status else None


# --- what takes the place of compiled code ---------------------------------------------------------------------------


def _in_python(operation: Callable[..., Any], meaning: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that Python may call, and that is the same one for the compiler of native functions."""
    return functools.wraps(operation)(lambda *arguments: meaning(*arguments))


def _by_precision(single: Callable[..., Any], double: Callable[..., Any]) -> Callable[..., Any]:
    """A helper that calls one of the two by the precision of its vectors."""

    def chosen(*given: Any) -> Any:
        return (single if next(each.bits for each in given if hasattr(each, "bits")) == 32 else double)(*given)

    return chosen


def _task(kernel: Any, dtypes: Sequence[str], interface: str = "task") -> int:
    """In place of `Kernel.task`."""
    key = (interface, *dtypes)
    if key not in kernel._tasks:
        kernel._tasks[key] = task(kernel, key[1:], parameters.lanes_of(interface))
    return kernel._tasks[key]


def _execute(runner: Any, operands: Sequence[Any], trusted: bool) -> None:
    """In place of `HostRunner.execute`."""
    if not trusted:
        runner.check_overlap(operands)
    if said := run(runner.plan, runner.views(operands)):
        raise runner.plan.error(said)


def _replace() -> None:
    """Replace what kernels are made of and how calls run them, before modules are imported that have kernels."""
    early = [each for each in sys.modules if each.startswith(("opgrad.cpu.kernels", "opgrad.cpu.runtime.plan"))]
    if early:
        raise ImportError(f"interpret: {early[0]} is imported already, expected this module to be the first")
    for module, operations in ((simd, VECTOR_OPERATIONS), (words, WORD_OPERATIONS)):
        for name, meaning in operations.items():
            setattr(module, name, _in_python(getattr(module, name), meaning))
    parameters.by_precision = _by_precision
    from opgrad.cpu.compiler import decorators
    from opgrad.cpu.runtime import abi

    decorators.Kernel.task = _task  # type: ignore[method-assign]
    abi.SUPPORTED = False  # no native calls
    from opgrad.call.arrays import HostRunner

    HostRunner.execute = _execute  # type: ignore[method-assign]


_replace()

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
