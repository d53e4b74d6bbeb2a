"""Attention on tensors: torch.nn.functional.scaled_dot_product_attention by opgrad's kernels on the CPU.

The operator returns the logarithm of each query's sum of exponentials beside the result; its gradient computes the
probabilities from that again. Gradients of gradients, tangents and gradients of masks are formulas on whole matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native
from opgrad.contract.lists import only
from opgrad.ops import graph_operators
from opgrad.torch.autocast import narrowed
from opgrad.torch.batching import Batch, Batched, batching
from opgrad.torch.formulas import Gradients, Needs
from opgrad.torch.operators import TensorOperator, is_exported
from opgrad.torch.renamed_errors import ERRORS, in_words
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
    """The same on the CPU, in the dtypes that autocast wants; native code does not see whether it is at work."""
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


@dataclass(frozen=True)
class Whole:
    """A call on whole matrices, in float32 or float64, keys and values repeated for all heads: p are probabilities."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    scale: float
    groups: int

    def summed(self, x: Tensor) -> Tensor:
        """The sum over heads that share keys and values."""
        return x.unflatten(1, (-1, self.groups)).sum(2) if self.groups > 1 else x

    def repeated(self, x: Tensor) -> Tensor:
        return _wide(x).repeat_interleave(self.groups, 1) if self.groups > 1 else _wide(x)

    def over_rows(self, ds: Tensor) -> Tensor:
        """The gradient of the scores by that of the probabilities, and their tangent by the scores' likewise."""
        return self.p * (ds - (self.p * ds).sum(-1, keepdim=True))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str, dropout: float
) -> Whole:
    if dropout:
        raise NotImplementedError(
            "scaled_dot_product_attention: a call with dropout is differentiable once, in reverse mode, by query, key "
            "and value: give dropout_p=0"
        )
    groups, factor = q.shape[1] // max(k.shape[1], 1), q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = _wide(q), *(_wide(each).repeat_interleave(groups, 1) if groups > 1 else _wide(each) for each in (k, v))
    s = q @ k.mT * factor
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~seen, float("-inf"))
    largest = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    e = (s - largest.masked_fill(largest == float("-inf"), 0)).exp()
    total = e.sum(-1, keepdim=True)
    return Whole(q, k, v, e / total.masked_fill(total == 0, 1), factor, groups)


def _to_mask(ds: Tensor, mask: Tensor) -> Tensor:
    """The sum of the gradients of scores over the axes along which a mask was broadcast."""
    return ds.sum_to_size(mask.shape).to(mask.dtype)


# --- gradients, tangents ----------------------------------------------------------------------------------------------


def _gradient(
    dy: Tensor | None, dlse: Tensor | None, needs: Needs, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
    mask: Tensor | None, scale: float | None, causal: str, dropout: float, seed: Tensor | None,
) -> Gradients:  # fmt: skip
    if dy is None:
        return {"q": None, "k": None, "v": None, "mask": None}
    found: Gradients = {"mask": None}
    if needs["mask"] and mask is not None:
        whole = _whole(q, k, v, mask, scale, causal, dropout)
        found["mask"] = _to_mask(whole.over_rows(_wide(dy) @ whole.v.mT), mask)
    if needs["q"] or needs["k"] or needs["v"]:
        given = (dy, q, k, v, y, lse, mask, scale, causal, dropout, seed)
        found |= dict(zip("qkv", _attention_grad.call(*given), strict=True))
    return found


def _gradient_of_gradient(
    a: Tensor | None, b: Tensor | None, c: Tensor | None, needs: Needs, dy: Tensor, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, scale: float | None, causal: str, dropout: float,
) -> Gradients:  # fmt: skip
    """a, b and c are the gradients of dq, dk and dv.

    With g = dy v^T: ds = p * (g - rowsum(p * g)), dq = scale * ds k, dk = scale * ds^T q, dv = p^T dy.
    """
    whole = _whole(q, k, v, mask, scale, causal, dropout)
    p, g = whole.p, _wide(dy) @ whole.v.mT
    a, b, c = (torch.zeros_like(like) if each is None else each for each, like in ((a, q), (b, k), (c, v)))
    a, b, c, dy_ = _wide(a), whole.repeated(b), whole.repeated(c), _wide(dy)
    ds = whole.over_rows(g)
    by_ds = whole.scale * (a @ whole.k.mT + whole.q @ b.mT)
    mean, total = (p * g).sum(-1, keepdim=True), (p * by_ds).sum(-1, keepdim=True)
    by_g = p * (by_ds - total)
    by_s = whole.over_rows(by_ds * (g - mean) - total * g + dy_ @ c.mT)
    found: Gradients = {
        "dy": p @ c + by_g @ whole.v,
        "q": whole.scale * (ds @ b + by_s @ whole.k),
        "k": whole.summed(whole.scale * (ds.mT @ a + by_s.mT @ whole.q)),
        "v": whole.summed(by_g.mT @ dy_),
    }
    like = {"dy": dy, "q": q, "k": k, "v": v}
    mask_part = _to_mask(by_s, mask) if mask is not None and needs["mask"] else None
    return {name: each.to(like[name].dtype) for name, each in found.items() if each is not None} | {
        "mask": mask_part, "y": None, "lse": None
    }  # fmt: skip


def _scores_tangent(whole: Whole, given: Mapping[str, Tensor]) -> Tensor:
    """The tangent of the probabilities."""
    zero = torch.zeros_like(whole.p)
    by_q = _wide(given["q"]) @ whole.k.mT if "q" in given else zero
    by_k = whole.q @ whole.repeated(given["k"]).mT if "k" in given else zero
    return whole.scale * (by_q + by_k) + given.get("mask", 0)


def _of(values: Mapping[str, Any]) -> Whole:
    return _whole(*(values[name] for name in ("q", "k", "v", "mask", "scale", "causal", "dropout")))


def _tangent(given: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    whole = _of(values)
    t = _scores_tangent(whole, given)
    by_p = whole.over_rows(t) @ whole.v
    y = by_p + whole.p @ whole.repeated(given["v"]) if "v" in given else by_p
    return y, (whole.p * t).sum(-1)


def _tangent_of_gradient(given: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    whole, dy = _of(values), _wide(values["dy"])
    p, g = whole.p, dy @ whole.v.mT
    t_p, t_dy = whole.over_rows(_scores_tangent(whole, given)), _wide(given["dy"]) if "dy" in given else None
    t_g = dy @ whole.repeated(given["v"]).mT if "v" in given else torch.zeros_like(g)
    t_g = t_g if t_dy is None else t_g + t_dy @ whole.v.mT
    mean, ds = (p * g).sum(-1, keepdim=True), whole.over_rows(g)
    t_ds = t_p * (g - mean) + p * (t_g - (t_p * g + p * t_g).sum(-1, keepdim=True))
    t_dq, t_dk, t_dv = t_ds @ whole.k, t_ds.mT @ whole.q, t_p.mT @ dy
    t_dq = t_dq + ds @ whole.repeated(given["k"]) if "k" in given else t_dq
    t_dk = t_dk + ds.mT @ _wide(given["q"]) if "q" in given else t_dk
    t_dv = t_dv if t_dy is None else t_dv + p.mT @ t_dy
    return whole.scale * t_dq, whole.summed(whole.scale * t_dk), whole.summed(t_dv)


# --- many calls at once ---------------------------------------------------------------------------------------------


def _batched(batch: Batch) -> Batched:
    """More sequences; a mask that has no axis of sequences gets one if each call has its own."""
    names = [name for name in batch.operator.names if name not in OPTIONS]
    size = batch.given["q"].shape[1 if "q" in batch.batched else 0]
    changed = {name: batch.every(name).flatten(0, 1) for name in names}
    mask, seed = batch.given["mask"], batch.given["seed"]
    if mask is not None and ("mask" in batch.batched or (mask.dim() == AXES and mask.shape[0] > 1)):
        own = mask if "mask" in batch.batched else mask[None]
        own = own.reshape(own.shape[0], *[1] * (AXES + 1 - own.dim()), *own.shape[1:])
        changed["mask"] = own.expand(batch.size, size, *own.shape[2:]).flatten(0, 1)
    if "seed" in batch.batched:
        changed["seed"] = seed[0]
    results = batch.call(**changed)
    return tuple(each.unflatten(0, (batch.size, size)) for each in results), (0,) * len(results)


_attention.differentiate(_gradient)
_attention.derivative.tangent = _tangent
_attention.derivative.batching = batching(_attention, _batched)
_attention_grad.differentiate(_gradient_of_gradient)
_attention_grad.derivative.tangent = _tangent_of_gradient
_attention_grad.derivative.batching = batching(_attention_grad, _batched)
