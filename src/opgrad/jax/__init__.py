"""JAX: differentiable functions that work under jit, grad, vmap, pmap and shard_map, on the CPU.

Imports `call` and below.

XLA calls the kernels itself, through its FFI, with the addresses of its own buffers: nothing is copied, and neither
Python nor its lock takes part. Arrays that hold numbers are computed on at once. On other devices XLA moves the arrays
to the host and back.
"""

from collections.abc import Mapping
from typing import Any, cast

from jax import Array
from jax.numpy import asarray, finfo, inf, int32, ones, where
from jax.random import bits

import opgrad
from opgrad.jax.loss import cross_entropy, linear_cross_entropy, linear_jsd, linear_kl_div
from opgrad.jax.operators import ATTENTION, LAYERS, differentiable, wide

__all__ = [
    "cross_entropy",
    "dot_product_attention",
    "dropout",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_kl_div",
    "log_softmax",
    "rms_norm",
    "sink_softmax",
    "softmax",
    "swiglu",
]

_opgrad: Any = opgrad  # whose functions are typed as they are for NumPy
_finfo: Any = finfo  # which has no types


def softmax(x: Array, axis: int = -1) -> Array:
    """Probabilities from logits over one axis.

    x: any shape of at least one dimension; float32, float64, float16 or bfloat16. Returns y, like x. Raises TypeError,
    ValueError. Formula: y = exp(x - max(x)) / sum(exp(x - max(x))). Source: jax.nn.softmax.
    """
    return cast(Array, _opgrad.softmax(asarray(x), axis))


def log_softmax(x: Array, axis: int = -1) -> Array:
    """Logarithms of the softmax probabilities over one axis.

    Shapes, dtypes and what is raised are those of softmax. Formula: y = x - max(x) - log(sum(exp(x - max(x)))).
    Source: jax.nn.log_softmax.
    """
    return cast(Array, _opgrad.log_softmax(asarray(x), axis))


def embedding(indices: Array, table: Array) -> Array:
    """The rows of a table that indices name, with a gradient that is summed in the same order every time.

    indices: any shape; int32 or int64 in [-V, V). table: shape (V, D1, …); float32, float64, float16 or bfloat16.
    Returns y of shape indices.shape + table.shape[1:]. Raises TypeError; ValueError for an index out of range, in a
    compiled function as XLA raises it. Formula: y[i] = table[indices[i]]. Source: ONNX Gather.
    """
    return cast(Array, _opgrad.gather(asarray(table), asarray(indices)))


def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    *, scale: float | None = None, is_causal: bool = False,
) -> Array:  # fmt: skip
    """Attention of queries to keys, in tiles: the matrix of scores is never whole in memory.

    query: shape (B, T, N, H). key, value: shape (B, S, K, H); N is a multiple of K, and neighbouring heads of query
        share one of key. float32, float64, float16 or bfloat16; H is 1 to 256.
    bias: what is added to the scores, broadcast to (B, N, T, S), with a gradient.
    mask: bool, True where a query sees a key, likewise.
    scale: what products are multiplied with; None: 1 / sqrt(H). is_causal: query i sees keys up to i alone.

    Returns y of the shape of query; 0 for a query that sees no key. Differentiable twice in reverse, then, and by bias,
    on whole matrices of scores. Raises TypeError, ValueError.
    Formula: y = softmax(scale * query key^T + bias) value. Source: jax.nn.dot_product_attention.
    """
    q, k, v = (asarray(each) for each in (query, key, value))
    added = None if bias is None else asarray(bias)
    if mask is not None:
        seen = asarray(mask)
        added = seen if added is None else where(seen, added, -inf)
    options = {"scale": scale, "causal": "top_left" if is_causal else "", "layout": "BLHD"}
    return _layer("attention", ATTENTION, {"q": q, "k": k, "v": v, "mask": added}, **options)


def _layer(name: str, caller: str, arrays: Mapping[str, Array | None], **attributes: Any) -> Array:
    """The first result of an operator, differentiable; arrays are given by name, those left out as None."""
    given = {each: array for each, array in arrays.items() if array is not None}
    return differentiable(LAYERS[name], given, attributes, caller)[0]


def gelu(x: Array, approximate: bool = True) -> Array:
    """Gaussian error linear unit.

    x: any shape; float32, float64, float16 or bfloat16. approximate: whether by tanh. Returns y, like x. Differentiable
    twice in reverse, as are all layers. Raises TypeError, ValueError.
    Formula: y = x / 2 * (1 + erf(x / sqrt(2))), or x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
    Source: jax.nn.gelu.
    """
    return _layer("fast_gelu" if approximate else "gelu", "gelu", {"x": asarray(x)})


def swiglu(gate: Array, up: Array) -> Array:
    """SiLU of the gate times up, as Llama's layers have it, forward and backward in one pass each.

    gate: any shape; float32, float64, float16 or bfloat16. up: of its shape and dtype. Returns y, like gate. Raises
    TypeError, ValueError. Formula: y = gate / (1 + exp(-gate)) * up. Source: Shazeer, "GLU Variants Improve
    Transformer", 2020.
    """
    return _layer("gated_linear_unit", "swiglu", {"gate": asarray(gate), "up": asarray(up)}, activation="silu")


def geglu(gate: Array, up: Array, approximate: bool = True) -> Array:
    """Gelu of the gate times up, as Gemma's layers have it, forward and backward in one pass each.

    gate, up: as for swiglu. approximate: whether gelu is that by tanh. Returns y, like gate. Raises TypeError,
    ValueError. Formula: y = gelu(gate) * up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    activation = "gelu_tanh" if approximate else "gelu"
    return _layer("gated_linear_unit", "geglu", {"gate": asarray(gate), "up": asarray(up)}, activation=activation)


def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Array:
    """Layer normalization over the axes from `axis` on.

    x: any shape; float32, float64, float16 or bfloat16. scale, bias: of the shape of these axes; None: 1 and 0. Those
        of another dtype than x are computed with as they are, and the result is rounded to that of x.
    epsilon: added to the variance. Returns y, like x. Raises TypeError, ValueError.
    Formula: y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias. Source: ONNX LayerNormalization.
    """
    return _normalized("layer_normalization", "layer_norm", x, scale, bias, axis, epsilon)


def rms_norm(x: Array, scale: Array | None = None, *, axis: int = -1, epsilon: float | None = None) -> Array:
    """Root mean square normalization over the axes from `axis` on.

    x, scale: as for layer_norm. epsilon: added to the mean square; None: the distance of 1 and the next number in the
    dtype that is computed in, float32 for half precision. Returns y, like x. Raises TypeError, ValueError.
    Formula: y = x / sqrt(mean(x * x) + epsilon) * scale. Source: ONNX RMSNormalization.
    """
    return _normalized("simplified_layer_normalization", "rms_norm", x, scale, None, axis, epsilon)


def _normalized(
    name: str, caller: str, x: Array, scale: Array | None, bias: Array | None, axis: int, epsilon: float | None
) -> Array:
    x = asarray(x)
    factor = ones(x.shape[axis:], x.dtype) if scale is None else asarray(scale)
    given = {"x": x.astype(factor.dtype), "scale": factor, "bias": None if bias is None else asarray(bias)}
    added = float(_finfo(wide(x.dtype)).eps) if epsilon is None else epsilon
    return _layer(name, caller, given, axis=axis, epsilon=added).astype(x.dtype)


def dropout(key: Array, x: Array, rate: float = 0.5) -> Array:
    """Drop elements at random, and scale the others up.

    key: of jax.random, which decides. x: any shape; float32, float64, float16 or bfloat16. rate: the probability of
        being dropped, 0 to 1. Returns y, like x; the gradient keeps a byte for each element. Raises TypeError,
        ValueError. Formula: y = x / (1 - rate) where kept, else 0. Source: ONNX Dropout.
    """
    seed = bits(key, (1,), "uint32").astype(int32)
    return _layer("dropout", "dropout", {"x": asarray(x), "seed": seed}, ratio=rate, training_mode=True)


def sink_softmax(x: Array, sink: Array) -> Array:
    """Softmax of the last axis beside a logit of each head that takes a share and has no place in the result.

    x: scores, shape (N, H, L, S); float32, float64, float16 or bfloat16. sink: shape (H,), of its dtype or float32.
    Returns y, like x. Raises TypeError, ValueError. Formula: y = exp(x) / (sum(exp(x)) + exp(sink)). Source: gpt-oss;
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
    """
    return _layer("sink_softmax", "sink_softmax", {"x": asarray(x), "sink": asarray(sink)})
