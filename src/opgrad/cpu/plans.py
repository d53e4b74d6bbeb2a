"""The one cache of plans: a signature's plan is made once in a process, whoever asks for it.

NumPy's functions, plans that users keep, tensors, lists, nodes of onnxruntime and functions compiled by JAX get their
plans here. Each of them keeps what leads from its own calls to a plan: dictionaries by arguments, entries, or lists of
words that native code searches (`Keyed`). The key of a plan is the problem that kernels are given. So an axis given as
-1 or as a number, a result that a call makes or brings, and arrays of NumPy or of another library lead to the same
plan, wherever these make no difference to kernels.
"""

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from opgrad.base.locks import settling
from opgrad.contract import DTYPES, Attributes, Operator, Spec, only, spread
from opgrad.contract.signature import Explain, Problem, is_plain, prepare
from opgrad.cpu import programs
from opgrad.cpu.compiler import decorators
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.target import LackingError, object_cache
from opgrad.cpu.compiler.words import Structure, at, atomic_load, load_word, structure, words
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime.plan import overlap_words, plan_words
from opgrad.ops import public_operators

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
    """All that is worked out before a call: the problem, and the words that native code reads.

    parts_max: the most parts of a step. explain: makes the error that a kernel reports. implementation: which kernels
    run. tables: arrays to which the words point.
    """

    problem: Problem
    words: Any
    scratch_bytes: int
    explain: Explain
    implementation: str
    parts_max: int = 1
    tables: Sequence[Any] = ()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def error(self, report: Sequence[int] | None, more: int = 0) -> Exception:
        """The exception for a run that wrote this report; None: it got no memory.

        more: bytes that it wanted in addition.
        """
        if report is None:
            wanted = self.scratch_bytes + more
            return MemoryError(f"{self.problem.operator.name}: cannot allocate {wanted} bytes of working memory")
        return self.explain(report[1], report[2])


RUNNERS = 1024  # signatures of which a public function, or a library of arrays, keeps what runs their plans
PLANS = Kept[Plan](4096)


def plan(op: Operator, specs: Sequence[Spec | None], attributes: Attributes, out: Sequence[Spec] | None = None) -> Plan:
    """The plan of a signature on the CPU. `out` describes results that the caller brings. Raises what `prepare` raises.

    Making a plan chooses its loops, compiles the kernels that they need, and writes all down as words.
    """
    return plan_for(prepare(op, specs, attributes, out))


def plan_for(problem: Problem) -> Plan:
    """The plan of a checked signature; see `plan`."""
    with settling:
        threads.join_openmp()
        key = _key(problem)
        found = PLANS.get(key)
        if found is None:
            found = _new_plan(problem)
            if key is not None and not decorators.is_unfinished():  # a plan that was made meanwhile may lack kernels
                PLANS.keep(key, found)
        return found


def _key(problem: Problem) -> Hashable:
    """All that a plan depends on; None if a value among the attributes may change.

    The text of the attributes tells 1 from 1.0 and True, and 0.0 from -0.0.
    """
    if not all(is_plain(each) or type(each) is range for each in problem.attributes.values()):
        return None
    each = (tuple(one.items()) for one in (problem.operands, problem.specs, problem.orders))
    sizes = problem.outer, problem.n, problem.inner
    return problem.operator, sizes, *each, problem.copies, repr(problem.attributes)


def _new_plan(problem: Problem) -> Plan:
    operator = problem.operator
    try:
        program = operator.kernel(programs.__name__)(problem)
        code = plan_words(program, *overlap_words(problem))
    except LackingError as error:
        raise LackingError(f"{operator.name}: {error}") from None
    kernels = dict.fromkeys(step.kernel.__name__ for step in program.steps)
    implementation = program.name or " + ".join(kernels) or "nothing to do"
    parts = max((step.parts for step in program.steps), default=1)
    explain = program.explain or _unexplained
    return Plan(problem, words(code), program.scratch_bytes, explain, implementation, parts, program.tables)


def _unexplained(position: int, value: int) -> Exception:
    return RuntimeError(f"opgrad: a kernel left a status that it does not explain ({position}, {value})")


@structure
class Keyed(Structure):
    """A plan with its key, in a list. The addresses of what belongs to it."""

    next: int  # the next one, or 0
    key: int  # the words of the key; the first is their number
    plan: int
    parts: int  # the most parts of one of the plan's steps
    own: int  # the caller's structure


class KeyedPlan:
    """A plan with its key, and the structure in which its caller has what else it knows of it."""

    def __init__(self, plan: Plan, key: tuple[int, ...], own: Any, following: int, *kept: Any):
        """following: the address of the next one. kept: blocks to which `own` points."""
        self.plan, self.key, self.own = plan, key, own
        self._key = words(key)
        self._kept = kept
        self._keyed = Keyed(following, ctypes.addressof(self._key), plan.address, plan.parts_max, own.address)
        self.address = self._keyed.address


@inline
def find_keyed(first: int, key: int) -> int:
    """The keyed plan that has this key, or 0. first: the address of the word that has the address of the first one."""
    address, count = atomic_load(first), load_word(key, 0)
    while address != 0:
        keyed, same = at(Keyed, address), 0
        while same < count and load_word(keyed.key, same) == load_word(key, same):
            same += 1
        if same == count:
            return address
        address = keyed.next
    return 0


class Call(NamedTuple):
    """A call of an operator; one of the kernels of its plan is the requested one.

    needs: the results that it computes, None for all. lists: the lengths of its lists of inputs and of results.
    specs: shape and dtype of each array, None for one left out.
    """

    operator: str
    needs: tuple[str, ...] | None
    lists: tuple[int, int] | None
    specs: tuple[tuple[tuple[int, ...], str] | None, ...]
    attributes: dict[str, Any]

    def compile(self, name: str) -> bool:
        """Compile the kernel whose object code has this name; returns whether the cache has it."""
        specs = [None if each is None else Spec(each[0], DTYPES[each[1]]) for each in self.specs]
        op = public_operators()[self.operator]
        if self.needs is not None:
            op = only(op, tuple(self.needs))
        elif self.lists is not None:
            op = spread(op, *self.lists)
        with decorators.noting([name]):
            plan(op, specs, self.attributes)
        return object_cache().read(name) is not None
