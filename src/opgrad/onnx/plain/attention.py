"""Attention and rotary embedding with their gradients; attention has whole matrices of scores in both parts."""

from dataclasses import dataclass
from functools import reduce

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers
from opgrad.ops.attention import PACKED

# Indices of inputs from the mask on.
MASK, KEY_LENGTHS, SINK, SEED, OFFSET, STARTS_OF_QUERIES, STARTS_OF_KEYS, DLSE = range(8)
FORWARD, BACKWARD = 3, 6  # where these inputs begin in the two nodes
FAR = 2.0**20  # from here on the rounding of lse in float32 is an error of all probabilities of a row
# The numbers of the plain form's dropout: moduli are primes below 2**31, so that squares of remainders fit int64.
PRIMES, ROUNDS, STRIDE = (2147483647, 2147483629), 3, 48271


@dataclass
class AttentionInputs:
    """The inputs that both nodes have, with heads in front of tokens.

    begin: the index of the mask. is_packed: whether the node has sequences behind each other, here one batch entry.
    """

    call: Call
    q: Value
    k: Value
    v: Value
    begin: int
    is_packed: bool

    def by_heads(self, index: int) -> Value:
        """An input like q, k, v or y."""
        return _by_heads(self.call, self.call.required(index), self.is_packed)

    def in_layout(self, value: Value) -> Value:
        """The opposite of `by_heads`."""
        return value.squeeze(0).transpose(1, 0, 2) if self.is_packed else _by_heads(self.call, value, False)

    def of_rows(self, index: int) -> Value:
        """An input with one number for each query of each head."""
        return self.call.required(index).unsqueeze(*((0, 3) if self.is_packed else (3,)))

    def more(self, index: int) -> Value | None:
        """An input from the mask on."""
        return self.call.input(self.begin + index)

    def scaled(self, value: Value) -> Value:
        """The value times the factor of products, by default 1 / sqrt(size of a head)."""
        scale = self.call.get("scale")
        return value / self.q.shape(3, 4).reshape([]).like(value).apply("Sqrt") if scale is None else value * scale

    def scores(self) -> tuple[Value, Value | None]:
        """The scores, and the slope of the softcap, None without."""
        call, body = self.call, self.call.body
        s = self.scaled(body.node("MatMul", self.q, self.k.transpose(0, 1, 3, 2)))
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
    for index in range(ROUNDS):
        h = call.body.node("Mod", h, modulus if index % 2 == 0 else other)
        h = h * h + seed * (index + 40692)
    return call.body.node("Mod", h, modulus)


def _visible(parts: AttentionInputs) -> list[Value]:
    """The conditions under which queries see keys, by sequences, causality, window and lengths."""
    call = parts.call
    if parts.is_packed:
        place, columns, more, found = _in_sequences(parts)
    else:
        columns, lengths = _places(parts.k), parts.more(KEY_LENGTHS)
        count = parts.k.shape(2, 3) if lengths is None else lengths.cast(TensorProto.INT64).reshape([-1, 1, 1, 1])
        place, more = _places(parts.q).reshape([-1, 1]), count - parts.q.shape(2, 3)
        found = [] if lengths is None else [columns < count]
    if call.get("causal", "") == "bottom_right":
        place = place + more
    left, right = call.get("window", [-1, -1])
    if call.get("causal", ""):
        found.append(~(columns > place))
    if left >= 0:
        found.append(~(columns < place - left))
    if right >= 0:
        found.append(~(columns > place + right))
    return found


def _in_sequences(parts: AttentionInputs) -> tuple[Value, Value, Value, list[Value]]:
    """The place of each query and of each key in its sequence, how many more keys than queries it has, and conditions.

    These are whether a key is of the query's own sequence, and whether the query has one.
    """
    starts = parts.call.required(parts.begin + STARTS_OF_QUERIES).cast(TensorProto.INT64)
    given = parts.more(STARTS_OF_KEYS)
    starts_of_keys = starts if given is None else given.cast(TensorProto.INT64)
    rows, columns = (_places(each) for each in (parts.q, parts.k))
    own, inside = _sequences(rows, starts)
    keys_own, _ = _sequences(columns, starts_of_keys)
    begin, end = _limits(starts, own)
    key_begin, key_end = _limits(starts_of_keys, own)
    more = (key_end - key_begin) - (end - begin)
    seen = [own.reshape([-1, 1]).equals(keys_own), inside.reshape([-1, 1])]
    keys_begin, _ = _limits(starts_of_keys, keys_own)
    return (rows - begin).reshape([-1, 1]), columns - keys_begin, more.reshape([-1, 1]), seen


def _sequences(places: Value, starts: Value) -> tuple[Value, Value]:
    """The number of each place's sequence, -1 before the first and behind the last, and whether it has one."""
    begun = (~(places.reshape([-1, 1]) < starts)).cast(TensorProto.INT64).sum([1], keepdims=False) - 1
    inside = ~(begun < 0) & (begun < starts.shape(0, 1) - 1)
    return places.body.where(inside, begun, -1), inside


def _limits(starts: Value, sequences: Value) -> tuple[Value, Value]:
    """Where these sequences begin and end; those of -1 anywhere."""
    body = starts.body
    return body.node("Gather", starts, sequences), body.node("Gather", starts, sequences + 1)


def _places(value: Value) -> Value:
    return value.body.range(value.shape(2, 3).reshape([]))


def _parts(call: Call, first: int, begin: int) -> AttentionInputs:
    """The inputs from q on, which is at the place `first`."""
    is_packed = call.input(begin + STARTS_OF_QUERIES) is not None
    q, k, v = (_by_heads(call, call.required(index), is_packed) for index in range(first, first + 3))
    return AttentionInputs(call, q, _repeated(q, k), _repeated(q, v), begin, is_packed)


def _by_heads(call: Call, value: Value, is_packed: bool) -> Value:
    if is_packed:
        return value.transpose(1, 0, 2).unsqueeze(0)
    return value.transpose(0, 2, 1, 3) if call.get("layout", "BHLD") == "BLHD" else value


def _repeated(q: Value, value: Value) -> Value:
    """Keys or values of each head of queries; neighbouring ones share them."""
    body = q.body
    own = body.concat(value.shape(0, 2), q.shape(1, 2) / value.shape(1, 2), value.shape(2, 4))
    wide = value.unsqueeze(2).expand(own)
    return wide.in_shape(body.concat(q.shape(0, 2), value.shape(2, 4)))


def _summed(value: Value, like: Value) -> Value:
    """The sums over heads that share keys and values. like: those, with the heads that they have."""
    body = value.body
    split = body.concat(like.shape(0, 2), value.shape(1, 2) / like.shape(1, 2), like.shape(2, 4))
    return value.in_shape(split).sum([2], keepdims=False)


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
    e = (s - base).apply("Exp")
    total = e.sum([3])
    if sink is not None:
        total = total + (sink - base).apply("Exp")
    lse = total.apply("Log") + base
    p, kept = e / body.where(total > 0, total, 1), parts.kept()
    y = body.node("MatMul", p if kept is None else p * kept, parts.v)
    return [parts.in_layout(y), lse.squeeze(*((0, 3) if parts.is_packed else (3,)))]


def _probabilities(parts: AttentionInputs, s: Value, lse: Value) -> tuple[Value, Value | None]:
    """Those of keys and of the sink, 0 in the rows of queries that see no key.

    They are divided by their sum where lse has no digits left for the sum beside the largest score.
    """
    body, sink = parts.call.body, parts.more(SINK)
    finite = body.where(lse > float("-inf"), lse, 0)
    p, of_sink = (s - finite).apply("Exp"), None
    total = p.sum([3])
    if sink is not None:
        of_sink = (sink.reshape([-1, 1, 1]).like(lse) - finite).apply("Exp")
        total = total + of_sink
    total = body.where(finite.apply("Abs") < FAR, 1, total)
    return p / total, None if of_sink is None else of_sink / total


@lowers("AttentionGrad")
@in_float32(1, 1, 1, 1, 1)
def attention_grad(call: Call) -> Results:
    """dv = dropout(p).T @ dy, ds = scale * p * (dropout(dy @ v.T) - sum(dy * y) + dlse), dq = ds @ k, dk = ds.T @ q."""
    parts, body = _parts(call, 1, BACKWARD), call.body
    dy, y = (parts.by_heads(index) for index in (0, 4))
    lse, dlse = parts.of_rows(5).like(dy), None if parts.more(DLSE) is None else parts.of_rows(BACKWARD + DLSE).like(dy)
    s, slope = parts.scores()
    (p, of_sink), kept, delta = _probabilities(parts, s, lse), parts.kept(), (dy * y).sum([3])
    delta = delta if dlse is None else delta - dlse
    dp = body.node("MatMul", dy, parts.v.transpose(0, 1, 3, 2))
    ds = p * ((dp if kept is None else dp * kept) - delta)
    dr = parts.scaled(ds if slope is None else ds * slope)
    every = p if kept is None else p * kept
    dq = body.node("MatMul", dr, parts.k)
    dk = body.node("MatMul", dr.transpose(0, 1, 3, 2), parts.q)
    dv = body.node("MatMul", every.transpose(0, 1, 3, 2), dy)
    keys, values = (parts.by_heads(index) for index in (2, 3))
    results = [parts.in_layout(each) for each in (dq, _summed(dk, keys), _summed(dv, values))]
    sink, mask, dmask, dsink = parts.more(SINK), parts.more(MASK), None, None
    if mask is not None and 3 in call.wanted:
        # The sum of the scores' gradients over the axes along which an added mask was broadcast.
        sizes = call.input_shapes[parts.begin]
        if sizes is None:
            raise NoForm("the graph does not tell the rank of its mask")
        total = ds.sum(list(range(4 - len(sizes))), keepdims=False) if len(sizes) < 4 else ds
        ones: Value | list[int] = [axis for axis, size in enumerate(sizes) if size == 1]
        if None in sizes:  # some sizes are known when the graph runs
            ones = mask.shape().equals(1).apply("NonZero").squeeze(0)
        dmask = total.sum(ones).like(mask)
    if sink is not None and of_sink is not None and 4 in call.wanted:
        dsink = (-(of_sink * delta)).sum([0, 2, 3], keepdims=False).like(sink)
    return [*results, dmask, dsink]


END = 2**31 - 1  # beyond every axis


lowers("RotaryEmbeddingTraining")(lambda call, x, cos, sin: _turned(call, x, cos, sin))


lowers("RotaryEmbeddingGrad")(lambda call, dy, cos, sin: _turned(call, dy, cos, -sin))


def _turned(call: Call, x: Value, cos: Value, sin: Value) -> Value:
    rank = len(call.input_shapes[0] or ())
    turned, interleaved = call.get("rotary_embedding_dim", 0), call.get("interleaved", 0)
    if not rank:
        raise NoForm("the graph does not tell the rank of its input X")
    heads_first = rank > PACKED and call.get("layout", "BHLD") == "BHLD"
    heads = x if rank > PACKED else x.reshape([0, 0, call.get("num_heads", 0), -1])
    cos, sin = (_angles(call, x, each, heads_first) for each in (cos, sin))
    first, rest = (heads.slice(0, turned, 3), [heads.slice(turned, END, 3)]) if turned else (heads, [])
    a, b = (first.slice(index, END, 3, 2) for index in (0, 1)) if interleaved else first.split(2, 3)
    pair = [a * cos - b * sin, b * cos + a * sin]
    if interleaved:
        both = call.body.concat(*(each.unsqueeze(4) for each in pair), axis=4)
        pair = [both.reshape(first.shape())]
    y = call.body.concat(*pair, *rest, axis=3) if len(pair) + len(rest) > 1 else pair[0]
    return y if rank > PACKED else y.reshape(x.shape())


def _angles(call: Call, x: Value, table: Value, heads_first: bool) -> Value:
    """The table's rows of all tokens, as they go with [B, H, L, D] or [B, L, H, D]."""
    positions = call.input(3)
    if positions is not None:
        rows, axes = call.body.node("Gather", table, positions), PACKED
    else:
        rows, axes = table, len(call.input_shapes[1] or ())
        if not axes:
            raise NoForm("the graph does not tell the rank of its input cos_cache")
        if axes < PACKED:
            index = 2 if heads_first else 1
            rows = table.slice(0, x.shape(index, index + 1))
    # The axis of heads is put behind the batch, or behind the tokens.
    return rows.unsqueeze(1 if axes == PACKED else 0) if heads_first else rows.unsqueeze(axes - 1)
