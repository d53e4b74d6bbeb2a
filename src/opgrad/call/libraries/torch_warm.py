"""Calls on CUDA tensors whose signature has been answered: one look-up leads from the arguments to the runner.

Names, library, form and plan are settled with the signature. What may differ between two calls of one signature is
asked at each: whether somebody watches, whether a gradient is wanted, which device is current.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from opgrad.call.libraries import torch_tensors
from opgrad.call.libraries.torch_tensors import PLAIN, is_direct, is_here, note_written
from opgrad.contract import Operator
from opgrad.contract.signature import is_plain

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


def key(args: Arguments, kwargs: Named) -> Hashable:
    """The signature of a call that may be answered so; None for any other."""
    if torch.compiler.is_compiling():
        return None
    values, of = (*args, *kwargs.values()), torch_tensors._cuda.memory.key
    tensors = [value for value in values if type(value) in PLAIN]
    if not tensors or not is_here(tensors[0]) or not is_direct(tensors):
        return None
    if not all(type(value) in PLAIN or is_plain(value) for value in values):
        return None
    try:
        return (*kwargs, *(of(value) if type(value) in PLAIN else (value, type(value)) for value in values))
    except RuntimeError:  # a tensor without storage
        return None


def call_of(op: Operator, given: Named, args: Arguments, kwargs: Named) -> Callable[[Arguments, Named], Any] | None:
    """What answers calls of a signature of which a plain one was answered; None if not by CUDA's kernels."""
    runner = torch_tensors._cuda.kept.get(torch_tensors._cuda._key(op, given))
    if runner is None:
        return None
    positions = dict(zip(op.parameters, range(len(args)), strict=False))
    sources = [(positions.get(name), name) for name in op.inputs]
    computed, finish = runner.computed, runner.finish

    def call(args: Arguments, kwargs: Named) -> Any:
        arrays = [kwargs.get(name) if place is None else args[place] for place, name in sources]
        out = kwargs.get("out")
        results = computed(arrays, out)[1]
        if out is not None:
            note_written(results)
        return finish(tuple(results))

    return call
