"""Rotary embedding and its gradient, which turns the other way."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, NoForm, lowers
from opgrad.ops.attention import PACKED

END = 2**31 - 1  # beyond every axis


@lowers("RotaryEmbeddingTraining")
def rotary_embedding(call: Call) -> Value:
    """y = (a * cos - b * sin, b * cos + a * sin) for each pair (a, b) of x."""
    x, cos, sin = call.operands(3)
    return _turned(call, x, cos, sin)


@lowers("RotaryEmbeddingGrad")
def rotary_embedding_grad(call: Call) -> Value:
    """dx = (a * cos + b * sin, b * cos - a * sin) for each pair (a, b) of dy."""
    dy, cos, sin = call.operands(3)
    return _turned(call, dy, cos, -sin)


def _turned(call: Call, x: Value, cos: Value, sin: Value) -> Value:
    rank, turned, interleaved = (
        len(call.input_shapes[0] or ()),
        call.get("rotary_embedding_dim", 0),
        call.get("interleaved", 0),
    )
    if not rank:
        raise NoForm("the graph does not tell the rank of its input X")
    heads_first = rank > PACKED and call.get("layout", "BHLD") == "BHLD"
    heads = x if rank > PACKED else x.reshape([0, 0, call.get("num_heads", 0), -1])
    cos, sin = (_angles(call, x, each, heads_first) for each in (cos, sin))
    first, rest = (heads.slice(0, turned, 3), [heads.slice(turned, END, 3)]) if turned else (heads, [])
    a, b = (first.slice(place, END, 3, 2) for place in (0, 1)) if interleaved else first.split(2, 3)
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
            place = 2 if heads_first else 1
            rows = table.slice(0, x.shape(place, place + 1))
    # The axis of heads is put behind the batch, or behind the tokens.
    return rows.unsqueeze(1 if axes == PACKED else 0) if heads_first else rows.unsqueeze(axes - 1)
