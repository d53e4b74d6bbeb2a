"""Attention on JAX arrays beside jax.nn's: at once, in jit, differentiated twice, with masks and shared heads."""

import numpy as np
import pytest

import opgrad

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import opgrad.jax  # noqa: E402

attend = opgrad.jax.dot_product_attention
SHAPES = {"equal": [(2, 5, 4, 8)] * 3, "shared heads": [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]}


def arrays(rng, shapes):
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def close(found, expected):
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"bias": True}, {"mask": True}], ids=str)
@pytest.mark.parametrize("heads", SHAPES)
def test_values_and_gradients(heads, options, rng):
    given, options = arrays(rng, SHAPES[heads]), dict(options)
    shape = (1, 4, 5, given[1].shape[1])
    if "bias" in options:
        options["bias"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    if "mask" in options:
        options["mask"] = jnp.asarray(rng.random(shape) > 0.3).at[..., 0].set(True)

    def mine(*x):
        return (attend(*x, **options) ** 3).sum()

    def theirs(*x):
        return (jax.nn.dot_product_attention(*x, **options) ** 3).sum()

    close(attend(*given, **options), jax.nn.dot_product_attention(*given, **options))
    close(jax.jit(lambda *x: attend(*x, **options))(*given), attend(*given, **options))
    expected = jax.grad(theirs, (0, 1, 2))(*given)
    close(jax.grad(mine, (0, 1, 2))(*given), expected)
    close(jax.jit(jax.grad(mine, (0, 1, 2)))(*given), expected)


def test_gradients_of_gradients_and_of_the_bias(rng):
    given, bias = arrays(rng, [(1, 3, 2, 4)] * 3), jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32)

    def twice(function):
        def slope(*x):
            found = jax.grad(lambda *x: (function(*x[:3], bias=x[3][None]) ** 2).sum(), (0, 1, 2, 3))(*x)
            return sum((each**2).sum() for each in found[:3])

        return jax.grad(slope, (0, 1, 2, 3))(*given, bias)

    close(twice(attend), twice(jax.nn.dot_product_attention))
    mine, theirs = (jax.grad(lambda b, f=f: (f(*given, bias=b[None]) ** 2).sum())(bias) for f in
                    (attend, jax.nn.dot_product_attention))  # fmt: skip
    close(mine, theirs)


def test_vmap_and_queries_without_a_key(rng):
    given = [jnp.stack([each, 2 * each]) for each in arrays(rng, [(1, 3, 2, 4)] * 3)]
    found = jax.vmap(attend)(*given)
    close(found[1], attend(*[each[1] for each in given]))
    hidden = attend(*[each[0] for each in given], mask=jnp.zeros((3, 3), bool))
    assert (hidden == 0).all()


def test_queries_from_which_the_least_number_hides_all_keys(rng):
    given = arrays(rng, [(2, 5, 4, 8)] * 3)
    bias = jnp.zeros((1, 1, 5, 5)).at[..., 2, :].set(jnp.finfo(jnp.float32).min)

    def of(function):
        return jax.value_and_grad(lambda *x: (function(*x, bias=bias) ** 2).sum(), (0, 1, 2))(*given)

    close(of(attend), of(jax.nn.dot_product_attention))


def test_refused(rng):
    q, k, v = arrays(rng, [(1, 3, 4, 4), (1, 3, 3, 4), (1, 3, 3, 4)])
    with pytest.raises(ValueError, match=r"^dot_product_attention: k has 3 heads, expected a divisor of 4"):
        attend(q, k, v)
