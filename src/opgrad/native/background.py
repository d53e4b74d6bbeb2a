"""Compiles kernels in the background, and switches plans to them when they are compiled.

Such a plan has the words of two programs. The first is one whose kernels are compiled already; the second, the later
one, is faster. One word of the plan tells which of them runs. So a plan is switched between two calls by one store, and
whoever keeps its address need not know. Both programs give the same bits.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from opgrad.cpu.compiler import native, processes, sources
from opgrad.cpu.compiler.memory import atomic_store
from opgrad.cpu.compiler.requests import Made, Request
from opgrad.cpu.programs.program import Program
from opgrad.locks import in_child, settling
from opgrad.native.plan import FIRST_STEP, STEPS, dtypes_of, step_words
from opgrad.native.plan import words as plan_words

VARIABLE = "OPGRAD_FUSION"
LATER, NOW, NEVER = CHOICES = ("later", "now", "never")
NOTHING = (0, 0, 0, 0)  # the words of a step without parts


class Job(NamedTuple):
    """A plan that shall be switched to a program when the requests are met. place: where the program's words begin."""

    plan: Any  # a weak reference
    program: Program
    place: int
    requests: Sequence[Request]


def chosen(later: Program | None, program: Callable[[], Program]) -> Program:
    """The program with which a plan begins: `later` if its kernels are compiled, else `program`, to be replaced by it.

    OPGRAD_FUSION=now: the kernels of `later` are compiled before the first call runs. never: `later` is not used.
    Raises ValueError for any other value but "later", the default.
    """
    choice = os.environ.get(VARIABLE, LATER)
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} is {choice!r}, expected one of {', '.join(CHOICES)}")
    if later is None or choice == NEVER:
        return program()
    if choice == NOW or not lacking(later):
        return later
    return replace(program(), later=later if processes.count() else None)


def lacking(program: Program) -> list[Request]:
    """The requests for those kernels of a program that the cache lacks.

    Each of its kernels must know how it is `made`.
    """
    found: list[Request] = []
    with native.noting() as missing:
        for step in program.steps:
            dtypes = dtypes_of(step)
            if not step.kernel.task(dtypes):
                form = f"task({','.join(dtypes)})"
                name: Any = sources.object_name(step.kernel.function, form)
                made: Any = step.kernel.made
                found.append((name, Made._make((*made, form))))
    return found if missing else []


def words(program: Program, apart: Sequence[int]) -> tuple[list[int], int]:
    """The words of a plan with a program and its later one, and the word at which the later one begins."""
    later: Any = program.later
    count = max(len(program.steps), len(later.steps))
    code = plan_words(program, apart)
    code += NOTHING * (count - len(program.steps))
    code[STEPS] = count
    with native.noting():
        return code + _steps(later, count), len(code)


def _steps(program: Program, count: int) -> list[int]:
    found = [word for step in program.steps for word in step_words(step, program)]
    return found + list(NOTHING) * (count - len(program.steps))


@native.native(2)
def _publish(address: int, value: int) -> int:
    atomic_store(address, value)
    return 0


def _go_over(job: Job) -> None:
    """Switch the plan to the later program, if the plan still exists and all kernels were compiled."""
    plan = job.plan()
    if plan is None or lacking(job.program):
        return
    with settling:
        found = _steps(job.program, plan.words[STEPS])
        plan.words[job.place : job.place + len(found)] = found
        _publish.call(plan.address + 8 * FIRST_STEP, job.place)
        plan.implementation = job.program.name


# --- the thread that waits for the compiler ---------------------------------------------------------------------------

_jobs: SimpleQueue[Job] = SimpleQueue()
_thread: threading.Thread | None = None
_open = 0  # the number of jobs that are not finished


def go_over_later(plan: Any, program: Program, place: int) -> None:
    """Switch a plan to a program as soon as its kernels are compiled, which another process does in the background."""
    global _thread, _open
    requests = lacking(program)
    with settling:
        _open += 1
        _jobs.put(Job(weakref.ref(plan), program, place, requests))
        if _thread is None:
            _thread = threading.Thread(target=_work, name="opgrad-background", daemon=True)
            _thread.start()


def _work() -> None:
    global _open
    while True:
        job = _jobs.get()
        try:
            with suppress(Exception):  # after an error the plan keeps its first program, which gives the same results
                _compile(job.requests)
                _go_over(job)
        finally:
            with settling:
                _open -= 1


def _compile(requests: Sequence[Request]) -> None:
    if found := processes.compilers(beside=True):
        found.wait(found.add(requests))


def wait(seconds: float = float("inf")) -> bool:
    """Wait, at most so many seconds, until no plan is to be switched any more. Returns whether that is so."""
    end = time.monotonic() + seconds
    while _open and time.monotonic() < end:
        time.sleep(processes.LOOK / 10)
    return not _open


def _forget_after_fork() -> None:
    """A forked child lacks the thread. Its plans keep their first programs; the next job starts a new thread."""
    global _jobs, _thread, _open
    _jobs, _thread, _open = SimpleQueue(), None, 0


in_child(_forget_after_fork)
