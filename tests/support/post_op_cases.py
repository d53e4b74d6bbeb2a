"""Post-ops: each eltwise one, the broadcast patterns of an operand, chains."""

import itertools

import numpy as np
from primitive_cases import numbers

from opgrad.contract import DTYPES
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.primitive import OPERAND_TYPES

ELTWISE = [
    post_ops.abs(), post_ops.clip(-0.5, 0.25), post_ops.clip_v2(0.01, 2), post_ops.elu(0.7), post_ops.elu(-2),
    post_ops.exp(), post_ops.gelu_erf(), post_ops.gelu_tanh(), post_ops.hardsigmoid(0.3, 0.2),
    post_ops.hardsigmoid(-2, 1), post_ops.hardswish(), post_ops.hardswish(-0.5, 0.25), post_ops.linear(-3.7, 0.3),
    post_ops.linear(), post_ops.log(), post_ops.logistic(), post_ops.mish(), post_ops.pow(2, 0.5),
    post_ops.pow(-1.5, 3), post_ops.pow(1, -2), post_ops.pow(3, 0), post_ops.relu(), post_ops.relu(-0.25),
    post_ops.round(), post_ops.soft_relu(), post_ops.soft_relu(-3), post_ops.sqrt(), post_ops.square(),
    post_ops.swish(), post_ops.swish(-2.5), post_ops.tanh(),
]  # fmt: skip


SHAPE = (2, 3, 4, 9)


# One size or all of it on each axis, of each rank; no axis at all is a scalar.
PATTERNS = [
    shape for rank in range(5) for shape in itertools.product(*((1, size) for size in SHAPE[4 - rank :]))
]  # fmt: skip


def made(op, operand, rng):
    """A binary post-op with this operand; where it compares, so that both outcomes occur."""
    if op == "select":
        return post_ops.select(rng.random(np.shape(operand)) < 0.5, operand)
    return getattr(post_ops, op)(operand)


def before(op):
    """What is done first: numbers that are equal now and then."""
    return [post_ops.linear(7, 1), post_ops.round()] if op in ("ge", "gt", "le", "lt", "eq", "ne") else []


def operand_of(rng, shape, dtype):
    array = rng.integers(-4, 5, shape) if dtype == "int32" else numbers(rng, shape, dtype)
    return np.asarray(array).astype(DTYPES[dtype])


def some_chain(rng, shape, length):
    """Operations drawn from all of them; what has grown is brought back."""
    chain = []
    while len(chain) < length:
        if rng.random() < 0.5:
            chain.append(ELTWISE[rng.integers(len(ELTWISE))])
        else:
            op, rank = post_ops.BINARY[rng.integers(13)], int(rng.integers(0, len(shape) + 1))
            pattern = [size if rng.random() < 0.5 else 1 for size in shape[len(shape) - rank :]]
            chain.append(made(op, operand_of(rng, pattern, str(rng.choice(OPERAND_TYPES))), rng))
        if chain[-1].name in ("exp", "pow", "square", "div", "log", "sqrt") and len(chain) < length:
            chain.append(post_ops.clip(-4, 4))
    return chain
