"""A call or a step in PyTorch, by our function and by torch's: their time, and the memory that they take."""

import ctypes
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import opgrad
from opgrad.bench.cells import Cell
from opgrad.bench.measure import NEW, OURS, Call, interleaved
from opgrad.bench.peers import tried

TORCH = "torch"
Function = Callable[..., Any]  # of the leaves


class StepCase:
    """A cell's tensors, and the functions that compute it.

    leaves: the arguments; those that require it get gradients, in new memory. upstream: the gradient of the result,
    None for a loss. kept: bytes of the results and gradients. needed: bytes of these and of the arguments.
    longest: seconds of a step by name, beyond which a peer is not measured further.
    """

    leaves: list[Any]
    upstream: Any = None
    kept: int
    needed: int
    longest: Mapping[str, float] = {}

    def __init__(self, cell: Cell):
        import torch

        torch.set_num_threads(opgrad.get_num_threads())
        self.torch, self.cell = torch, cell
        self.dtype = getattr(torch, cell.dtype)
        self.generator = torch.Generator().manual_seed(0)

    def functions(self, names: Sequence[str]) -> dict[str, Function]:
        """Ours and those of these peers, by name."""
        raise NotImplementedError

    def error(self) -> float | None:
        """How far ours is off, in ulp; None if that is not measured."""
        return None

    def normal(self, size: Sequence[int], spread: float = 1.0) -> Any:
        """Normally distributed numbers."""
        return (self.torch.randn(size, generator=self.generator) * spread).to(self.dtype)

    def step(self, function: Function) -> Any:
        """Forward and, if anything wants a gradient, backward; returns the result."""
        for leaf in self.leaves:
            leaf.grad = None
        result = function(*self.leaves)
        if result.requires_grad:
            result.backward(self.upstream)
        return result


def measure(case_of: type[StepCase], cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """A cell of a result: times by name, and bytes of memory beyond arguments, results and gradients by name."""
    try:
        case = case_of(cell)
    except ImportError:
        return {**cell.known, "left_out": "needs PyTorch"}
    steps = {name: partial(case.step, function) for name, function in case.functions(names).items()}
    steps[OURS]()
    error = case.error()
    rivals, notes = tried([name for name in steps if name != OURS], steps.get, case.longest)
    calls: dict[str, Call] = {OURS: steps[OURS], **rivals}
    times = interleaved(calls, seconds)
    return {
        **cell.known,
        "group": cell.workload.group,
        "headline": False,
        **({} if error is None else {"error_ulp": error if math.isfinite(error) else None}),
        "beyond": {name: _beyond(case, call) for name, call in calls.items()},
        "needed": case.needed,
        "ways": {NEW: {"times": times, "notes": notes}},
    }


def _beyond(case: StepCase, call: Call) -> int | None:
    for leaf in case.leaves:
        leaf.grad = None
    grown = growth(call)
    return None if grown is None else max(0, grown - case.kept)


def growth(call: Call) -> int | None:
    """Bytes of resident memory that a call takes at most; None where the system cannot tell: Linux alone does."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was released before would not be seen to be taken
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return None
    before = _resident()
    call()
    return _resident("VmHWM") - before


def _resident(field: str = "VmRSS") -> int:
    """Bytes of this process's memory: now, or at most since it was last cleared (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))
