"""Writes a program as the words of a plan, and runs these words in native code.

A step's words are the address of its task, the number of its parts, and its arguments. A plan holds no addresses of
operands or of working memory. Each call fills them into its own copy of the arguments, so many threads can run one plan
at the same time.
"""

from collections.abc import Sequence
from struct import pack, unpack
from typing import Any, Final

from opgrad.contract.problem import Operand
from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.parameters import POINTERS, Float, Private, values
from opgrad.cpu.compiler.words import call_address, load_word, stack_words, store_word
from opgrad.cpu.runtime import scratch
from opgrad.cpu.runtime.abi import DATA
from opgrad.cpu.runtime.overlap import NOTHING, may_overlap
from opgrad.cpu.runtime.program import Address, Operands, Program, Step
from opgrad.cpu.runtime.scratch import STACK_WORDS, give, take
from opgrad.cpu.runtime.workspace import IN_USE, STATUS_WORDS, Scratch

# Words of a plan: the number of steps, the word at which they begin, the bytes of working memory that they need, and
# the source of that memory, as `scratch.source` gives it; then the words of `overlap.words`, by which overlaps are
# found.
STEPS, FIRST_STEP, SCRATCH_BYTES, SCRATCH_FROM, APART = range(5)
TASK, PARTS, ARGUMENTS, PATCHES, STEP = 0, 1, 2, 3, 4  # words of a step, before its arguments and its patches
MAX_ARGUMENTS: Final = 256
SCRATCH: Final = -1  # the operand number of scratch memory
TABLE: Final = -2  # the operand number of the table of all operands' addresses


def words(program: Program, apart: Sequence[int] = NOTHING) -> list[int]:
    """The plan's words. apart: the words of `overlap.words`, which say which operands must not overlap."""
    size = program.scratch_bytes
    result = [len(program.steps), APART + len(apart), size, scratch.source(size), *apart]
    for step in program.steps:
        result += step_words(step, program)
    return result


def dtypes_of(step: Step) -> list[str]:
    """The dtypes of the pointers that a step's kernel is given."""
    given = (each for name, kind in step.kernel.parameters.items() for each in values(kind, step.arguments[name]))
    return ["float32" if value is None else value.dtype for kind, value in given if kind in POINTERS]


def step_words(step: Step, program: Program) -> list[int]:
    """The words of a step: its own, its kernel's arguments, and its patches, which say what each call adds to them."""
    filled = _header(step, program)
    for name, kind in step.kernel.parameters.items():
        filled += values(kind, step.arguments[name])
    if len(filled) > MAX_ARGUMENTS:
        raise RuntimeError(f"opgrad: a kernel takes {len(filled)} words of arguments, expected at most {MAX_ARGUMENTS}")
    patches = [word for index, (kind, value) in enumerate(filled) for word in _patch(index, kind, value)]
    arguments = [_word(value, kind) for kind, value in filled]
    return [
        step.kernel.task(dtypes_of(step), step.interface),
        step.parts,
        len(filled),
        len(patches) // 2,
        *arguments,
        *patches,
    ]


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


def _patch(index: int, kind: Any, value: Any) -> list[int]:
    """The patch of the argument word at `index`: this index and the operand whose address a call adds."""
    if kind is Private or value is None:
        return []
    if isinstance(value, Operand):
        return [index, value.number]
    if isinstance(value, Operands):
        return [index, TABLE]
    return [index, SCRATCH] if isinstance(value, Scratch) else []


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
def run_plan(plan: int, operands: int, run: int, context: int, report: int) -> int:
    """Run a plan on a table of operands' addresses, with working memory that is taken for this run.

    Returns 0, NO_MEMORY, or the status that a step wrote to the working memory. In the last case the step's report is
    copied to the address `report`, unless that is 0. run: a C function run(context, task, arguments, parts) that shares
    the parts among threads; if it is 0, this thread runs all parts.
    """
    size, source, memory = load_word(plan, SCRATCH_BYTES), load_word(plan, SCRATCH_FROM), stack_words(STACK_WORDS)
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
def run_steps(plan: int, operands: int, scratch: int, run: int, context: int) -> int:
    """Run all steps in order, until one of them reports a status; return that status, or 0."""
    arguments = stack_words(MAX_ARGUMENTS)
    step = plan + 8 * load_word(plan, FIRST_STEP)
    if scratch:
        for word in range(STATUS_WORDS):
            store_word(scratch, word, 0)
    for _ in range(load_word(plan, STEPS)):
        count, patches = load_word(step, ARGUMENTS), load_word(step, PATCHES)
        filled = step + 8 * STEP
        for index in range(count):
            store_word(arguments, index, load_word(filled, index))
        for patch in range(patches):
            index, operand = load_word(filled, count + 2 * patch), load_word(filled, count + 2 * patch + 1)
            base = scratch if operand == SCRATCH else operands
            if operand >= 0:
                base = load_word(operands, operand)
            store_word(arguments, index, base + load_word(arguments, index))
        task, parts = load_word(step, TASK), load_word(step, PARTS)
        if run and parts > 1:
            call_address(run, context, task, arguments, parts)
        else:
            for part in range(parts):
                call_address(task, arguments, part)
        if scratch and load_word(scratch, 0):
            return load_word(scratch, 0)
        step = filled + 8 * (count + 2 * patches)
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
    if not trusted and may_overlap(plan + 8 * APART, operands, 0):
        return OVERLAP
    return run_plan(plan, operands, run, context, report)


def run_on(plan: int, operands: int, threads: tuple[int, int]) -> int:
    """Run a plan on a table of operands that do not overlap.

    Its status. threads: run and context, from `threads_for`.
    """
    return execute.call(plan, operands, 0, 0, True, *threads, 0)
