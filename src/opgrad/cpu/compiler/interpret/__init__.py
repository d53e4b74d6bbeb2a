"""Runs kernels in Python, one vector at a time, with operations in NumPy, so that a debugger can step through them.

`OPGRAD_INTERPRET=1` runs every kernel of the process so; the functions that call kernels stay compiled. Each load and
store is checked against the memory that a call was given: one outside raises IndexError with the address, where a
compiled kernel would read or write somebody else's bytes. A kernel runs some thousand times slower than compiled.

Results agree with compiled ones within the operators' tolerances, not always to the bit: a product that is added is
rounded twice here where float64 holds no exact product, and numbers that Numba makes float64 stay float32.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from opgrad.cpu.compiler import INTERPRETED, INTERPRETING
from opgrad.cpu.compiler.interpret import simd, words
from opgrad.cpu.compiler.interpret.regions import REGIONS, region_of
from opgrad.cpu.compiler.interpret.values import CheckedPointer
from opgrad.cpu.compiler.interpret.words import FUNCTIONS, STACK
from opgrad.cpu.compiler.parameters import (
    PER_PART,
    POINTERS,
    PRIVATE,
    PRIVATE_HEADER,
    UNITS,
    UNITS_HEADER,
    Float,
    Parameters,
    Private,
    fields,
)
from opgrad.cpu.compiler.words import CACHE_LINE

_callbacks: list[Any] = []  # kept, since plans hold their addresses


def task(kernel: Parameters, dtypes: Sequence[str], lanes: int) -> int:
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


def _given(kernel: Parameters, dtypes: list[str], arguments: int, part: int, lanes: int) -> Iterator[Any]:
    """The values of a kernel's parameters, from the words of its arguments as a compiled task reads them."""
    load = _word  # unchecked: arguments lie on a stack that belongs to no region
    start = UNITS_HEADER if kernel.takes_units or kernel.takes_private else 0
    if start:
        begin = part * load(arguments, PER_PART)
        yield range(begin, min(begin + load(arguments, PER_PART), load(arguments, UNITS)))
    if kernel.takes_part:
        yield part
    private = 0
    if kernel.takes_private:  # the first slot: parts run one after the other
        private = load(arguments, start + PRIVATE)
        start += PRIVATE_HEADER
    bits = 64 if "float64" in dtypes else 32
    storages, places = iter(dtypes), iter(range(start, 1 << 20))
    for kind in kernel.parameters.values():
        yield _value(kind, arguments, places, storages, bits, private, lanes)


def _word(address: int, index: int) -> int:
    return ctypes.c_int64.from_address(address + 8 * index).value


def _value(
    kind: Any, arguments: int, places: Iterator[int], storages: Iterator[str], bits: int, private: int, lanes: int
) -> Any:
    """One parameter, from the next words."""
    inside = fields(kind)
    if inside:
        values = [_value(each, arguments, places, storages, bits, private, lanes) for each in inside]
        return kind(*values) if isinstance(kind, type) else tuple(values)
    place = next(places)
    if kind is Float:
        return np.int64(_word(arguments, place)).view(np.float64)
    word = _word(arguments, place)
    if kind in POINTERS:
        return CheckedPointer(word + (private if kind is Private else 0), next(storages), bits, lanes)
    return word


def run(run_steps: Callable[..., int], plan: Any, operands: Sequence[Any]) -> list[int] | None:
    """Run a plan on arrays, None for one left out: kernels may touch these, the plan and its working memory alone.

    Returns what a kernel reports that could not do its work, as working memory begins then. Of operands that are given
    as addresses the extents are not known: then nothing is checked.
    """
    addresses = np.array([each.ctypes.data if isinstance(each, np.ndarray) else each or 0 for each in operands])
    scratch = np.zeros(plan.scratch_bytes + CACHE_LINE, np.uint8)
    start = scratch.ctypes.data + -scratch.ctypes.data % CACHE_LINE if plan.scratch_bytes else 0
    tables = [np.ctypeslib.as_array(each) for each in plan.tables]
    named = dict(zip([*plan.operator.arrays, *plan.operator.results], operands, strict=True))
    named |= {"working memory": scratch, "the operands": addresses, "the plan": np.ctypeslib.as_array(plan.words)}
    arrays = [(name, array) for name, array in named.items() if isinstance(array, np.ndarray) and array.size]
    regions = [region_of(array, name) for name, array in [*arrays, *(("a table", table) for table in tables)]]
    known = all(each is None or isinstance(each, np.ndarray) for each in operands)
    with REGIONS.allowed(regions if known else []):
        status = run_steps(plan.address, addresses.ctypes.data, start, 0, 0)
    place = start - scratch.ctypes.data
    return scratch[place : place + 24].view(np.int64).tolist() if status else None


if INTERPRETING:
    INTERPRETED.update({**simd.OPERATIONS, **words.OPERATIONS})
