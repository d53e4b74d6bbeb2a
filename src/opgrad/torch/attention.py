"""Attention on tensors: torch.nn.functional.scaled_dot_product_attention by opgrad's kernels on the CPU.

The operator returns the logarithm of each query's sum of exponentials beside the result; its gradient computes the
probabilities from that again. Gradients of gradients, tangents and gradients of masks are formulas on whole matrices.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native
from opgrad.contract.declaration import only
from opgrad.ops import graph_operators
from opgrad.torch.autocast import narrowed
from opgrad.torch.derivative import pulled_back, wide
from opgrad.torch.formulas import Gradients, Needs, differentiate
from opgrad.torch.operators import ERRORS, TensorOperator, in_words, is_exported
from opgrad.torch.schema import REGISTERED

OPTIONS = ("mask", "scale", "causal", "dropout", "seed")
SEEDS = 2**62  # drawn by PyTorch's generator
AXES = 4  # of the operator's queries: batch, heads, length, size of a head


def _operator(name: str, arrays: Sequence[str], results: tuple[str, ...]) -> TensorOperator:
    """An operator of attention, with these results and the options that PyTorch's function has."""
    op = only(graph_operators()[name], results)
    made = TensorOperator(replace(op, parameters=(*arrays, *OPTIONS), attributes={**op.attributes, "causal": ""}))
    REGISTERED[name] = made
    return made


_attention = _operator("attention", ("q", "k", "v"), ("y", "lse"))
_attention_grad = _operator("attention_grad", ("dy", "q", "k", "v", "y", "lse"), ("dq", "dk", "dv"))


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of queries to keys, in tiles: the matrix of scores is never whole in memory.

    query: shape (N, …, H, L, E); float32, float64, float16 or bfloat16; E is 1 to 256. Under autocast query, key and
        value become of its dtype.
    key: shape (N, …, H, S, E); value: shape (N, …, H, S, Ev), both of the dtype of query.
    attn_mask: broadcast to (N, …, H, L, S); bool, True where a query sees a key, or what is added to the scores, of the
        dtype of query or float32.
    dropout_p: the probability at which an element of the softmax is dropped, by decisions of PyTorch's generator.
    is_causal: query i sees keys up to i alone; without attn_mask.
    scale: what products of queries and keys are multiplied with; None: 1 / sqrt(E).
    enable_gqa: whether key and value may have fewer heads than query, a divisor of their number.

    Returns y of shape (N, …, H, L, Ev), contiguous; 0 for a query that sees no key. The gradient keeps query, key,
    value, y and one number for each query. Differentiable twice without dropout, then on whole matrices of scores. On
    CUDA, and while a model is exported, PyTorch's own function is called. Raises TypeError for a wrong dtype,
    ValueError for wrong shapes, NotImplementedError for second derivatives with dropout.

    Formula: y = dropout(softmax(scale * query key^T + attn_mask)) value.
    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    if query.is_cuda or is_exported():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = narrowed(query, key, value)
    if attn_mask is not None and attn_mask.dtype != torch.float32:  # which keeps the least number
        (attn_mask,) = narrowed(attn_mask)
    return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@native
def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention on the CPU, in autocast's dtypes, which are settled before: native code does not see autocast."""
    _check(query, key, value, attn_mask, is_causal, enable_gqa)
    q, k, v, mask, shape = _in_four_axes(query, key, value, attn_mask)
    seed = torch.randint(SEEDS, (1,), device=query.device) if dropout_p else None
    causal = "top_left" if is_causal else ""
    try:
        y: Tensor = _attention.call(q, k, v, mask, scale, causal, dropout_p, seed)[0]
    except ERRORS as error:
        raise in_words(error, WORDS) from None
    return y if y.dim() == query.dim() else y.reshape(*shape, *y.shape[-2:])


WORDS = {
    "attention": "scaled_dot_product_attention",
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "dropout": "dropout_p",
}


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> None:
    what = "scaled_dot_product_attention:"
    for name, each in (("query", q), ("key", k), ("value", v)):
        if each.dim() < 2 or each.dim() != q.dim():
            expected = "at least 2" if each.dim() < 2 else f"{q.dim()}, as query has"
            raise ValueError(f"{what} {name} has {each.dim()} dimensions, expected {expected}")
    if mask is not None and is_causal:
        raise ValueError(f"{what} attn_mask is given, expected None, as is_causal is True")
    if not enable_gqa and q.dim() > 2 and q.shape[-3] != k.shape[-3] and k.shape[-3] != 1:
        heads = f"key has {k.shape[-3]} heads, expected {q.shape[-3]}, those of query"
        raise ValueError(f"{what} {heads}: enable_gqa=True lets heads of query share those of key")


def _in_four_axes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Sequence[int]]:
    """The arrays as [batch, heads, length, size], and the sizes before the last two of the result."""
    if q.dim() == AXES and q.shape[0] == k.shape[0] == v.shape[0] and (mask is None or mask.dim() <= AXES):
        return q, k, v, mask, q.shape[:2]
    leads = [each.shape[:-3] for each in (q, k, v)]
    if mask is not None and mask.dim() > 3:
        leads.append(mask.shape[:-3])
    lead = torch.broadcast_shapes(*leads)
    shape = (*lead, *q.shape[-3:-2])
    q, k, v = (_flat(each, lead) for each in (q, k, v))
    if mask is not None and mask.dim() > 3:
        mask = _flat(mask, lead)
    return q, k, v, mask, shape


def _flat(x: Tensor, lead: Sequence[int]) -> Tensor:
    """[…, heads, length, size] with all axes before the heads in one; what has no heads gets one."""
    x = x[None] if x.dim() == 2 else x
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


# --- on whole matrices -----------------------------------------------------------------------------------------------


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str, dropout: float
) -> Tensor:
    """The result in the dtype of sums."""
    if dropout:
        raise NotImplementedError(
            "scaled_dot_product_attention: a call with dropout is differentiable once, in reverse mode, by query, key "
            "and value: give dropout_p=0"
        )
    groups, factor = q.shape[1] // max(k.shape[1], 1), q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (each.to(wide(each.dtype)) for each in (q, k, v))
    if groups > 1:
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    s = q @ k.mT * factor
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~seen, float("-inf"))
    largest = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    e = (s - largest.masked_fill(largest == float("-inf"), 0)).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1) @ v


def _gradient(
    dy: Tensor | None, dlse: Tensor | None, needs: Needs, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
    mask: Tensor | None, scale: float | None, causal: str, dropout: float, seed: Tensor | None,
) -> Gradients:  # fmt: skip
    found: Gradients = dict.fromkeys(("q", "k", "v", "mask"))
    if dy is not None and needs["mask"] and mask is not None:
        (found["mask"],) = pulled_back(lambda mask: _attended(q, k, v, mask, scale, causal, dropout), [mask], [dy])
    if dy is not None and (needs["q"] or needs["k"] or needs["v"]):
        given = (dy, q, k, v, y, lse, mask, scale, causal, dropout, seed)
        found |= dict(zip("qkv", _attention_grad.call(*given), strict=True))
    return found


def _pulled(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str, dropout: float
) -> Sequence[Tensor]:
    return pulled_back(lambda q, k, v: _attended(q, k, v, mask, scale, causal, dropout), [q, k, v], [dy])


_attention.differentiate(_gradient)
differentiate(_attention_grad, _pulled)
