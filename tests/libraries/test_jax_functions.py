"""opgrad.jax: under jit and grad, against JAX's own functions."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

check_grads = pytest.importorskip("jax.test_util").check_grads

import opgrad.jax  # noqa: E402


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_vmap_and_numerical_gradients():
    labels, x = jnp.asarray([[0, 1, 2], [6, 5, 4]]), random(2, 3, 7)
    each = jax.vmap(opgrad.jax.cross_entropy)(x, labels)
    expected = [opgrad.jax.cross_entropy(*pair) for pair in zip(x, labels, strict=True)]
    np.testing.assert_allclose(each, jnp.stack(expected), rtol=1e-5)
    for function in (opgrad.jax.log_softmax, lambda x: opgrad.jax.cross_entropy(x, labels[0], label_smoothing=0.1)):
        check_grads(function, (x[0],), order=1, modes=["rev"], rtol=2e-2, atol=2e-2, eps=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_label_names_the_function():
    for call in (
        lambda labels: opgrad.jax.cross_entropy(random(2, 3), labels),
        lambda labels: opgrad.jax.linear_cross_entropy(random(2, 4), random(3, 4), labels),
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
        with pytest.raises(ValueError, match="ignore_index is 9223372036854775808, expected a 64-bit integer"):
            loss(x, 2**63)
