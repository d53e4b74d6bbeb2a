"""Attention of onnxruntime's models of language: rotary embeddings, grouped heads, caches."""

import numpy as np
import torch
from runtime_cases import RuntimeCase

RANDOM = np.random.default_rng(1)


def numbers(*shape, kind=np.float32):
    return RANDOM.normal(size=shape).astype(kind)


# --- rotary embeddings ---


def rotated(x, cos, sin, interleaved=0):
    """[N, heads, L, H] with the first pairs rotated by angles [N, 1, L, pairs]."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    parts = a * cos - b * sin, b * cos + a * sin
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([both, rest], -1)


def embedding(shape, positions, domain, kind=np.float32, pairs=2, **attributes):
    """A RotaryEmbedding of x [N, L, hidden] or [N, heads, L, H]. positions: "first", "all" or "none"."""
    n, length = shape[0], shape[2] if len(shape) == 4 else shape[1]
    rows = (n, length) if positions == "none" else (9,)
    caches = [each(numbers(*rows, pairs)).astype(kind) for each in (np.cos, np.sin)]
    places = {"first": np.array([2]), "all": RANDOM.integers(0, 9, (n, length)), "none": None}[positions]
    heads = attributes.get("num_heads")

    def formula(*given):
        x, cos, sin = (given[place] for place in ((0, 2, 3) if domain else (0, 1, 2)))
        if positions != "none":
            rows = torch.tensor(np.arange(2, 2 + length)[None].repeat(n, 0) if positions == "first" else places)
            cos, sin = cos[rows], sin[rows]
        split = x if x.ndim == 4 else x.reshape(n, length, heads or shape[2] // (2 * pairs), -1).transpose(1, 2)
        y = rotated(split, cos[:, None], sin[:, None], attributes.get("interleaved", 0))
        return y if x.ndim == 4 else y.transpose(1, 2).reshape(shape)

    x = numbers(*shape, kind=kind)
    arrays = [x, places, *caches] if domain else [x, *caches, places]
    return RuntimeCase(
        "RotaryEmbedding", arrays, formula, (0, 2, 3) if domain else (0, 1, 2), attributes, domain, opset=23
    )


MS = "com.microsoft"
CASES = {
    "RotaryEmbedding of com.microsoft": embedding((2, 3, 8), "all", MS),
    "RotaryEmbedding of com.microsoft, from the first": embedding((2, 3, 8), "first", MS, interleaved=1),
    "RotaryEmbedding of com.microsoft, four axes": embedding((2, 2, 3, 4), "all", MS, interleaved=1),
    "RotaryEmbedding of com.microsoft, a part": embedding((2, 3, 12), "all", MS, num_heads=2, rotary_embedding_dim=4),
    "RotaryEmbedding of com.microsoft, float16": embedding((2, 3, 8), "all", MS, np.float16),
    "RotaryEmbedding": embedding((2, 2, 3, 4), "all", ""),
    "RotaryEmbedding, no positions": embedding((2, 2, 3, 4), "none", "", interleaved=1),
    "RotaryEmbedding, three axes": embedding((2, 3, 8), "all", "", num_heads=2),
    "RotaryEmbedding, a part": embedding((2, 2, 3, 6), "all", "", rotary_embedding_dim=4),
    "RotaryEmbedding, float16": embedding((2, 2, 3, 4), "all", "", np.float16),
}


# --- grouped heads ---


def grouped(
    new=4, past=None, counted=None, queries=4, keys=2, width=16, n=2, room=None, packed=False, bias=False, sink=False,
    rotary=False, positions=None, kind=np.float32, wanted=None, causal=True, **attributes,
):  # fmt: skip
    """A GroupQueryAttention. counted: how many keys each row has in the end; past: how many are in the cache at most.

    room: how many the cache has room for. packed: keys and values lie in the query.
    """
    if room is None:
        room = past
    counted = np.array([(past or 0) + new] * n if counted is None else counted)
    total = int(max(counted.max(), new if not past else 0))
    shapes = [(n, new, queries * width), (n, new, keys * width), (n, new, keys * width)]
    parts = [numbers(*shape, kind=kind) for shape in shapes]
    x = [np.concatenate(parts, 2), None, None] if packed else parts
    caches = [None if room is None else numbers(n, keys, room, width, kind=kind) for _ in range(2)]
    angles = [each(numbers(16, width // 2)).astype(kind) if rotary else None for each in (np.cos, np.sin)]
    arrays = [
        *x, *caches, (counted - 1).astype(np.int32), np.array(total, np.int32), *angles, positions,
        numbers(n, queries, new, total, kind=kind) if bias else None, numbers(queries, kind=kind) if sink else None,
    ]  # fmt: skip
    given = {"num_heads": queries, "kv_num_heads": keys, **attributes}
    if rotary:
        given["do_rotary"] = 1
    if not causal:
        given["causal"] = 0

    def formula(*tensors):
        x, key, value, past_key, past_value, _, _, cos, sin, places, added, sinks = tensors
        if packed:
            x, key, value = x.split([queries * width, keys * width, keys * width], 2)
        split = [each.reshape(n, new, -1, width) for each in (x, key, value)]
        others = past_key, past_value, cos, sin, places, added, sinks
        return torch.stack([of_row(row, split, *others) for row in range(n)])

    def of_row(row, split, past_key, past_value, cos, sin, places, added, sinks):
        before = 0 if total == new else int(counted[row]) - new
        q, k, v = (each[row].transpose(0, 1) for each in split)
        if rotary:
            own = np.arange(new) + before if places is None else places[row].numpy()
            own = np.arange(new) + int(places[0, 0]) if places is not None and total == new else own
            turn = [each[np.minimum(own, 15)][None, None] for each in (cos, sin)]
            q, k = (rotated(each[None], *turn, attributes.get("rotary_interleaved", 0))[0] for each in (q, k))
        if past_key is not None:
            k, v = (torch.cat([a[row, :, :before], b], 1) for a, b in ((past_key, k), (past_value, v)))
        k, v = (each.repeat_interleave(queries // keys, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) * attributes.get("scale", width**-0.5)
        cap = attributes.get("softcap", 0)
        scores = torch.tanh(scores / cap) * cap if cap else scores
        scores = scores if added is None else scores + added[row][:, :, : before + new]
        at, key_at = torch.arange(new)[:, None] + before, torch.arange(before + new)
        allowed = (key_at < int(counted[row])) & ((key_at <= at) | (not causal))
        window = attributes.get("local_window_size", -1)
        if window >= 0:
            allowed = allowed & (key_at > at - window)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None or attributes.get("smooth_softmax"):
            column = (torch.zeros(queries) if sinks is None else sinks)[:, None, None].expand(-1, new, 1)
            p = torch.softmax(torch.cat([column, scores], 2), 2)[:, :, 1:]
        else:
            p = torch.softmax(scores, 2)
        return (p @ v).transpose(0, 1).reshape(new, -1)

    floats = [place for place, array in enumerate(arrays) if array is not None and array.dtype == kind]
    wanted = tuple(floats) if wanted is None else wanted
    return RuntimeCase("GroupQueryAttention", arrays, formula, wanted, given, MS, outputs=3, terms=256)


CASES |= {
    f"GroupQueryAttention, {form}": grouped(**given)
    for form, given in {
        "first prompt": {},
        "one group": {"queries": 2},
        "packed": {"packed": True},
        "rotary": {"rotary": True},
        "rotary, interleaved, packed": {"rotary": True, "packed": True, "rotary_interleaved": 1},
        "rotary, positions": {"rotary": True, "positions": np.array([[2, 3, 4, 5], [1, 2, 3, 4]])},
        "window": {"local_window_size": 2},
        "softcap": {"softcap": 1.5, "scale": 0.7},
        "sink": {"sink": True},
        "smooth softmax": {"smooth_softmax": 1},
        "bias": {"bias": True},
        "empty past": {"past": 0, "wanted": (0, 1, 2)},
        "past": {"past": 3, "n": 1},
        "past of several lengths": {"past": 3, "new": 1, "counted": [4, 2]},
        "past, rotary": {"past": 3, "new": 1, "counted": [4, 2], "rotary": True},
        "past, room left": {"past": 3, "room": 8, "new": 2, "n": 1},
        "past, window, softcap, sink": {
            "past": 5, "new": 2, "local_window_size": 3, "softcap": 2.0, "sink": True, "rotary": True, "n": 1,
        },
        "first prompt, padded": {"counted": [4, 2]},
        "all keys": {"causal": False},
        "float16": {"kind": np.float16, "rotary": True, "past": 2, "new": 3, "n": 1},
    }.items()
}  # fmt: skip


# --- ai.onnx ---


def attention(
    queries=3, keys=4, heads=4, groups=2, width=4, past=0, mask=None, nonpad=None, mode=None, axes=4, kind=np.float32,
    opset=24, **attributes,
):  # fmt: skip
    """Attention of ai.onnx. mask: "boolean", "float" or "short"; mode: of the last result, None without it."""
    total = past + keys
    shapes = (heads, queries), (groups, keys), (groups, keys)
    split = [numbers(2, *shape, width, kind=kind) for shape in shapes]
    caches = [numbers(2, groups, past, width, kind=kind) if past else None for _ in range(2)]
    masks = {
        None: None, "float": numbers(2, 1, queries, total, kind=kind), "boolean": RANDOM.random((queries, total)) < 0.8,
        "short": numbers(queries, total - 1, kind=kind),
    }  # fmt: skip
    added = masks[mask]
    if mask == "boolean":
        added[:, 0] = True
    given = dict(attributes)
    if axes == 3:
        given |= {"q_num_heads": heads, "kv_num_heads": groups}
    if mode is not None:
        given["qk_matmul_output_mode"] = mode

    def formula(q, k, v, added, past_key, past_value, nonpad=None):
        if axes == 3:
            counts = zip((q, k, v), (heads, groups, groups), strict=True)
            q, k, v = (each.reshape(2, -1, count, width).transpose(1, 2) for each, count in counts)
        k, v = (b if a is None else torch.cat([a, b], 2) for a, b in ((past_key, k), (past_value, v)))
        whole = [each.repeat_interleave(heads // groups, 1) for each in (k, v)]
        raw = q @ whole[0].transpose(2, 3) * attributes.get("scale", width**-0.5)
        cap = attributes.get("softcap", 0)
        capped = torch.tanh(raw / cap) * cap if cap else raw
        allowed = torch.ones(2, 1, queries, total, dtype=torch.bool)
        if attributes.get("is_causal"):
            at = torch.arange(queries)[:, None] + (past if nonpad is None else 0)
            at = at if nonpad is None else (at + nonpad[:, None, None] - queries)[:, None]
            allowed = allowed & (torch.arange(total) <= at)
        if nonpad is not None:
            allowed = allowed & (torch.arange(total) < nonpad[:, None, None, None])
        if mask == "boolean":
            allowed = allowed & added
        elif mask is not None:
            short = total - added.shape[-1]
            capped_and = capped + torch.nn.functional.pad(added, (0, short), value=-torch.inf)
        biased = (capped if mask in (None, "boolean") else capped_and).masked_fill(~allowed, -torch.inf)
        p = torch.softmax(biased, 3)
        y = p @ whole[1]
        y = y.transpose(1, 2).reshape(2, queries, -1) if axes == 3 else y
        return [y, k, v, {None: None, 0: raw, 1: capped, 3: p}[mode]][:outputs]

    x = [each.transpose(0, 2, 1, 3).reshape(2, each.shape[2], -1) if axes == 3 else each for each in split]
    arrays = [*x, added, *caches, *([] if nonpad is None else [np.array(nonpad)])]
    floats = [place for place, array in enumerate(arrays) if array is not None and array.dtype.kind == "f"]
    outputs = 1 if not past and mode is None else 3 if mode is None else 4
    return RuntimeCase("Attention", arrays, formula, tuple(floats), given, "", opset, outputs, terms=256)


ATTENTION = {
    "grouped heads": {},
    "three axes": {"axes": 3},
    "past": {"past": 2},
    "past, causal": {"past": 2, "keys": 3, "is_causal": 1},
    "past, mask, three axes": {"past": 2, "mask": "float", "axes": 3},
    "booleans, softcap": {"mask": "boolean", "softcap": 1.5},
    "scores": {"mode": 0, "softcap": 1.5, "scale": 0.4},
    "capped scores": {"mode": 1, "softcap": 1.5, "past": 1},
    "shares": {"mode": 3, "is_causal": 1, "queries": 4},
    "lengths": {"nonpad": [4, 2]},
    "float16": {"past": 2, "kind": np.float16, "mask": "float"},
    "opset 23": {"past": 2, "opset": 23, "mask": "float"},
}
CASES |= {f"Attention, {form}": attention(**given) for form, given in ATTENTION.items()}


# --- linear attention: a state for each head, which every token changes ---


def linear(
    rule, heads=(2, 2), per_key=False, past=False, domain="", kind=np.float32, one_rate=False, few=None, **attributes
):
    """A LinearAttention of 2 rows of 4 tokens. per_key: whether each key's place decays for itself.

    few: how many keys a token has, if fewer than values.
    """
    queries, keys = heads
    few = few or keys
    width, depth, new = 3, 2, 4
    gated, delta = "gated" in rule, "delta" in rule
    q, k, v = (numbers(2, new, size, kind=kind) for size in (queries * width, few * width, keys * depth))
    k = (k / np.linalg.norm(k.reshape(2, new, few, width), axis=3).repeat(width, 2)).astype(kind)
    decay = -np.abs(numbers(2, new, keys * (width if per_key else 1), kind=kind)) if gated else None
    rate = RANDOM.uniform(0.2, 0.8, (2, new, 1 if one_rate else keys)).astype(kind) if delta else None
    state = numbers(2, keys, width, depth, kind=kind) if past else None

    def formula(q, k, v, state=None, decay=None, rate=None):
        s = torch.zeros(2, keys, width, depth, dtype=torch.float64) if state is None else state
        q, k, v = (each.reshape(2, new, -1, size) for each, size in ((q, width), (k, width), (v, depth)))
        k, rows = k.repeat_interleave(keys // few, 2), []
        for t in range(new):
            s = s if decay is None else s * torch.exp(decay[:, t].reshape(2, keys, -1, 1))
            change = v[:, t] if rate is None else v[:, t] - torch.einsum("nhkd,nhk->nhd", s, k[:, t])
            change = change if rate is None else change * rate[:, t, :, None]
            s = s + torch.einsum("nhk,nhd->nhkd", k[:, t], change)
            whole, asked = (
                x.repeat_interleave(max(1, a // b), 1) for x, a, b in ((s, queries, keys), (q[:, t], keys, queries))
            )
            rows.append(torch.einsum("nhk,nhkd->nhd", asked, whole) * attributes.get("scale", width**-0.5))
        return torch.stack(rows, 1).reshape(2, new, -1), s

    arrays = [q, k, v, state, decay, rate]
    wanted = tuple(place for place, array in enumerate(arrays) if array is not None)
    given = {"update_rule": rule, "q_num_heads": queries, "kv_num_heads": keys, **attributes}
    return RuntimeCase("LinearAttention", arrays, formula, wanted, given, domain, 21 if domain else 27, 2, terms=256)


LINEAR = {
    "linear": {"rule": "linear"},
    "gated": {"rule": "gated", "past": True},
    "gated by key, grouped heads": {"rule": "gated", "per_key": True, "heads": (4, 2), "scale": 0.7},
    "delta": {"rule": "delta", "past": True, "one_rate": True},
    "gated delta": {"rule": "gated_delta", "past": True},
    "gated delta by key": {"rule": "gated_delta", "per_key": True, "heads": (4, 2)},
}
CASES |= {f"LinearAttention, {form}": linear(**given) for form, given in LINEAR.items()}
CASES |= {f"LinearAttention of com.microsoft, {form}": linear(domain=MS, **given) for form, given in LINEAR.items()}
CASES["LinearAttention of com.microsoft, more keys than queries"] = linear("gated_delta", (2, 4), domain=MS)
CASES["LinearAttention of com.microsoft, more values than keys"] = linear("gated_delta", (2, 4), domain=MS, few=2)
CASES["LinearAttention, float16"] = linear("gated_delta", past=True, kind=np.float16)
