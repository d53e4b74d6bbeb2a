"""Calls of PyTorch in either way, and what torch.compile makes of them."""

import importlib
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import opgrad
from opgrad.bench.ways import GIVEN, Call, only
from opgrad.contract import FLOAT8

ML_DTYPES = ("bfloat16", *FLOAT8)  # those that NumPy and torch know from each other by their bits alone
TRIED = 3
RESULTS = frozenset({"out", "grad_input", "save_mean", "save_invstd"})  # keywords for memory that is given


class TorchCalls:
    """PyTorch with opgrad's number of threads, asked to work in a way."""

    def __init__(self, way: str):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten, self.way = self.torch.ops.aten, way

    @property
    def is_given(self) -> bool:
        """Whether results go into memory that is given."""
        return self.way == GIVEN

    def only(self, way: str) -> None:
        """Raise NoSuchWay unless that is the way which is asked for."""
        only(way, self.way)

    def into(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Callable[..., Any]:
        """The call with these arguments, which writes into the results named by keyword, or makes new ones.

        An overload of aten's that writes is then replaced by the plain one.
        """
        if self.is_given:
            return partial(function, *args, **keywords)
        packet = getattr(function, "overloadpacket", None)
        plain = {name: value for name, value in keywords.items() if name not in RESULTS}
        return partial(function if packet is None else packet.default, *args, **plain)


def tensor_of(torch: Any, array: Any) -> Any:
    """An array as a tensor in the same memory."""
    if isinstance(array, torch.Tensor):
        return array.detach()  # a tensor of its own, of which a peer may ask for a gradient
    if array.dtype.name in ML_DTYPES:
        bits = array.view(np.int16 if array.itemsize > 1 else np.int8)
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def compiled(call: Call) -> Call:
    """What torch.compile makes of a call, for these very tensors; it compiles when it is first called."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 calls PyTorch would compile no more

    def run() -> object:
        return call()

    made: Call = torch.compile(run, dynamic=False, fullgraph=True)
    return made


def fastest(*calls: Call) -> Call:
    """That of several calls for the same thing which takes the least time, tried in turn."""
    return min(calls, key=lambda call: min(timeit.repeat(call, number=1, repeat=TRIED)))
