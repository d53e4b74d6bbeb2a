"""Rotary embedding and its gradient: which elements are a pair, layouts, positions, and what is refused."""

import numpy as np
import pytest
from accuracy import differences
from graph_cases import check_close

import opgrad
from opgrad.contract import DTYPES, FLOATS, reference
from opgrad.ops import graph_operators

NAMES = ("rotary_embedding", "rotary_embedding_grad")


def arrays(rng, shape, rows, turned, dtype="float64"):
    angles = rng.uniform(-4, 4, (*rows, turned // 2))
    return [each.astype(DTYPES[dtype]) for each in (rng.normal(size=shape), np.cos(angles), np.sin(angles))]


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_the_product_of_complex_numbers(interleaved, rng):
    x, cos, sin = arrays(rng, (2, 3, 4, 10), (4,), 6)
    found = opgrad.rotary_embedding(x, cos, sin, interleaved=interleaved, rotary_embedding_dim=6)
    a, b = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    turned = (a + 1j * b) * (cos + 1j * sin)
    pair = [turned.real, turned.imag]
    joined = np.stack(pair, -1).reshape(2, 3, 4, 6) if interleaved else np.concatenate(pair, -1)
    np.testing.assert_allclose(found[..., :6], joined, rtol=1e-12)
    assert found[..., 6:].tobytes() == x[..., 6:].tobytes()


@pytest.mark.parametrize(
    "options", [{}, {"interleaved": True}, {"rotary_embedding_dim": 4}, {"layout": "BLHD"}], ids=str
)
def test_the_gradient_is_that_of_differences(options, rng):
    """The operator is linear in x, so that the differences are exact but for rounding."""
    x, cos, sin = arrays(rng, (2, 3, 3, 6), (3,), options.get("rotary_embedding_dim", 6))
    dy = rng.normal(size=x.shape)
    slope = differences(lambda moved: reference(NAMES[0])(moved, cos, sin, **options), 0 * x, dy, 1.0)
    np.testing.assert_allclose(reference(NAMES[1])(dy, cos, sin, **options), slope, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(opgrad.rotary_embedding_grad(dy, cos, sin, **options), slope, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 14, 16, 18, 30, 32, 34, 62, 64, 66, 130])
def test_heads_around_the_size_of_vectors(size, interleaved, dtype, rng):
    x, cos, sin = arrays(rng, (1, 2, 3, size), (3,), size, dtype)
    for name in NAMES:
        given = {"interleaved": interleaved}
        first = {"x" if name == NAMES[0] else "dy": x}
        exact = graph_operators()[name].reference(*(each.astype("f8") for each in (x, cos, sin)), **given)
        check_close([getattr(opgrad, name)(**first, cos_cache=cos, sin_cache=sin, **given)], [exact], 2)


def test_layouts_hold_the_same_heads(rng):
    x, cos, sin = arrays(rng, (2, 3, 5, 8), (5,), 8, "float32")
    y = opgrad.rotary_embedding(x, cos, sin)
    moved = np.ascontiguousarray(x.swapaxes(1, 2))
    by_token = opgrad.rotary_embedding(moved, cos, sin, layout="BLHD")
    packed = opgrad.rotary_embedding(moved.reshape(2, 5, 24), cos, sin, num_heads=3)
    assert by_token.swapaxes(1, 2).tobytes() == y.tobytes()
    assert packed.reshape(by_token.shape).tobytes() == by_token.tobytes()


def test_tables_by_token_and_by_position(rng):
    x, cos, sin = arrays(rng, (2, 3, 4, 8), (9,), 8, "float32")
    positions = rng.integers(-9, 9, (2, 4))
    y = opgrad.rotary_embedding(x, cos, sin, positions)
    assert opgrad.rotary_embedding(x, cos[positions], sin[positions]).tobytes() == y.tobytes()
    assert opgrad.rotary_embedding(x, cos, sin, positions.astype("i4")).tobytes() == y.tobytes()
    every = np.broadcast_to(np.arange(4), (2, 4))
    assert opgrad.rotary_embedding(x, cos, sin).tobytes() == opgrad.rotary_embedding(x, cos, sin, every).tobytes()
    one = opgrad.rotary_embedding(x, cos[None, :4], sin[None, :4])
    assert one.tobytes() == opgrad.rotary_embedding(x, cos, sin).tobytes()


def test_in_place_and_back(rng):
    x, cos, sin = arrays(rng, (2, 3, 4, 38), (4,), 38, "float32")
    for interleaved in (False, True):
        y = x.copy()
        assert opgrad.rotary_embedding(y, cos, sin, interleaved=interleaved, out=y) is y
        assert y.tobytes() == opgrad.rotary_embedding(x, cos, sin, interleaved=interleaved).tobytes()
        opgrad.rotary_embedding_grad(y, cos, sin, interleaved=interleaved, out=y)
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_its_pair():
    x = np.array([np.nan, 1, -np.inf, 2, 3, 4, 5, 6], np.float32).reshape(1, 1, 1, 8)
    cos, sin = np.full((1, 4), 0.6, np.float32), np.full((1, 4), 0.8, np.float32)
    y = opgrad.rotary_embedding(x, cos, sin)
    assert np.isnan(y.ravel()).tolist() == [True, False, False, False] * 2
    assert np.isinf(y.ravel()).tolist() == [False, False, True, False] * 2


def test_a_plan(rng):
    x, cos, sin = arrays(rng, (2, 3, 4, 8), (4,), 8, "float32")
    y = np.empty_like(x)
    plan = opgrad.plan(opgrad.rotary_embedding, x, cos, sin, out=y)
    plan(x, cos, sin, out=y)
    assert y.tobytes() == opgrad.rotary_embedding(x, cos, sin).tobytes()


X, TABLE = np.zeros((2, 3, 4, 6), np.float32), np.zeros((4, 3), np.float32)
REFUSED = [
    ({"x": X[0, 0]}, "x has 2 dimensions, expected 3 or 4"),
    ({"cos_cache": TABLE[:3], "sin_cache": TABLE[:3]}, r"cos_cache has shape \(3, 3\), expected \(4, 3\)"),
    ({"sin_cache": TABLE[:, :2]}, r"sin_cache has shape \(4, 2\), expected \(4, 3\), the shape of cos_cache"),
    ({"position_ids": np.full((2, 4), 4)}, r"position_ids\[0, 0\] is 4, expected -4 to 3"),
    ({"position_ids": np.zeros((4, 2), int)}, r"position_ids has shape \(4, 2\), expected \(2, 4\)"),
    ({"rotary_embedding_dim": 3}, "rotary_embedding_dim is 3, expected an even number from 0 to 6"),
    ({"rotary_embedding_dim": 8}, "rotary_embedding_dim is 8, expected an even number from 0 to 6"),
    ({"x": X[..., :5]}, "rotary_embedding_dim is 0, expected an even number above 0"),
    ({"num_heads": 2}, "num_heads is 2, expected 0 or 3, the heads that x has"),
    ({"x": X[0]}, "num_heads is 0, expected a number that divides 6"),
    ({"layout": "LBHD"}, "layout is 'LBHD', expected one of BHLD, BLHD"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(changed, message):
    out = np.ones_like(changed.get("x", X))
    with pytest.raises(ValueError, match=f"^rotary_embedding: {message}"):
        opgrad.rotary_embedding(**{"x": X, "cos_cache": TABLE, "sin_cache": TABLE, "out": out, **changed})
    assert (out == 1).all()
