"""Attention and its gradient with whole matrices of scores, in the precision of the arguments: the references.

Every array is brought into the form batch x heads x length x size. Packed sequences are one batch entry, in which a
query sees only the keys of its own sequence.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrad.contract import Array
from opgrad.contract.arrangement import sum_to
from opgrad.ops.reference.random import keep_mask, kept_scale

UNLIMITED = -1  # of a window's sides
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
