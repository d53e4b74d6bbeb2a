"""Writes the words of an entry, which describes calls of one signature to native code (`opgrad.call.calls`).

An entry is made from a call that Python has answered. Each operand of that call is identified as an object: it is an
argument, an item of a sequence among the arguments, or an object that the plan keeps. If it is none of these, Python
has made it during the call, and Python goes on answering calls of this signature.
"""

import ctypes
import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrad.call import calls
from opgrad.call.arguments import NotNative as NotNative
from opgrad.call.arguments import Tensors as Tensors
from opgrad.call.arguments import Values, flattened
from opgrad.contract import Spec
from opgrad.contract.lists import lists_of
from opgrad.contract.plain import RECORDS, fields, is_plain
from opgrad.cpu.runtime import scratch
from opgrad.cpu.runtime.overlap import FEW

UNLOCKED_FROM = 1 << 16  # bytes moved; giving the interpreter's lock up and taking it again costs some 50 ns
MOST_VALUES = 16


@dataclass(frozen=True)
class Answered:
    """How Python has answered a call.

    by: the runner (`native.runners`) whose plan was run, or a function that was called with `operands`, in that order.
    operands: inputs and results in the plan's order, None for one that was left out. In place of a view that repeats an
        array stands that array, and in place of an array of a record's numbers the record, as the call was given them.
    results: the operands that are returned, in order. new: whether the call allocated them.
    answer: what was returned. kept: objects other than arguments that every such call uses. watched: whether, before
        each call, the arrays' library is asked whether it must see the call.
    """

    by: Any
    operands: Sequence[Any]
    results: Sequence[Any]
    new: bool
    answer: Any
    kept: Sequence[Any] = ()
    watched: bool = True


tensors = Tensors()  # replaced by PyTorch's when that is imported


def know(found: Tensors) -> None:
    """Allow entries for calls on the arrays of this library, too."""
    global tensors
    tensors = found


def signature_of(by: Any, values: Sequence[Any], names: Sequence[str]) -> Any:
    """A hashable key; two calls of one function that need different entries have different keys."""
    places: dict[int, int] = {}
    same: list[int] = []
    rest: list[Any] = []
    for value in flattened(values):
        same.append(places.setdefault(id(value), len(same)))
        rest.append((type(value), value if is_plain(value) else _layout(value)))
    return by, tuple(names), tuple(same), tuple(rest)


def _layout(value: Any) -> Any:
    """The shape and strides of an array.

    A plan cannot stand for them: a repeated array has the plan of its whole shape.
    """
    if type(value) is np.ndarray:
        return value.shape, value.strides
    return tensors.layout(value) if type(value) in tensors.kinds else None


class Entry:
    """The words of one signature, and all that they point to."""

    def __init__(self, answered: Answered, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.answered, self.tensors = answered, tensors
        self.values, self.positional = [*args, *kwargs.values()], len(args)
        self.names = [sys.intern(name) for name in kwargs]
        self.by_plan = hasattr(answered.by, "plan")
        self.used = 0  # how many operands were found among the arguments
        if len(self.values) > MOST_VALUES:
            raise NotNative
        self.arguments = Values(tensors, self.by_plan, () if answered.new else answered.results)
        for place, value in enumerate(self.values):
            self.arguments.record(value, 0, place)
        self.places, self.kept = self.arguments.places, self.arguments.kept
        self.kept += [answered.by, getattr(answered.by, "plan", None), answered.kept]
        self.is_torch = any(type(each) in tensors.kinds for each in flattened(self.values))
        words = self._words()
        self._check_unchanged()
        self._kept = (ctypes.c_int64 * len(words))(*words)
        self.address = ctypes.addressof(self._kept)
        del self.answered, self.values, self.places, self.arguments  # the caller's arrays go

    def _check_unchanged(self) -> None:
        """Raise NotNative if another thread has given an array another shape since the plan was made for it."""
        if self.is_torch or not self.by_plan:
            return
        for spec, array in zip(self.answered.by.specs, self.answered.operands, strict=False):
            if spec is not None and type(array) is np.ndarray and not _is_still(array, spec):
                raise NotNative

    # --- what is done with them ---

    def _words(self) -> list[int]:
        answered = self.answered
        by_plan = self.by_plan
        operands = [word for each in answered.operands for word in self._operand(each)]
        if self.used != self.arguments.arrays:  # an array that is no operand is an attribute's value, which may change
            raise NotNative
        results = [word for number in range(len(answered.results)) for word in self._result(number)] if by_plan else []
        parts = {
            calls.NAMES_AT: [id(name) for name in self.names],
            calls.RECORDS_AT: [word for record in self.arguments.records for word in record],
            calls.OPERANDS_AT: operands,
            calls.RESULTS_AT: results,
            calls.ORDER_AT: range(len(answered.operands)),
        }
        header = {
            calls.POSITIONAL: self.positional,
            calls.NAMED: len(self.names),
            calls.RECORDS: len(self.arguments.records),
            calls.OWNER: id(self),
            calls.OPERANDS: len(answered.operands),
            calls.IS_TORCH: self.is_torch,
            calls.WATCHING: self.tensors.watchers(flattened(self.values)) if answered.watched else calls.NONE,
            **(self._of_plan() if by_plan else self._of_function()),
        }
        at = calls.ENTRY
        for word, part in parts.items():
            header[word], at = at, at + len(part)
        return [
            *(int(header.get(word, 0)) for word in range(calls.ENTRY)),
            *(w for part in parts.values() for w in part),
        ]

    def _of_plan(self) -> dict[int, int]:
        answered, plan = self.answered, self.answered.by.plan
        lists = lists_of(answered.by.op)
        if plan.copies or lists is None:
            raise NotNative
        self._check_answer(lists)
        out = calls.NONE
        if not answered.new and not lists:
            out = next((place for place, each in enumerate(self.values) if each is answered.answer), calls.NONE)
        returned = len(answered.results) if out == calls.NONE else 0
        return {
            calls.PLAN: plan.address,
            calls.SHARED: plan.parts_max > 1,
            calls.UNLOCKED: plan.bytes_moved >= UNLOCKED_FROM,
            calls.TRUSTED: answered.new,
            calls.OUT: out,
            calls.LISTS: lists,
            calls.RESULTS: returned,
            calls.TABLES_FROM: scratch.source(8 * calls.TABLES * len(answered.operands)),
        }

    def _check_answer(self, lists: int) -> None:
        """Raise NotNative if the call returned anything but the plan's results."""
        answered = self.answered
        if lists:
            return
        if answered.new:
            found = answered.answer if isinstance(answered.answer, tuple) else (answered.answer,)
            same = len(found) == len(answered.results) and all(map(operator.is_, found, answered.results))
        else:  # PyTorch counts how often a tensor was written to
            same = not self.is_torch and any(each is answered.answer for each in self.values)
        if not same:
            raise NotNative

    def _of_function(self) -> dict[int, int]:
        answered = self.answered
        if len(answered.operands) > FEW:
            raise NotNative
        item, whole = calls.NONE, answered.results
        if isinstance(whole, tuple) and answered.answer is not whole:
            item = next((place for place, each in enumerate(whole) if each is answered.answer), calls.NONE)
        if item == calls.NONE and answered.answer is not whole:
            raise NotNative
        return {calls.APPLY: id(answered.by), calls.ITEM: item}

    def _operand(self, operand: Any) -> tuple[int, int]:
        answered, by_plan = self.answered, self.by_plan
        if operand is None and by_plan:
            return calls.NOTHING, 0
        if by_plan and answered.new:
            for number, each in enumerate(answered.results):
                if operand is each:
                    return calls.NEW, number
        if by_plan and id(operand) in self.arguments.fields_at:
            return self._numbers(operand)
        if id(operand) in self.places:
            self.used += 1
            return self.places[id(operand)]
        if any(operand is each for each in answered.kept) or (not by_plan and is_plain(operand)):
            self.kept.append(operand)
            return calls.KEPT, id(operand)
        raise NotNative

    def _numbers(self, value: Any) -> tuple[int, int]:
        """The record of an operand that holds a record's numbers, with the words that `objects.write_numbers` reads."""
        kind = type(value)
        places = [fields(kind).index(each) for each in RECORDS[kind]]
        if len(places) > calls.MOST_NUMBERS:
            raise NotNative
        words = (ctypes.c_int64 * (2 + len(places)))(self.arguments.fields_at[id(value)], len(places), *places)
        self.kept.append(words)
        return calls.NUMBERS, ctypes.addressof(words)

    def _result(self, number: int) -> list[int]:
        answered = self.answered
        result = answered.results[number]
        if not answered.new:
            words = [calls.GIVEN, len(answered.operands) - len(answered.results) + number]
            return [1 + len(words), *words]
        make = answered.by.makers[number]
        if self.is_torch:
            plainly, words = self.tensors.is_plainly_made(make), self.tensors.of_result(result)
        else:
            plainly, words = _is_plainly_made(make), [id(result.dtype), result.ndim, *result.shape]
        self.kept += [make, result.dtype]
        return [2 + len(words), 0 if plainly else id(make), *words]


def _is_still(array: Any, spec: Spec) -> bool:
    """Whether an array, broadcast to the shape of `spec`, has its strides and dtype."""
    try:
        shown = array if array.shape == spec.shape else np.broadcast_to(array, spec.shape)
    except ValueError:
        return False
    return (shown.strides, shown.dtype) == (spec.strides, spec.dtype)


def _is_plainly_made(make: Callable[..., Any]) -> bool:
    """Whether a result is made by np.empty alone, so that native code can make it without Python."""
    return isinstance(make, functools.partial) and make.func is np.empty
