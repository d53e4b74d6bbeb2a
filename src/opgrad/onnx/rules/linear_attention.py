"""Linear attention: every token changes a state of each head, of which its query reads."""

from dataclasses import dataclass

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node, numbers_of, sizes_of
from opgrad.onnx.rules.registry import Gradients, NoGradient, in_float32, recomputed

WITH_BATCH = 4  # axes of tokens in rows, [N, T, heads, size]
NEARLY_ZERO = 1e-6  # under the root of a norm, as onnxruntime has it


@dataclass(frozen=True)
class Tokens:
    """What the tokens bring, one after the other along axis 0.

    q: [T, N, heads, queries of a head, K]. k, v: [T, N, heads, K] and [T, N, heads, D].
    decay: logarithms of what stays of the state, [T, N, heads, K or 1]; None if all stays.
    rate: how far the state goes towards the value, [T, N, heads, 1]; None if the value is added.
    """

    q: Value
    k: Value
    v: Value
    decay: Value | None
    rate: Value | None

    def given(self) -> list[Value]:
        """Those that are there, in this order."""
        return [each for each in (self.q, self.k, self.v, self.decay, self.rate) if each is not None]


def attended(body: Body, state: Value, tokens: Tokens) -> tuple[Value, Value]:
    """What the queries read, [T, N, heads, queries of a head, D], and the last state, [N, heads, K, D]."""

    def step(inner: Body, s: Value, q: Value, k: Value, v: Value, *others: Value) -> tuple[list[Value], list[Value]]:
        rest = list(others)
        if tokens.decay is not None:
            s = s * rest.pop(0).apply("Exp").unsqueeze(3)
        change = v.unsqueeze(2)
        if tokens.rate is not None:
            change = (change - inner.node("MatMul", k.unsqueeze(2), s)) * rest.pop(0).unsqueeze(3)
        s = s + inner.node("MatMul", k.unsqueeze(3), change)
        return [s], [inner.node("MatMul", q, s)]

    last, y = body.scan([state], tokens.given(), step)
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
    tokens = Tokens(
        _queries(_in_time(node.x, queries), queries, keys, width) * (node.get("scale", 0.0) or width**-0.5),
        k,
        v,
        _in_time(decay, keys) if decay is not None and "gated" in rule else None,
        _in_time(rate, -1) if rate is not None and "delta" in rule else None,
    )
    start = body.full(body.concat(node.x.shape(0, 1), body.ints([keys, width, depth])), 0, node.x)
    y, last = attended(body, start if past is None else past, tokens)
    return [y.transpose(1, 0, 2, 3, 4).reshape([0, 0, max(queries, keys) * depth]), last]


def _in_time(value: Value, heads: int) -> Value:
    """[N, T, heads * size] as [T, N, heads, size]; -1: heads of one number."""
    return value.reshape([0, 0, heads, -1] if heads > 0 else [0, 0, -1, 1]).transpose(1, 0, 2, 3)


def _queries(q: Value, queries: int, keys: int, width: int) -> Value:
    """[T, N, queries, K] as those of each head of keys; a head of queries may belong to several of keys."""
    if queries >= keys:
        return q.reshape([0, 0, keys, queries // keys, width])
    shared = q.unsqueeze(3).expand(q.body.ints([1, 1, 1, keys // queries, 1]))
    return shared.reshape([0, 0, keys, 1, width])


@recomputed("GatedDeltaNet", domain=MICROSOFT, constant=(3, 9, 10))
@in_float32
def gated_delta_net(node: Node) -> Gradients:
    """s = exp(decay) * s + k * rate * (v - k @ exp(decay) * s), y = scale * q @ s, with what gives decay and rate."""
    key, value, state = node.input(1), node.input(2), node.input(6)
    if key is None or value is None or node.input(3) is not None or node.get("state_update_capacity", 0):
        raise NoGradient("its query holds key and value, or its rows have lengths of their own, or it keeps changes")
    (heads, depth), (few, width) = numbers_of(value, -2, -1), numbers_of(key, -2, -1)
    body = node.body
    batch = (node.x if len(sizes_of(node.x)) == WITH_BATCH or state is None else state).shape(0, 1)
    q, k = (_shared(_rows(each, batch, few, width, node.get("qk_l2_norm", 0)), heads, few) for each in (node.x, key))
    decay, rate = node.input(4), node.input(5)
    if decay is not None:
        per_key = len(sizes_of(decay)) == len(sizes_of(value))
        shape = [heads, width] if per_key else [heads]
        decay = _rows(_decay(node, decay, shape), batch, heads, width if per_key else 1)
    if rate is not None:
        rate = rate.apply("Sigmoid") if node.get("beta_activation", "none") == "sigmoid" else rate
        rate = _rows(rate, batch, heads, 1)
    tokens = Tokens(
        (q * (node.get("scale", 0.0) or width**-0.5)).unsqueeze(3),
        k,
        _rows(value, batch, heads, depth),
        decay,
        rate,
    )
    zeros = body.full(body.concat(batch, body.ints([heads, width, depth])), 0, node.x)
    y, last = attended(body, zeros if state is None else state.transpose(0, 1, 3, 2), tokens)
    whole = body.concat(node.x.shape(0, node.rank() - 2), body.ints([heads, depth]))
    return [y.transpose(1, 0, 2, 3, 4).reshape(whole), last.transpose(0, 1, 3, 2)]


def _rows(value: Value, batch: Value, heads: int, size: int, normalized: int = 0) -> Value:
    """[tokens, heads, size], or with the rows as an axis, as [T, N, heads, size]; each head of norm 1 if normalized."""
    rows = value.reshape(value.body.concat(batch, value.body.ints([-1, heads, size]))).transpose(1, 0, 2, 3)
    return rows / (rows.along("ReduceSumSquare", [3], keepdims=1) + NEARLY_ZERO).apply("Sqrt") if normalized else rows


def _shared(value: Value, heads: int, few: int) -> Value:
    """[T, N, few, K] with every head once for each that shares it."""
    if heads == few:
        return value
    several = value.unsqueeze(3).expand(value.body.ints([1, 1, 1, heads // few, 1]))
    return several.reshape(value.body.concat(value.shape(0, 2), value.body.ints([heads]), value.shape(3, 4)))


def _decay(node: Node, decay: Value, shape: list[int]) -> Value:
    """The logarithm of what stays of the state."""
    kind = node.get("gate_activation", "none")
    if kind == "none":
        return decay
    scale, bias = node.required(7).apply("Exp"), node.input(8)
    scale = scale if len(shape) == 1 else scale.unsqueeze(1)
    decay = decay if bias is None else decay + bias.reshape(shape)
    if kind in ("softplus", "qwen"):
        return -scale * decay.apply("Softplus")
    return (scale * decay).apply("Sigmoid") * node.get("gate_lower_bound", -5.0)
