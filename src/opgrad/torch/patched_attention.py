"""opgrad's attention in models of transformers that attend by "sdpa", PyTorch's function.

The models' configurations stay as they are: the function that transformers calls for "sdpa" asks each module whether
it belongs to a patched model, and is the library's own for all others, and for calls that are not known.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.attention import scaled_dot_product_attention

SDPA = "sdpa"  # the name of PyTorch's function in transformers
MARK = "_opgrad_attends"  # of modules whose attention is ours
# What models hand to any implementation, and "sdpa" makes nothing of: the mask has it, or it is not about attention.
UNUSED = {
    "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states",
    "output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "deterministic",
}  # fmt: skip
LARGEST_HEAD = 256


class _Attention:
    """What transformers calls for "sdpa". own: its own function."""

    def __init__(self, own: Callable[..., Any]):
        self.own = own

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if getattr(module, MARK, False) and not more and _is_known(query, key, value, attention_mask, **named):
            return _attend(module, query, key, value, attention_mask, **named)
        return self.own(module, query, key, value, attention_mask, *more, **named)


def _is_known(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **others: Any,
) -> bool:  # fmt: skip
    """Whether opgrad's attention computes the same."""
    if any(each is not None and each is not False and name not in UNUSED for name, each in others.items()):
        return False
    if not (query.device.type == "cpu" and query.dim() == key.dim() == value.dim() == 4):
        return False
    if max(query.shape[3], value.shape[3]) > LARGEST_HEAD or not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        return False
    return mask is None or (mask.dim() == 4 and mask.dtype in (torch.bool, query.dtype, torch.float32))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it; a single query, and one with a mask, sees all keys that the mask has."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = query.shape[2] > 1 and mask is None and bool(is_causal)
    shared = query.shape[1] != key.shape[1]
    y = scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=shared
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None


def register() -> None:
    """Put ours into the table of a transformers that is loaded and has one."""
    table: Any = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
    own = table().get(SDPA) if table is not None else None
    if own is not None and not isinstance(own, _Attention):
        table.register(SDPA, _Attention(own))


def set_attention(model: torch.nn.Module, ours: bool) -> None:
    """Mark the modules of a model that may attend, those that have a configuration, or take the marks away."""
    register()
    for module in model.modules():
        if ours and "config" in module.__dict__:
            module.__dict__[MARK] = True
        else:
            module.__dict__.pop(MARK, None)
