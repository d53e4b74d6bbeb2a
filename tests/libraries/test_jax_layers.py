"""Layers, attention and losses on JAX arrays: at once, in jit, and their gradients, beside float64 formulas of JAX."""

import numpy as np
import pytest
from samples import refused

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import opgrad  # noqa: E402
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


def attention(*bias, shared=1, **options):
    """A layer of the table: five queries, as many keys, or more, which `shared` heads of queries share."""
    keys = (2, 7, 4 // shared, 8) if shared > 1 else HEADS

    def formula(q, k, v, bias=0.0):
        k, v = (jnp.repeat(each, shared, 2) for each in (k, v))
        s = jnp.einsum("bihd,bjhd->bhij", q, k) * options.get("scale", 8**-0.5) + bias
        seen = jnp.tril(jnp.ones(s.shape[-2:], bool)) if "is_causal" in options else options.get("mask", True)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf)), v)

    return lambda *x: opgrad.jax.dot_product_attention(*x, **options), formula, [HEADS, keys, keys, *bias]


def rotary(shape, rows, **options):
    """A layer of the table: the tables of angles are constants. Arrays of three axes have two heads in the last one."""
    angles = np.linspace(0, 6, 3 * int(np.prod(rows))).reshape(*rows, 3)
    positions = options.get("position_ids")

    def formula(x):
        y = x.reshape(*x.shape[:2], 2, 6) if x.ndim == 3 else x.swapaxes(1, 2)
        turned = (angles if positions is None else angles[positions])[..., None, :]
        cos, sin = jnp.cos(turned), jnp.sin(turned)
        is_apart = "interleaved" not in options
        a, b = (y[..., :3], y[..., 3:]) if is_apart else (y[..., ::2], y[..., 1::2])
        pair = a * cos - b * sin, a * sin + b * cos
        y = jnp.concatenate(pair, -1) if is_apart else jnp.stack(pair, -1).reshape(y.shape)
        return y.reshape(x.shape) if x.ndim == 3 else y.swapaxes(1, 2)

    def ours(x):
        cos, sin = (jnp.asarray(each, x.dtype) for each in (np.cos(angles), np.sin(angles)))
        given = {name: jnp.asarray(each) if name == "position_ids" else each for name, each in options.items()}
        return opgrad.rotary_embedding(x, cos, sin, **given)

    return ours, formula, [shape]


HEADS = (2, 5, 4, 8)
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
    "attention, causal": attention(is_causal=True, scale=0.3),
    "attention, masked": attention(mask=np.arange(25).reshape(5, 5) % 3 != 1),
    "attention, shared heads": attention(shared=2),
    "attention with a bias": attention((1, 4, 5, 5)),
    "rotary embedding": rotary((2, 3, 4, 6), (4,)),
    "rotary embedding of neighbours": rotary((2, 3, 4, 6), (2, 4), interleaved=True),
    "rotary embedding by position": rotary(
        (2, 4, 12), (7,), num_heads=2, position_ids=np.array([[0, 6, 3, 1], [2, 2, 5, 4]], "int32")
    ),
}


def given(rng, shapes, dtype):
    """Arrays of a dtype, and the same numbers in float64."""
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return arrays, [np.asarray(each).astype(np.float64) for each in arrays]


def assert_near(found, expected, dtype):
    expected = np.asarray(expected)
    atol = FUNCTIONS * EPSILON[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), expected, rtol=4 * EPSILON[dtype], atol=atol)


def value_and_gradients(function):
    """(dy, *x): y, and the gradients of x."""

    def both(dy, *x):
        y, pull = jax.vjp(function, *x)
        return y, *pull(dy)

    return both


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_value_and_gradients(name, dtype, rng):
    """Compiled; in float32 at once, too."""
    ours, formula, shapes = LAYERS[name]
    arrays, exact = given(rng, shapes, dtype)
    (upstream,), (dy,) = given(rng, [jax.eval_shape(formula, *exact).shape], dtype)
    with jax.enable_x64(True):
        expected = jax.jit(value_and_gradients(formula))(dy, *exact)
    mine = value_and_gradients(ours)
    for call in (mine, jax.jit(mine)) if dtype == "float32" else (jax.jit(mine),):
        y, *slopes = call(upstream, *arrays)
        assert y.dtype == dtype
        for found, wanted in zip((y, *slopes), expected, strict=True):
            assert_near(found, wanted, dtype)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.one_in(2)
def test_gradients_of_gradients(name, rng):
    ours, formula, shapes = LAYERS[name]
    arrays, exact = given(rng, shapes, "float32")

    def twice(function):
        places = tuple(range(len(shapes)))
        first = jax.grad(lambda *each: (function(*each) ** 2).sum(), argnums=places)
        return jax.grad(lambda *each: sum((slope**2).sum() for slope in first(*each)), argnums=places)

    with jax.enable_x64(True):
        expected = jax.jit(twice(formula))(*exact)
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


def test_attention_where_no_key_counts(rng):
    q, k, v = given(rng, [HEADS] * 3, "float32")[0]
    assert (opgrad.jax.dot_product_attention(q, k, v, mask=jnp.zeros((5, 5), bool)) == 0).all()
    bias = jnp.zeros((1, 1, 5, 5)).at[..., 2, :].set(jnp.finfo(jnp.float32).min)  # hides all keys alike: all count

    def of(function):
        return jax.jit(jax.value_and_grad(lambda *x: (function(*x, bias=bias) ** 2).sum(), (0, 1, 2)))(q, k, v)

    both = [jax.tree.leaves(of(each)) for each in (opgrad.jax.dot_product_attention, jax.nn.dot_product_attention)]
    for mine, other in zip(*both, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)


def test_wrong_arguments():
    q, k = jnp.ones((1, 3, 4, 4)), jnp.ones((1, 3, 3, 4))
    with pytest.raises(ValueError, match=r"^dot_product_attention: k has 3 heads, expected a divisor of 4"):
        opgrad.jax.dot_product_attention(q, k, k)
    table = jnp.zeros((2, 1))
    with pytest.raises(NotImplementedError, match=r"^rotary_embedding: no gradient with respect to cos_cache"):
        jax.grad(lambda cos: opgrad.rotary_embedding(jnp.zeros((1, 1, 2, 2)), cos, table).sum())(table)
    x = jnp.ones((2, 3), jnp.float32)
    refused(ValueError, r"^swiglu: up has shape", opgrad.jax.swiglu, x, x[:1])
    refused(ValueError, r"^dropout: ratio is 2", opgrad.jax.dropout, jax.random.key(0), x, 2.0)
    refused(TypeError, r"^gelu: x", opgrad.jax.gelu, jnp.ones(3, jnp.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_epsilon_of_rms_norm_is_that_of_float32(dtype):
    x = jnp.full((2, 4), 1e-4, dtype)
    exact = x[0, 0].astype(float) / np.sqrt(x[0, 0].astype(float) ** 2 + np.finfo(np.float32).eps)
    np.testing.assert_allclose(opgrad.jax.rms_norm(x).astype(float), exact, rtol=2**-8)


# --- losses without float64 ------------------------------------------------------------------------------------------


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_vmap_of_losses():
    labels, x = jnp.asarray([[0, 1, 2], [6, 5, 4]]), normal(2, 3, 7)
    each = jax.vmap(opgrad.jax.cross_entropy)(x, labels)
    expected = [opgrad.jax.cross_entropy(*pair) for pair in zip(x, labels, strict=True)]
    np.testing.assert_allclose(each, jnp.stack(expected), rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_label_names_the_function():
    for call in (
        lambda labels: opgrad.jax.cross_entropy(normal(2, 3), labels),
        lambda labels: opgrad.jax.linear_cross_entropy(normal(2, 4), normal(3, 4), labels),
    ):
        with pytest.raises(Exception, match=r"cross_entropy: labels\[1\] is 3, expected"):
            jax.block_until_ready(call(jnp.asarray([0, 3])))


def test_large_arrays_do_not_wait_for_each_other():
    logits, labels = jnp.zeros((512, 32000)), jnp.zeros(512, jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x: opgrad.jax.cross_entropy(x * 2.0, labels)))
    for _ in range(3):
        loss, dlogits = step(logits)
    np.testing.assert_allclose(loss, np.log(32000), rtol=1e-5)
    assert dlogits.shape == logits.shape


@pytest.mark.parametrize("shift", [0, 1])
def test_a_label_beyond_int32_is_no_class(shift):
    x, w = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 3), (5, 3)))
    labels = np.array([0, 1, 0, 4], np.int32)
    for loss in (
        lambda x, ignored: opgrad.jax.cross_entropy(x @ w.T, labels, ignore_index=ignored, shift=shift),
        lambda x, ignored: opgrad.jax.linear_cross_entropy(x, w, labels, ignore_index=ignored, shift=shift),
        lambda x, ignored: opgrad.jax.linear_jsd(x, w, x, 2 * w, labels, ignore_index=ignored, shift=shift),
    ):
        found, exact = (jax.value_and_grad(loss)(x, ignored) for ignored in (2**32, -100))
        np.testing.assert_array_equal(found[0], exact[0])
        np.testing.assert_array_equal(found[1], exact[1])
        refused(ValueError, "ignore_index is 9223372036854775808, expected a 64-bit integer", loss, x, 2**63)
