"""opgrad's layers in the place of a language model's own: RMS normalization, gated layers, gelu, attention.

Nothing of transformers is imported. A module is known by its parts, and is replaced only if it computes the same on a
few numbers. Attention is replaced through the table of implementations that transformers has, if that is loaded.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.torch.attention import scaled_dot_product_attention
from opgrad.torch.layers import geglu, gelu, rms_norm, swiglu

NAME = "opgrad"  # of the implementation of attention
OTHERS = "sdpa"  # that of PyTorch's function, in whose place ours is
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
        self.had_attention = _set_attention(model, OTHERS, NAME)

    def undo(self, model: torch.nn.Module) -> None:
        for module, ours in self.forwards:
            if module.__dict__.get("forward") is ours:  # others may have put theirs around it
                del module.__dict__["forward"]
        if self.had_attention:
            _set_attention(model, NAME, OTHERS)


def _in_place_of(own: Callable[..., Any], found: Forward) -> Callable[..., Any]:
    """`found` for calls with one argument, as its name and signature the module's own, which answers all others."""

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return own(self, *given, **named) if named or len(given) != 1 else found(self, given[0])

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
    """What may stand in a module's place, and the width of its input."""
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


# --- attention --------------------------------------------------------------------------------------------------------


def _set_attention(model: Any, before: str, after: str) -> bool:
    """Exchange the implementation of attention in a model that has this one; whether it was done."""
    library = sys.modules.get("transformers")
    configuration = getattr(model, "config", None)
    tables = [getattr(library, each, None) for each in ("AttentionInterface", "AttentionMaskInterface")]
    if getattr(configuration, "_attn_implementation", None) != before or None in tables:
        return False
    if not hasattr(model, "set_attn_implementation"):
        return False
    attention, masks = (table() for table in tables if table is not None)
    attention.register(NAME, _attend)
    masks.register(NAME, masks[OTHERS])
    model.set_attn_implementation(after)
    return True


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it, by opgrad's kernels on the CPU."""
    if attention_mask is not None:
        attention_mask = attention_mask[:, :, :, : key.shape[-2]]
    if is_causal is None:
        is_causal = query.shape[2] > 1 and attention_mask is None and getattr(module, "is_causal", True)
    attend = functional.scaled_dot_product_attention if query.is_cuda else scaled_dot_product_attention
    y = attend(
        query, key, value, attention_mask, dropout, bool(is_causal), scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None
