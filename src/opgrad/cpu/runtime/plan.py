"""Writes a program as the words of a plan, and runs these words in native code.

A step's words are the address of its task, the number of its parts, and its arguments. A plan holds no addresses of
operands or of working memory. Each call fills them into its own copy of the arguments, so many threads can run one plan
at the same time.
"""

import ctypes
from collections.abc import Sequence
from struct import pack, unpack
from typing import Any, Final

from opgrad.contract.signature import Operand
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.parameters import POINTERS, Float, Private, values
from opgrad.cpu.compiler.structures import Structure, at, behind, structure
from opgrad.cpu.compiler.words import call_address, load_word, stack_words, store_word
from opgrad.cpu.runtime import scratch
from opgrad.cpu.runtime.abi import DATA
from opgrad.cpu.runtime.overlap import Couple, Span, may_overlap
from opgrad.cpu.runtime.program import Address, Operands, Program, Step
from opgrad.cpu.runtime.scratch import STACK_WORDS, give, take
from opgrad.cpu.runtime.workspace import IN_USE, STATUS_WORDS, Scratch


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
    """What each call adds to an argument: the address of an operand, of SCRATCH, or of the TABLE."""

    argument: int
    operand: int


MAX_ARGUMENTS: Final = 256
SCRATCH: Final = -1  # the operand number of scratch memory
TABLE: Final = -2  # the operand number of the table of all operands' addresses


def words(program: Program, couples: Sequence[Couple] = (), spans: Sequence[Span] = ()) -> list[int]:
    """The plan's words. couples, spans: the operands that must not overlap, as `overlap.checked` gives them."""
    return joined([step_words(step, program) for step in program.steps], program.scratch_bytes, couples, spans)


def joined(steps: Sequence[list[int]], size: int, couples: Sequence[Couple], spans: Sequence[Span]) -> list[int]:
    """The words of a plan with these steps and so many bytes of working memory."""
    apart = [word for each in (*couples, *spans) for word in each.words]
    first = ctypes.sizeof(Plan) + 8 * len(apart)
    head = Plan(len(steps), first, size, scratch.source(size), len(couples), len(spans))
    return [*head.words, *apart, *(word for step in steps for word in step)]


def dtypes_of(step: Step) -> list[str]:
    """The dtypes of the pointers that a step's kernel is given."""
    given = (each for name, kind in step.kernel.parameters.items() for each in values(kind, step.arguments[name]))
    return ["float32" if value is None else value.dtype for kind, value in given if kind in POINTERS]


def step_words(step: Step, program: Program) -> list[int]:
    """The words of a step: its own, its kernel's arguments, and its patches, which say what each call adds to them."""
    filled = _header(step, program)
    for name, kind in step.kernel.parameters.items():
        filled += values(kind, step.arguments[name])
    patched = enumerate(_patched(kind, value) for kind, value in filled)
    patches = [Patch(index, operand) for index, operand in patched if operand is not None]
    arguments = [_word(value, kind) for kind, value in filled]
    return call_words(step.kernel.task(dtypes_of(step), step.interface), step.parts, arguments, patches)


def call_words(task: int, parts: int, arguments: Sequence[int], patches: Sequence[Patch]) -> list[int]:
    """The words of a step that calls a task with these arguments and patches."""
    if len(arguments) > MAX_ARGUMENTS:
        count = f"{len(arguments)} words of arguments"
        raise RuntimeError(f"opgrad: a kernel takes {count}, expected at most {MAX_ARGUMENTS}")
    head = StepHead(task, parts, len(arguments), len(patches))
    return [*head.words, *arguments, *(word for patch in patches for word in patch.words)]


def _header(step: Step, program: Program) -> list[tuple[Any, Any]]:
    """The words before a kernel's own arguments, as opgrad.cpu.compiler.parameters lays them out."""
    if not step.kernel.takes_units:
        return []
    header: list[Any] = [step.per_part, step.units]
    if step.kernel.takes_private:
        workspace: Any = program.workspace
        memory = Scratch(workspace.slots_begin), workspace.slot_bytes, Scratch(8 * IN_USE), program.slots
        header += memory
    return [(int, value) for value in header]


def _patched(kind: Any, value: Any) -> int | None:
    """The operand whose address a call adds to an argument; None if it adds nothing."""
    if kind is Private or value is None:
        return None
    if isinstance(value, Operand):
        return value.number
    if isinstance(value, Operands):
        return TABLE
    return SCRATCH if isinstance(value, Scratch) else None


def _word(value: Any, kind: Any) -> int:
    if value is None or isinstance(value, Operand | Operands):
        return 0
    if isinstance(value, Scratch):
        return value.offset
    if isinstance(value, Address):
        return value.value
    return int(unpack("q", pack("d", value))[0]) if kind is Float else int(value)


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
            base = scratch if operand == SCRATCH else operands
            if operand >= 0:
                base = load_word(operands, operand)
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


def run_on(plan: int, operands: int, threads: tuple[int, int]) -> int:
    """Run a plan on a table of operands that do not overlap.

    Its status. threads: run and context, from `threads_for`.
    """
    return execute.call(plan, operands, 0, 0, True, *threads, 0)
