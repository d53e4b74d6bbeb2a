"""A case in PyTorch: its arrays as tensors, calls in either way, and what torch.compile makes of them."""

import importlib
import math
import timeit
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np

import opgrad
from bench.case import Case
from bench.measure import GIVEN, NEW, Call, only

TRIED = 3
RESULTS = frozenset({"out", "grad_input", "save_mean", "save_invstd"})  # keywords for memory that is given


class Torch:
    """A case's arrays as PyTorch's tensors in the same memory, to be used with opgrad's number of threads in a way.

    A setup gets one of these and returns the call to be timed, or None for arguments that torch cannot take. Each call
    returns the operator's results, in its order, as far as torch has them, in new memory or in the case's arrays. It
    raises NoSuchWay where torch has no kernel that works this way, but for an `out` that copies. Indices are converted
    before the call, so that no conversion is timed.
    """

    def __init__(self, case: Case, way: str = GIVEN):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten, self.case, self.way = self.torch.ops.aten, case, way
        self.values = {name: self._converted(value) for name, value in case.values.items()}
        self.results = {name: self._converted(value) for name, value in case.results.items()}

    def _converted(self, value: Any) -> Any:
        """A list, an array or a tensor as tensors, any other argument as it is."""
        if isinstance(value, list):
            return [self._converted(each) for each in value]
        if isinstance(value, self.torch.Tensor):
            return value.detach()  # a tensor of its own, of which a peer may ask for a gradient
        if not isinstance(value, np.ndarray):
            return value
        from opgrad.call.libraries.torch_copies import shared

        return shared(value)

    def __getitem__(self, name: str) -> Any:
        """The argument or result of this name, or an attribute's default; None for an input that is not given."""
        found = self.results if name in self.results else self.values
        return found[name] if name in found else self.case.op.attributes.get(name)

    def named(self, given: Any) -> Any:
        """What a word names: "x" an argument or a result, "x.dtype" its dtype. Anything else stays as it is."""
        if not isinstance(given, str):
            return given
        name, _, attribute = given.partition(".")
        return getattr(self[name], attribute) if attribute else self[name]

    def has(self, name: str) -> bool:
        """Whether an input is given, or an attribute is neither None nor zero."""
        return isinstance(self[name], self.torch.Tensor) or bool(self[name])

    def rows(self, name: str, axis: int = -1) -> Any:
        """An argument or a result as rows, each of all axes from `axis` on."""
        shape = self[name].shape
        start = axis % len(shape)
        return self[name].view(math.prod(shape[:start]), math.prod(shape[start:]))

    def like(self, name: str) -> Any:
        """New memory for what comes between two calls, of the shape and dtype of an argument or a result."""
        return self.torch.empty_like(self[name])

    @property
    def is_given(self) -> bool:
        """Whether results go into memory that is given."""
        return self.way == GIVEN

    def only(self, way: str) -> None:
        """Raise NoSuchWay unless that is the way which is asked for."""
        only(way, self.way)

    def into(self, function: str, *given: Any, **keywords: Any) -> Callable[..., Any]:
        """The call with these arguments, which writes into the results named by keyword, or makes new ones.

        function: of torch, such as "softmax" or "aten.silu.out"; an overload of aten's that writes is replaced by the
        plain one where new memory is asked for. given, keywords: arguments; words name the case's, see `named`.
        Raises NoSuchWay where no result is named, and they have to go into memory that is given.
        """
        found: Any = self.torch.ops if function.startswith("aten.") else self.torch
        found = reduce(getattr, function.split("."), found)
        arguments = [self.named(each) for each in given]
        memory = {name: self.named(value) for name, value in keywords.items() if name in RESULTS}
        others = {name: value for name, value in keywords.items() if name not in RESULTS}
        if self.is_given and memory:
            return partial(found, *arguments, **others, **memory)
        self.only(NEW)
        packet = getattr(found, "overloadpacket", None)
        return partial(found if packet is None or not memory else packet.default, *arguments, **others)

    def fastest(self, *calls: Call) -> Call:
        """That of several calls for the same thing which takes the least time."""
        return fastest(*calls)


Setup = Callable[[Torch], Call | None]
Setups = Mapping[str, Setup]


def direct(function: str, *given: Any, **keywords: Any) -> Setup:
    """The setup of what one call of torch computes, see `Torch.into`."""
    return lambda t: t.into(function, *given, **keywords)


class Traced(Torch):
    """The same case with other tensors as its arguments, which torch.compile traces through a setup."""

    def __init__(self, like: Torch, values: Mapping[str, Any]):
        self.torch, self.aten, self.case, self.way = like.torch, like.aten, like.case, like.way
        self.values, self.results = {**like.values, **values}, like.results

    def fastest(self, *calls: Call) -> Call:
        """The first: while a call is traced, it takes no time."""
        return calls[0]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile makes of a call, for tensors of one shape; it compiles when it is first called."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 calls PyTorch would compile no more

    def run(*arrays: Any) -> object:
        return call(*arrays)

    made: Callable[..., Any] = torch.compile(run, dynamic=False, fullgraph=True)
    return made


def fastest(*calls: Call) -> Call:
    """That of several calls for the same thing which takes the least time, tried in turn."""
    return min(calls, key=lambda call: min(timeit.repeat(call, number=1, repeat=TRIED)))
