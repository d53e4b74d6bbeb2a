"""Attention, grouped and linear attention, and rotary embedding, as the operators that they are made of.

A key's place in its row is that in the cache: those of the past come first, new ones behind them, at a place that each
row of the batch has for itself. In linear attention every token changes a state of each head, of which its query reads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, ONE_AXIS_FROM, Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import are_equal, known
from opgrad.onnx.passes.attention import LARGEST_HEAD
from opgrad.onnx.rules.node import (
    Gradients,
    Node,
    NoGradient,
    decomposition,
    gradient,
    in_float32,
    numbers_of,
    recomputed,
    sizes_of,
    unbroadcast,
)

ATTRIBUTES = ("scale", "causal", "window", "softcap", "dropout", "layout")  # of AttentionTraining and its gradient
MASKED = -10000.0  # the default of the number that is added to the scores of masked keys
SEVERAL = 5  # axes of an input that packs several projections: [N, L, heads, how many, H]


@gradient("AttentionTraining", domain=MICROSOFT, constant=(4, 6, 7, 8, 9))
def attention_training(node: Node) -> Gradients:
    """dv = dropout(p).T @ dy, ds = scale * p * (dropout(dy @ v.T) - sum(dy * y) + dlse), dq = ds @ k, dk = ds.T @ q."""
    dtype = TensorProto.DOUBLE if node.x.element_type == TensorProto.DOUBLE else TensorProto.FLOAT
    dlse = node.dys[1] if len(node.dys) > 1 else None
    y, lse = node.y, node.output(1, "_lse", dtype)
    q, k, v, *more = (node.input(index) for index in range(10))
    dq, dk, dv, dmask, dsink = node.results(
        "AttentionGrad", 5, node.dy, q, k, v, y, lse, *more, dlse, **node.given(*ATTRIBUTES)
    )
    return [dq, dk, dv, dmask, None, dsink]


@decomposition("Attention", domain=MICROSOFT)
def attention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head, q, k and v being parts of x @ weights + bias."""
    if node.get("do_rotary", 0) or node.get("past_present_share_buffer", 0):
        raise NoGradient("it is rotary, or shares a buffer with the past")
    weights, bias = node.required(1), node.input(2)
    (width,) = numbers_of(weights, 1)
    packed = node.body.node("MatMul", node.x, weights)
    packed = packed if bias is None else packed + bias
    ends = np.cumsum([0, *(node.get("qkv_hidden_sizes") or [width // 3] * 3)]).tolist()
    q, k, v = (_split_heads(node, packed.slice(*part, 2)) for part in pairwise(ends))
    past = node.input(4)
    if past is not None:
        befores = [past.slice(index, index + 1).squeeze(0) for index in range(2)]
        k, v = (node.body.concat(*pair, axis=2) for pair in zip(befores, (k, v), strict=True))
    present = node.body.concat(k.unsqueeze(0), v.unsqueeze(0), axis=0)
    return [_attended(node, q, k, v, 3), present]


@decomposition("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head; q, k and v are [N, L, heads * H], or packed."""
    x, key, value = node.x, node.input(1), node.input(2)
    if len(sizes_of(x)) == SEVERAL:
        q, k, v = _unpacked(x, 3)
    elif key is not None and len(sizes_of(key)) == SEVERAL:
        q, k, v = _split_heads(node, x), *_unpacked(key, 2)
    elif key is None or value is None:
        raise NoGradient("its key and value are missing, and its query does not hold them")
    else:  # key and value of cross attention come with the heads in front
        q, k, v = (each if len(sizes_of(each)) > 3 else _split_heads(node, each) for each in (x, key, value))
    bias = node.input(3)
    if bias is not None:
        q, k, v = (each + part for each, part in zip((q, k, v), _biases(node, bias), strict=True))
    pasts = zip((node.input(6), node.input(7)), (k, v), strict=True)
    k, v = (each if before is None else node.body.concat(before, each, axis=2) for before, each in pasts)
    return [_attended(node, q, k, v, 4), k, v]


def _unpacked(packed: Value, count: int) -> list[Value]:
    return [packed.slice(index, index + 1, 3).squeeze(3).transpose(0, 2, 1, 3) for index in range(count)]


def _split_heads(node: Node, value: Value) -> Value:
    return value.reshape([0, 0, node.get("num_heads"), -1]).transpose(0, 2, 1, 3)


def _biases(node: Node, bias: Value) -> list[Value]:
    """The parts of the bias for query, key and value, each [heads, 1, H]."""
    (whole,), width = numbers_of(bias, 0), sizes_of(node.x)[-1]
    own = width if node.rank() < SEVERAL and isinstance(width, int) else whole // 3
    ends = [0, own, 2 * own, whole]
    return [bias.slice(*part).reshape([node.get("num_heads"), 1, -1]) for part in pairwise(ends)]


def _attended(node: Node, q: Value, k: Value, v: Value, mask: int) -> Value:
    """The result of attention, [N, L, heads * H]. mask: the index of the input that tells which keys count."""
    dtype, body = node.x.element_type or TensorProto.FLOAT, node.body
    scale: Value | float = node.get("scale", 0.0)
    if not scale:
        scale = 1 / q.shape(3, 4).cast(dtype).reshape([]).apply("Sqrt")
    scores = body.node("MatMul", q, k.transpose(0, 1, 3, 2)) * scale
    for each in _added(node, q, k, mask):
        scores = scores + each
    y = body.node("MatMul", scores.apply("Softmax", axis=-1 if node.opset >= ONE_AXIS_FROM else 3), v)
    return y.transpose(0, 2, 1, 3).reshape([0, 0, -1])


def _added(node: Node, q: Value, k: Value, mask: int) -> list[Value]:
    """The terms that are added to the scores: the bias, the mask of keys, and the causal mask.

    mask: the index of a mask of the keys, of one for each query, or of the number of keys of each row.
    """
    own, keys, zero, allowed = node.input(5), node.input(mask), node.body.number(0, node.x), list[Value]()
    if keys is not None:  # which keys count, [N, 1, L or 1, T]
        axes = len(sizes_of(keys))
        if axes > 3:
            raise NoGradient(f"its mask has {axes} axes, expected at most 3")
        if axes > 1:
            allowed.append((keys > 0).unsqueeze(*([1, 2] if axes == 2 else [1])))
        elif are_equal(sizes_of(keys), sizes_of(node.x)[:1]):
            allowed.append(_places(k) < keys.cast(TensorProto.INT64).reshape([-1, 1, 1, 1]))
        else:
            raise NoGradient("its mask of one axis is not known to be one length for each row")
    if node.get("unidirectional", 0):
        last = k.shape(2, 3) - q.shape(2, 3)  # the last query is at the place of the last key
        allowed.append(~(_places(k) > _places(q).reshape([-1, 1]) + last))
    low = node.get("mask_filter_value", MASKED)
    return [*([] if own is None else [own]), *(node.where(each, zero, low) for each in allowed)]


def _places(value: Value) -> Value:
    """0, 1, … along axis 2."""
    return value.body.range(value.shape(2, 3).squeeze(0))


LOWEST = -3.4e38  # the score of a key that does not count


class GroupedHeads(NamedTuple):
    """How a row of numbers is divided: queries by query heads, keys and values by key heads; a head has `width`."""

    queries: int
    keys: int
    width: int


@recomputed("GroupQueryAttention", domain=MICROSOFT, constant=(5, 6, 9))
@in_float32
def group_query_attention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head of q, with the keys of its group; caches come first."""
    _refuse(node)
    heads = _grouped_heads(node)
    q, k, v = _parts(node, heads)
    new = node.x.shape(1, 2).squeeze(0)
    counted = node.required(5).cast(TensorProto.INT64).reshape([-1, 1, 1, 1]) + 1
    # In a first prompt all keys are new, whatever the rows' lengths are.
    past, total = node.input(3), node.required(6).cast(TensorProto.INT64).scalar()
    before = node.where(total.equals(new), 0, counted - new)  # how many keys each row has before the new ones
    at = before + node.body.range(new).unsqueeze(1)  # [N, 1, L, 1]
    if node.get("do_rotary", 0):
        q, k = (_turned(node, each, at.squeeze(1, 3)) for each in (q, k))
    if _all_new(node) and _takes_tiles(node, heads):  # in the axes of the projections, without a transpose
        inputs = q, k, v, node.input(10), counted.reshape([-1]), _sink(node, heads, node.input(11))
        y = _in_tiles(node, heads, *inputs, **_limits(node), layout="BLHD")
        return [y, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)]
    q, k, v = (each.transpose(0, 2, 1, 3) for each in (q, k, v))
    count = new if past is None or _all_new(node) else node.body.node("Max", total, past.shape(2, 3).squeeze(0))
    keys = node.body.range(count)  # [T]
    k, v = (_in_cache(node.input(index), each, before, keys) for index, each in ((3, k), (4, v)))
    mask, window = keys < counted, node.get("local_window_size", -1)
    if node.get("causal", 1):
        mask = mask & ~(keys > at)
    mask = mask if window < 0 else mask & (keys > at - window)
    return [attended(node, (q, k, v), heads, mask, node.input(10), node.input(11)), k, v]


def _all_new(node: Node) -> bool:
    """Whether there is no past, so that a key's place in its row is that among the new ones."""
    past = node.input(3)
    return past is None or known(list(past.sizes or [None] * 4)[2:3]) == [0]


def _refuse(node: Node) -> None:
    reasons = {
        "its caches are quantized": node.get("k_quant_type", "NONE") != "NONE" or node.input(12) is not None,
        "its caches are windows that slide": node.get("sliding_window_cache", 0),
        "its heads are normalized": node.input(14) is not None,
        "its rows have lengths of their own": node.input(16) is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NoGradient(f"{reason}, which onnxruntime does on GPUs or for generation alone")


def _grouped_heads(node: Node) -> GroupedHeads:
    queries, keys, (width,) = node.get("num_heads"), node.get("kv_num_heads"), numbers_of(node.x, 2)
    return GroupedHeads(queries, keys, width // (queries if node.input(1) is not None else queries + 2 * keys))


def _parts(node: Node, heads: GroupedHeads) -> list[Value]:
    """Query, key and value as [N, L, heads, H]; they may lie behind each other in the query."""
    x, key, value = node.x, node.input(1), node.input(2)
    if key is None or value is None:
        ends = [0, heads.queries, heads.queries + heads.keys, heads.queries + 2 * heads.keys]
        x, key, value = (x.slice(start * heads.width, end * heads.width, 2) for start, end in pairwise(ends))
    return [each.reshape([0, 0, -1, heads.width]) for each in (x, key, value)]


def _turned(node: Node, x: Value, own: Value) -> Value:
    """x with its pairs turned by the angles of places [N, L]; places beyond the cache of angles belong to no token."""
    positions = node.input(9)
    if positions is not None:  # of a first prompt onnxruntime reads the first position alone
        new = node.x.shape(1, 2).squeeze(0)
        prompt = node.required(6).cast(TensorProto.INT64).scalar().equals(new)
        own = node.where(prompt, own + positions.slice(0, 1, 0).slice(0, 1, 1), positions)
    return _turned_by(node, x, own)


def _turned_by(node: Node, x: Value, own: Value) -> Value:
    """x, [N, L, heads, H], with its pairs turned by the angles of places [N, L]."""
    cos, sin = node.required(7), node.required(8)
    positions = node.body.node("Min", own, cos.shape(0, 1).squeeze(0) - 1)
    turns = {"rotary_embedding_dim": 2 * numbers_of(cos, 1)[0], "interleaved": node.get("rotary_interleaved", 0)}
    return node.microsoft("RotaryEmbeddingTraining", x, cos, sin, positions, **turns, layout="BLHD")


def _in_cache(past: Value | None, now: Value, before: Value, keys: Value) -> Value:
    """The keys of the past with the new ones behind them, [N, heads, T, H]. keys: the indices of all, [T]."""
    if past is None or known(list(past.sizes or [None] * 4)[2:3]) == [0]:
        return now
    body, room, new = past.body, past.shape(2, 3).squeeze(0), now.shape(2, 3).squeeze(0)
    both, place = body.concat(past, now, axis=2), keys.unsqueeze(1)
    # A place behind the past has a new key, which follows the whole cache in `both`; one behind these has none.
    at = body.where(place < before, place, body.node("Min", place - before, new - 1) + room)
    shape = body.concat(now.shape(0, 2), keys.shape(0, 1), now.shape(3, 4))
    return body.node("GatherElements", both, at.expand(shape), axis=2)


def attended(
    node: Node,
    projections: tuple[Value, Value, Value],
    heads: GroupedHeads,
    mask: Value,
    bias: Value | None = None,
    sink: Value | None = None,
) -> Value:
    """The result of attention, [N, L, heads * H].

    In a plain graph the queries of a group are rows of a product with their keys; elsewhere one node works in tiles.
    """
    body, (q, k, v) = node.body, projections
    if _takes_tiles(node, heads):
        mask = mask if bias is None else node.where(mask, bias, LOWEST)
        return _in_tiles(node, heads, q, k, v, mask, None, _sink(node, heads, sink))
    rows = q.reshape([0, heads.keys, -1, heads.width])
    scores = body.node("MatMul", rows, k.transpose(0, 1, 3, 2)) * (node.get("scale", 0.0) or heads.width**-0.5)
    softcap = node.get("softcap", 0.0)
    if softcap:
        scores = (scores / softcap).apply("Tanh") * softcap
    shape = body.concat(q.shape(0, 3), k.shape(2, 3))
    scores = scores.reshape(shape)
    scores = scores if bias is None else scores + bias
    scores = node.where(mask, scores, LOWEST)
    p = _softmax(node, scores, sink)
    y = body.node("MatMul", p.reshape(body.concat(rows.shape(0, 3), k.shape(2, 3))), v)
    return y.reshape(q.shape()).transpose(0, 2, 1, 3).reshape([0, 0, heads.queries * heads.width])


def _takes_tiles(node: Node, heads: GroupedHeads) -> bool:
    return not node.body.plain and heads.width <= LARGEST_HEAD


def _limits(node: Node) -> dict[str, Any]:
    """Which of the new keys count for which queries, as attributes of the node that works in tiles."""
    window = node.get("local_window_size", -1)
    limits = {"window": (window - 1, -1)} if window > 0 else {}
    return {"causal": "top_left" if node.get("causal", 1) else "", **limits}


def _in_tiles(node: Node, heads: GroupedHeads, *inputs: Value | None, layout: str = "BHLD", **given: Any) -> Value:
    """The result of attention, [N, L, heads * H], by a node that keeps no scores. given: attributes."""
    y = node.results("AttentionTraining", 2, *inputs, **_scaling(node, heads), **given, layout=layout)[0]
    y = y.transpose(0, 2, 1, 3) if layout == "BHLD" else y
    return y.reshape([0, 0, heads.queries * heads.width])


def _sink(node: Node, heads: GroupedHeads, given: Value | None) -> Value | None:
    if given is not None or not node.get("smooth_softmax", 0):
        return given
    return node.body.number(0, node.x).expand(node.body.ints([heads.queries]))


def _scaling(node: Node, heads: GroupedHeads) -> dict[str, Any]:
    """How scores are made of products, as attributes of the node that works in tiles."""
    return {"scale": node.get("scale", 0.0) or heads.width**-0.5, "softcap": node.get("softcap", 0.0)}


def in_sequences(node: Node, starts: Value, places: Value) -> Value:
    """The result of attention in one row of several sequences, of which each sees itself alone.

    starts: where each sequence begins, and the last one ends, [n + 1]. places: those of tokens in their sequences,
    [1, L]. Raises NoGradient for a bias, which is for whole rows.
    """
    _refuse(node)
    if node.input(10) is not None:
        raise NoGradient("its scores have a bias")
    heads = _grouped_heads(node)
    q, k, v = _parts(node, heads)
    if node.get("do_rotary", 0):
        q, k = (_turned_by(node, each, places) for each in (q, k))
    rows = [each.squeeze(0) for each in (q, k, v)]
    return of_sequences(
        node, rows, starts, _sink(node, heads, node.input(11)), **_limits(node), **_scaling(node, heads)
    )


def of_sequences(node: Node, parts: Sequence[Value], starts: Value, sink: Value | None = None, **given: Any) -> Value:
    """Attention of queries, keys and values [L, heads, H] of several sequences, [1, L, heads * H]."""
    y = node.results("AttentionTraining", 2, *parts, None, None, sink, None, None, starts, **given)[0]
    return y.reshape(node.body.concat(node.body.ints([1]), y.shape(0, 1), node.body.ints([-1])))


def _softmax(node: Node, scores: Value, sink: Value | None) -> Value:
    """Softmax over the keys. A sink takes a share of each head, as a key without a value would."""
    if sink is None and not node.get("smooth_softmax", 0):
        return scores.apply("Softmax", axis=3)
    body = node.body
    column = body.concat(scores.shape(0, 3), body.ints([1]))
    given = body.number(0, scores) if sink is None else sink.reshape([1, -1, 1, 1])
    return body.concat(given.expand(column), scores, axis=3).apply("Softmax", axis=3).slice(1, LAST, 3)


def _linearly_attended(
    state: Value, q: Value, k: Value, v: Value, decay: Value | None, rate: Value | None
) -> tuple[Value, Value]:
    """What the queries read, [T, N, heads, queries of a head, D], and the last state, [N, heads, K, D].

    The tokens come one after the other. q: [T, N, heads, queries of a head, K]. k, v: [T, N, heads, K] and [T, N,
    heads, D]. decay: logarithms of what stays of the state, [T, N, heads, K or 1]; None if all stays. rate: how far the
    state goes towards the value, [T, N, heads, 1]; None if the value is added.
    """

    def step(inner: Body, s: Value, q: Value, k: Value, v: Value, *others: Value) -> tuple[list[Value], list[Value]]:
        change = v.unsqueeze(2)
        if decay is not None:
            s = s * others[0].apply("Exp").unsqueeze(3)
        if rate is not None:
            change = (change - inner.node("MatMul", k.unsqueeze(2), s)) * others[-1].unsqueeze(3)
        s = s + inner.node("MatMul", k.unsqueeze(3), change)
        return [s], [inner.node("MatMul", q, s)]

    tokens = (q, k, v, decay, rate)
    last, y = state.body.scan([state], [each for each in tokens if each is not None], step)
    return y, last


@recomputed("LinearAttention", domain=MICROSOFT)
@in_float32
def linear_attention(node: Node) -> Gradients:
    """s = exp(decay) * s + k * rate * (v - k @ exp(decay) * s), y = scale * q @ s, one token after the other."""
    if node.get("state_window", 0):
        raise NoGradient("it keeps several states")
    body, rule = node.body, node.get("update_rule", "gated_delta")
    queries, keys = node.get("q_num_heads"), node.get("kv_num_heads")
    width, depth = (numbers_of(node.required(index), 2)[0] // heads for index, heads in ((0, queries), (2, keys)))
    past, decay, rate = node.input(3), node.input(4), node.input(5)
    few = numbers_of(node.required(1), 2)[0] // width
    k, v = _shared(_in_time(node.required(1), few), keys, few), _in_time(node.required(2), keys)
    q = _in_time(node.x, queries)
    if queries >= keys:
        q = q.reshape([0, 0, keys, queries // keys, width])
    else:  # a head of queries belongs to several of keys
        q = q.unsqueeze(3).expand(body.ints([1, 1, 1, keys // queries, 1])).reshape([0, 0, keys, 1, width])
    decay = _in_time(decay, keys) if decay is not None and "gated" in rule else None
    rate = _in_time(rate, -1) if rate is not None and "delta" in rule else None
    if past is None:
        past = body.full(body.concat(node.x.shape(0, 1), body.ints([keys, width, depth])), 0, node.x)
    y, last = _linearly_attended(past, q * (node.get("scale", 0.0) or width**-0.5), k, v, decay, rate)
    return [y.transpose(1, 0, 2, 3, 4).reshape([0, 0, max(queries, keys) * depth]), last]


def _in_time(value: Value, heads: int) -> Value:
    """[N, T, heads * size] as [T, N, heads, size]; -1: heads of one number."""
    return value.reshape([0, 0, heads, -1] if heads > 0 else [0, 0, -1, 1]).transpose(1, 0, 2, 3)


def _shared(value: Value, heads: int, few: int) -> Value:
    """[T, N, few, K] with every head once for each that shares it."""
    if heads == few:
        return value
    several = value.unsqueeze(3).expand(value.body.ints([1, 1, 1, heads // few, 1]))
    return several.reshape(value.body.concat(value.shape(0, 2), value.body.ints([heads]), value.shape(3, 4)))


ROTARY_ATTRIBUTES = ("interleaved", "rotary_embedding_dim", "num_heads", "layout")
PACKED = 3  # axes of x where a token's heads lie in one axis: [B, L, H * D]


def _rotary_gradients(
    node: Node, cos: Value, sin: Value, positions: Value | None, **more: int
) -> tuple[Value, list[Value]]:
    """dx, and dcos and dsin where they are asked for. more: attributes that the node lacks."""
    attributes = {name: node.attributes[name] for name in ROTARY_ATTRIBUTES if node.attributes.get(name)} | more
    dx = node.microsoft("RotaryEmbeddingGrad", node.dy, cos, sin, positions, **attributes)
    return dx, _of_tables(node, cos, positions, attributes.get("num_heads", 0)) if node.needed - {0} else []


@gradient("RotaryEmbeddingTraining", domain=MICROSOFT, constant=(3,))
@gradient("RotaryEmbedding", constant=(3,))
def rotary_embedding(node: Node) -> Gradients:
    """dx = dy, every pair turned back; dcos and dsin sum products of x and dy over heads and equal positions."""
    dx, tables = _rotary_gradients(node, node.required(1), node.required(2), node.input(3))
    return [dx, *tables]


@gradient("RotaryEmbedding", domain=MICROSOFT, constant=(1,))
def rotary_embedding_of_microsoft(node: Node) -> Gradients:
    """The same, with positions before the tables, or the position of the first token alone."""
    if node.get("is_packed_batching", 0) or node.get("scale", 1.0) != 1.0:
        raise NoGradient("it is packed, or scaled")
    x, positions = node.x, node.required(1)
    if len(sizes_of(positions)) == 1:
        index = 1 if len(sizes_of(x)) < 4 else 2
        every = node.body.range(x.shape(index, index + 1).squeeze(0)) + positions
        positions = every.unsqueeze(0).expand(node.body.concat(x.shape(0, 1), x.shape(index, index + 1)))
    heads = dict[str, int]()
    if node.rank() <= PACKED and not node.get("num_heads", 0):  # heads are as wide as the tables
        (width,), (half,) = numbers_of(node.x, 2), numbers_of(node.required(2), 1)
        heads["num_heads"] = width // (2 * half)
    dx, tables = _rotary_gradients(node, node.required(2), node.required(3), positions, **heads)
    return [dx, None, *tables]


def _of_tables(node: Node, cos: Value, positions: Value | None, heads: int) -> list[Value]:
    """dcos = dy[a] * x[a] + dy[b] * x[b] and dsin = dy[b] * x[a] - dy[a] * x[b], summed over heads in float32.

    (a, b) are the pairs. What tokens of the same position give is summed, too.
    """
    wide = node.wide()
    (half,) = numbers_of(cos, len(sizes_of(cos)) - 1)
    (a, b), (da, db) = (_pairs(node, each, half, heads) for each in (wide.x, wide.dy))
    parts = [each.sum([2], keepdims=False) for each in (da * a + db * b, db * a - da * b)]
    if positions is None and len(sizes_of(cos)) == PACKED:
        return [unbroadcast(each, each, cos) for each in parts]
    tokens = parts[0].shape(0, 2)
    if positions is None:
        positions = node.body.range(tokens.slice(1, 2).squeeze(0)).unsqueeze(0)
    rows = positions.expand(tokens)
    return [node.microsoft("GatherGrad", cos.shape(), rows, each, axis=0) for each in parts]


def _pairs(node: Node, x: Value, half: int, heads: int) -> tuple[Value, Value]:
    """The first and the second elements of the pairs, each [B, L, H, half]."""
    if node.rank() == PACKED:
        x = x.reshape([0, 0, heads, -1])
    elif node.get("layout", "BHLD") == "BHLD":
        x = x.transpose(0, 2, 1, 3)
    if node.get("interleaved", 0):
        return x.slice(0, 2 * half, 3, 2), x.slice(1, 2 * half, 3, 2)
    return x.slice(0, half, 3), x.slice(half, 2 * half, 3)


@gradient("MRotaryEmbedding", domain=MICROSOFT, constant=(1,))
def multimodal_rotary_embedding(node: Node) -> Value:
    """dx = dy, every pair turned back."""
    if node.needed - {0}:
        raise NoGradient("its cosines and sines are trained, and their gradients are not computed")
    positions, cos, sin = (node.required(index) for index in (1, 2, 3))
    return node.same(node.dy, positions, cos, -sin)
