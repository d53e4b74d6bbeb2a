"""Attention: checks of attributes and shapes, the sizes that follow, and the references, with whole matrices of scores.

Messages begin with the name of the operator that was called. In the references every array is brought into the form
batch x heads x length x size. Packed sequences are one batch entry, in which a query sees only the keys of its own
sequence.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from opgrad.contract import Array
from opgrad.contract.arrangement import sum_to
from opgrad.contract.attributes import (
    Attributes,
    Beside,
    Shape,
    Shapes,
    finite,
    flag,
    integer,
    number_that,
    one_of,
    shown,
)
from opgrad.ops.reference.dropout import keep_mask, kept_scale

LARGEST_HEAD: Final = 256
UNLIMITED: Final = -1  # of a window's sides
ALIGNED: Final = ("top_left", "bottom_right")
LAYOUTS: Final = ("BHLD", "BLHD")

layout = one_of(*LAYOUTS)
probability = number_that((lambda value: 0.0 <= value <= 1.0, "0 to 1"))
not_negative = number_that((lambda value: 0.0 <= value < float("inf"), "a finite number of at least 0"))


def scale(what: str, value: Any, beside: Beside) -> float | None:
    """The factor of the products of queries and keys; None stands for 1 / sqrt(size of a head)."""
    return None if value is None else finite(what, value, beside)


def causal(what: str, value: Any, beside: Beside) -> str:
    """How queries are aligned with keys if no query sees a later key; "" if every query sees every key."""
    if isinstance(value, str):
        if value not in ("", *ALIGNED):
            raise ValueError(f"{what} is {shown(value)}, expected a bool or one of {', '.join(ALIGNED)}")
        return str(value)
    return ALIGNED[0] if flag(what, value) else ""


def window(what: str, value: Any, beside: Beside) -> tuple[int, int]:
    """How many keys a query sees before the one that it is aligned with, and how many behind it."""
    if value is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{what} is {shown(value)}, expected None or a tuple (left, right)")
    left, right = (UNLIMITED if each is None else integer(what, each) for each in value)
    if min(left, right) < UNLIMITED:
        raise ValueError(f"{what} is {shown(value)}, expected sizes of at least 0, or -1 or None for no limit")
    return left, right


class AttentionSizes(NamedTuple):
    """Sizes of a call: batch, heads of queries, heads of keys, lengths, the numbers of a head of q and k, and of v."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    v_size: int


def split(shape: Shape, shapes: Shapes, attributes: Attributes) -> tuple[int, int, int, int]:
    """Batch, heads, length and the numbers of a head of an array of queries, keys or values."""
    if "cu_seqlens_q" in shapes:
        length, heads, size = shape
        return 1, heads, length, size
    batch, heads, length, size = shape
    return (batch, heads, length, size) if attributes["layout"] == "BHLD" else (batch, length, heads, size)


def joined(batch: int, heads: int, length: int, size: int, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of such an array."""
    if "cu_seqlens_q" in shapes:
        return length, heads, size
    return (batch, heads, length, size) if attributes["layout"] == "BHLD" else (batch, length, heads, size)


def sizes(shapes: Shapes, attributes: Attributes) -> AttentionSizes:
    """The sizes of a call whose arrays are checked."""
    batch, heads, queries, size = split(shapes["q"], shapes, attributes)
    _, kv_heads, keys, v_size = split(shapes["v"], shapes, attributes)
    return AttentionSizes(batch, heads, kv_heads, queries, keys, size, v_size)


def _operator(shapes: Shapes) -> str:
    """The operator that is called, by its arrays."""
    return "attention_grad" if "dy" in shapes else "attention"


def checked_q(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of q itself; ValueError if q or the arrays that decide about its form are not what they must be."""
    check_form(shapes)
    size = shapes["q"][-1]
    if not 1 <= size <= LARGEST_HEAD:
        raise ValueError(f"{_operator(shapes)}: q has heads of {size} numbers, expected 1 to {LARGEST_HEAD}")
    return shapes["q"]


def check_form(shapes: Shapes) -> None:
    """Raise ValueError unless q, k and v have the dimensions of their form, and the others go with it."""
    operator, rank = _operator(shapes), 3 if "cu_seqlens_q" in shapes else 4
    why = "as cu_seqlens_q is given" if rank == 3 else "as cu_seqlens_q is None"
    for name in ("q", "k", "v"):
        if len(shapes[name]) != rank:
            raise ValueError(f"{operator}: {name} has {len(shapes[name])} dimensions, expected {rank}, {why}")
    if rank == 4 and "cu_seqlens_k" in shapes:
        raise ValueError(f"{operator}: cu_seqlens_k is given, expected None, as cu_seqlens_q is None")
    for name in ("mask", "key_lengths"):
        if rank == 3 and name in shapes:
            raise ValueError(f"{operator}: {name} is given, expected None, {why}")
    if rank == 3 and "cu_seqlens_k" not in shapes and shapes["k"][0] != shapes["q"][0]:
        raise ValueError(
            f"{operator}: k has {shapes['k'][0]} places, expected {shapes['q'][0]}, those of q, as cu_seqlens_k is None"
        )


def checked_k(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape that k must have: its own heads and length."""
    batch, heads, _, size = split(shapes["q"], shapes, attributes)
    _, kv_heads, keys, _ = split(shapes["k"], shapes, attributes)
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"{_operator(shapes)}: k has {kv_heads} heads, expected a divisor of {heads}, the heads of q")
    return joined(batch, kv_heads, keys, size, shapes, attributes)


def checked_v(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape that v must have: that of k, but for the numbers of a head."""
    v_size = shapes["v"][-1]
    if not 1 <= v_size <= LARGEST_HEAD:
        raise ValueError(f"{_operator(shapes)}: v has heads of {v_size} numbers, expected 1 to {LARGEST_HEAD}")
    batch, kv_heads, keys, _ = split(shapes["k"], shapes, attributes)
    return joined(batch, kv_heads, keys, v_size, shapes, attributes)


def of_result(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of y."""
    found = sizes(shapes, attributes)
    return joined(found.batch, found.heads, found.queries, found.v_size, shapes, attributes)


def checked_dy(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of the gradient of y, which is the first array of its operator."""
    check_form(shapes)
    return of_result(shapes, attributes)


def of_rows(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of arrays with one number for each query of each head, such as lse."""
    found = sizes(shapes, attributes)
    rows = (found.heads, found.queries)
    return rows if "cu_seqlens_q" in shapes else (found.batch, *rows)


def of_mask(shapes: Shapes, attributes: Attributes) -> Shape:
    """The mask's own shape if it can be broadcast to the scores; else the shape of the scores, which it should have."""
    found, mask = sizes(shapes, attributes), shapes["mask"]
    scores = (found.batch, found.heads, found.queries, found.keys)
    fits = len(mask) <= 4 and all(size in (1, full) for size, full in zip(mask[::-1], scores[::-1], strict=False))
    return mask if fits else scores


def of_heads(shapes: Shapes, attributes: Attributes) -> Shape:
    return (sizes(shapes, attributes).heads,)


def of_batch(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["q"][:1]


def of_starts(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape that cu_seqlens_q and cu_seqlens_k have: one number more than there are sequences."""
    return (max(shapes["cu_seqlens_q"][0], 1),)


def given(name: str, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of an optional argument, which the result that is its gradient has, too."""
    if name not in shapes:
        raise ValueError(f"{_operator(shapes)}: needs has d{name}, expected it to have {name} as an argument")
    return shapes[name]


FAR = 1 / 8  # times 1 / epsilon: from here on lse has fewer than three digits behind its point, in twos


@dataclass(frozen=True)
class AttentionOptions:
    """What attention is given beside its arrays q, k and v, under the names that the operators give it."""

    mask: Array | None
    sink: Array | None
    key_lengths: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    seed: Any
    offset: Any
    scale: float | None
    causal: bool | str
    window: Any
    softcap: float
    dropout: float
    layout: str


def by_heads(x: Array, options: AttentionOptions) -> Array:
    """An array of queries, keys or values as batch x heads x length x size."""
    if options.cu_seqlens_q is not None:
        return x.swapaxes(0, 1)[None]
    return x if options.layout == "BHLD" else x.swapaxes(1, 2)


def in_layout(x: Array, options: AttentionOptions) -> Array:
    """The opposite of `by_heads`."""
    if options.cu_seqlens_q is not None:
        return x[0].swapaxes(0, 1)
    return x if options.layout == "BHLD" else x.swapaxes(1, 2)


def _repeated(x: Array, heads: int) -> Array:
    """The keys or values of each head of queries, neighbours of which share them."""
    return np.repeat(x, heads // x.shape[1], axis=1) if x.shape[1] else np.repeat(x, 0, axis=1)


def _summed(x: Array, kv_heads: int) -> Array:
    """The sum over the heads of queries that share keys and values."""
    batch, heads, length, size = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads if kv_heads else 0, length, size).sum(2)


def _within(cu_seqlens: Array, length: int) -> tuple[Array, Array, Array]:
    """For each place: the number of its sequence, its place within that, and how long the sequence is."""
    places = np.arange(length)
    sequence = np.searchsorted(cu_seqlens, places, side="right") - 1
    inside = (sequence >= 0) & (sequence < len(cu_seqlens) - 1)
    sequence = np.where(inside, sequence, -1)
    starts, stops = (np.append(each, 0)[sequence] for each in (cu_seqlens[:-1], cu_seqlens[1:]))
    return sequence, places - starts, stops - starts


def visible(batch: int, queries: int, keys: int, options: AttentionOptions) -> Array:
    """Which keys a query sees by lengths, sequences, causality and window: bool, batch x 1 x queries x keys."""
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    query_count: Any = queries
    if options.cu_seqlens_q is not None:
        cu_seqlens_k = options.cu_seqlens_q if options.cu_seqlens_k is None else options.cu_seqlens_k
        of_query, at, lengths = _within(np.asarray(options.cu_seqlens_q), queries)
        of_key, key_at, _ = _within(np.asarray(cu_seqlens_k), keys)
        key_counts = np.append(np.diff(np.asarray(cu_seqlens_k)), 0)[of_query]
        seen = ((of_query[:, None] == of_key[None, :]) & (of_query[:, None] >= 0))[None, None]
        i, j, query_count, key_count = at[:, None], key_at[None, :], lengths[:, None], key_counts[:, None]
    else:
        lengths = np.full(batch, keys) if options.key_lengths is None else np.asarray(options.key_lengths)
        key_count = lengths[:, None, None, None]
        seen = j < key_count
    place = i + (key_count - query_count if options.causal == "bottom_right" else 0)
    left, right = (UNLIMITED, UNLIMITED) if options.window is None else options.window
    if options.causal:
        seen = seen & (j <= place)
    if left not in (None, UNLIMITED):
        seen = seen & (j >= place - left)
    if right not in (None, UNLIMITED):
        seen = seen & (j <= place + right)
    return np.broadcast_to(seen, (batch, 1, queries, keys))


def _scores(q: Array, k: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """The scores, -inf where a query does not see a key, and their derivative by the scaled products."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    s = scale * (q @ k.swapaxes(2, 3))
    slope = np.ones_like(s)
    if options.softcap:
        t = np.tanh(s / options.softcap)
        s, slope = options.softcap * t, 1 - t * t
    seen = visible(q.shape[0], q.shape[2], k.shape[2], options)
    if options.mask is not None and options.mask.dtype == bool:
        seen = seen & options.mask
    elif options.mask is not None:
        s = s + options.mask
    return np.where(seen, s, -np.inf), np.where(seen, slope, 0.0)


def _kept(shape: tuple[int, ...], options: AttentionOptions) -> Array | float:
    """What dropout multiplies each probability with."""
    if not options.dropout:
        return 1.0
    seed, offset = (0 if each is None else int(np.asarray(each).reshape(())) for each in (options.seed, options.offset))
    return keep_mask(shape, options.dropout, seed, offset) * kept_scale(options.dropout)


def attention(q: Array, k: Array, v: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """(y, lse)."""
    q, k, v = (by_heads(each, options) for each in (q, k, v))
    s, _ = _scores(q, _repeated(k, q.shape[1]), options)
    base, rest = _sums(s, options)
    p = _probabilities(s, base, rest) * _kept(s.shape, options)
    y, lse = p @ _repeated(v, q.shape[1]), base + rest
    return in_layout(y, options), lse if options.cu_seqlens_q is None else lse[0]


def _sums(s: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """The logarithms of the sums of exponentials, as the largest score and the rest; 0 and -inf if no key is seen."""
    m = s.max(-1, initial=-np.inf)
    if options.sink is not None:
        m = np.maximum(m, options.sink[:, None])
    base = np.where(m == -np.inf, 0.0, m)
    total = np.exp(s - base[..., None]).sum(-1)
    if options.sink is not None:
        total = total + np.exp(options.sink[:, None] - base)
    with np.errstate(divide="ignore"):
        return base, np.log(total)


def _sums_of(lse: Array, s: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """lse in two parts; where it has no digits left for the sum beside the largest score, the sum is formed again."""
    far = np.isfinite(lse) & (np.abs(lse) >= FAR / np.finfo(s.dtype).eps)
    if not far.any():
        return lse, np.zeros_like(lse)
    base, rest = _sums(s, options)
    return np.where(far, base, lse), np.where(far, rest, 0.0)


def _probabilities(s: Array, base: Array, rest: Array | float = 0.0) -> Array:
    """They are 0 in the rows of queries that see no key, and at most 1, even if lse is too small by its rounding."""
    for each in (base, rest):
        s = s - np.where(each == -np.inf, 0.0, each)[..., None]
    return np.exp(np.minimum(s, 0.0))


def attention_grad(
    dy: Array, q: Array, k: Array, v: Array, y: Array, lse: Array, dlse: Array | None, options: AttentionOptions
) -> dict[str, Array]:
    """dq, dk, dv, the gradient of the scores before it is summed to that of a mask, and dsink, by name."""
    dy, q, k, v, y = (by_heads(each, options) for each in (dy, q, k, v, y))
    lse = lse.reshape(q.shape[:3])
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    every_k, every_v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    s, slope = _scores(q, every_k, options)
    base, more = _sums_of(lse, s, options)
    p, kept = _probabilities(s, base, more), _kept(s.shape, options)
    delta = (dy * y).sum(-1) - (0.0 if dlse is None else dlse.reshape(lse.shape))
    dp = (dy @ every_v.swapaxes(2, 3)) * kept
    ds = p * (dp - delta[..., None])
    dr = ds * slope * scale
    found = {
        "dq": in_layout(dr @ every_k, options),
        "dk": in_layout(_summed(dr.swapaxes(2, 3) @ q, k.shape[1]), options),
        "dv": in_layout(_summed((p * kept).swapaxes(2, 3) @ dy, k.shape[1]), options),
    }
    if options.mask is not None:
        found["dmask"] = sum_to(ds, options.mask.shape)
    if options.sink is not None:
        rest = np.exp(options.sink[:, None] - np.where(base == -np.inf, 0.0, base) - more)
        found["dsink"] = -(rest * delta).sum((0, 2))
    return found
