"""Layers on JAX arrays: at once, in jit, and their gradients, beside the float64 formulas of JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import opgrad.jax  # noqa: E402

SHAPE = (2, 3, 5, 7)
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
FUNCTIONS = 8  # units in the last place of exp, tanh, erf and of sums of 7 to 30 elements, together


def norm(x, scale, bias=None, rms=False):
    z = x if rms else x - x.mean(-1, keepdims=True)
    y = z / jnp.sqrt((z**2).mean(-1, keepdims=True) + 1e-5) * scale
    return y if bias is None else y + bias


def sink(x, beside):
    return jnp.exp(x) / (jnp.exp(x).sum(-1, keepdims=True) + jnp.exp(beside)[:, None, None])


# The function, its formula, and the shapes of its arrays.
LAYERS = {
    "gelu": (lambda x: opgrad.jax.gelu(x, approximate=False), lambda x: jax.nn.gelu(x, False), [SHAPE]),
    "gelu by tanh": (opgrad.jax.gelu, lambda x: jax.nn.gelu(x, True), [SHAPE]),
    "swiglu": (opgrad.jax.swiglu, lambda g, u: jax.nn.silu(g) * u, [SHAPE, SHAPE]),
    "geglu": (opgrad.jax.geglu, lambda g, u: jax.nn.gelu(g, True) * u, [SHAPE, SHAPE]),
    "layer_norm": (opgrad.jax.layer_norm, norm, [SHAPE, SHAPE[-1:], SHAPE[-1:]]),
    "rms_norm": (
        lambda x, scale: opgrad.jax.rms_norm(x, scale, epsilon=1e-5),
        lambda x, scale: norm(x, scale, rms=True),
        [SHAPE, SHAPE[-1:]],
    ),
    "sink_softmax": (opgrad.jax.sink_softmax, sink, [SHAPE, SHAPE[1:2]]),
}


def given(rng, shapes, dtype):
    """Arrays of a dtype, and the same numbers in float64."""
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return arrays, [np.asarray(each).astype(np.float64) for each in arrays]


def assert_near(found, expected, dtype):
    expected = np.asarray(expected)
    atol = FUNCTIONS * EPSILON[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), expected, rtol=4 * EPSILON[dtype], atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_value_and_gradients(name, dtype, rng):
    ours, formula, shapes = LAYERS[name]
    arrays, exact = given(rng, shapes, dtype)
    (upstream,), (dy,) = given(rng, [SHAPE], dtype)
    with jax.enable_x64(True):
        expected, pull = jax.vjp(formula, *exact)
        slopes = pull(jnp.asarray(dy))
    for call in (ours, jax.jit(ours)):
        y, pull = jax.vjp(call, *arrays)
        assert y.dtype == dtype
        assert_near(y, expected, dtype)
        for found, wanted in zip(jax.jit(pull)(upstream), slopes, strict=True):
            assert_near(found, wanted, dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_gradients(name, rng):
    ours, formula, shapes = LAYERS[name]
    arrays, exact = given(rng, shapes, "float32")

    def twice(function):
        places = tuple(range(len(shapes)))
        first = jax.grad(lambda *each: (function(*each) ** 2).sum(), argnums=places)
        return jax.grad(lambda *each: sum((slope**2).sum() for slope in first(*each)), argnums=places)

    with jax.enable_x64(True):
        expected = twice(formula)(*exact)
    for found, wanted in zip(jax.jit(twice(ours))(*arrays), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", LAYERS)
def test_vmap(name, rng):
    ours, _, shapes = LAYERS[name]
    arrays = [jnp.stack([each, 2 * each]) for each in given(rng, shapes, "float32")[0]]
    for place, found in enumerate(jax.vmap(ours)(*arrays)):
        np.testing.assert_array_equal(found, ours(*[each[place] for each in arrays]))


def test_dropout_keeps_what_its_key_says():
    key, x = jax.random.key(3), jnp.full((64, 64), 2.0, jnp.float32)
    y, pull = jax.vjp(jax.jit(lambda x: opgrad.jax.dropout(key, x, 0.25)), x)
    kept = np.asarray(y) != 0
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / x.size)
    np.testing.assert_allclose(np.asarray(y)[kept], 2 / 0.75, rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], kept / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(opgrad.jax.dropout(key, x, 0.25), y)
    assert (np.asarray(opgrad.jax.dropout(jax.random.key(4), x, 0.25)) != y).any()
    second = jax.grad(lambda x: (jax.grad(lambda x: (opgrad.jax.dropout(key, x, 0.25) ** 2).sum())(x) ** 2).sum())(x)
    np.testing.assert_allclose(second, np.where(kept, 8 * 2.0 / 0.75**4, 0), rtol=1e-5)


def test_scale_of_another_dtype_and_none(rng):
    x = jnp.asarray(rng.normal(size=(4, 8)), jnp.bfloat16)
    scale = jnp.ones(8, jnp.float32)
    np.testing.assert_array_equal(opgrad.jax.rms_norm(x, scale, epsilon=1e-6).astype("float32"),
                                  opgrad.jax.rms_norm(x, epsilon=1e-6).astype("float32"))  # fmt: skip
    assert opgrad.jax.layer_norm(x, scale).dtype == jnp.bfloat16


def test_wrong_arguments():
    x = jnp.ones((2, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"^swiglu: up has shape"):
        opgrad.jax.swiglu(x, x[:1])
    with pytest.raises(ValueError, match=r"^dropout: ratio is 2"):
        opgrad.jax.dropout(jax.random.key(0), x, 2.0)
    with pytest.raises(TypeError, match=r"^gelu: x"):
        opgrad.jax.gelu(jnp.ones(3, jnp.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_epsilon_of_rms_norm_is_that_of_float32(dtype):
    x = jnp.full((2, 4), 1e-4, dtype)
    exact = x[0, 0].astype(float) / np.sqrt(x[0, 0].astype(float) ** 2 + np.finfo(np.float32).eps)
    np.testing.assert_allclose(opgrad.jax.rms_norm(x).astype(float), exact, rtol=2**-8)
