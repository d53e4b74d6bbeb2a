"""Attention in PyTorch: opgrad.torch.scaled_dot_product_attention and torch's own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from opgrad.bench import step_forms
from opgrad.bench.cells import Cell
from opgrad.bench.measure import OURS
from opgrad.bench.step_case import TORCH, Function, StepCase
from opgrad.contract import DTYPES
from opgrad.testing.accuracy import error_in_ulp


class AttentionCase(StepCase):
    """Queries, keys and values, of which gradients are wanted if the form is one with a backward part."""

    def __init__(self, cell: Cell):
        import opgrad.torch

        super().__init__(cell)
        batch, heads, *of_keys, length, size = cell.workload.shape
        form = step_forms.ATTENTION_FORMS[cell.workload.form]
        options: dict[str, Any] = {"is_causal": form.is_causal, "enable_gqa": bool(of_keys)}
        self.ours = partial(opgrad.torch.scaled_dot_product_attention, **options)
        self.theirs = partial(self.torch.nn.functional.scaled_dot_product_attention, **options)
        shared = (batch, *(of_keys or [heads]), length, size)
        sizes = (batch, heads, length, size), shared, shared
        self.leaves = [self.normal(each).requires_grad_(form.backward) for each in sizes]
        self.upstream = self.normal(sizes[0]) if form.backward else None
        arguments, result = sum(leaf.nbytes for leaf in self.leaves), self.leaves[0].nbytes
        self.kept = result + arguments * form.backward
        self.needed = arguments + result * form.backward + self.kept

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
