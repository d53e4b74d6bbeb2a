"""Attention's reference: against softmax between two products, its gradient against finite differences, errors."""

import numpy as np
import pytest

from opgrad.ops import graph_operators
from opgrad.ops.reference.dropout import keep_mask

OPERATORS = graph_operators()
FORWARD, GRADIENT = OPERATORS["attention"].reference, OPERATORS["attention_grad"].reference
STEP = 1e-5
NEEDS = ("dq", "dk", "dv", "dmask", "dsink")
B, H, KV, L, S, D, V = 2, 4, 2, 5, 7, 3, 6
LENGTHS = np.array([4, 7])


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_it_is_softmax_between_two_products(rng):
    q, k, v = rng.normal(size=(B, H, L, D)), rng.normal(size=(B, H, S, D)), rng.normal(size=(B, H, S, V))
    s = q @ k.swapaxes(2, 3) / np.sqrt(D)
    y, lse = FORWARD(q, k, v, needs=("y", "lse"))
    np.testing.assert_allclose(y, softmax(s) @ v, rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)), rtol=1e-12)
    mask = rng.random((B, 1, L, S)) > 0.4
    mask[..., 0] = True
    np.testing.assert_allclose(FORWARD(q, k, v, mask=mask), softmax(np.where(mask, s, -np.inf)) @ v, rtol=1e-12)
    bias = rng.normal(size=(H, 1, S))
    np.testing.assert_allclose(
        FORWARD(q, k, v, mask=bias, softcap=2.0), softmax(2 * np.tanh(s / 2) + bias) @ v, rtol=1e-12
    )
    kept = keep_mask(s.shape, 0.3, 5, 9) / 0.7
    np.testing.assert_allclose(FORWARD(q, k, v, dropout=0.3, seed=5, offset=9), (softmax(s) * kept) @ v, rtol=1e-12)
    with_sink = softmax(
        np.concatenate([s, np.broadcast_to([[[[1.0]], [[2.0]], [[-np.inf]], [[0.0]]]], (B, H, L, 1))], 3)
    )
    np.testing.assert_allclose(
        FORWARD(q, k, v, sink=np.array([1.0, 2.0, -np.inf, 0.0])), with_sink[..., :-1] @ v, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": True}, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        ({"causal": "bottom_right"}, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ({"causal": "bottom_right", "window": (1, 0)}, [[0, 1, 1, 0], [0, 0, 1, 1]]),
        ({"window": (0, 1)}, [[1, 1, 0, 0], [0, 1, 1, 0]]),
        ({"window": (None, 1)}, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ({"window": (0, -1)}, [[1, 1, 1, 1], [0, 1, 1, 1]]),
        ({"key_lengths": np.array([3])}, [[1, 1, 1, 0], [1, 1, 1, 0]]),
        ({"key_lengths": np.array([3]), "causal": "bottom_right"}, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ({"key_lengths": np.array([1]), "causal": "bottom_right"}, [[0, 0, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_which_keys_a_query_sees(options, seen):
    """Of equal keys each that is seen has the same share, which the unit vectors as values show."""
    zeros, seen = np.zeros((1, 1, 4, 1)), np.array(seen, float)
    y = FORWARD(zeros[:, :, :2], zeros, np.eye(4)[None, None], **options)
    np.testing.assert_allclose(y[0, 0], seen / np.maximum(seen.sum(1, keepdims=True), 1))


def test_layouts_and_packed_sequences(rng):
    q, k, v = (rng.normal(size=(1, heads, 9, D)) for heads in (H, KV, KV))
    y, lse = FORWARD(q, k, v, causal=True, needs=("y", "lse"))
    turned = FORWARD(*(each.swapaxes(1, 2) for each in (q, k, v)), causal=True, layout="BLHD")
    np.testing.assert_array_equal(turned, y.swapaxes(1, 2))
    packed = [each[0].swapaxes(0, 1) for each in (q, k, v)]
    starts = np.array([0, 4, 4, 8])
    z, packed_lse = FORWARD(*packed, causal=True, cu_seqlens_q=starts, needs=("y", "lse"))
    np.testing.assert_allclose(z[:4], turned[0, :4], rtol=1e-12)
    np.testing.assert_allclose(packed_lse[:, :4], lse[0, :, :4], rtol=1e-12)
    own = FORWARD(*(each[:, :, 4:8] for each in (q, k, v)), causal=True)
    np.testing.assert_allclose(z[4:8], own[0].swapaxes(0, 1), rtol=1e-12)
    assert not z[8].any()
    assert np.isneginf(packed_lse[:, 8]).all()


def packed(**more):
    return {"cu_seqlens_q": np.array([0, 2, 2, 5]), "cu_seqlens_k": np.array([1, 4, 5, 7])} | more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.7},
        {"causal": "bottom_right", "key_lengths": LENGTHS},
        {"window": (1, 2), "softcap": 1.5},
        {"layout": "BLHD", "dropout": 0.3, "seed": 4, "offset": 2},
        packed(),
        packed(causal="bottom_right", dropout=0.4, seed=3),
    ],
)
@pytest.mark.parametrize("mask", [None, (B, H, L, S), (1, 1, S), (B, 1, L, 1), ()])
def test_the_gradient_is_the_derivative(options, mask, rng):
    """Along random directions of all arrays at once, and of one at a time."""
    is_packed, turned = "cu_seqlens_q" in options, options.get("layout") == "BLHD"
    if is_packed and mask is not None:
        return
    shapes = {"q": (B, H, L, D), "k": (B, KV, S, D), "v": (B, KV, S, V)}
    if is_packed or turned:
        shapes = {name: (b, n, h, d)[is_packed:] for name, (b, h, n, d) in shapes.items()}
    shapes |= {"sink": (H,)} | ({} if mask is None else {"mask": mask})
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    y, lse = FORWARD(**arrays, **options, needs=("y", "lse"))
    dy, dlse = rng.normal(size=y.shape), rng.normal(size=lse.shape)
    needs = [f"d{name}" for name in shapes]
    found = GRADIENT(dy=dy, y=y, lse=lse, dlse=dlse, **arrays, **options, needs=needs)
    found = dict(zip([each for each in NEEDS if each in needs], found, strict=True))

    def value(changes, step):
        y, lse = FORWARD(
            **arrays | {name: arrays[name] + step * change for name, change in changes.items()},
            **options,
            needs=("y", "lse"),
        )
        return (y * dy).sum() + (lse * dlse).sum()

    for name in (*shapes, None):
        changes = {each: rng.normal(size=shape) for each, shape in shapes.items() if name in (each, None)}
        slope = sum((found[f"d{each}"] * change).sum() for each, change in changes.items())
        difference = (value(changes, STEP) - value(changes, -STEP)) / (2 * STEP)
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-7, err_msg=str(name))
