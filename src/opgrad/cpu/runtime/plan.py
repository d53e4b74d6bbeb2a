"""Programs, steps of kernels with their working memory; their words, which are a plan; and the runs of plans.

Working memory is laid out region by region before anything runs, as in oneDNN's scratchpad registry. A call has one
copy of a shared region, in which one step leaves results for the next. It has a copy of a private region for each part
that runs at the same time; the copy lies in a slot, which a part takes when it starts.

A step's words are the address of its task, the number of its parts, and its arguments. A plan holds no addresses of
operands or of working memory. Each call fills them into its own copy of the arguments, so many threads can run one plan
at the same time.

Results must not overlap other operands. Native code compares the ranges of bytes that operands cover: up to FEW
operands each pair, of more, as in an optimizer's lists, neighbours after a sort by address. Ranges that meet need not
share a byte, since arrays may have gaps; then `check_overlap` decides exactly, in Python, and raises the error.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from struct import pack, unpack
from typing import Any, Final

import numpy as np

from opgrad.base.locks import once
from opgrad.contract import DTYPES, Array, Operator, Spec
from opgrad.contract.signature import Explain, Operand, Problem, covered
from opgrad.cpu.compiler.decorators import Kernel, inline, native
from opgrad.cpu.compiler.parameters import POINTERS, Float, Private, values
from opgrad.cpu.compiler.words import (
    CACHE_LINE,
    Structure,
    at,
    behind,
    call_address,
    load_word,
    stack_words,
    store_word,
    structure,
)
from opgrad.cpu.runtime import pool
from opgrad.cpu.runtime.abi import DATA
from opgrad.cpu.runtime.pool import STACK_WORDS, give, take
from opgrad.cpu.runtime.threads import chosen_threads, threads_for

# The least bytes of a part: handing it to a thread pays from about 5 µs of work, which is 128 KiB at 25 GB/s.
PART_BYTES = 1 << 17
# The most bytes of a part: with larger ones, threads only end at more different times.
MAX_PART_BYTES = 1 << 20
DEFAULT_CACHE = 32 << 20


@functools.cache
def caches() -> dict[str, int]:
    """Bytes of the first core's data caches by level, "L1" first; empty where the system does not say."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K") and size[:-1].isdecimal():
            sizes[f"L{level}"] = int(size[:-1]) << 10
    return sizes


def last_level_cache() -> int:
    """The size of the largest cache in bytes."""
    return max(caches().values(), default=DEFAULT_CACHE)


def streams(size: int) -> bool:
    """Whether a call that touches `size` bytes writes past the cache. If all fits the cache, that would be slower."""
    return size > last_level_cache()


def units_per_part(units: int, unit_bytes: float) -> int:
    """How many units of work (rows, blocks, strips) make a part."""
    total = units * unit_bytes
    wanted = min(max(PART_BYTES, total / 64), MAX_PART_BYTES)
    return max(1, min(units, round(wanted / max(unit_bytes, 1))))


def ceil_div(units: int, per: int) -> int:
    """How many parts, each of `per` units, so many units make."""
    return -(-units // per)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


MAX_SLOTS: Final = 63
# bytes behind each region, for whole vectors at its end; it also keeps distances off powers of two
PADDING: Final = 256
STATUS_WORDS: Final = 16  # the first words: a status, 0 if all is right, two words that explain it, and IN_USE
IN_USE: Final = 8  # the word with a bit for each slot in use


@dataclass(frozen=True)
class Scratch:
    """A region of working memory; a private one counts from the start of a slot."""

    offset: int = 0
    dtype: str = "float32"
    private: bool = False

    def moved(self, elements: int) -> "Scratch":
        """The region that begins so many elements later."""
        return replace(self, offset=self.offset + elements * DTYPES[self.dtype].itemsize)


class Workspace:
    """Working memory of a program whose computations have this precision."""

    def __init__(self, precision: str = "float32"):
        self.precision = precision
        self.shared_bytes, self.private_bytes = 8 * STATUS_WORDS, 0

    def shared(self, count: int, dtype: str | None = None) -> Scratch:
        """Memory for so many numbers, of the precision unless a dtype is given."""
        dtype = dtype or self.precision
        start, self.shared_bytes = _behind(self.shared_bytes, count, dtype)
        return Scratch(start, dtype)

    def private(self, count: int, dtype: str | None = None) -> Scratch:
        """Memory for so many numbers for each part that runs at the same time."""
        dtype = dtype or self.precision
        start, self.private_bytes = _behind(self.private_bytes, count, dtype)
        return Scratch(start, dtype, private=True)

    @property
    def slots_begin(self) -> int:
        return round_up(self.shared_bytes, CACHE_LINE)

    @property
    def slot_bytes(self) -> int:
        return round_up(self.private_bytes, CACHE_LINE)

    def bytes(self, slots: int) -> int:
        """The bytes of the working memory with so many slots; 0 without a region."""
        is_used = self.shared_bytes > 8 * STATUS_WORDS or self.private_bytes
        return self.slots_begin + slots * self.slot_bytes if is_used else 0


def _behind(end: int, count: int, dtype: str) -> tuple[int, int]:
    """Where the region after one that ends at `end` starts and ends."""
    start = round_up(end, CACHE_LINE)
    return start, start + count * DTYPES[dtype].itemsize + PADDING


@dataclass(frozen=True)
class Address:
    """An argument: a fixed address of memory that outlives the program."""

    value: int
    dtype: str


@dataclass(frozen=True)
class Step:
    """A kernel with its arguments by parameter name, its number of units, and the units of each part.

    interface: for which the kernel is compiled; see `Kernel.task`.
    """

    kernel: Kernel
    units: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_part: int = 1
    interface: str = "task"

    @property
    def parts(self) -> int:
        return ceil_div(self.units, self.per_part)


def shared_out(
    kernel: Kernel, units: int, unit_bytes: float, arguments: Mapping[str, Any], interface: str = "task"
) -> Step:
    """A step whose parts are large enough to be handed to threads; each unit touches `unit_bytes` bytes."""
    return Step(kernel, units, arguments, units_per_part(units, unit_bytes), interface)


class Tables(list[Any]):
    """Arrays of numbers that kernels read through their addresses; the program keeps them alive."""

    def add(self, numbers: Any, dtype: str = "int64") -> int:
        """The address of a table with these numbers."""
        self.append(np.ascontiguousarray(numbers, dtype))
        return int(self[-1].ctypes.data)


class Program:
    """Steps in order, with their working memory and tables.

    explain: makes the error that a kernel reports. name: which kernels run, if their own names do not say it well.
    """

    explain: Explain | None = None
    name = ""

    def __init__(self, steps: Sequence[Step] = (), precision: str = "float32"):
        self.steps, self.workspace, self.tables = [*steps], Workspace(precision), Tables()

    @once
    def slots(self) -> int:
        """How many parts can have private memory at a time, once all steps are added.

        The plan is kept, and a later call may use more threads: all processors count.
        """
        parts = max((step.parts for step in self.steps if step.kernel.takes_private), default=0)
        return min(parts, MAX_SLOTS, max(os.cpu_count() or 1, chosen_threads()))

    @property
    def scratch_bytes(self) -> int:
        return self.workspace.bytes(self.slots) if self.steps else 0


FEW: Final = 32  # the most operands of which every pair is compared


@structure
class Couple(Structure):
    """A result and another operand that must not overlap, and the bytes that each covers, counted from its pointer."""

    a: int
    b: int
    a_low: int
    a_high: int
    b_low: int
    b_high: int
    same: int  # whether they may be the same memory


def couples_of(problem: Problem) -> list[Couple]:
    """The results with every other array that they must not overlap."""
    op, specs, found = problem.operator, problem.specs, []
    numbers = {name: number for number, name in enumerate((*op.inputs, *op.results))}
    for result in op.results:
        for name, spec in specs.items():
            if numbers[name] < numbers[result]:
                output = specs[result]
                same = (spec.dtype, spec.strides) == (output.dtype, output.strides)
                same &= name in op.in_place.get(result, ())
                found.append(Couple(numbers[result], numbers[name], *covered(output), *covered(spec), same))
    return found


@structure
class Span(Structure):
    """The range of bytes that an operand covers, counted from its pointer."""

    low: int
    high: int
    group: int  # operands of one group may be the same memory


def overlap_words(problem: Problem) -> tuple[list[Couple], list[Span]]:
    """What is compared in calls of a signature that bring their results: couples of operands, or many operands."""
    op, specs = problem.operator, problem.specs
    names, groups = [*op.inputs, *op.results], dict[str, str]()
    if len(names) <= FEW:
        return couples_of(problem), []
    for result, others in op.in_place.items():
        for name in others:
            a, b = specs.get(name), specs.get(result)
            if a is not None and b is not None and (a.dtype, a.strides) == (b.dtype, b.strides):
                groups[name] = result
    ends = [covered(specs[name]) if name in specs else (0, 0) for name in names]
    return [], [Span(*each, names.index(groups.get(name, name))) for name, each in zip(names, ends, strict=True)]


# --- in native code ------------------------------------------------------------------------------------------------


@inline
def touch(couple: Couple, a: int, b: int) -> bool:
    """Whether two operands at these addresses cover common bytes, unless they are the same memory and may be."""
    are_apart = a + couple.a_high <= b + couple.b_low
    are_apart |= b + couple.b_high <= a + couple.a_low
    return not are_apart and not (a == b and couple.same)


@inline
def may_overlap(couples: int, spans: int, first: int, operands: int, order: int) -> bool:
    """Whether operands at these addresses cover common bytes, other than operands that may be the same memory and are.

    couples, spans: how many there are; one of them is 0. first: the address of the first. order: the address of the
    operands' numbers, sorted by the addresses of the last call; they are sorted anew. If it is 0, more than FEW
    operands always count as overlapping.
    """
    for number in range(couples):
        couple = at(Couple, first, number)
        if touch(couple, load_word(operands, couple.a), load_word(operands, couple.b)):
            return True
    return spans > 0 and (order == 0 or _meet(spans, first, operands, order))


@inline
def _start(spans: int, operands: int, number: int) -> int:
    return load_word(operands, number) + at(Span, spans, number).low


@inline
def _sort(spans: int, count: int, operands: int, order: int) -> None:
    """Sort operands' numbers by their addresses. Insertion sort starts from the order of the last call.

    That order is usually right already, so this takes one comparison for each operand.
    """
    for place in range(1, count):
        number, free = load_word(order, place), place
        start = _start(spans, operands, number)
        while free > 0 and _start(spans, operands, load_word(order, free - 1)) > start:
            store_word(order, free, load_word(order, free - 1))
            free -= 1
        store_word(order, free, number)


@inline
def _meet(count: int, spans: int, operands: int, order: int) -> bool:
    """Whether two operands cover common bytes, unless they are the same memory and belong to one group."""
    group, first, reached = -1, 0, 0
    _sort(spans, count, operands, order)
    for place in range(count):
        number = load_word(order, place)
        span, address = at(Span, spans, number), load_word(operands, number)
        start, end = address + span.low, address + span.high
        if start < reached and start < end:
            same = start == first and end == reached and span.group == group
            if not same:
                return True
        if end > reached:
            group, first, reached = span.group, start, end
    return False


# --- exactly ---------------------------------------------------------------------------------------------------------


def check_overlap(op: Operator, arrays: Sequence[Array | None]) -> None:
    """Raise ValueError if a result overlaps another array in a way that is not allowed."""
    names = [*op.arrays, *op.results]
    for group in _close(arrays):
        for number, place in enumerate(group):
            output: Any = arrays[place]
            for other in group[:number] if place >= len(op.arrays) else ():
                result, name, array = names[place], names[other], arrays[other]
                if array is None or not np.shares_memory(array, output):
                    continue
                allowed = name in op.in_place.get(result, ())
                same = array.ctypes.data == output.ctypes.data and array.strides == output.strides
                if not (allowed and same and array.dtype == output.dtype):
                    expected = f"{name} itself or separate memory" if allowed else "separate memory"
                    raise ValueError(f"{op.name}: out for {result} overlaps {name}, expected {expected}")


def _close(arrays: Sequence[Array | None]) -> list[list[int]]:
    """Groups of arrays whose ranges of bytes meet, by their places; arrays of different groups share no memory.

    Comparing every pair of arrays exactly took 0.5 ms for the 65 arrays of a list operator.
    """
    spans = []
    for place, array in enumerate(arrays):
        if array is not None and array.size:
            low, high = covered(Spec(array.shape, array.dtype, array.strides))
            spans.append((array.ctypes.data + low, array.ctypes.data + high, place))
    groups: list[list[int]] = []
    reached = 0
    for start, end, place in sorted(spans):
        if start >= reached:
            groups.append([])
        groups[-1].append(place)
        reached = max(reached, end)
    return [sorted(group) for group in groups if len(group) > 1]


@structure
class Plan(Structure):
    """The first words of a plan. Couples or spans follow, by which overlaps are found, and then the steps."""

    steps: int
    first_step: int  # the distance in bytes
    scratch_bytes: int
    scratch_from: int  # the source of working memory, as `scratch.source` gives it
    couples: int
    spans: int


@structure
class StepHead(Structure):
    """The first words of a step. The words of its arguments follow, and then its patches."""

    task: int
    parts: int
    arguments: int
    patches: int


@structure
class Patch(Structure):
    """What each call adds to an argument: the address of an operand, or of SCRATCH."""

    argument: int
    operand: int


MAX_ARGUMENTS: Final = 256
SCRATCH: Final = -1  # the operand number of scratch memory


def plan_words(program: Program, couples: Sequence[Couple] = (), spans: Sequence[Span] = ()) -> list[int]:
    """The plan's words. couples, spans: the operands that must not overlap, as `overlap_words` gives them."""
    return joined([step_words(step, program) for step in program.steps], program.scratch_bytes, couples, spans)


def joined(steps: Sequence[list[int]], size: int, couples: Sequence[Couple], spans: Sequence[Span]) -> list[int]:
    """The words of a plan with these steps and so many bytes of working memory."""
    apart = [word for each in (*couples, *spans) for word in each.words]
    first = ctypes.sizeof(Plan) + 8 * len(apart)
    head = Plan(len(steps), first, size, pool.source(size), len(couples), len(spans))
    return [*head.words, *apart, *(word for step in steps for word in step)]


def dtypes_of(step: Step) -> list[str]:
    """The dtypes of the pointers that a step's kernel is given."""
    given = (each for name, kind in step.kernel.parameters.items() for each in values(kind, step.arguments[name]))
    return ["float32" if value is None else value.dtype for kind, value in given if kind in POINTERS]


def step_words(step: Step, program: Program) -> list[int]:
    """The words of a step: its own, its kernel's arguments, and its patches, which say what each call adds to them."""
    filled: list[tuple[Any, Any]] = []
    if step.kernel.takes_units:  # the words before the arguments, as opgrad.cpu.compiler.parameters lays them out
        filled += (int, step.per_part), (int, step.units)
        if step.kernel.takes_private:
            workspace = program.workspace
            memory = Scratch(workspace.slots_begin), workspace.slot_bytes, Scratch(8 * IN_USE), program.slots
            filled += ((int, value) for value in memory)
    for name, kind in step.kernel.parameters.items():
        filled += values(kind, step.arguments[name])
    arguments, patches = [], []
    for index, (kind, value) in enumerate(filled):
        operand = None
        if value is None:
            arguments.append(0)
        elif isinstance(value, Operand):
            arguments.append(0)
            operand = value.number
        elif isinstance(value, Scratch):
            arguments.append(value.offset)
            operand = SCRATCH
        elif isinstance(value, Address):
            arguments.append(value.value)
        else:
            arguments.append(int(unpack("q", pack("d", value))[0]) if kind is Float else int(value))
        if operand is not None and kind is not Private:  # a call adds the address of the operand
            patches.append(Patch(index, operand))
    return call_words(step.kernel.task(dtypes_of(step), step.interface), step.parts, arguments, patches)


def call_words(task: int, parts: int, arguments: Sequence[int], patches: Sequence[Patch]) -> list[int]:
    """The words of a step that calls a task with these arguments and patches."""
    if len(arguments) > MAX_ARGUMENTS:
        count = f"{len(arguments)} words of arguments"
        raise RuntimeError(f"opgrad: a kernel takes {count}, expected at most {MAX_ARGUMENTS}")
    head = StepHead(task, parts, len(arguments), len(patches))
    return [*head.words, *arguments, *(word for patch in patches for word in patch.words)]


OVERLAP, NO_MEMORY = -1, -2  # the status of a run that ran no kernel: arrays may overlap; working memory was refused
REPORT: Final = 3  # words in which a kernel reports bad input: its status, then the two arguments of `Explain`


@inline
def run_plan(plan: Plan, operands: int, run: int, context: int, report: int) -> int:
    """Run a plan on a table of operands' addresses, with working memory that is taken for this run.

    Returns 0, NO_MEMORY, or the status that a step wrote to the working memory. In the last case the step's report is
    copied to the address `report`, unless that is 0. run: a C function run(context, task, arguments, parts) that shares
    the parts among threads; if it is 0, this thread runs all parts.
    """
    size, source, memory = plan.scratch_bytes, plan.scratch_from, stack_words(STACK_WORDS)
    if source:
        memory = take(source, size)
        if memory == 0:
            return NO_MEMORY
    status = run_steps(plan, operands, memory if size else 0, run, context)
    if status and report:
        for word in range(REPORT):
            store_word(report, word, load_word(memory, word))
    if source:
        give(source, memory, size)
    return status


@inline
def run_steps(plan: Plan, operands: int, scratch: int, run: int, context: int) -> int:
    """Run all steps in order, until one of them reports a status; return that status, or 0."""
    arguments = stack_words(MAX_ARGUMENTS)
    next_step = plan.address + plan.first_step
    if scratch:
        for word in range(STATUS_WORDS):
            store_word(scratch, word, 0)
    for _ in range(plan.steps):
        step = at(StepHead, next_step)
        filled, patches = behind(step), behind(step) + 8 * step.arguments
        for index in range(step.arguments):
            store_word(arguments, index, load_word(filled, index))
        for number in range(step.patches):
            patch = at(Patch, patches, number)
            index, operand = patch.argument, patch.operand
            base = scratch if operand == SCRATCH else load_word(operands, operand)
            store_word(arguments, index, base + load_word(arguments, index))
        task, parts = step.task, step.parts
        next_step = at(Patch, patches, step.patches).address
        if run and parts > 1:
            call_address(run, context, task, arguments, parts)
        else:
            for part in range(parts):
                call_address(task, arguments, part)
        if scratch and load_word(scratch, 0):
            return load_word(scratch, 0)
    return 0


@native(8)
def execute(
    plan: int, operands: int, arrays: int, count: int, trusted: int, run: int, context: int, report: int
) -> int:
    """Run a plan on operands given as a table of addresses: the status of `run_plan`, or OVERLAP unless `trusted`.

    arrays: the address of `count` pointers to NumPy arrays, whose data addresses are first written to the table; 0 if
    the table holds them already.
    """
    if arrays:
        for number in range(count):
            store_word(operands, number, load_word(load_word(arrays, number) + DATA, 0))
    found = at(Plan, plan)
    if not trusted and may_overlap(found.couples, found.spans, behind(found), operands, 0):
        return OVERLAP
    return run_plan(found, operands, run, context, report)


# For fewer bytes, waking a worker takes longer than the pass itself: 7 µs against 5 for 17,000 parameters.
LEAST_SHARED_BYTES = 1 << 20

Arguments = Callable[[list[Operand]], dict[str, Any]]


class RepeatedKernel:
    """A kernel over a number of units of contiguous arrays of any shapes, whose parts opgrad's threads share.

    arguments: makes the kernel's arguments from the operands of the arrays. each: the units of a part. traffic: the
    bytes that all units touch. least: the bytes from which on threads share the work.
    """

    def __init__(
        self, kernel: Kernel, arrays: Sequence[np.ndarray], units: int, each: int, traffic: int, arguments: Arguments,
        least: int = LEAST_SHARED_BYTES,
    ):  # fmt: skip
        operands = [Operand(number, array.dtype.name) for number, array in enumerate(arrays)]
        step = Step(kernel, units, arguments(operands), each)
        self._shared = step.parts > 1 and traffic >= least
        self._plan = np.array(plan_words(Program([step])), np.int64)
        self._table = np.array([array.ctypes.data for array in arrays], np.int64)
        self._arrays, self._addresses = arrays, (self._plan.ctypes.data, self._table.ctypes.data)

    def __call__(self) -> None:
        run, context = threads_for() if self._shared else (0, 0)
        execute.call(*self._addresses, 0, 0, True, run, context, 0)  # on operands that do not overlap


class Pass(RepeatedKernel):
    """A kernel over arrays of one length and dtype, float32 or float64, whose units are their elements."""

    def __init__(
        self, kernel: Kernel, arrays: Sequence[np.ndarray], arguments: Arguments, least: int = LEAST_SHARED_BYTES
    ):
        for array in arrays:  # native code must be able to step through it
            wrong = f"optimizer: an array has dtype {array.dtype}"
            if array.dtype not in (np.float32, np.float64) or array.dtype != arrays[0].dtype:
                raise TypeError(f"{wrong}, expected float32 or float64, the same for all")
            if array.ndim != 1 or array.shape != arrays[0].shape:
                raise ValueError(f"optimizer: an array has shape {array.shape}, expected ({arrays[0].size},)")
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise ValueError("optimizer: an array is read-only or strided, expected contiguous memory to write to")
        size, traffic = arrays[0].size, sum(array.nbytes for array in arrays)
        super().__init__(kernel, arrays, size, per_part(size, traffic), traffic, arguments, least)


def per_part(size: int, traffic: int) -> int:
    """How many elements make a part; every part but the last holds whole vectors."""
    return -(-units_per_part(size, traffic / size) // 64) * 64 if size else 1
