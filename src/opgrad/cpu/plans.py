"""The one cache of plans: a signature's plan is made once in a process, whoever asks for it.

NumPy's functions, plans that users keep, tensors, lists, nodes of onnxruntime and functions compiled by JAX get their
plans here. Each of them keeps what leads from its own calls to a plan: dictionaries by arguments, entries, or lists of
words that native code searches.

The key of a plan is the problem that kernels are given. So an axis given as -1 or as a number, a result that a call
makes or brings, and arrays of NumPy or of another library lead to the same plan, wherever these make no difference to
kernels.
"""

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opgrad.base.locks import settling
from opgrad.contract import Attributes, Operator, Spec
from opgrad.contract.signature import Explain, Prepared, is_plain, prepare
from opgrad.cpu import programs
from opgrad.cpu.compiler import decorators
from opgrad.cpu.compiler.packs import LackingError
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime.plan import overlap_words, words

T = TypeVar("T")


class Kept(Generic[T]):
    """At most so many values by key; the one that was kept first goes first.

    Looking a value up takes no lock. A fork waits until no value is being added.
    """

    def __init__(self, most: int):
        self.most = most
        self.values: dict[Hashable, T] = {}
        self.get = self.values.get

    def keep(self, key: Hashable, value: T) -> None:
        with settling:
            while len(self.values) >= self.most:
                del self.values[next(iter(self.values))]
            self.values[key] = value


@dataclass(eq=False)
class Plan:
    """All that is worked out before a call.

    `words` is what native code reads; `tables` are arrays to which they point.
    """

    operator: Operator
    results: tuple[Spec, ...]
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


RUNNERS = 1024  # signatures of which a public function, or a library of arrays, keeps what runs their plans
PLANS = Kept[Plan](4096)


def plan(op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None) -> Plan:
    """The plan of a signature on the CPU. `out` describes results that the caller brings. Raises what `prepare` raises.

    Making a plan chooses its loops, compiles the kernels that they need, and writes all down as words.
    """
    return plan_for(prepare(op, specs, attributes, out))


def plan_for(prepared: Prepared) -> Plan:
    """The plan of a checked signature; see `plan`."""
    with settling:
        threads.join_openmp()
        key = _key(prepared)
        found = PLANS.get(key)
        if found is None:
            found = _new_plan(prepared)
            if key is not None and not decorators.is_unfinished():  # a plan that was made meanwhile may lack kernels
                PLANS.keep(key, found)
        return found


def _key(prepared: Prepared) -> Hashable:
    """All that a plan depends on; None if a value among the attributes may change.

    The text of the attributes tells 1 from 1.0 and True, and 0.0 from -0.0.
    """
    problem = prepared.problem
    if not all(is_plain(each) or type(each) is range for each in problem.attributes.values()):
        return None
    sizes = problem.outer, problem.n, problem.inner
    each = problem.operands, problem.specs, problem.orders
    return prepared.operator, sizes, *(tuple(one.items()) for one in each), prepared.copies, repr(problem.attributes)


def _new_plan(prepared: Prepared) -> Plan:
    operator = prepared.operator
    try:
        program = operator.kernel(programs.__name__)(prepared.problem)
        code = words(program, *overlap_words(prepared))
    except LackingError as error:
        raise LackingError(f"{operator.name}: {error}") from None
    return Plan(
        operator,
        tuple(prepared.results.values()),
        prepared.copies,
        program.scratch_bytes,
        max((step.parts for step in program.steps), default=1),
        (ctypes.c_int64 * len(code))(*code),
        program.explain or _unexplained,
        program.name or " + ".join(dict.fromkeys(step.kernel.__name__ for step in program.steps)),
        prepared.problem.bytes,
        program.tables,
    )


def _unexplained(position: int, value: int) -> Exception:
    return RuntimeError(f"opgrad: a kernel left a status that it does not explain ({position}, {value})")
