"""Runs a kernel again and again on the same arrays, without an operator or its plan, as optimizers do in every step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgrad.contract.signature import Operand
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.plan import run_on, words
from opgrad.cpu.runtime.program import Program, Step
from opgrad.cpu.runtime.threads import threads_for

# For fewer bytes, waking a worker takes longer than the pass itself: 7 µs against 5 for 17,000 parameters.
LEAST_SHARED_BYTES = 1 << 20

Arguments = Callable[[list[Operand]], dict[str, Any]]


class RepeatedKernel:
    """A kernel over a number of units of contiguous arrays of any shapes, whose parts opgrad's threads share.

    arguments: makes the kernel's arguments from the operands of the arrays. each: the units of a part. traffic: the
    bytes that all units touch. least: the bytes from which on threads share the work.
    """

    def __init__(
        self, kernel: Kernel, arrays: Sequence[np.ndarray], units: int, each: int, traffic: int, arguments: Arguments,
        least: int = LEAST_SHARED_BYTES,
    ):  # fmt: skip
        operands = [Operand(number, array.dtype.name) for number, array in enumerate(arrays)]
        step = Step(kernel, units, arguments(operands), each)
        self._shared = step.parts > 1 and traffic >= least
        self._plan = np.array(words(Program([step])), np.int64)
        self._table = np.array([array.ctypes.data for array in arrays], np.int64)
        self._arrays, self._addresses = arrays, (self._plan.ctypes.data, self._table.ctypes.data)

    def __call__(self) -> None:
        run_on(*self._addresses, threads_for() if self._shared else (0, 0))


class Pass(RepeatedKernel):
    """A kernel over arrays of one length and dtype, float32 or float64, whose units are their elements."""

    def __init__(
        self, kernel: Kernel, arrays: Sequence[np.ndarray], arguments: Arguments, least: int = LEAST_SHARED_BYTES
    ):
        for array in arrays:
            _check(array, arrays[0])
        size, traffic = arrays[0].size, sum(array.nbytes for array in arrays)
        super().__init__(kernel, arrays, size, per_part(size, traffic), traffic, arguments, least)


def per_part(size: int, traffic: int) -> int:
    """How many elements make a part; every part but the last holds whole vectors."""
    return -(-partition.per_part(size, traffic / size) // 64) * 64 if size else 1


def _check(array: np.ndarray, model: np.ndarray) -> None:
    """Raise unless native code can step through the array."""
    if array.dtype not in (np.float32, np.float64) or array.dtype != model.dtype:
        raise TypeError(f"optimizer: an array has dtype {array.dtype}, expected float32 or float64, the same for all")
    if array.ndim != 1 or array.shape != model.shape:
        raise ValueError(f"optimizer: an array has shape {array.shape}, expected ({model.size},)")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("optimizer: an array is read-only or strided, expected contiguous memory to write to")
