"""Rows of an embedding table whose gradient is sparse: the rows that a batch names, each with its sum."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_tensors import is_transformed
from opgrad.contract.shapes import room_for
from opgrad.torch.operators import OPERATORS

_gather, _gather_grad = OPERATORS["gather"], OPERATORS["gather_grad"]


def check_padding(padding_idx: int, rows: int) -> None:
    """Raise ValueError unless padding_idx is a row of a table of so many."""
    if not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, expected {-rows} to {rows - 1}")


def sparse_embedding(input: Tensor, weight: Tensor, padding_idx: int | None, check: bool) -> Tensor:
    """What `embedding` gives with sparse.

    Raises NotImplementedError under torch.compile and torch.func, which have no sparse gradients.
    """
    if torch.compiler.is_compiling() or is_transformed():
        raise NotImplementedError("embedding: sparse is True, expected False under torch.compile and torch.func")
    if padding_idx is not None:
        check_padding(padding_idx, weight.shape[0])
    return _looked_up(input, weight, padding_idx, check)


class _SparseEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, check: bool) -> Tensor:
        ctx.save_for_backward(input)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return cast(Tensor, _gather(weight, input, 0, check))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (input,), (count, *row) = ctx.saved_tensors, ctx.shape
        named, dy = input.remainder(count).flatten(), dy.reshape(-1, *row)
        if ctx.padding_idx is not None:
            counts = named != ctx.padding_idx % count
            named, dy = named[counts], dy[counts]
        rows, places = named.unique(return_inverse=True)
        values = _gather_grad((room_for(len(rows)), *row), places, dy, 0)[: len(rows)]
        found = torch.sparse_coo_tensor(rows[None].long(), values, ctx.shape, is_coalesced=True, check_invariants=False)
        return None, found, None, None


_looked_up: Callable[[Tensor, Tensor, int | None, bool], Tensor] = _SparseEmbedding.apply
