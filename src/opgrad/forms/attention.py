"""Attention in tiles and its gradient, with whole matrices of scores: the plain form computes them in both parts."""

from dataclasses import dataclass
from functools import reduce

from onnx import TensorProto

from opgrad.forms.registry import Call, NoForm, Results, in_float32, lowers
from opgrad.graph.formulas import Value

MASK, KEY_LENGTHS, SINK, SEED, OFFSET = range(5)  # places among the inputs from the mask on
FORWARD, BACKWARD = 3, 6  # where these inputs begin in the two nodes
# The numbers of the plain form's dropout: moduli are primes below 2**31, so that squares of remainders fit int64.
PRIMES, ROUNDS, STRIDE = (2147483647, 2147483629), 3, 48271


@dataclass
class Parts:
    """The inputs that both nodes have, with heads in front of tokens. begin: the place of the mask."""

    call: Call
    q: Value
    k: Value
    v: Value
    begin: int

    def more(self, index: int) -> Value | None:
        """An input from the mask on."""
        return self.call.input(self.begin + index)

    def scores(self) -> tuple[Value, Value | None]:
        """The scores, and the slope of the softcap, None without."""
        call, body = self.call, self.call.body
        s = body.node("MatMul", self.q, self.k.transpose(0, 1, 3, 2)) * call.get("scale", 1.0)
        slope, cap = None, call.get("softcap", 0.0)
        if cap:
            t = (s * (1 / cap)).apply("Tanh")
            s, slope = t * cap, 1 - t * t
        conditions, mask = _visible(self), self.more(MASK)
        if mask is not None and call.input_types[self.begin] == TensorProto.BOOL:
            conditions.append(mask)
        elif mask is not None:
            s = s + mask.like(s)
        seen = reduce(lambda a, b: a & b, conditions) if conditions else None
        return (s if seen is None else body.where(seen, s, float("-inf"))), slope

    def kept(self) -> Value | None:
        """What dropout multiplies each probability with; None without."""
        ratio, seed = self.call.get("dropout", 0.0), self.more(SEED)
        if not ratio:
            return None
        if seed is None:
            raise NoForm("it has dropout and no seed")
        offset = self.more(OFFSET)
        number = seed.cast(TensorProto.INT64).reshape([]) + (0 if offset is None else offset.reshape([]) * 7919)
        shape = self.call.body.concat(self.q.shape(0, 3), self.k.shape(2, 3))
        if ratio == 1:
            return self.call.body.number(0, self.q).expand(shape)
        drawn = _drawn(self.call, number, shape.product()).reshape(shape)
        scale = self.call.body.number(1 / (1 - ratio), self.q)
        return self.call.body.where(drawn < int(ratio * PRIMES[0]), 0, scale)


def _drawn(call: Call, seed: Value, count: Value) -> Value:
    """A number below the first prime for each place; squares of remainders mix places and seed."""
    modulus, other = (call.body.ints([each]) for each in PRIMES)
    h = call.body.range(count.reshape([])) * STRIDE + seed * 69621 + 1
    for turn in range(ROUNDS):
        h = call.body.node("Mod", h, modulus if turn % 2 == 0 else other)
        h = h * h + seed * (turn + 40692)
    return call.body.node("Mod", h, modulus)


def _visible(parts: Parts) -> list[Value]:
    """The conditions under which queries see keys, by causality, window and lengths."""
    call, found = parts.call, list[Value]()
    rows, columns = (_places(each) for each in (parts.q, parts.k))
    lengths = parts.more(KEY_LENGTHS)
    count = parts.k.shape(2, 3) if lengths is None else lengths.cast(TensorProto.INT64).reshape([-1, 1, 1, 1])
    place = rows.reshape([-1, 1])
    if call.get("causal", "") == "bottom_right":
        place = place + (count - parts.q.shape(2, 3))
    left, right = call.get("window", [-1, -1])
    if lengths is not None:
        found.append(columns < count)
    if call.get("causal", ""):
        found.append(~(columns > place))
    if left >= 0:
        found.append(~(columns < place - left))
    if right >= 0:
        found.append(~(columns > place + right))
    return found


def _places(value: Value) -> Value:
    return value.body.range(value.shape(2, 3).reshape([]))


def _parts(call: Call, first: int, begin: int) -> Parts:
    """The inputs from q on, which is at the place `first`."""
    q, k, v = (_by_heads(call, call.input(place)) for place in range(first, first + 3))
    return Parts(call, q, _repeated(q, k), _repeated(q, v), begin)


def _by_heads(call: Call, value: Value | None) -> Value:
    if value is None:
        raise NoForm("it lacks queries, keys or values")
    return value.transpose(0, 2, 1, 3) if call.get("layout", "BHLD") == "BLHD" else value


def _repeated(q: Value, value: Value) -> Value:
    """Keys or values of each head of queries; neighbouring ones share them."""
    body = q.body
    own = body.concat(value.shape(0, 2), q.shape(1, 2) / value.shape(1, 2), value.shape(2, 4))
    wide = value.unsqueeze(2).expand(own)
    return wide.reshape(body.concat(q.shape(0, 2), value.shape(2, 4)))


def _summed(value: Value, like: Value) -> Value:
    """The sums over heads that share keys and values. like: those, with the heads that they have."""
    body = value.body
    split = body.concat(like.shape(0, 2), body.ints([-1]), like.shape(2, 4))
    return value.reshape(split).sum([2], keepdims=False)


@lowers("AttentionTraining")
@in_float32(0, 0)
def attention(call: Call) -> Results:
    """y = dropout(softmax(softcap(scale * q @ k.T) + mask)) @ v, and the logarithm of the sum of exponentials."""
    parts = _parts(call, 0, FORWARD)
    s, _ = parts.scores()
    sink, body = parts.more(SINK), call.body
    largest = s.along("ReduceMax", [3], keepdims=1)
    if sink is not None:
        sink = sink.reshape([-1, 1, 1]).like(s)
        largest = body.node("Max", largest, sink)
    base = body.where(largest > float("-inf"), largest, 0)
    total = (s - base).apply("Exp").sum([3])
    if sink is not None:
        total = total + (sink - base).apply("Exp")
    lse = total.apply("Log") + base
    p = _probabilities(call, s, lse)
    kept = parts.kept()
    y = body.node("MatMul", p if kept is None else p * kept, parts.v)
    return [_by_heads(call, y), lse.squeeze(3)]


def _probabilities(call: Call, s: Value, lse: Value) -> Value:
    """They are 0 in the rows of queries that see no key."""
    return (s - call.body.where(lse > float("-inf"), lse, 0)).apply("Exp")


@lowers("AttentionGrad")
@in_float32(1, 1, 1, 1, 1)
def attention_grad(call: Call) -> Results:
    """dv = dropout(p).T @ dy, ds = scale * p * (dropout(dy @ v.T) - sum(dy * y)), dq = ds @ k, dk = ds.T @ q."""
    parts, body = _parts(call, 1, BACKWARD), call.body
    dy, y = (_by_heads(call, call.input(place)) for place in (0, 4))
    lse = call.operands(6)[5].unsqueeze(3).like(dy)
    s, slope = parts.scores()
    p, kept, delta = _probabilities(call, s, lse), parts.kept(), (dy * y).sum([3])
    dp = body.node("MatMul", dy, parts.v.transpose(0, 1, 3, 2))
    ds = p * ((dp if kept is None else dp * kept) - delta)
    dr = (ds if slope is None else ds * slope) * call.get("scale", 1.0)
    every = p if kept is None else p * kept
    dq = body.node("MatMul", dr, parts.k)
    dk = body.node("MatMul", dr.transpose(0, 1, 3, 2), parts.q)
    dv = body.node("MatMul", every.transpose(0, 1, 3, 2), dy)
    keys, values = (_by_heads(call, call.input(place)) for place in (2, 3))
    found: list[Value | None] = [dq, _summed(dk, keys), _summed(dv, values)]
    results = [_by_heads(call, each) for each in found]
    return [*results, _mask_gradient(call, parts, ds), _sink_gradient(parts, lse, delta)]


def _mask_gradient(call: Call, parts: Parts, ds: Value) -> Value | None:
    """The sum of the scores' gradients over the axes along which an added mask was broadcast."""
    mask = parts.more(MASK)
    if mask is None or 3 not in call.wanted:
        return None
    sizes = call.input_shapes[parts.begin]
    if sizes is None:
        raise NoForm("the graph does not tell the rank of its mask")
    total = ds.sum(list(range(4 - len(sizes))), keepdims=False) if len(sizes) < 4 else ds
    ones: Value | list[int] = [axis for axis, size in enumerate(sizes) if size == 1]
    if None in sizes:  # some sizes are known when the graph runs
        ones = mask.shape().equals(1).apply("NonZero").squeeze(0)
    return total.sum(ones).like(mask)


def _sink_gradient(parts: Parts, lse: Value, delta: Value) -> Value | None:
    sink = parts.more(SINK)
    if sink is None or 4 not in parts.call.wanted:
        return None
    rest = (sink.reshape([-1, 1, 1]).like(lse) - lse).apply("Exp")
    return (-(rest * delta)).sum([0, 2, 3], keepdims=False).like(sink)
