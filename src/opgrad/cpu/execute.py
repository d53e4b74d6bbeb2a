"""Plans in the form that native code runs: a few words of memory for each step.

A step is a task, the number of its parts and its arguments. The addresses of operands and of scratch memory
are filled in at each call, so one plan serves many threads at once.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import pack, unpack
from typing import Any, Final

from opgrad.cpu import parallel
from opgrad.cpu.memory import call_address, load_word, stack_words, store_word
from opgrad.cpu.native import Kernel, inline, native
from opgrad.cpu.simd import Float, Pointer
from opgrad.problem import Operand, Pair
from opgrad.ranges import Explain

# Words of a plan: the number of steps, of pairs that must not overlap, where the steps begin; then the pairs.
STEPS, PAIRS, FIRST_STEP, HEADER = 0, 1, 2, 3
# Words of a pair: two operands, the bytes that each covers around its pointer, whether they may be the same.
PAIR: Final = 7
TASK, PARTS, ARGUMENTS, PATCHES, STEP = 0, 1, 2, 3, 4  # words of a step, before its arguments and its patches
MAX_ARGUMENTS: Final = 64
MAX_OPERANDS: Final = 8
SCRATCH: Final = -1  # the operand number of scratch memory
SLOTS: Final = 8  # scratch word: one bit for each working space in use
STATUS_WORDS: Final = 16  # scratch starts with a status (0: fine), what it is about, and SLOTS


@dataclass(frozen=True)
class Scratch:
    """Scratch memory from a byte offset on."""

    offset: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Step:
    """One kernel with its arguments by parameter name, to be run for part = 0 … parts - 1."""

    kernel: Kernel
    parts: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What a kernel function returns: steps, their scratch memory, and the words for what may go wrong."""

    steps: Sequence[Step]
    scratch_bytes: int = 0
    explain: Explain | None = None


def words(steps: Sequence[Step], pairs: Sequence[Pair]) -> list[int]:
    """The plan's words."""
    result = [len(steps), len(pairs), 0]
    for pair in pairs:
        result += [pair.result, pair.other, *pair.result_bytes, *pair.other_bytes, pair.same]
    result[FIRST_STEP] = len(result)
    for step in steps:
        result += _step_words(step)
    return result


def _step_words(step: Step) -> list[int]:
    arguments, patches, dtypes = [], [], []
    for place, (name, kind) in enumerate(step.kernel.parameters.items()):
        value = step.arguments[name]
        if isinstance(value, Operand):
            patches += [place, value.number]
        elif isinstance(value, Scratch):
            patches += [place, SCRATCH]
        if kind == Pointer:
            dtypes.append("float32" if value is None else value.dtype)
        arguments.append(_word(value, kind))
    task = step.kernel.task(dtypes)
    return [task, step.parts, len(arguments), len(patches) // 2, *arguments, *patches]


def _word(value: Any, kind: str) -> int:
    if value is None or isinstance(value, Operand):
        return 0
    if isinstance(value, Scratch):
        return value.offset
    return int(unpack("q", pack("d", value))[0]) if kind == Float else int(value)


@inline
def run_steps(plan: int, operands: int, scratch: int, run: int, context: int) -> int:
    arguments = stack_words(MAX_ARGUMENTS)
    step = plan + 8 * load_word(plan, FIRST_STEP)
    if scratch:
        for word in range(STATUS_WORDS):
            store_word(scratch, word, 0)
    for _ in range(load_word(plan, STEPS)):
        count, patches = load_word(step, ARGUMENTS), load_word(step, PATCHES)
        given = step + 8 * STEP
        for place in range(count):
            store_word(arguments, place, load_word(given, place))
        for patch in range(patches):
            place, operand = load_word(given, count + 2 * patch), load_word(given, count + 2 * patch + 1)
            base = scratch if operand == SCRATCH else load_word(operands, operand)
            store_word(arguments, place, base + load_word(arguments, place))
        task, parts = load_word(step, TASK), load_word(step, PARTS)
        if run and parts > 1:
            call_address(run, context, task, arguments, parts)
        else:
            for part in range(parts):
                call_address(task, arguments, part)
        if scratch and load_word(scratch, 0):
            return load_word(scratch, 0)
        step = given + 8 * (count + 2 * patches)
    return 0


@native(5)
def execute(plan: int, operands: int, scratch: int, run: int, context: int) -> int:
    """Run a plan on operands given as an array of addresses; 0, or the status that a step left in scratch.

    `run` is a C function run(context, task, arguments, parts); 0 runs all parts here.
    """
    return run_steps(plan, operands, scratch, run, context)


@inline
def overlap(plan: int, operands: int) -> bool:
    """Whether a pair covers common bytes without being the same memory where that is allowed."""
    pair = plan + 8 * HEADER
    for _ in range(load_word(plan, PAIRS)):
        a, b = load_word(operands, load_word(pair, 0)), load_word(operands, load_word(pair, 1))
        apart = a + load_word(pair, 3) <= b + load_word(pair, 4) or b + load_word(pair, 5) <= a + load_word(pair, 2)
        if not apart and not (a == b and load_word(pair, 6)):
            return True
        pair += 8 * PAIR
    return False


OVERLAP: Final = -1  # the status of a call that did nothing because its arrays may overlap


@native(6 + MAX_OPERANDS)
def execute_arrays(
    plan: int, scratch: int, run: int, context: int, trusted: int, present: int,
    a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int,
) -> int:  # fmt: skip
    """The same on NumPy array objects; `present` has a bit for each that is one. OVERLAP unless `trusted`."""
    operands = stack_words(MAX_OPERANDS)
    store_word(operands, 0, load_word(a + DATA, 0) if present & 1 else 0)
    store_word(operands, 1, load_word(b + DATA, 0) if present & 2 else 0)
    store_word(operands, 2, load_word(c + DATA, 0) if present & 4 else 0)
    store_word(operands, 3, load_word(d + DATA, 0) if present & 8 else 0)
    store_word(operands, 4, load_word(e + DATA, 0) if present & 16 else 0)
    store_word(operands, 5, load_word(f + DATA, 0) if present & 32 else 0)
    store_word(operands, 6, load_word(g + DATA, 0) if present & 64 else 0)
    store_word(operands, 7, load_word(h + DATA, 0) if present & 128 else 0)
    if not trusted and overlap(plan, operands):
        return OVERLAP
    return run_steps(plan, operands, scratch, run, context)


# An ndarray's first field behind the object header is its data pointer; PyArray_DATA reads it inline, so its place
# is part of NumPy's binary interface. Reading it there costs 0.1 µs an array, `ndarray.ctypes` 0.6 µs.
DATA: Final = object.__basicsize__


@cache
def caller(count: int) -> Any:
    """`execute_arrays` for Python callers with `count` arrays; those it leaves out are never read."""
    integer = ctypes.c_int64
    return ctypes.CFUNCTYPE(integer, *[integer] * 6, *[ctypes.py_object] * count)(execute_arrays.address)


def threads_for() -> tuple[int, int]:
    """The arguments `run` and `context` for work that is shared out to threads."""
    pool = parallel.pool()
    return (parallel.run.address, pool) if pool else (0, 0)
