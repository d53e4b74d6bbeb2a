"""The rules of torch.autocast, which it does not apply to functions that it does not know."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widens_softmax(x: Tensor) -> bool:
    """Whether autocast wants the softmax of this tensor in float32."""
    return isinstance(x, Tensor) and x.dtype in HALF and torch.is_autocast_enabled(x.device.type)


def narrows_products(x: Tensor) -> bool:
    """Whether autocast wants matrix products with this tensor in its own dtype, which is half precision."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product as autocast gives them: in its own dtype, unless they are of float64."""
    if not torch.is_autocast_enabled(tensors[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def widest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors as autocast gives them to an operation that takes one dtype: in the wider one."""
    if x.dtype == y.dtype or not torch.is_autocast_enabled(x.device.type):
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def autocast_layer(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """A linear layer as autocast wants it, and the dtype of a loss of its results."""
    if not narrows_products(x):
        return x, w, b, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), torch.float32
