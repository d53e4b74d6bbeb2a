"""The calls that compiled functions make by name, and their plans, in the form that the handler reads.

A compiled function may be kept on disk and loaded by another process, so it holds no address: only the digest of what
it calls, its operator, dtypes and attributes. Whoever traces the function, which JAX does in every process before it
looks for a compiled one, makes the digest known here. Keyed plans stay, as do JAX's compiled functions.
"""

import ctypes
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from opgrad.base.locks import settling
from opgrad.contract import Operator, Shape, Spec
from opgrad.cpu import plans
from opgrad.cpu.compiler import machine_code
from opgrad.cpu.compiler.structures import words
from opgrad.cpu.keyed import KeyedPlan
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime.plan import REPORT, execute
from opgrad.jax.handler import (
    BUCKETS,
    DIGEST_BYTES,
    HEADER,
    INTERNAL,
    INVALID_ARGUMENT,
    KEY_HEAD,
    MINOR_DEFINED,
    MOST_BUFFERS,
    MOST_KEY_WORDS,
    RESOURCE_EXHAUSTED,
    TABLE,
    UNIMPLEMENTED,
    Buffers,
    Failure,
    Table,
    handle,
)
from opgrad.ops.reference.primitive import STATE

CODES = {TypeError: INVALID_ARGUMENT, ValueError: INVALID_ARGUMENT}
CODES |= {NotImplementedError: UNIMPLEMENTED, MemoryError: RESOURCE_EXHAUSTED}


@dataclass(frozen=True)
class Called:
    """An operator as compiled functions call it.

    given: the names of the arrays that are given, with their shapes and dtypes as the call was traced. results: those
    of the results. attributes: the operator's own. name: what errors call the operator. is_part: whether other devices
    compute other parts at the same time, so that wrong numbers give NaN: the others would wait in the next collective
    for one that has raised an error, until XLA ends the process.
    """

    operator: Operator
    given: Mapping[str, Spec]
    results: Mapping[str, Spec]
    attributes: Mapping[str, Any]
    name: str
    is_part: bool = False

    @property
    def digest(self) -> str:
        """Text that stands for it in any process. It leaves out the sizes, which every call comes with."""
        op = self.operator
        every = (*self.given.items(), *self.results.items())
        kinds = [(name, len(spec.shape), spec.dtype.name) for name, spec in every]
        form = (op.name, op.kind, op.arrays, sorted(op.attributes.items(), key=str), sorted(self.attributes.items()))
        text = repr((kinds, form, self.name, self.is_part))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES // 2).hexdigest()

    def plan(self, inputs: Sequence[Shape], results: Sequence[Shape]) -> plans.Plan:
        """The plan for arrays of these shapes, which may have axes of vmap before those that were traced."""
        lead = {len(shape) - len(spec.shape) for shape, spec in zip(inputs, self.given.values(), strict=True)}
        lead |= {len(shape) - len(spec.shape) for shape, spec in zip(results, self.results.values(), strict=True)}
        (before,) = lead
        given = self._specs(inputs, self.given, before)
        made = self._specs(results, self.results, before)
        specs = [given.get(name) for name in self.operator.arrays]
        try:
            return plans.plan(self.operator, specs, dict(self.attributes), list(made.values()))
        except Exception as error:
            raise in_name_of(self.operator, self.name, error) from None

    def _specs(self, shapes: Sequence[Shape], traced: Mapping[str, Spec], before: int) -> dict[str, Spec]:
        """The plan's arrays: with classes on axis 1, the axes of vmap are further samples."""
        found = {}
        for (name, spec), shape in zip(traced.items(), shapes, strict=True):
            if name == STATE:
                shape = spec.shape  # in other words (`calls`)
            elif before and self.operator.kind == "classes":
                shape = (math.prod(shape[: before + 1]), *shape[before + 1 :])
            found[name] = Spec(shape, spec.dtype)
        return found


def in_name_of(op: Operator, name: str, error: Exception) -> Exception:
    """An error of an operator, as one of the function that the user has called; "": of the operator."""
    own, text = f"{op.name}: ", str(error)
    return type(error)(f"{name}: {text.removeprefix(own)}") if name and text.startswith(own) else error


_called: dict[bytes, Called] = {}  # by digest


def known(called: Called) -> str:
    """The digest of a call, by which the handler finds it from now on."""
    digest = called.digest
    _called[digest.encode()] = called
    return digest


# --- plans ----------------------------------------------------------------------------------------------------------


_keyed: dict[tuple[int, ...], KeyedPlan] = {}  # by key
_by_address: dict[int, tuple[Called, KeyedPlan]] = {}


def _prepare(key: int, bucket: int, found: int) -> int:
    """The handler calls this for a key that it does not know; writes the plan's address to `found`, or fails.

    Others may be walking through the bucket's plans in native code: a new one goes before them.
    """
    try:
        whole = tuple((ctypes.c_int64 * _at(key).value).from_address(key))
        with settling:
            if whole not in _keyed:
                _keyed[whole] = _keyed_plan(whole, _at(bucket).value)
                _at(bucket).value = _keyed[whole].address
            _at(found).value = _keyed[whole].address
        return 0
    except BaseException as error:
        return _failure(error)


_at = ctypes.c_int64.from_address


def _keyed_plan(key: tuple[int, ...], following: int) -> KeyedPlan:
    """The plan that a key stands for, with the operands' numbers of all buffers."""
    called, plan = _plan_for(key)
    operands = [*called.operator.arrays, *called.operator.results]
    places = words(operands.index(name) for name in (*called.given, *called.results))
    sizes = words(math.prod(spec.shape) * spec.dtype.itemsize for spec in plan.results)
    own = Buffers(len(operands), ctypes.addressof(places), ctypes.addressof(sizes) if called.is_part else 0)
    made = KeyedPlan(plan, key, own, following, places, sizes)
    _by_address[made.address] = called, made
    return made


def _plan_for(key: tuple[int, ...]) -> tuple[Called, plans.Plan]:
    """The call and the plan of a key."""
    if not key:
        expected = f"at most {MOST_BUFFERS} arrays with {MOST_KEY_WORDS - KEY_HEAD} dimensions in all"
        raise ValueError(f"opgrad.jax: a call has too many arrays or dimensions, expected {expected}")
    called = _called.get(bytes(words(key[1:KEY_HEAD])))
    if called is None:
        raise ValueError(
            "opgrad.jax: this function was compiled in another process and not traced in this one: trace it again"
        )
    shapes = list(_shapes(key[KEY_HEAD:]))
    return called, called.plan(shapes[: len(called.given)], shapes[len(called.given) :])


def _shapes(sizes: Sequence[int]) -> Iterator[Shape]:
    rest = iter(sizes)
    for rank in rest:
        yield tuple(itertools.islice(rest, rank))


def _refuse(keyed: int, report: int) -> int:
    """The handler calls this when a plan has refused its arguments, or its working memory could not be had (0)."""
    try:
        called, this = _by_address[keyed]
        told = list((ctypes.c_int64 * REPORT).from_address(report)) if report else None
        raise in_name_of(called.operator, called.name, this.plan.error(told))
    except BaseException as error:
        return _failure(error)


_failures: dict[int, Any] = {}  # the last one of each thread, which XLA copies at once


def _failure(error: BaseException) -> int:
    """The words of a failure, as the handler reads them."""
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), INTERNAL)
    text = ctypes.create_string_buffer(str(error).encode())
    told = Failure(code, ctypes.addressof(text))
    _failures[threading.get_ident()] = told, text
    return told.address


# --- what the handler finds by name -----------------------------------------------------------------------------------

_tables: list[Any] = []


def _table() -> Any:
    """The handler's table: made once, and kept even when the interpreter ends, because XLA may still run."""
    if not _tables:
        word = ctypes.c_int64
        functions = (ctypes.CFUNCTYPE(word, *[word] * count)(each) for each, count in ((_prepare, 3), (_refuse, 2)))
        start = ctypes.CFUNCTYPE(word)(threads.team)
        callbacks = [*functions, start]
        natives = [execute.address, threads.run.address, threads.team_word()]
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in callbacks]
        table = words([*Table(*addresses, *natives, _minor_version()).words, *[0] * BUCKETS])
        kept = (table, callbacks, _keyed, _by_address, _failures)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        _tables.append(table)
    return _tables[0]


def _minor_version() -> int:
    """The version of the FFI that this jaxlib has; XLA refuses handlers of some others."""
    with open(os.path.join(jax.ffi.include_dir(), *HEADER.split("/")), encoding="utf-8") as header:
        (found,) = (line for line in header if line.startswith(MINOR_DEFINED))
    return int(found.removeprefix(MINOR_DEFINED))


def handler_address() -> int:
    """The address of the handler, with its table in place."""
    with settling:
        machine_code.give_name(TABLE, ctypes.addressof(_table()))
        return handle.address
