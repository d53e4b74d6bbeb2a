"""Divergences of softmax distributions from those of a teacher, with their gradients: what models are distilled by."""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, Tensor, like, operator, reference
from opgrad.contract.attributes import FLOATS, Array
from opgrad.ops.sample_loss import Positive, Share

Logits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 3))]
Teacher = Annotated[Array, like("logits")]
OF_ROWS = Tensor(
    ("float32", "float64"), lambda shapes, _: shapes["logits"][:1], "the rows of logits", dtype_of="logits"
)
OfRow = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["logits"][:1], "the rows of logits")]


def _share(p: Array, log_ratio: Array) -> Array:
    """p * log_ratio, and 0 where p is, whatever the ratio is there."""
    return np.where(p == 0, 0, p * np.where(p == 0, 0, log_ratio))


@operator(
    "loss = beta * KL(teacher || mixture) + (1 - beta) * KL(student || mixture), and dlogits",
    support=IN_GRAPHS,
    results={"loss": OF_ROWS, "dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
)
def softmax_divergence_and_grad(
    logits: Logits, teacher_logits: Teacher, dloss: OfRow | None = None, beta: Share = 0.5,
    temperature: Positive = 1.0, *, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """How far each row's softmax is from a teacher's, by the generalized Jensen-Shannon divergence, and its gradient.

    logits: the student's, shape (N, C); float32, float64, float16 or bfloat16.
    teacher_logits: of the shape and dtype of logits; they get no gradient.
    dloss: gradient with respect to loss, shape (N,), any of the four dtypes; None: all 1.
    beta: in [0, 1], the share of the teacher in the mixture. 0 stands for KL(teacher || student), 1 for KL(student ||
        teacher), which are the limits of the divergence over beta, and over 1 - beta.
    temperature: above 0; divides both logits.
    out: where to write loss and dlogits; the latter may be logits.

    Returns (loss, dlogits): loss of shape (N,) in float32, or float64 for float64; dlogits of the shape and dtype of
    logits. Classes of probability 0 count nothing. NaN and +inf in a row make it NaN. Raises TypeError, ValueError.

    Formula: p, q = softmax(teacher_logits / temperature), softmax(logits / temperature); m = beta * p + (1 - beta) * q;
    loss = sum(beta * p * log(p / m) + (1 - beta) * q * log(q / m)); dlogits = dloss / temperature * q *
    (d - sum(q * d)), d = (1 - beta) * log(q / m).
    Source: Agarwal et al., "On-Policy Distillation of Language Models", 2024.

    Example:
    >>> student = np.array([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], np.float32)
    >>> teacher = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]], np.float32)
    >>> loss, dlogits = opgrad.softmax_divergence_and_grad(student, teacher, beta=0.0)
    >>> loss.round(4) + 0.0, dlogits.round(4) + 0.0
    (array([0.   , 0.732], dtype=float32), array([[ 0.    ,  0.    ,  0.    ],
           [ 0.2881,  0.2881, -0.5761]], dtype=float32))
    """
    log_q, log_p = (reference("log_softmax")(x / temperature) for x in (logits, teacher_logits))
    p, q = np.exp(log_p), np.exp(log_q)
    slope = (np.ones(len(logits)) if dloss is None else dloss)[:, None] / temperature
    if beta == 0:
        return _share(p, log_p - log_q).sum(1), slope * (q * p.sum(1, keepdims=True) - p)
    if beta == 1:
        loss, d = _share(q, log_q - log_p), log_q - log_p
    else:
        # log(q / m) and log(p / m) by log(p / q): a difference from log(m) is inexact where p / q is near 1.
        near = np.clip(log_p - log_q, -700, 700)
        log_ratio = -np.log1p(beta * np.expm1(near))
        loss = beta * _share(p, log_ratio + near) + (1 - beta) * _share(q, log_ratio)
        d = (1 - beta) * log_ratio
    d = np.where(q == 0, 0, d)
    mean = (q * d).sum(1, keepdims=True) / q.sum(1, keepdims=True)
    return loss.sum(1), slope * q * (d - mean)
