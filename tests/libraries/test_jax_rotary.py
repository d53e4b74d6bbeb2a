"""Rotary embedding on JAX arrays: at once, in jit, and differentiated twice."""

import numpy as np
import pytest

import opgrad

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

FORMS = {
    "halves": ((2, 3, 4, 6), (4,), {}),
    "neighbours": ((2, 3, 4, 6), (2, 4), {"interleaved": True}),
    "positions": ((2, 4, 12), (7,), {"num_heads": 2}),
}


@pytest.mark.parametrize("form", FORMS)
def test_jit_and_grad(form, rng):
    shape, rows, options = FORMS[form]
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    angles = rng.uniform(0, 6, (*rows, 3)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    positions = jnp.asarray(rng.integers(0, 7, (2, 4)), jnp.int32) if form == "positions" else None

    def call(x):
        return opgrad.rotary_embedding(x, cos, sin, positions, **options)

    expected = opgrad.rotary_embedding(
        *(np.asarray(each) for each in (x, cos, sin)), None if positions is None else np.asarray(positions), **options
    )
    np.testing.assert_array_equal(call(x), expected)
    np.testing.assert_array_equal(jax.jit(call)(x), expected)
    found = jax.jit(jax.grad(lambda x: (call(x) ** 3).sum()))(x)
    wanted = opgrad.rotary_embedding_grad(3 * call(x) ** 2, cos, sin, positions, **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    twice = jax.grad(lambda x: (jax.grad(lambda x: (call(x) ** 2).sum())(x) ** 2).sum())(x)
    np.testing.assert_allclose(twice, 8 * x, rtol=1e-4, atol=1e-4)  # the transposed rotation is the inverse one
    each = jax.vmap(call)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(each[1], 2 * expected, rtol=1e-5)


def test_tables_have_no_gradient():
    x, table = jnp.zeros((1, 1, 2, 2)), jnp.zeros((2, 1))
    with pytest.raises(NotImplementedError, match=r"^rotary_embedding: no gradient with respect to cos_cache"):
        jax.grad(lambda cos: opgrad.rotary_embedding(x, cos, table).sum())(table)
