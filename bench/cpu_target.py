"""This machine's CPU as a target of the benchmark: one cell measured, into what a result file holds of it.

How fast memory is, a copy with opgrad's own vectors and threads says, of as many bytes as a cell moves. Of losses and
attention in PyTorch, by our function and by torch's, the time of a step is measured, and the memory that it takes.
"""

import ctypes
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import opgrad
from bench import cells, peers
from bench.case import Case, GraphCase
from bench.cells import ATTENTION, GRAPH, LOSSES, PLAIN, STEPS, WORKLOADS, Cell, Workloads
from bench.measure import GIVEN, NEW, OURS, Call, finite, interleaved, raced
from bench.peers import COMPILE, tried
from opgrad.cli.examples.arguments import aligned, error_in_ulp
from opgrad.contract import DTYPES

MOST_COPIED = 1 << 28  # bytes moved: beyond the cache, more of them are not slower


@lru_cache(maxsize=8)  # the cells with the largest arrays share one
class Copy:
    """A call that copies: half of `traffic` bytes are read, half written; `bytes` is what that comes to.

    It is scale with a factor of 1. Like every kernel, it writes past the cache when the data exceed it.
    """

    def __init__(self, traffic: int):
        self.source, self.target = (aligned((max(1, traffic // 8),), DTYPES["float32"]) for _ in range(2))
        self.source.fill(1.0)
        self.bytes = self.source.nbytes + self.target.nbytes
        self.copy = partial(opgrad.scale, self.source, np.ones(1, np.float32), out=self.target)


TORCH = "torch"
WHOLE, CHUNKED = "torch, linear_cross_entropy", "torch, in chunks"
SPREAD = 0.05  # of a linear layer's numbers, so that logits are of the size of a model's
IGNORED = -100
Function = Callable[..., Any]  # of the leaves


class StepCase:
    """A cell's tensors, and the functions that compute it.

    leaves: the arguments; those that require it get gradients, in new memory. upstream: the gradient of the result,
    None for a loss. kept: bytes of the results and gradients. needed: bytes of these and of the arguments.
    longest: seconds of a step by name, beyond which a peer is not measured further.
    """

    leaves: list[Any]
    kept: int
    needed: int
    upstream: Any = None
    longest: Mapping[str, float] = {}

    def __init__(self, cell: Cell):
        import torch

        import opgrad.torch

        torch.set_num_threads(opgrad.get_num_threads())
        self.torch, self.own, self.cell = torch, opgrad.torch, cell
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

    def beyond(self, call: Call) -> int | None:
        """Bytes that a step takes beyond results and gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        grown = growth(call)
        return None if grown is None else max(0, grown - self.kept)


class LossCase(StepCase):
    """A cell's tensors, and a step with each loss."""

    longest = dict.fromkeys((TORCH, WHOLE, CHUNKED), 2.0)

    def __init__(self, cell: Cell):
        super().__init__(cell)
        torch, made = self.torch, self.generator
        shape = rows, classes, *inner = cell.workload.shape
        self.is_linear = cell.op.name != cells.LOGITS
        sizes = [(rows, *inner), (classes, *inner)] if self.is_linear else [shape]
        spread = SPREAD if self.is_linear else 1.0
        self.leaves = [self.normal(size, spread).requires_grad_() for size in sizes]
        self.kept = sum(leaf.nbytes for leaf in self.leaves)
        is_distilled = cell.op.name == cells.DIVERGENCE
        self.teacher = [self.normal(size, spread) for size in sizes] if is_distilled else []
        self.needed = 2 * self.kept + sum(each.nbytes for each in self.teacher)
        self.options = dict(cells.FORMS[cell.workload.form])
        self.target = torch.randint(0, classes, (rows,) if self.is_linear else (rows, *inner), generator=made)
        if self.options.pop("ignored", False):
            self.target[::2] = IGNORED
        if self.options.pop("probabilities", False):
            self.target = torch.randn(shape, generator=made).softmax(1).to(self.dtype)
        if self.options.pop("weight", False):
            self.options["weight"] = (torch.rand(classes, generator=made) + 0.5).to(self.dtype)

    def functions(self, names: Sequence[str]) -> dict[str, Function]:
        found: dict[str, Function] = {OURS: self._ours()}
        if TORCH in names:
            found[TORCH] = self._composed
            functional = self.torch.nn.functional
            if self.cell.op.name == cells.LINEAR and hasattr(functional, cells.LINEAR):
                whole = functional.linear_cross_entropy
                chunks = self.torch.nn.LinearCrossEntropyOptions(allow_retain_graph=False)
                found[WHOLE] = lambda *leaves: whole(*leaves, self.target)
                found[CHUNKED] = lambda *leaves: whole(*leaves, self.target, options=chunks)
        if COMPILE in names:
            self.torch.compiler.reset()
            found[COMPILE] = self.torch.compile(self._composed, dynamic=False, fullgraph=True)
        return found

    def _ours(self) -> Function:
        name = self.cell.op.name
        function = getattr(self.own, name)
        if name == cells.DIVERGENCE:
            return lambda *leaves: function(*leaves, *self.teacher)
        if name == cells.LOG_PROBABILITY:
            return lambda *leaves: function(*leaves, self.target).mean()
        given = dict(self.options)
        if not (share := given.pop("entropy", None)):
            return lambda *leaves: function(*leaves, self.target, **given)

        def loss(*leaves: Any) -> Any:
            found = function(*leaves, self.target, return_entropy=True, **given)
            return found.loss - share * found.entropy.mean()

        return loss

    def _composed(self, x: Any, *layer: Any) -> Any:
        """What users of PyTorch write."""
        torch, options, target = self.torch, self.options, self.target
        functional = torch.nn.functional
        z = functional.linear(x, *layer) if layer else x
        if self.cell.op.name == cells.LOG_PROBABILITY:
            return z.log_softmax(-1).gather(1, target[:, None]).mean()
        if self.teacher:
            logs = torch.stack([each.log_softmax(-1) for each in (z, functional.linear(*self.teacher))])
            mixture = logs.logsumexp(0) - math.log(2)
            apart = functional.kl_div(mixture.expand_as(logs), logs, reduction="none", log_target=True)
            return apart.sum() / 2 / len(x)
        z = torch.tanh(z / options["softcap"]) * options["softcap"] if "softcap" in options else z
        z = z / options["temperature"] if "temperature" in options else z
        if shift := options.get("shift", 0):
            target = functional.pad(target[shift:], (0, shift), value=IGNORED)
        given = {name: options[name] for name in ("weight", "label_smoothing") if name in options}
        if items := options.get("num_items"):
            loss = functional.cross_entropy(z, target, reduction="sum", **given) / items
        else:
            loss = functional.cross_entropy(z, target, **given)
        if not options.keys() & {"lse_square_scale", "entropy"}:
            return loss
        kept, lse = target != IGNORED, z.logsumexp(1)
        if scale := options.get("lse_square_scale"):
            loss = loss + scale * torch.where(kept, lse, 0).square().sum() / (items or kept.sum())
        if share := options.get("entropy"):
            entropy = lse - (z.softmax(1) * z).sum(1)
            loss = loss - share * torch.where(kept, entropy, 0).mean()
        return loss


class AttentionCase(StepCase):
    """Queries, keys and values, of which gradients are wanted if the form is one with a backward part."""

    def __init__(self, cell: Cell):
        super().__init__(cell)
        batch, heads, *of_keys, length, size = cell.workload.shape
        backward = cells.ATTENTION_FORMS[cell.workload.form]
        options: dict[str, Any] = {"is_causal": "causal" in cell.workload.form, "enable_gqa": bool(of_keys)}
        self.ours = partial(self.own.scaled_dot_product_attention, **options)
        self.theirs = partial(self.torch.nn.functional.scaled_dot_product_attention, **options)
        shared = (batch, *(of_keys or [heads]), length, size)
        sizes = (batch, heads, length, size), shared, shared
        self.leaves = [self.normal(each).requires_grad_(backward) for each in sizes]
        self.upstream = self.normal(sizes[0]) if backward else None
        arguments, result = sum(leaf.nbytes for leaf in self.leaves), self.leaves[0].nbytes
        self.kept = result + arguments * backward
        self.needed = arguments + result * backward + self.kept

    def functions(self, names: Sequence[str]) -> dict[str, Function]:
        return {OURS: self.ours} | ({TORCH: self.theirs} if TORCH in names else {})

    def error(self) -> float:
        """The largest difference of ours, gradients among them, from what torch computes of the same in float32."""
        wide = [leaf.detach().float().requires_grad_(leaf.requires_grad) for leaf in self.leaves]
        pairs = zip(self.computed(self.ours, self.leaves), self.computed(self.theirs, wide), strict=True)
        dtype = DTYPES[self.cell.dtype]
        return max(error_in_ulp(ours.float().numpy().astype(dtype), exact.numpy()) for ours, exact in pairs)

    def computed(self, function: Function, leaves: Sequence[Any]) -> list[Any]:
        """The result, and the gradients if they are wanted."""
        y = function(*leaves)
        if self.upstream is None:
            return [y]
        return [y.detach(), *self.torch.autograd.grad(y, leaves, self.upstream.to(y.dtype))]


CASES: Mapping[str, type[StepCase]] = {LOSSES: LossCase, ATTENTION: AttentionCase}


def measure(cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """A cell of a result: times by name, and bytes of memory beyond arguments, results and gradients by name."""
    try:
        case = CASES[cell.workload.group](cell)
    except ImportError:
        return {**cell.known, "left_out": "needs PyTorch"}
    steps = {name: partial(case.step, function) for name, function in case.functions(names).items()}
    steps[OURS]()
    error, others = case.error(), [name for name in steps if name != OURS]
    race = partial(interleaved, seconds=seconds)
    found = raced({NEW: steps[OURS]}, lambda way: tried(others, steps.get, case.longest), race)
    beyond = {name: case.beyond(steps[name]) for name in found["ways"][NEW]["times"]}
    known = cell.known | {"group": cell.workload.group, "headline": False}
    known |= {} if error is None else {"error_ulp": finite(error)}
    return {**known, "beyond": beyond, "needed": case.needed, **found}


def growth(call: Call) -> int | None:
    """Bytes of resident memory that a call takes at most; None where the system cannot tell: Linux alone does."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was released before would not be seen to be taken
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return None
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Bytes of this process's memory: now (VmRSS), or at most since it was last cleared (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))


COMPILED_FROM = 1 << 16  # bytes moved: with fewer, the checks before torch.compile's code runs take longest


class Target:
    """This machine's CPU, of which other targets are kinds.

    `seconds` and `quick_seconds`: how long a cell is measured by default. `packages`: those of peers.
    """

    workloads: Workloads = WORKLOADS
    packages: Sequence[str] = ()
    seconds, quick_seconds = 0.5, 0.2

    def installed(self) -> list[str]:
        """The peers that this Python has."""
        return peers.installed()

    def peers(self, names: Sequence[str]) -> list[str]:
        """These peers, or all that are installed. Raises ValueError for one that is unknown or not installed."""
        return peers.chosen(names, self.installed())

    def describe(self) -> dict[str, Any] | None:
        """What a result file says of the device; None for the CPU, which it describes anyway."""
        return None

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """One cell of a result: times by name, bytes of traffic, the error of our results."""
        if cell.workload.group in STEPS:
            return measure(cell, names, seconds)
        case = (GraphCase if cell.workload.group == GRAPH else Case)(cell)
        case.call(GIVEN)()
        error, copy = case.error(), Copy(min(case.traffic, MOST_COPIED))
        chosen = [name for name in names if name != COMPILE or case.traffic >= COMPILED_FROM]
        ours = {way: case.call(way) for way in case.ways}
        race = partial(interleaved, seconds=seconds)
        known = cell.known | {"workload": case.label, "headline": cell.workload.headline}
        known |= {} if cell.workload.group == PLAIN else {"group": cell.workload.group}
        known |= {"bytes": case.traffic, "copied_bytes": copy.bytes, "error_ulp": finite(error)}
        return known | raced(ours, lambda way: peers.calls(case, chosen, way), race, copy.copy)
