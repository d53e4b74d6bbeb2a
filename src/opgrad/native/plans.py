"""A signature's plan on the CPU: its program turned into the words that native code runs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opgrad.contract import Attributes, Operator, Spec
from opgrad.contract.ranges import Explain
from opgrad.contract.signature import Prepared, prepare
from opgrad.locks import settling
from opgrad.native import background, overlap, threads
from opgrad.native.plan import words


@dataclass(eq=False)
class Plan:
    """All that is worked out before a call.

    `words` is what native code reads; `tables` are arrays to which they point.
    """

    operator: Operator
    results: tuple[Spec, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    scratch_bytes: int
    parts_max: int
    words: Any
    explain: Explain
    implementation: str
    bytes_moved: int
    tables: Sequence[Any]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def error(self, report: Sequence[int] | None, more: int = 0) -> Exception:
        """The exception for a run that wrote this report; None: it got no memory.

        more: bytes that it wanted in addition.
        """
        if report is None:
            wanted = self.scratch_bytes + more
            return MemoryError(f"{self.operator.name}: cannot allocate {wanted} bytes of working memory")
        return self.explain(report[1], report[2])


def plan(op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None) -> Plan:
    """The plan of a signature on the CPU: its loops chosen, what they need compiled, all put together.

    `out` describes results that the caller brings. Raises what `prepare` raises.
    """
    with settling:
        threads.join_openmp()
        return _plan(prepare(op, specs, attributes, out))


def _plan(prepared: Prepared) -> Plan:
    op = prepared.operator
    program = op.kernel()(prepared.problem)
    apart = overlap.words(prepared)
    if program.later is None:
        return _made(prepared, [program], words(program, apart))
    code, place = background.words(program, apart)
    found = _made(prepared, [program, program.later], code)
    background.go_over_later(found, program.later, place)
    return found


def _made(prepared: Prepared, programs: Sequence[Any], code: Sequence[int]) -> Plan:
    """The plan that runs the first of these programs, with working memory that is enough for each of them."""
    op, program = prepared.operator, programs[0]
    return Plan(
        op,
        tuple(prepared.results.values()),
        tuple(_unless_c_order(prepared.problem.orders[name]) for name in prepared.results),
        prepared.copies,
        max(each.scratch_bytes for each in programs),
        max((step.parts for each in programs for step in each.steps), default=1),
        (ctypes.c_int64 * len(code))(*code),
        program.explain or _unexplained,
        program.name or " + ".join(dict.fromkeys(step.kernel.__name__ for step in program.steps)),
        prepared.problem.bytes,
        [table for each in programs for table in each.tables],
    )


def _unexplained(position: int, value: int) -> Exception:
    return RuntimeError(f"opgrad: a kernel left a status that it does not explain ({position}, {value})")


def _unless_c_order(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order
