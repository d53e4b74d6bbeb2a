"""Activations written over their argument, as `inplace=True` asks for; their gradients follow from the result."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_tensors import execute, is_direct, is_traced, is_transformed
from opgrad.torch.door import run
from opgrad.torch.operators import OPERATORS, TensorOperator


def replace(operator: TensorOperator, x: Tensor, *attributes: Any) -> Tensor:
    """Write operator(x, …) to x and return it.

    Raises RuntimeError for a leaf that requires grad, ValueError for a slope below 0 where a gradient is needed.
    """
    if not isinstance(x, Tensor) or is_direct((x,)):
        return cast(Tensor, run(operator.op, {**_named(operator, x, attributes), "out": x}))
    if is_traced((x,)) or is_transformed():
        return x.copy_(operator(x.clone(), *attributes))  # the clone is what the backward pass reads
    origin = x._base if x._is_view() else x
    if origin is not None and origin.is_leaf and origin.requires_grad:
        # PyTorch itself would raise this error only after the kernel has run.
        raise RuntimeError(f"{operator.op.name}: x is a leaf that requires grad, or a view of one: leave inplace away")
    for name, value in zip(operator.names[1:], attributes, strict=False):
        if value < 0:
            raise ValueError(
                f"{operator.op.name}: {name} is {value} and inplace is True, expected at least 0 where a gradient is "
                "needed: the result does not tell the sign of the input"
            )
    return _replaced(operator, x, *map(float, attributes))


def _named(operator: TensorOperator, x: Tensor, attributes: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(operator.names, (x, *attributes), strict=False))


class _Replaced(torch.autograd.Function):
    """An activation whose gradient operator takes the result for the input, as those of one sign may."""

    @staticmethod
    def forward(ctx: Any, operator: TensorOperator, x: Tensor, *attributes: float) -> Tensor:
        execute(operator.op, {**_named(operator, x, attributes), "out": x})
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.backward_operator, ctx.attributes = OPERATORS[f"{operator.op.name}_grad"], attributes
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return None, ctx.backward_operator(dy, y, *ctx.attributes), *[None] * len(ctx.attributes)


_replaced: Callable[..., Tensor] = _Replaced.apply
