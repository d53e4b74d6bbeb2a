"""Divergences between a student's and a teacher's linear layer on JAX arrays: some rows' logits at a time.

XLA forms the products, in a loop over chunks of rows; the kernel gives a chunk's divergences and the gradient of its
logits. The backward pass computes the chunk's logits again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from opgrad.jax.calls import alike, call
from opgrad.jax.formulas import wide
from opgrad.jax.linear_loss import CHUNK, Dense, logits_of, over_chunks
from opgrad.ops import graph_operators

_operator = graph_operators()["softmax_divergence_and_grad"]


@functools.lru_cache(1024)
def _divergence(name: str, beta: float, temperature: float) -> Any:
    """The divergence of each row of logits from others, differentiable once, by the logits."""
    options = {"beta": beta, "temperature": temperature}

    @jax.custom_vjp
    def divergence(logits: Array, others: Array) -> Array:
        return forward(logits, others)[0]

    def forward(logits: Array, others: Array) -> tuple[Array, Array]:
        loss, dlogits = call(_operator, {"logits": logits, "teacher_logits": others}, options, name)
        return loss, dlogits

    def backward(dlogits: Array, dloss: Array) -> tuple[Array, None]:
        return dlogits * dloss[:, None], None

    divergence.defvjp(forward, backward)
    return divergence


def divergences(
    name: str, x: Array, student: Dense, y: Array, teacher: Dense, beta: float, temperature: float
) -> Array:
    """That of each row; the arguments are checked."""
    dtype = wide(x.dtype)
    of = _divergence(name, beta, temperature)

    @jax.checkpoint
    def of_chunk(student: Dense, teacher: Dense, x: Array, y: Array) -> Array:
        pairs = ((x, student), (y, teacher))
        logits, others = (logits_of(rows, each.weight.astype(dtype), each.bias) for rows, each in pairs)
        found: Array = of(logits, others)
        return found

    def body(carry: Any, part: Any) -> tuple[Any, Array]:
        return carry, of_chunk(student, jax.lax.stop_gradient(teacher), *part)

    x, y, student, teacher = alike((x, y, student, teacher))
    rows = max(CHUNK // max(2 * student.weight.shape[0] * jnp.dtype(dtype).itemsize, 1), 1)
    found: Array = over_chunks(body, None, (x, jax.lax.stop_gradient(y)), rows)[1]
    return found
