"""Layers of language models on tensors, attention among them, by opgrad's CPU kernels.

Each has the operators of training graphs for its value and its gradient. Gradients of gradients are those of the
layer's formula in PyTorch's functions; for attention, and gradients of its mask, on whole matrices of scores. On CUDA,
and while a model is exported, PyTorch's functions are called.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_calls import native
from opgrad.contract.declaration import only
from opgrad.ops import graph_operators
from opgrad.ops.reference.gradient_formulas import SHARED, attended, gated
from opgrad.torch.formulas import XP, Gradients, Needs, differentiate
from opgrad.torch.functions import narrowed, widens_softmax, widest
from opgrad.torch.operators import TensorOperator, is_exported, pulled_back, wide, worded

SEEDS = 2**62  # drawn by PyTorch's generator


def _registered(name: str) -> TensorOperator:
    """The operator, with all arrays in front of the attributes, as a schema has what has no default."""
    op = graph_operators()[name]
    return TensorOperator(replace(op, parameters=tuple(sorted(op.parameters, key=lambda each: each not in op.inputs))))


def _differentiated(name: str) -> TensorOperator:
    """The operator of a layer, with all its derivatives."""
    forward, backward = _registered(name), _registered(f"{name}_grad")
    results, arrays = [*forward.op.results], [each.removeprefix("d") for each in backward.op.results]

    def gradient(*values: Any) -> Gradients:
        dy, saved = values[0], values[len(results) :]
        if dy is None:
            return dict.fromkeys(arrays)
        found = backward.call(dy, *saved)
        return dict(zip(arrays, found if isinstance(found, tuple) else (found,), strict=True))

    forward.differentiate(gradient, wanted=(*backward.op.arrays[1:], *backward.op.attributes))
    differentiate(backward, partial(SHARED[backward.op.name], XP), backward.names)
    return forward


_gelu_operator, _fast_gelu_operator = _differentiated("gelu"), _differentiated("fast_gelu")
_gated_operator, _dropout = _differentiated("gated_linear_unit"), _differentiated("dropout")
_layer_norm, _rms_norm = _differentiated("layer_normalization"), _differentiated("simplified_layer_normalization")
_sink_softmax = _differentiated("sink_softmax")


# --- functions --------------------------------------------------------------------------------------------------------


def is_torchs(x: Tensor) -> bool:
    """Whether PyTorch's function is called."""
    return x.is_cuda or is_exported()


@native
def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit.

    input: any shape; float32, float64, float16 or bfloat16. approximate: "none", or "tanh" for its approximation.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = x / 2 * (1 + erf(x / sqrt(2))), or x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
    Source: torch.nn.functional.gelu.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    if is_torchs(input):
        return functional.gelu(input, approximate=approximate)
    found: Tensor = (_gelu_operator if approximate == "none" else _fast_gelu_operator).call(input)
    return found


@native
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times up, as Llama's layers have it, forward and backward in one pass each.

    gate: any shape; float32, float64, float16 or bfloat16. up: of its shape and dtype; under autocast both
        become of the wider dtype.

    Returns y, of the shape and dtype of gate. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = gate / (1 + exp(-gate)) * up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated_unit("swiglu", gate, up, "silu")


@native
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Gelu of the gate times up, as Gemma's layers have it, forward and backward in one pass each.

    gate, up: as for swiglu. approximate: "tanh", or "none" for gelu itself.

    Returns y, of the shape and dtype of gate. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = gelu(gate) * up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    return _gated_unit("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated_unit(name: str, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if is_torchs(gate):
        return cast(Tensor, gated(XP, gate, up, activation))
    found: Tensor = worded({"gated_linear_unit": name}, _gated_operator.call, *widest(gate, up), activation)
    return found


@native
def layer_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Layer normalization over the last axes.

    input: shape (…, *normalized_shape); float32, float64, float16 or bfloat16.
    weight, bias: of shape normalized_shape; None: 1 and 0. Those of another dtype than input are computed with as they
        are, and the result is rounded to that of input.
    eps: added to the variance.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. Source: torch.nn.functional.layer_norm.
    """
    shape = _shape("layer_norm", input, normalized_shape)
    if is_torchs(input):
        return functional.layer_norm(input, shape, weight, bias, eps)
    scale = input.new_ones(shape) if weight is None else weight
    if bias is not None:
        scale, bias = widest(scale, bias)
    x = input if scale.dtype == input.dtype else input.to(scale.dtype)
    return _in_words("layer_norm", _layer_norm, (x, scale, bias, -len(shape), eps)).to(input.dtype)


@native
def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root mean square normalization over the last axes.

    input: shape (…, *normalized_shape); float32, float64, float16 or bfloat16.
    weight: of shape normalized_shape; None: 1. One of another dtype than input is computed with as it is.
    eps: added to the mean square; None: the distance of 1 and the next number in the dtype that is computed in,
        float32 for half precision.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = x / sqrt(mean(x * x) + eps) * weight. Source: torch.nn.functional.rms_norm.
    """
    shape = _shape("rms_norm", input, normalized_shape)
    eps = torch.finfo(wide(input.dtype)).eps if eps is None else eps
    if is_torchs(input):
        return functional.rms_norm(input, shape, weight, eps)
    scale = input.new_ones(shape) if weight is None else weight
    x = input if scale.dtype == input.dtype else input.to(scale.dtype)
    return _in_words("rms_norm", _rms_norm, (x, scale, -len(shape), eps)).to(input.dtype)


def _shape(name: str, x: Tensor, normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not is_torchs(x) and (not shape or list(x.shape[-len(shape) :]) != shape):
        raise ValueError(f"{name}: input has shape {tuple(x.shape)}, expected {tuple(shape)} as its last axes")
    return shape


def _in_words(name: str, operator: TensorOperator, arguments: Sequence[Any]) -> Tensor:
    """The first result of a normalization; errors speak of the function and its arguments."""
    words = {operator.op.name: name, "x": "input", "scale": "weight"}
    found: Tensor = worded(words, operator.call, *arguments)[0]
    return found


@native
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop elements at random, and scale the others up.

    input: any shape; float32, float64, float16 or bfloat16.
    p: the probability of being dropped, 0 to 1, by decisions that a seed of PyTorch's generator gives.
    training: False gives input itself. inplace: write y to input, and return it.

    Returns y, of the shape and dtype of input; the gradient keeps a byte for each element. Differentiable twice. Raises
    TypeError, ValueError.

    Formula: y = input / (1 - p) where kept, else 0. Source: torch.nn.functional.dropout.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is {p}, expected 0 to 1")
    if is_torchs(input) or not training or not p:
        return functional.dropout(input, p, training, inplace)
    y: Tensor = _dropout.call(input, torch.randint(SEEDS, (1,), device=input.device), p, True)[0]
    return input.copy_(y) if inplace else y


@native
def sink_softmax(x: Tensor, sink: Tensor) -> Tensor:
    """Softmax of the last axis beside a logit of each head that takes a share and has no place in the result.

    x: scores, shape (N, H, L, S); float32, float64, float16 or bfloat16. sink: shape (H,), of its dtype or float32.

    Returns y, of the shape and dtype of x, float32 for half precision under autocast. Differentiable.
    Raises TypeError, ValueError.

    Formula: y = exp(x) / (sum(exp(x)) + exp(sink)). Source: gpt-oss; Xiao et al., "Efficient Streaming Language Models
    with Attention Sinks", 2023.
    """
    x, sink = (each.float() if widens_softmax(each) else each for each in (x, sink))
    if is_torchs(x):
        z = x.to(wide(x.dtype))
        z = torch.cat([z, sink.to(z.dtype).view(-1, 1, 1).expand(*z.shape[:-1], 1)], -1)
        return z.softmax(-1)[..., :-1].to(x.dtype)  # without the sink's probability
    found: Tensor = _sink_softmax.call(x, sink)[0]
    return found


OPTIONS = ("mask", "scale", "causal", "dropout", "seed")
AXES = 4  # of the operator's queries: batch, heads, length, size of a head


def _operator(name: str, arrays: Sequence[str], results: tuple[str, ...]) -> TensorOperator:
    """An operator of attention, with these results and the options that PyTorch's function has."""
    op = only(graph_operators()[name], results)
    return TensorOperator(replace(op, parameters=(*arrays, *OPTIONS), attributes={**op.attributes, "causal": ""}))


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
    if is_torchs(query):
        return functional.scaled_dot_product_attention(
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
    y: Tensor = worded(WORDS, _attention.call, q, k, v, mask, scale, causal, dropout_p, seed)[0]
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
    q, k, v = (each.to(wide(each.dtype)) for each in (q, k, v))
    return cast(Tensor, attended(XP, q, k, v, mask, scale, causal))


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


_attention.differentiate(_gradient)
differentiate(
    _attention_grad,
    lambda dy, q, k, v, mask, scale, causal, dropout: pulled_back(
        lambda q, k, v: _attended(q, k, v, mask, scale, causal, dropout), [q, k, v], [dy]
    ),
)
