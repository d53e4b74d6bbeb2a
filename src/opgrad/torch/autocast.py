"""What torch.autocast asks of functions that it does not know."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widens_softmax(x: Tensor) -> bool:
    """Whether autocast wants the softmax of this tensor in float32."""
    return isinstance(x, Tensor) and x.dtype in HALF and torch.is_autocast_enabled(x.device.type)


def narrows_products(x: Tensor) -> bool:
    """Whether autocast wants matrix products with this tensor in its own dtype, which is half precision."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def autocast_layer(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """A linear layer as autocast wants it, and the dtype of a loss of its results."""
    if not narrows_products(x):
        return x, w, b, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), torch.float32
