"""Attention and its gradient, and what goes with it: rotary position embedding, and softmax with a bias before it, with
dropout behind it or with a sink, a logit of each head that takes a share of the probability.
"""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np

from opgrad.contract import (
    IN_GRAPHS,
    ON_CPU,
    Axis,
    OnnxName,
    Tensor,
    choosing,
    chosen,
    like,
    one_number,
    operator,
    shaped_like,
)
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes
from opgrad.ops.dropout import ratio_checked
from opgrad.ops.reference import attending
from opgrad.ops.reference.dropout import kept_scale

X = Annotated[Array, Tensor(FLOATS, ranks=range(1, 65))]


def _bias_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    """The bias's own shape if it fits; else that of a single row."""
    x, bias, start = shapes["x"], shapes["bias"], attributes["axis"].start
    row = x[start:]
    rows, given = math.prod(x[:start]), math.prod(bias[: len(bias) - len(row)])
    fits = len(bias) >= len(row) and bias[len(bias) - len(row) :] == row
    return bias if fits and (rows % given == 0 if given else not rows) else row


Bias = Annotated[
    Array,
    Tensor(
        FLOATS,
        _bias_shape,
        "the shape of x from axis on, behind dimensions whose product divides the number of rows",
        dtype_of="x",
    ),
]
Saved = Annotated[Array, like("dy")]
Mask = Annotated[Array, shaped_like("dy", ("bool",))]


def _rows(array: Array, axis: int) -> Array:
    """The array as rows, each of all axes from `axis` on."""
    start = axis % array.ndim
    return array.reshape(math.prod(array.shape[:start]), math.prod(array.shape[start:]))


@operator(
    support=IN_GRAPHS,
    results={"y": like("x")},
    in_place={"y": ("x",)},
    onnx=OnnxName("BiasSoftmax", attributes={"axis": 1, "is_inner_broadcast": 0}),
)
def bias_softmax(
    x: X, bias: Bias, axis: Axis = -1, is_inner_broadcast: bool = False, *, out: Array | None = None
) -> Array:
    """Softmax of the sum of scores and a bias, or an additive mask, that repeats.

    x: the scores, of at least one dimension; float32, float64, float16 or bfloat16.
    bias: shape x.shape[axis:], or that behind further dimensions whose product B divides the number of rows of x; of
        the dtype of x.
    axis: a row is all of x from this axis on, and has one sum of 1.
    is_inner_broadcast: which of its B rows the bias has for row r of x's R rows: with False r % B, as for a bias of
        shape (1, 1, L, S) with scores of shape (N, H, L, S); with True r // (R / B), as for one of shape (N, 1, 1, S).

    Returns y, of the shape and dtype of x; NaN in rows of -inf alone.

    Formula: y = softmax(x + bias), the sum rounded to float32, or float64 for float64.
    Source: com.microsoft BiasSoftmax.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> bias = np.array([[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]], np.float32)
    >>> opgrad.bias_softmax(x, bias)
    array([[0.2689, 0.7311, 0.    ],
           [0.3333, 0.3333, 0.3333]], dtype=float32)
    """
    if not x.size:
        return x.copy()
    scores = _rows(x, axis)
    every = bias.reshape(-1, scores.shape[1])
    repeats = len(scores) // len(every)
    z = scores + (np.repeat(every, repeats, 0) if is_inner_broadcast else np.tile(every, (repeats, 1)))
    e = np.exp(z - z.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)).reshape(x.shape)


@operator(
    support=IN_GRAPHS,
    results={
        "dx": Tensor(FLOATS, partial(ratio_checked, "softmax_dropout_grad", "dy"), "the shape of dy", dtype_of="dy")
    },
    in_place={"dx": ("dy", "y")},
    onnx=OnnxName("SoftmaxDropoutGrad", ("dy", "mask", "y", "ratio?"), ("dx",), {"axis": 1}),
)
def softmax_dropout_grad(
    dy: X, mask: Mask, y: Saved, ratio: float = 0.5, axis: Axis = -1, *, out: Array | None = None
) -> Array:
    """Gradient of dropout(softmax(x)).

    dy: gradient with respect to the output of dropout, of at least one dimension; float32, float64, float16 or
        bfloat16.
    mask: bool, of the shape of dy; True where dropout kept an element.
    y: the output of softmax, of the shape and dtype of dy.
    ratio: as given to dropout; with 1 the gradient is 0.
    axis: a row is all of y from this axis on.

    Returns dx, of the shape and dtype of dy; dy counts for nothing where mask is False, even if it is NaN there.

    Formula: g = where(mask, dy / (1 - ratio), 0); dx = y * (g - sum(y * g)), the sum over a row.
    Source: com.microsoft SoftmaxDropoutGrad.

    Example:
    >>> x = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    >>> mask = np.array([[True, True, False], [True, True, True]])
    >>> opgrad.softmax_dropout_grad(dy, mask, opgrad.softmax(x), ratio=0.5)
    array([[ 0.1639, -0.0441, -0.1198],
           [-0.2222, -0.2222,  0.4444]], dtype=float32)
    """
    g = _rows(np.where(mask, dy * kept_scale(ratio), 0.0), axis)
    p = _rows(y, axis)
    return (p * (g - (p * g).sum(1, keepdims=True))).reshape(y.shape)


# --- attention: softmax between two products -------------------------------------------------------------------------


def _gradient_of(name: str) -> Tensor:
    return Tensor(FLOATS, partial(attending.given, name), f"the shape of {name}", name)


def _in_q(shape: Any, as_in: str, *besides: str, dtypes: tuple[str, ...] = FLOATS) -> Tensor:
    """An array of the dtype of q, or one of those besides."""
    return Tensor(dtypes, shape, as_in, dtype_of="q", besides=besides)


OF_K = "the batch and the size of a head of q, the heads and the length of k"
OF_Y, OF_DY = "the shape of q with heads as large as v's", "the shape of y"
OF_ROWS, OF_HEADS = "batch, heads and length of q", "the heads of q"
OF_SCORES = "that of the scores, or sizes of 1 in place of some of its"
LSE = _in_q(attending.of_rows, OF_ROWS, "float32", dtypes=("float32", "float64"))
Mask4 = Annotated[Array, _in_q(attending.of_mask, OF_SCORES, "bool", "float32", dtypes=("bool", *FLOATS))]
Sink = Annotated[Array, _in_q(attending.of_heads, OF_HEADS, "float32")]
KeyLengths = Annotated[Array, Tensor(INTEGERS, attending.of_batch, "the batch of q")]
Starts = Annotated[Array, Tensor(INTEGERS, attending.of_starts, "one number more than sequences", ranks=range(1, 2))]
Seed = Annotated[Array, one_number("seed", INTEGERS)]
Offset = Annotated[Array, one_number("offset", INTEGERS)]
Rows = Annotated[Array, LSE]
Q = Annotated[Array, Tensor(FLOATS, attending.checked_q, "its own shape")]
LikeDy = Annotated[Array, Tensor(FLOATS, attending.checked_q, "its own shape", dtype_of="dy")]
K = Annotated[Array, _in_q(attending.checked_k, OF_K)]
V = Annotated[Array, _in_q(attending.checked_v, "the batch, the heads and the length of k")]
Y = Annotated[Array, _in_q(attending.of_result, OF_Y)]
Dy = Annotated[Array, Tensor(FLOATS, attending.checked_dy, OF_DY)]
Scale = Annotated[float | None, attending.scale]
Causal = Annotated[bool | str, attending.causal]
Window = Annotated[Any, attending.window]
Softcap = Annotated[float, attending.not_negative]
Probability = Annotated[float, attending.probability]
Layout = Annotated[str, attending.layout]
NODE_ATTRIBUTES = {"scale": None, "causal": "", "window": (-1, -1), "softcap": 0.0, "dropout": 0.0, "layout": "BHLD"}
NODE_INPUTS = ("mask?", "key_lengths?", "sink?", "seed?", "offset?", "cu_seqlens_q?", "cu_seqlens_k?")
NODE_TYPES: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("lse", "dlse"), "lse"),
    **dict.fromkeys(("key_lengths", "seed", "offset", "cu_seqlens_q", "cu_seqlens_k"), ("int64",)),
}


@operator(
    kind="strided",
    support=IN_GRAPHS,
    results={"y": _in_q(attending.of_result, OF_Y), "lse": LSE},
    onnx=OnnxName(
        "AttentionTraining", ("q", "k", "v", *NODE_INPUTS), ("y?", "lse?"), NODE_ATTRIBUTES, types=NODE_TYPES
    ),
    general=choosing(("y",)),
)
def attention(
    q: Q, k: K, v: V, *, mask: Mask4 | None = None, scale: Scale = None, causal: Causal = False,
    window: Window = None, softcap: Softcap = 0.0, sink: Sink | None = None, key_lengths: KeyLengths | None = None,
    dropout: Probability = 0.0, seed: Seed | None = None, offset: Offset | None = None, layout: Layout = "BHLD",
    cu_seqlens_q: Starts | None = None, cu_seqlens_k: Starts | None = None,
    needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Attention of queries to keys, in tiles: the matrix of scores is never whole in memory.

    q: queries, [batch, heads, length, size of a head]; float32, float64, float16 or bfloat16.
    k, v: keys and values, likewise, with a length of their own; the size of v's heads may differ from that of q and k.
        All sizes of heads are 1 to 256. k may have fewer heads than q, a divisor of their number: neighbouring heads
        of q share one of k and v. Arrays are read where they lie, if their last axis is contiguous.
    mask: what is added to the scores, of the dtype of q or float32; or bool, True where a query sees a key. It is
        broadcast to [batch, heads, length of q, length of k]. Numbers beyond 2.35e38 (float64: 1.24e308) on either side
        count as that: where the least number of a dtype hides all keys, the query sees all, as with other libraries.
    scale: what products of q and k are multiplied with; None: 1 / sqrt(size of a head).
    causal: True or "top_left": query i sees keys up to i; "bottom_right": the last query sees the last key, query i
        keys up to i + length of k - length of q.
    window: (left, right): of the keys to the left and to the right of the last one that a causal query i sees, so many
        are seen; -1 or None sets no limit.
    softcap: c > 0 replaces scores s by c * tanh(s / c) before the mask is added; 0 does not.
    sink: a logit of each head that takes a share of its probability and has no value; shape (heads of q,).
    key_lengths: int32 or int64, how many keys each sequence of the batch has; those behind are not read.
    dropout: the probability at which an element of the softmax is dropped; the others are scaled up.
    seed, offset: ints, or arrays of one; None: 0. Decisions depend on them and on an element's place in C order in
        [batch, heads, length of q, length of k] alone, as those of opgrad.Dropout do.
    layout: "BHLD", or "BLHD" for q, k, v and y as [batch, length, heads, size].
    cu_seqlens_q: for sequences behind each other, where each starts and the last one ends, n + 1 ints. q, k, v and y
        are [length, heads, size] then, lse is [heads, length], places of dropout are in [heads, length of q, length of
        k]; mask and key_lengths are refused, and layout does not matter.
    cu_seqlens_k: likewise for k and v; None: as cu_seqlens_q.
    needs: the results that are wanted, ("y",), ("lse",) or both; None: y alone.
    out: where to write; a tuple of two if both results are wanted; must not overlap an input.

    Returns y like q, with heads of the size of v's; or (y, lse), lse the logarithm of the sum of exponentials of a
    query's scores, sink included: [batch, heads, length of q], float32, or float64 for float64. Queries that see no key
    have y = 0, and lse = -inf without a sink. The score of a key that a query does not see counts for nothing, whatever
    it is; values should be finite nevertheless, since 0 * NaN is NaN: of keys beside others that are seen, values are
    multiplied with 0.

    Formula: p = softmax(softcap * tanh(scale * q k / softcap) + mask); y = dropout(p) v.
    Source: ONNX Attention, com.microsoft MultiHeadAttention and GroupQueryAttention, of which AttentionTraining is the
    node in com.microsoft here.

    Example:
    >>> q = k = np.eye(2, 3, dtype=np.float32)[None, None]
    >>> v = np.array([[[[1.0], [3.0]]]], np.float32)
    >>> opgrad.attention(q, k, v, scale=1.0, causal=True, needs=("y", "lse"))
    (array([[[[1.    ],
             [2.4621]]]], dtype=float32), array([[[1.    , 1.3133]]], dtype=float32))
    """
    masking = mask, sink, key_lengths, cu_seqlens_q, cu_seqlens_k, seed, offset
    options = attending.AttentionOptions(*masking, scale, causal, window, softcap, dropout, layout)
    return chosen(dict(zip(("y", "lse"), attending.attention(q, k, v, options), strict=True)), needs or ("y",))


@operator(
    "dv = dropout(p).T dy, ds = p * (dropout(dy v.T) - rowsum(dy * y)), dq = scale * ds k, dk = scale * ds.T q",
    kind="strided",
    support=IN_GRAPHS,
    results={
        "dq": _in_q(lambda shapes, _: shapes["q"], "the shape of q"),
        "dk": _in_q(lambda shapes, _: shapes["k"], "the shape of k"),
        "dv": _in_q(lambda shapes, _: shapes["v"], "the shape of v"),
        "dmask": _gradient_of("mask"),
        "dsink": _gradient_of("sink"),
    },
    onnx=OnnxName(
        "AttentionGrad",
        ("dy", "q", "k", "v", "y", "lse", *NODE_INPUTS, "dlse?"),
        ("dq?", "dk?", "dv?", "dmask?", "dsink?"),
        NODE_ATTRIBUTES,
        types=NODE_TYPES,
    ),
    general=choosing(("dq", "dk", "dv")),
)
def attention_grad(
    dy: Dy, q: LikeDy, k: K, v: V, y: Y, lse: Rows, *, dlse: Rows | None = None,
    mask: Mask4 | None = None, scale: Scale = None, causal: Causal = False, window: Window = None,
    softcap: Softcap = 0.0, sink: Sink | None = None, key_lengths: KeyLengths | None = None,
    dropout: Probability = 0.0, seed: Seed | None = None, offset: Offset | None = None, layout: Layout = "BHLD",
    cu_seqlens_q: Starts | None = None, cu_seqlens_k: Starts | None = None,
    needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Gradients of attention with respect to q, k, v, an additive mask and the sink.

    dy: gradient with respect to y, of its shape; float32, float64, float16 or bfloat16.
    q, k, v, mask, scale, causal, window, softcap, sink, key_lengths, dropout, seed, offset, layout, cu_seqlens_q,
        cu_seqlens_k: as given to attention; q, k, v and y of the dtype of dy.
    y, lse: its results. Probabilities are computed again from q, k and lse. An lse from 7e5 on (float64: 4e14), on
        either side, has no digits for the sum beside the largest score: there the sum is formed again, of these keys.
    dlse: gradient with respect to lse, of its shape; None: 0.
    needs: the results that are wanted, a tuple with some of "dq", "dk", "dv", "dmask" and "dsink"; the last two need
        an additive mask and a sink. None: ("dq", "dk", "dv").

    Returns (dq, dk, dv), or those in needs, of the shapes and dtypes of q, k, v, mask and sink. Sums are formed in
    float32 (float64 for float64), in an order that depends on shapes alone.

    Formula: delta = rowsum(dy * y) - dlse; p = min(exp(s - lse), 1); dv = sum of dropout(p) dy; ds = p * (dropout(dy v)
    - delta); dmask = sum of ds; dr = scale * ds * (1 - tanh(scale * q k / softcap)**2); dq = dr k; dk = sum of dr q;
    dsink = -sum of exp(sink - lse) * delta. Source: Dao, "FlashAttention-2", 2023;
    AttentionGrad is its node in com.microsoft here.

    Example:
    >>> q = k = np.eye(2, 3, dtype=np.float32)[None, None]
    >>> v = np.array([[[[1.0], [3.0]]]], np.float32)
    >>> y, lse = opgrad.attention(q, k, v, causal=True, needs=("y", "lse"))
    >>> dq, dk, dv = opgrad.attention_grad(np.ones_like(y), q, k, v, y, lse, causal=True)
    >>> dv
    array([[[[1.3595],
             [0.6405]]]], dtype=float32)
    """
    masking = mask, sink, key_lengths, cu_seqlens_q, cu_seqlens_k, seed, offset
    options = attending.AttentionOptions(*masking, scale, causal, window, softcap, dropout, layout)
    return chosen(attending.attention_grad(dy, q, k, v, y, lse, dlse, options), needs or ("dq", "dk", "dv"))


HeadScores = Annotated[Array, Tensor(FLOATS, ranks=range(4, 5))]
HEADS_OF_X = "the heads of x, its second axis"
SinkOfHeads = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: shapes["x"][1:2], HEADS_OF_X, dtype_of="x", besides=("float32",))
]
SoftmaxOfHeads = Annotated[Array, like("dy")]
LseOfHeads = Annotated[Array, Tensor(("float32", "float64"), lambda shapes, _: shapes["dy"][:-1], "the rows of dy")]
SavedSink = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: shapes["dy"][1:2], HEADS_OF_X, dtype_of="dy", besides=("float32",))
]


@operator(
    support=IN_GRAPHS,
    results={
        "y": like("x"),
        "lse": Tensor(("float32", "float64"), lambda shapes, _: shapes["x"][:-1], "the rows of x", dtype_of="x"),
    },
    in_place={"y": ("x",)},
)
def sink_softmax(x: HeadScores, sink: SinkOfHeads, *, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """Softmax of the last axis beside a logit of each head that takes a share and has no place in the result.

    x: scores, shape (N, H, L, S); float32, float64, float16 or bfloat16.
    sink: shape (H,), of the dtype of x or float32.

    Returns (y, lse): y like x, whose rows sum to 1 less the share of the sink; lse of shape (N, H, L), the logarithm of
    the sum of exponentials, that of the sink included, in float32, or float64 for float64. Rows of -inf with a sink of
    -inf are 0.

    Formula: y = exp(x) / (sum(exp(x)) + exp(sink)); lse = log(sum(exp(x)) + exp(sink)).
    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, as trained in gpt-oss.

    Example:
    >>> x = np.log(np.array([[[[1.0, 2.0]]]], np.float32))
    >>> y, lse = opgrad.sink_softmax(x, np.zeros(1, np.float32))
    >>> y, np.exp(lse)
    (array([[[[0.25, 0.5 ]]]], dtype=float32), array([[[4.]]], dtype=float32))
    """
    beside = sink[:, None, None]
    m = np.maximum(x.max(-1, keepdims=True, initial=-np.inf), beside)
    base = np.where(m == -np.inf, 0, m)
    e = np.exp(x - base)
    total = e.sum(-1, keepdims=True) + np.exp(beside - base)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + base
    return e / np.where(total == 0, 1, total), lse[..., 0]


@operator(
    forward="sink_softmax",
    support=IN_GRAPHS,
    results={"dx": like("dy"), "dsink": like("sink")},
    in_place={"dx": ("dy", "y")},
)
def sink_softmax_grad(
    dy: HeadScores, y: SoftmaxOfHeads, lse: LseOfHeads, sink: SavedSink, *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Gradients of sink_softmax's y with respect to x and sink.

    dy: gradient with respect to y, shape (N, H, L, S); float32, float64, float16 or bfloat16.
    y, lse: the results of sink_softmax, y of the dtype of dy. sink: as given to it.

    Returns (dx, dsink): dx like dy, dsink of the shape and dtype of sink. Sums over rows are formed in one order.

    Formula: dx = y * (dy - sum(y * dy)); dsink = -sum over rows of exp(sink - lse) * sum(y * dy). Source: that of
    sink_softmax.

    Example:
    >>> x, sink = np.log(np.array([[[[1.0, 2.0]]]], np.float32)), np.zeros(1, np.float32)
    >>> y, lse = opgrad.sink_softmax(x, sink)
    >>> opgrad.sink_softmax_grad(np.array([[[[1.0, 0.0]]]], np.float32), y, lse, sink)
    (array([[[[ 0.1875, -0.125 ]]]], dtype=float32), array([-0.0625], dtype=float32))
    """
    total = (y * dy).sum(-1)
    rest = np.exp(sink[:, None] - np.where(lse == -np.inf, 0, lse))
    return y * (dy - total[..., None]), -(rest * total).sum((0, 2))


PACKED = 3  # axes of x where a token's heads lie in one axis: [B, L, H * D]


class Rotation(NamedTuple):
    """The sizes of x, and the shape that its tables must have.

    half: how many pairs of a head's elements are turned. heads_first: whether heads stand before tokens.
    """

    batch: Any
    heads: Any
    tokens: Any
    size: Any
    half: Any
    heads_first: bool
    table: Shape


FORWARD, BACKWARD = "rotary_embedding", "rotary_embedding_grad"
ARRAYS = {FORWARD: "x", BACKWARD: "dy"}


def rotation(operator: str, shapes: Shapes, attributes: Attributes) -> Rotation:
    """The sizes of a call of `operator`. Raises its ValueError."""
    array, heads = ARRAYS[operator], attributes["num_heads"]
    shape = shapes[array]
    if len(shape) == PACKED:
        batch, tokens, width = shape
        if heads < 1 or width % heads:
            what = f"{operator}: num_heads is {heads}, expected a number that divides {width}"
            raise ValueError(f"{what}, the last size of {array}, which has 3 dimensions")
        heads_first, size = False, width // heads
    else:
        heads_first = attributes["layout"] == "BHLD"
        batch, size = shape[0], shape[3]
        found, tokens = (shape[1], shape[2]) if heads_first else (shape[2], shape[1])
        if heads not in (0, found):
            raise ValueError(f"{operator}: num_heads is {heads}, expected 0 or {found}, the heads that {array} has")
        heads = found
    turned = attributes["rotary_embedding_dim"]
    if turned % 2 or not 0 <= turned <= size or (not turned and size % 2):
        expected = f"an even number from 0 to {size}, the size of a head" if size % 2 == 0 else "an even number above 0"
        raise ValueError(f"{operator}: rotary_embedding_dim is {turned}, expected {expected}")
    half = (turned or size) // 2
    cos = shapes["cos_cache"]
    if "position_ids" in shapes:
        table: Shape = (cos[0], half)
    elif len(cos) == PACKED:
        table = (1 if cos[0] == 1 else batch, tokens, half)
    else:
        table = (max(cos[0], tokens), half)
    return Rotation(batch, heads, tokens, size, half, heads_first, table)


TABLE = "half of the turned elements of a head for each token, or for each position"
ROTARY_ATTRIBUTES = {"interleaved": 0, "rotary_embedding_dim": 0, "num_heads": 0, "layout": "BHLD"}
ROTARY_INPUTS = ("cos_cache", "sin_cache", "position_ids?")


def _cos(name: str) -> Tensor:
    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        return rotation(name, shapes, attributes).table

    return Tensor(FLOATS, shape, TABLE, dtype_of=ARRAYS[name], ranks=range(2, 4))


def _sin(name: str) -> Tensor:
    return shaped_like("cos_cache", dtype_of=ARRAYS[name])


def _positions(name: str) -> Tensor:
    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        sizes = rotation(name, shapes, attributes)
        return sizes.batch, sizes.tokens

    return Tensor(INTEGERS, shape, f"batch and tokens of {ARRAYS[name]}", ranks=range(2, 3))


def _of_tokens(x: Array, sizes: Rotation) -> Array:
    """The array as [B, L, H, D]."""
    if sizes.heads_first:
        return x.swapaxes(1, 2)
    return x.reshape(sizes.batch, sizes.tokens, sizes.heads, sizes.size)


def _turned(x: Array, sizes: Rotation, cos: Array, sin: Array, positions: Array | None, interleaved: bool) -> Array:
    """Every pair (a, b) as (a * cos - b * sin, b * cos + a * sin)."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    elif cos.ndim < PACKED:
        cos, sin = cos[: sizes.tokens], sin[: sizes.tokens]
    cos, sin = cos[..., None, :], sin[..., None, :]
    whole, half = 2 * sizes.half, sizes.half
    first, second = (slice(0, whole, 2), slice(1, whole, 2)) if interleaved else (slice(half), slice(half, whole))
    y = np.array(x)
    before, after = _of_tokens(x, sizes), _of_tokens(y, sizes)
    after[..., first] = before[..., first] * cos - before[..., second] * sin
    after[..., second] = before[..., second] * cos + before[..., first] * sin
    return y


@operator(
    support=ON_CPU,
    results={"y": like("x")},
    in_place={"y": ("x",)},
    onnx=OnnxName("RotaryEmbeddingTraining", ("x", *ROTARY_INPUTS), ("y",), ROTARY_ATTRIBUTES),
)
def rotary_embedding(
    x: Annotated[Array, Tensor(FLOATS, ranks=range(3, 5))], cos_cache: Annotated[Array, _cos(FORWARD)],
    sin_cache: Annotated[Array, _sin(FORWARD)], position_ids: Annotated[Array, _positions(FORWARD)] | None = None,
    interleaved: bool = False, rotary_embedding_dim: int = 0, num_heads: int = 0, layout: Layout = "BHLD",
    *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Rotary position embedding: turns pairs of each head's elements by angles that belong to the token's position.

    x: queries or keys, shape [B, H, L, D], or [B, L, H, D] as layout says, or [B, L, H * D]; float32, float64, float16
        or bfloat16. With R = rotary_embedding_dim or D elements of a head that are turned:
    cos_cache, sin_cache: cosine and sine of the angles, of the dtype of x. With position_ids shape [P, R / 2], a row
        for each position; without them [B, L, R / 2] or [1, L, R / 2], or [P, R / 2] with P >= L, whose first L rows
        are taken.
    position_ids: the position of each token, shape [B, L]; int32 or int64 in [-P, P), where negative ones count from
        the end.
    interleaved: which elements a and b are a pair: 2i and 2i + 1; by default i and i + R / 2.
    rotary_embedding_dim: R, an even number up to D; elements from R on stay as they are. 0: D.
    num_heads: H, for x of three dimensions; otherwise it need not be given.
    layout: "BHLD" or "BLHD", the axes of x if it has four.

    Formula: y[a] = x[a] * cos - x[b] * sin; y[b] = x[b] * cos + x[a] * sin. Source: ONNX RotaryEmbedding, of which
    RotaryEmbeddingTraining is the node in com.microsoft here.

    Example:
    >>> x = np.array([[[[1.0, 0.0], [1.0, 0.0]]]], np.float32)
    >>> angle = np.array([[0.0], [np.pi / 2]])
    >>> cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    >>> opgrad.rotary_embedding(x, cos, sin).round(3) + 0.0
    array([[[[1., 0.],
             [0., 1.]]]], dtype=float32)
    """
    given = {"num_heads": num_heads, "layout": layout, "rotary_embedding_dim": rotary_embedding_dim}
    sizes = rotation(FORWARD, {"x": x.shape, "cos_cache": cos_cache.shape}, given)
    return _turned(x, sizes, cos_cache, sin_cache, position_ids, interleaved)


@operator(
    support=ON_CPU,
    forward=FORWARD,
    results={"dx": like("dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName("RotaryEmbeddingGrad", ("dy", *ROTARY_INPUTS), ("dx",), ROTARY_ATTRIBUTES),
)
def rotary_embedding_grad(
    dy: Annotated[Array, Tensor(FLOATS, ranks=range(3, 5))], cos_cache: Annotated[Array, _cos(BACKWARD)],
    sin_cache: Annotated[Array, _sin(BACKWARD)], position_ids: Annotated[Array, _positions(BACKWARD)] | None = None,
    interleaved: bool = False, rotary_embedding_dim: int = 0, num_heads: int = 0, layout: Layout = "BHLD",
    *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of rotary_embedding with respect to x: the rotation by the same angles the other way round.

    dy: gradient with respect to the output, of the shape of x; float32, float64, float16 or bfloat16.
    cos_cache, sin_cache, position_ids, interleaved, rotary_embedding_dim, num_heads, layout: as given to
        rotary_embedding, the tables of the dtype of dy.

    Formula: dx[a] = dy[a] * cos + dy[b] * sin; dx[b] = dy[b] * cos - dy[a] * sin. Source: the gradient of ONNX
    RotaryEmbedding, of which RotaryEmbeddingGrad is the node in com.microsoft here.

    Example:
    >>> dy = np.array([[[[1.0, 0.0], [1.0, 0.0]]]], np.float32)
    >>> angle = np.array([[0.0], [np.pi / 2]])
    >>> cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    >>> opgrad.rotary_embedding_grad(dy, cos, sin).round(3) + 0.0
    array([[[[ 1.,  0.],
             [ 0., -1.]]]], dtype=float32)
    """
    given = {"num_heads": num_heads, "layout": layout, "rotary_embedding_dim": rotary_embedding_dim}
    sizes = rotation(BACKWARD, {"dy": dy.shape, "cos_cache": cos_cache.shape}, given)
    return _turned(dy, sizes, cos_cache, -sin_cache, position_ids, interleaved)
