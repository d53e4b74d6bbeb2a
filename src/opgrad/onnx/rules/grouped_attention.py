"""Attention with fewer heads of keys than of queries, and with caches of keys, as language models have it.

A key's place in its row is that in the cache: those of the past come first, new ones behind them, at a place that each
row of the batch has for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import known
from opgrad.onnx.passes.attention import LARGEST_HEAD
from opgrad.onnx.rules.node import Node, numbers_of
from opgrad.onnx.rules.registry import Gradients, NoGradient, in_float32, recomputed

LOWEST = -3.4e38  # the score of a key that does not count


@dataclass(frozen=True)
class GroupedHeads:
    """How a row of numbers is divided: queries by query heads, keys and values by key heads; a head has `width`."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True)
class TokenPlaces:
    """Where tokens are in their rows.

    before: how many keys each row has before the new ones, int64 [N, 1, 1, 1]. new: the number of new tokens, of
    shape (). total: how many places the keys have, of shape ().
    """

    before: Value
    new: Value
    total: Value

    def queries(self) -> Value:
        """The indices of the queries, [N, 1, L, 1]."""
        return self.before + self.new.body.range(self.new).unsqueeze(1)

    def keys(self) -> Value:
        """The indices of the keys, [T]."""
        return self.new.body.range(self.total)


@recomputed("GroupQueryAttention", domain=MICROSOFT, constant=(5, 6, 9))
@in_float32
def group_query_attention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head of q, with the keys of its group; caches come first."""
    _refuse(node)
    heads = _heads(node)
    q, k, v = _projections(node, heads)
    new = node.x.shape(1, 2).squeeze(0)
    counted = node.required(5).cast(TensorProto.INT64).reshape([-1, 1, 1, 1]) + 1
    places = _places(node, new, counted)
    if node.get("do_rotary", 0):
        q, k = (_turned(node, each, places) for each in (q, k))
    k, v = (_in_cache(node.input(place), each, places) for place, each in ((3, k), (4, v)))
    if _all_new(node) and _takes_tiles(node, heads):
        y = _in_tiles(node, (q, k, v), heads, node.input(10), node.input(11), counted.reshape([-1]), **_limits(node))
    else:
        y = attended(node, (q, k, v), heads, _mask(node, places, counted), node.input(10), node.input(11))
    return [y, k, v]


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


def _heads(node: Node) -> GroupedHeads:
    queries, keys, (width,) = node.get("num_heads"), node.get("kv_num_heads"), numbers_of(node.x, 2)
    return GroupedHeads(queries, keys, width // (queries if node.input(1) is not None else queries + 2 * keys))


def _projections(node: Node, heads: GroupedHeads) -> list[Value]:
    """Query, key and value as [N, heads, L, H]."""
    return [each.transpose(0, 2, 1, 3) for each in _parts(node, heads)]


def _parts(node: Node, heads: GroupedHeads) -> list[Value]:
    """Query, key and value as [N, L, heads, H]; they may lie behind each other in the query."""
    x, key, value = node.x, node.input(1), node.input(2)
    if key is None or value is None:
        ends = [0, heads.queries, heads.queries + heads.keys, heads.queries + 2 * heads.keys]
        x, key, value = (x.slice(start * heads.width, end * heads.width, 2) for start, end in pairwise(ends))
    return [each.reshape([0, 0, -1, heads.width]) for each in (x, key, value)]


def _places(node: Node, new: Value, counted: Value) -> TokenPlaces:
    """In a first prompt all keys are new, whatever the rows' lengths are."""
    past, total = node.input(3), node.required(6).cast(TensorProto.INT64).scalar()
    before = node.where(total.equals(new), 0, counted - new)
    if past is None or _all_new(node):
        return TokenPlaces(before, new, new)
    return TokenPlaces(before, new, node.body.node("Max", total, past.shape(2, 3).squeeze(0)))


def _turned(node: Node, x: Value, places: TokenPlaces) -> Value:
    """x with its pairs turned by the angles of their places; places beyond the cache of angles belong to no token."""
    given = node.input(9)
    own = places.queries().squeeze(1, 3)
    if given is not None:  # of a first prompt onnxruntime reads the first position alone
        prompt = node.required(6).cast(TensorProto.INT64).scalar().equals(places.new)
        own = node.where(prompt, own + given.slice(0, 1, 0).slice(0, 1, 1), given)
    return _turned_by(node, x, own)


def _turned_by(node: Node, x: Value, own: Value, **given: Any) -> Value:
    """x with its pairs turned by the angles of places [N, L]. given: attributes."""
    cos, sin = node.required(7), node.required(8)
    positions = node.body.node("Min", own, cos.shape(0, 1).squeeze(0) - 1)
    turns = {"rotary_embedding_dim": 2 * numbers_of(cos, 1)[0], "interleaved": node.get("rotary_interleaved", 0)}
    turns |= given
    return node.microsoft("RotaryEmbeddingTraining", x, cos, sin, positions, **turns)


def _in_cache(past: Value | None, now: Value, places: TokenPlaces) -> Value:
    """The keys of the past with the new ones behind them, [N, heads, T, H]."""
    if past is None or known(list(past.sizes or [None] * 4)[2:3]) == [0]:
        return now
    body, room = past.body, past.shape(2, 3).squeeze(0)
    both, place = body.concat(past, now, axis=2), places.keys().unsqueeze(1)
    # A place behind the past has a new key, which follows the whole cache in `both`; one behind these has none.
    at = body.where(place < places.before, place, body.node("Min", place - places.before, places.new - 1) + room)
    shape = body.concat(now.shape(0, 2), places.total.reshape([1]), now.shape(3, 4))
    return body.node("GatherElements", both, at.expand(shape), axis=2)


def _mask(node: Node, places: TokenPlaces, counted: Value) -> Value:
    """Which keys count for which queries, [N, 1, L, T]."""
    at, keys = places.queries(), places.keys()
    window = node.get("local_window_size", -1)
    counts = keys < counted
    if node.get("causal", 1):
        counts = counts & ~(keys > at)
    return counts if window < 0 else counts & (keys > at - window)


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
        return _in_tiles(node, projections, heads, mask if bias is None else node.where(mask, bias, LOWEST), sink)
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


def _in_tiles(
    node: Node, projections: tuple[Value, Value, Value], heads: GroupedHeads, mask: Value | None, sink: Value | None,
    lengths: Value | None = None, **seen: Any,
) -> Value:  # fmt: skip
    """The result of attention, [N, L, heads * H], by a node that keeps no scores. lengths: of the keys of each row."""
    inputs, given = (*projections, mask, lengths, _sink(node, heads, sink)), _scaling(node, heads)
    y = node.results("AttentionTraining", 2, *inputs, **given, **seen)[0]
    return y.transpose(0, 2, 1, 3).reshape([0, 0, heads.queries * heads.width])


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
    heads = _heads(node)
    q, k, v = _parts(node, heads)
    if node.get("do_rotary", 0):
        q, k = (_turned_by(node, each, places, layout="BLHD") for each in (q, k))
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
