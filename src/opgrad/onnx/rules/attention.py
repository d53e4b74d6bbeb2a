"""Attention of com.microsoft, which onnxruntime's optimizers write, as the operators that it is made of."""

from itertools import pairwise

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import are_equal
from opgrad.onnx.rules.node import Node, sizes_of
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, gradient

ATTRIBUTES = ("scale", "causal", "window", "softcap", "dropout", "layout")  # of AttentionTraining and its gradient
MASKED = -10000.0  # the default of the number that is added to the scores of masked keys
SEVERAL = 5  # axes of an input that packs several projections: [N, L, heads, how many, H]
ONE_AXIS_FROM = 13  # opset of Softmax


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
    width = sizes_of(weights)[1]
    if not isinstance(width, int):
        raise NoGradient("the graph does not tell the size of its weights")
    packed = node.body.node("MatMul", node.x, weights)
    packed = packed if bias is None else packed + bias
    ends = np.cumsum([0, *(node.get("qkv_hidden_sizes") or [width // 3] * 3)]).tolist()
    q, k, v = (_split_heads(node, packed.slice(*part, 2)) for part in pairwise(ends))
    past = node.input(4)
    if past is not None:
        k, v = (_behind(past.slice(index, index + 1).squeeze(0), each) for index, each in enumerate((k, v)))
    present = node.body.concat(k.unsqueeze(0), v.unsqueeze(0), axis=0)
    return [_attended(node, q, k, v, 3), present]


@decomposition("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> Gradients:
    """y = softmax(scale * q @ k.T + mask) @ v of each head; q, k and v are [N, L, heads * H], or packed."""
    q, k, v = _projections(node)
    bias = node.input(3)
    if bias is not None:
        q, k, v = (each + part for each, part in zip((q, k, v), _biases(node, bias), strict=True))
    past = node.input(6), node.input(7)
    k, v = (each if before is None else _behind(before, each) for before, each in zip(past, (k, v), strict=True))
    return [_attended(node, q, k, v, 4), k, v]


def _projections(node: Node) -> list[Value]:
    """Query, key and value as [N, heads, L, H]."""
    q, key, value = node.x, node.input(1), node.input(2)
    if len(sizes_of(q)) == SEVERAL:
        return _unpacked(q, 3)
    if key is not None and len(sizes_of(key)) == SEVERAL:
        return [_split_heads(node, q), *_unpacked(key, 2)]
    if key is None or value is None:
        raise NoGradient("its key and value are missing, and its query does not hold them")
    # Key and value of cross attention come with the heads in front.
    return [each if len(sizes_of(each)) > 3 else _split_heads(node, each) for each in (q, key, value)]


def _unpacked(packed: Value, count: int) -> list[Value]:
    return [packed.slice(index, index + 1, 3).squeeze(3).transpose(0, 2, 1, 3) for index in range(count)]


def _split_heads(node: Node, value: Value) -> Value:
    return value.reshape([0, 0, node.get("num_heads"), -1]).transpose(0, 2, 1, 3)


def _biases(node: Node, bias: Value) -> list[Value]:
    """The parts of the bias for query, key and value, each [heads, 1, H]."""
    whole, width = sizes_of(bias)[0], sizes_of(node.x)[-1]
    if not isinstance(whole, int):
        raise NoGradient("the graph does not tell the size of its bias")
    own = width if node.rank() < SEVERAL and isinstance(width, int) else whole // 3
    ends = [0, own, 2 * own, whole]
    return [bias.slice(*part).reshape([node.get("num_heads"), 1, -1]) for part in pairwise(ends)]


def _behind(past: Value, now: Value) -> Value:
    return now.body.concat(past, now, axis=2)


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
    """The terms that are added to the scores: the bias, the mask of keys, and the causal mask."""
    own, keys, zero = node.input(5), node.input(mask), node.body.number(0, node.x)
    allowed = [] if keys is None else [_counting(node, keys, k)]
    if node.get("unidirectional", 0):
        last = k.shape(2, 3) - q.shape(2, 3)  # the last query is at the place of the last key
        allowed.append(~(_places(k) > _places(q).reshape([-1, 1]) + last))
    low = node.get("mask_filter_value", MASKED)
    return [*([] if own is None else [own]), *(node.where(each, zero, low) for each in allowed)]


def _counting(node: Node, keys: Value, k: Value) -> Value:
    """Which keys count, [N, 1, L or 1, T].

    keys: a mask of the keys, a mask for each query, or the number of keys of each row.
    """
    axes = len(sizes_of(keys))
    if axes == 1:
        if not are_equal(sizes_of(keys), sizes_of(node.x)[:1]):
            raise NoGradient("its mask of one axis is not known to be one length for each row")
        return _places(k) < keys.cast(TensorProto.INT64).reshape([-1, 1, 1, 1])
    if axes > 3:
        raise NoGradient(f"its mask has {axes} axes, expected at most 3")
    return (keys > 0).unsqueeze(*([1, 2] if axes == 2 else [1]))


def _places(value: Value) -> Value:
    """0, 1, … along axis 2."""
    return value.body.range(value.shape(2, 3).squeeze(0))
