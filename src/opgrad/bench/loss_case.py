"""A step of a loss in PyTorch: forward and backward, ours and torch's, their time, and the memory that they take."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import opgrad
from opgrad.bench import loss_forms
from opgrad.bench.cells import Cell
from opgrad.bench.measure import NEW, OURS, Call, interleaved
from opgrad.bench.peers import COMPILE, tried

TORCH, WHOLE, CHUNKED = "torch", "torch, linear_cross_entropy", "torch, in chunks"
SPREAD = 0.05  # of a linear layer's numbers, so that logits are of the size of a model's
IGNORED = -100
LONGEST = dict.fromkeys((TORCH, WHOLE, CHUNKED), 2.0)  # seconds of a step, beyond which they are not measured further
Loss = Callable[..., Any]


class LossCase:
    """A cell's tensors, and a step with each loss: `leaves` are the tensors that get gradients."""

    def __init__(self, cell: Cell):
        import torch

        torch.set_num_threads(opgrad.get_num_threads())
        self.torch, self.cell = torch, cell
        self.dtype = getattr(torch, cell.dtype)
        made = torch.Generator().manual_seed(0)
        shape = rows, classes, *inner = cell.workload.shape
        self.is_linear = cell.op.name == loss_forms.LINEAR
        sizes = [(rows, *inner), (classes, *inner)] if self.is_linear else [shape]
        spread = SPREAD if self.is_linear else 1.0
        self.leaves = [(torch.randn(size, generator=made) * spread).to(self.dtype).requires_grad_() for size in sizes]
        self.options = dict(loss_forms.FORMS[cell.workload.form])
        self.target = torch.randint(0, classes, (rows,) if self.is_linear else (rows, *inner), generator=made)
        if self.options.pop("ignored", False):
            self.target[::2] = IGNORED
        if self.options.pop("probabilities", False):
            self.target = torch.randn(shape, generator=made).softmax(1).to(self.dtype)
        if self.options.pop("weight", False):
            self.options["weight"] = (torch.rand(classes, generator=made) + 0.5).to(self.dtype)

    def losses(self, names: Sequence[str]) -> dict[str, Loss]:
        """Ours and those of these peers, by name: each takes the leaves."""
        found: dict[str, Loss] = {OURS: self._ours()}
        if TORCH in names:
            found[TORCH] = self._composed
            functional = self.torch.nn.functional
            if self.is_linear and hasattr(functional, loss_forms.LINEAR):
                whole = functional.linear_cross_entropy
                chunks = self.torch.nn.LinearCrossEntropyOptions(allow_retain_graph=False)
                found[WHOLE] = lambda *leaves: whole(*leaves, self.target)
                found[CHUNKED] = lambda *leaves: whole(*leaves, self.target, options=chunks)
        if COMPILE in names:
            self.torch.compiler.reset()
            found[COMPILE] = self.torch.compile(self._composed, dynamic=False, fullgraph=True)
        return found

    def step(self, loss: Loss) -> None:
        """Forward and backward, with gradients in new memory."""
        for leaf in self.leaves:
            leaf.grad = None
        loss(*self.leaves).backward()

    def _ours(self) -> Loss:
        import opgrad.torch

        function = getattr(opgrad.torch, self.cell.op.name)
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
        z = torch.tanh(z / options["softcap"]) * options["softcap"] if "softcap" in options else z
        z = z / options["temperature"] if "temperature" in options else z
        if shift := options.get("shift", 0):
            target = functional.pad(target[shift:], (0, shift), value=IGNORED)
        given = {"weight": options.get("weight"), "label_smoothing": options.get("label_smoothing", 0.0)}
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


def measure(cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """A cell of a result: times by name, and bytes of memory beyond arguments and gradients (`needed`) by name."""
    try:
        case = LossCase(cell)
    except ImportError:
        return {**cell.known, "left_out": "needs PyTorch"}
    steps = {name: partial(case.step, loss) for name, loss in case.losses(names).items()}
    steps[OURS]()
    rivals, notes = tried([name for name in steps if name != OURS], steps.get, LONGEST)
    calls: dict[str, Call] = {OURS: steps[OURS], **rivals}
    times = interleaved(calls, seconds)
    gradients = sum(leaf.nbytes for leaf in case.leaves)
    return {
        **cell.known,
        "group": cell.workload.group,
        "headline": False,
        "beyond": {name: _beyond(case, call, gradients) for name, call in calls.items()},
        "needed": 2 * gradients,
        "ways": {NEW: {"times": times, "notes": notes}},
    }


def _beyond(case: LossCase, call: Call, gradients: int) -> int | None:
    for leaf in case.leaves:
        leaf.grad = None
    grown = growth(call)
    return None if grown is None else max(0, grown - gradients)


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
