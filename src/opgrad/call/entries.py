"""Makes entries, which describe calls of one signature to native code (`opgrad.call.calls`).

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

from opgrad.call import calls, objects
from opgrad.call.arguments import NoTensors, Values, flattened
from opgrad.call.arguments import NotNative as NotNative
from opgrad.contract import Spec
from opgrad.contract.declaration import lists_of
from opgrad.contract.signature import RECORDS, fields, is_plain
from opgrad.cpu.compiler.structures import several, words
from opgrad.cpu.runtime import pool
from opgrad.cpu.runtime.plan import FEW

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


tensors: Any = NoTensors()  # replaced by PyTorch's when that is imported


def know(found: Any) -> None:
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
    """An entry of native code, and all that it points to."""

    def __init__(self, answered: Answered, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.answered, self.tensors = answered, tensors
        self.values = [*args, *kwargs.values()]
        self.by_plan = hasattr(answered.by, "plan")
        self.used = 0  # how many operands were found among the arguments
        if len(self.values) > MOST_VALUES:
            raise NotNative
        self.arguments = Values(tensors, self.by_plan, () if answered.new else answered.results)
        for place, value in enumerate(self.values):
            self.arguments.describe(value, 0, place)
        self.places, self.kept = self.arguments.places, self.arguments.kept
        self.kept += [answered.by, getattr(answered.by, "plan", None), answered.kept]
        self.is_torch = any(type(each) in tensors.kinds for each in flattened(self.values))
        self._entry = self._made(len(args), [sys.intern(name) for name in kwargs])
        self.address = self._entry.address
        self._check_unchanged()
        del self.answered, self.values, self.places, self.arguments  # the caller's arrays go

    def _check_unchanged(self) -> None:
        """Raise NotNative if another thread has given an array another shape since the plan was made for it."""
        if self.is_torch or not self.by_plan:
            return
        for spec, array in zip(self.answered.by.specs, self.answered.operands, strict=False):
            if spec is not None and type(array) is np.ndarray and not _is_still(array, spec):
                raise NotNative

    # --- what is done with them ---

    def _at(self, block: Any) -> int:
        """The address of a block of memory, which is kept."""
        self.kept.append(block)
        return ctypes.addressof(block)

    def _made(self, positional: int, names: Sequence[str]) -> calls.Entry:
        answered, values, flat = self.answered, self.arguments.described, flattened(self.values)
        operands = [self._operand(each) for each in answered.operands]
        if self.used != self.arguments.arrays:  # an array that is no operand is an attribute's value, which may change
            raise NotNative
        self.kept.append(names)
        return calls.Entry(
            positional=positional,
            named=len(names),
            names=self._at(words(map(id, names))),
            values=len(values),
            first_value=self._at(several(objects.Value, values)),
            owner=id(self),
            is_torch=self.is_torch,
            watchers=self.tensors.watchers(flat) if answered.watched else calls.NONE,
            operands=len(operands),
            first_operand=self._at(several(calls.Operand, operands)),
            order=self._at(words(range(len(operands)))),
            **(self._of_plan() if self.by_plan else self._of_function()),
        )

    def _of_plan(self) -> dict[str, int]:
        answered, plan = self.answered, self.answered.by.plan
        lists = lists_of(answered.by.op)
        if plan.copies or lists is None:
            raise NotNative
        self._check_answer(lists)
        out = calls.NONE
        if not answered.new and not lists:
            out = next((place for place, each in enumerate(self.values) if each is answered.answer), calls.NONE)
        results = [self._result(number) for number in range(len(answered.results) if out == calls.NONE else 0)]
        return {
            "plan": plan.address,
            "shared": plan.parts_max > 1,
            "unlocked": plan.bytes_moved >= UNLOCKED_FROM,
            "trusted": answered.new,
            "out": out,
            "lists": lists,
            "results": len(results),
            "first_result": self._at(several(calls.Result, results)),
            "tables_from": pool.source(8 * calls.TABLES * len(answered.operands)),
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

    def _of_function(self) -> dict[str, int]:
        answered = self.answered
        if len(answered.operands) > FEW:
            raise NotNative
        item, whole = calls.NONE, answered.results
        if isinstance(whole, tuple) and answered.answer is not whole:
            item = next((place for place, each in enumerate(whole) if each is answered.answer), calls.NONE)
        if item == calls.NONE and answered.answer is not whole:
            raise NotNative
        return {"apply": id(answered.by), "item": item}

    def _operand(self, operand: Any) -> calls.Operand:
        answered, by_plan = self.answered, self.by_plan
        if operand is None and by_plan:
            return calls.Operand(calls.LEFT_OUT)
        if by_plan and answered.new:
            for number, each in enumerate(answered.results):
                if operand is each:
                    return calls.Operand(calls.NEW, result=number)
        if by_plan and id(operand) in self.arguments.fields_at:
            # An operand that holds a record's numbers.
            kind = type(operand)
            places = [fields(kind).index(each) for each in RECORDS[kind]]
            if len(places) > calls.MOST_NUMBERS:
                raise NotNative
            found = objects.Numbers(self.arguments.fields_at[id(operand)], len(places), self._at(words(places)))
            return calls.Operand(calls.NUMBERS, numbers=self._at(found))
        if id(operand) in self.places:
            self.used += 1
            return calls.Operand(calls.ARGUMENT, *self.places[id(operand)])
        if any(operand is each for each in answered.kept) or (not by_plan and is_plain(operand)):
            self.kept.append(operand)
            return calls.Operand(calls.KEPT, object=id(operand))
        raise NotNative

    def _result(self, number: int) -> calls.Result:
        answered = self.answered
        result = answered.results[number]
        if not answered.new:
            return calls.Result(len(answered.operands) - len(answered.results) + number)
        make = answered.by.makers[number]
        if self.is_torch:
            plainly, sizes = self.tensors.is_plainly_made(make), self.tensors.sizes(result)
            dtype, rank = self.tensors.dtype(result), len(sizes) // 2
        else:
            plainly, dtype, rank, sizes = _is_plainly_made(make), id(result.dtype), result.ndim, result.shape
        self.kept += [make, result.dtype]
        maker = 0 if plainly else id(make)
        return calls.Result(calls.NONE, maker, dtype, device=-1, rank=rank, sizes=self._at(words(sizes)))


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
