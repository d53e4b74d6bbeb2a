"""Rotary embedding and its gradient: which elements are a pair, layouts, positions, and what is refused."""

import numpy as np
import pytest
from graph_cases import check_close

import opgrad
from opgrad.contract import DTYPES, FLOATS
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


def test_what_is_not_finite_stays_in_its_pair():
    x = np.array([np.nan, 1, -np.inf, 2, 3, 4, 5, 6], np.float32).reshape(1, 1, 1, 8)
    cos, sin = np.full((1, 4), 0.6, np.float32), np.full((1, 4), 0.8, np.float32)
    y = opgrad.rotary_embedding(x, cos, sin)
    assert np.isnan(y.ravel()).tolist() == [True, False, False, False] * 2
    assert np.isinf(y.ravel()).tolist() == [False, False, True, False] * 2
