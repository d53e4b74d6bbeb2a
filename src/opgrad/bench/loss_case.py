"""Losses in PyTorch: ours, and what users of PyTorch write."""

import math
from collections.abc import Sequence
from typing import Any

from opgrad.bench import step_forms
from opgrad.bench.cells import Cell
from opgrad.bench.measure import OURS
from opgrad.bench.peers import COMPILE
from opgrad.bench.step_case import TORCH, Function, StepCase

WHOLE, CHUNKED = "torch, linear_cross_entropy", "torch, in chunks"
SPREAD = 0.05  # of a linear layer's numbers, so that logits are of the size of a model's
IGNORED = -100


class LossCase(StepCase):
    """A cell's tensors, and a step with each loss."""

    longest = dict.fromkeys((TORCH, WHOLE, CHUNKED), 2.0)

    def __init__(self, cell: Cell):
        super().__init__(cell)
        torch, made = self.torch, self.generator
        shape = rows, classes, *inner = cell.workload.shape
        self.is_linear = cell.op.name != step_forms.LOGITS
        sizes = [(rows, *inner), (classes, *inner)] if self.is_linear else [shape]
        spread = SPREAD if self.is_linear else 1.0
        self.leaves = [self.normal(size, spread).requires_grad_() for size in sizes]
        self.kept = sum(leaf.nbytes for leaf in self.leaves)
        is_distilled = cell.op.name == step_forms.DIVERGENCE
        self.teacher = [self.normal(size, spread) for size in sizes] if is_distilled else []
        self.needed = 2 * self.kept + sum(each.nbytes for each in self.teacher)
        self.options = dict(step_forms.FORMS[cell.workload.form])
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
            if self.cell.op.name == step_forms.LINEAR and hasattr(functional, step_forms.LINEAR):
                whole = functional.linear_cross_entropy
                chunks = self.torch.nn.LinearCrossEntropyOptions(allow_retain_graph=False)
                found[WHOLE] = lambda *leaves: whole(*leaves, self.target)
                found[CHUNKED] = lambda *leaves: whole(*leaves, self.target, options=chunks)
        if COMPILE in names:
            self.torch.compiler.reset()
            found[COMPILE] = self.torch.compile(self._composed, dynamic=False, fullgraph=True)
        return found

    def _ours(self) -> Function:
        import opgrad.torch

        name = self.cell.op.name
        function = getattr(opgrad.torch, name)
        if name == step_forms.DIVERGENCE:
            return lambda *leaves: function(*leaves, *self.teacher)
        if name == step_forms.LOG_PROBABILITY:
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
        if self.cell.op.name == step_forms.LOG_PROBABILITY:
            return z.log_softmax(-1).gather(1, target[:, None]).mean()
        if self.teacher:
            logs = torch.stack([each.log_softmax(-1) for each in (z, functional.linear(*self.teacher))])
            mixture = logs.logsumexp(0) - math.log(2)
            return (
                functional.kl_div(mixture.expand_as(logs), logs, reduction="none", log_target=True).sum() / 2 / len(x)
            )
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
