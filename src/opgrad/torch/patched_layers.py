"""opgrad's layers in the place of a language model's own: RMS normalization, gated layers, gelu, attention.

Nothing of transformers is imported. A module is known by its parts, and is replaced only if it computes the same on a
few numbers.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.attention import scaled_dot_product_attention
from opgrad.torch.layers import geglu, gelu, rms_norm, swiglu

CLOSE = 1e-4
Forward = Callable[[Any, Tensor], Tensor]


class PatchedLayers:
    """The layers of a model that were replaced, and how the model gets them back."""

    def __init__(self, model: torch.nn.Module):
        self.forwards: list[tuple[Any, Callable[..., Any]]] = []
        for module in model.modules():
            if "forward" not in module.__dict__ and (found := _forward_of(module)) is not None:
                settable: Any = module
                settable.forward = types.MethodType(_in_place_of(type(module).forward, found), module)
                self.forwards.append((module, settable.forward))
        set_attention(model, True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, too, transformers' table has ours."""
        self.__dict__.update(state)
        register()

    def undo(self, model: torch.nn.Module) -> None:
        for module, ours in self.forwards:
            if module.__dict__.get("forward") is ours:  # others may have put theirs around it
                del module.__dict__["forward"]
        set_attention(model, False)


def _in_place_of(own: Callable[..., Any], found: Forward) -> Callable[..., Any]:
    """`found` for calls with one argument, as its name and signature the module's own, which answers all others.

    A normalization that has no use for its weight may be given other sizes than that has.
    """

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        weight = getattr(self, "weight", None)
        if named or len(given) != 1 or (weight is not None and weight.shape[-1] != given[0].shape[-1]):
            return own(self, *given, **named)
        return found(self, given[0])

    return forward


# --- normalization, gated layers, activations -------------------------------------------------------------------------


def _forward_of(module: torch.nn.Module) -> Forward | None:
    """The first candidate that computes what the module computes; None if none does."""
    for forward, width in _candidates(module):
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.device.type != "cpu":
            return None
        dtype = torch.float32 if parameter is None else parameter.dtype
        x = torch.sin(torch.arange(3 * width, dtype=torch.float32)).reshape(3, width).to(dtype) * 4
        try:
            with torch.no_grad():
                expected, found = module(x), forward(module, x)
        except Exception:
            continue
        close = CLOSE if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps
        if isinstance(expected, Tensor) and torch.allclose(found, expected, rtol=close, atol=close):
            return forward
    return None


def _candidates(module: Any) -> Iterator[tuple[Forward, int]]:
    """The functions that may replace a module, and the width of its input."""
    name, weight = type(module).__name__, getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if name.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float):
        yield _norm, len(weight)
        yield _norm_beside_one, len(weight)
    elif all(
        isinstance(getattr(module, each, None), torch.nn.Module) for each in ("gate_proj", "up_proj", "down_proj")
    ):
        width = getattr(module.gate_proj, "in_features", 0)
        for unit in (swiglu, geglu, functools.partial(geglu, approximate="none")):
            yield functools.partial(_gated, unit), width
    elif "GELU" in name and next(module.children(), None) is None and not isinstance(module, torch.nn.GELU):
        for approximate in ("tanh", "none"):
            yield functools.partial(_activation, approximate), 64


def _epsilon(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight.shape, self.weight, _epsilon(self)).to(hidden_states.dtype)


def _norm_beside_one(self: Any, hidden_states: Tensor) -> Tensor:
    """Gemma's weights are those beside 1."""
    return rms_norm(hidden_states, self.weight.shape, 1 + self.weight, _epsilon(self)).to(hidden_states.dtype)


def _gated(unit: Callable[[Tensor, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.down_proj(unit(self.gate_proj(x), self.up_proj(x)))
    return found


def _activation(approximate: str, self: Any, input: Tensor) -> Tensor:
    return gelu(input, approximate=approximate)


# --- attention -------------------------------------------------------------------------------------------------------


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
    """The function that transformers calls for "sdpa". own: the library's own."""

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
