"""Without any one of the names that JAX does not document, opgrad.jax is imported and plain calls work."""

import ast
import sys

import pytest
from lacking import SOURCE, looked_for, nodes, run_without

jax = pytest.importorskip("jax")

from opgrad.call.libraries import jax_private  # noqa: E402

PATHS = looked_for(jax_private)

# JAX's own code needs some of the names when it is called, so they are back by then: what opgrad found stays.
CHILD = """
import warnings
import jax, jax.numpy as jnp, numpy as np, opgrad  # once, for all children

def child(path):
    *owners, last = path.split(".")
    owner = jax
    for each in owners:
        owner = getattr(owner, each)
    kept = getattr(owner, last)
    delattr(owner, last)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from opgrad.call.libraries import jax_private
    setattr(owner, last, kept)
    assert "jax." + path in jax_private.MISSING, jax_private.MISSING
    assert any("lacks jax." + path in str(each.message) for each in told)
    import opgrad.jax
    x, labels = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(3)
    y = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(opgrad.jax.softmax(jnp.asarray(x)), y, rtol=1e-5)
    found = jax.jit(opgrad.jax.cross_entropy)(x, labels)
    np.testing.assert_allclose(found, -np.log(y[labels, labels]).mean(), rtol=1e-5)

fork_for(sys.argv[1].split(), child)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_without_one_of_them():
    assert len(PATHS) > 5
    run_without(CHILD, PATHS)


def test_this_release_has_them_all():
    """What goes missing with a new release of JAX is noticed here, before users do."""
    assert jax_private.MISSING == []
    assert jax_private.is_committed(jax.device_put(1.0, jax.devices("cpu")[0]))
    assert jax.jit(lambda x: jax.numpy.asarray(jax_private.is_traced(x)))(1.0)


def test_they_stand_in_one_file():
    for name, node in nodes(*(SOURCE / "jax").rglob("*.py"), SOURCE / "call" / "libraries" / "jax_arrays.py"):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert not text.startswith(("jax.core", "jax._src", "jax.interpreters", "_jax.core")), (name, text)
            assert node.attr not in ("committed", "canonicalize_dtype", "vma"), (name, text)
