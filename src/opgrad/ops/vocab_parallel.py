"""Cross-entropy whose classes are split over processes: what a shard adds to each row, and the gradient of a shard."""

from typing import Annotated

import numpy as np

from opgrad.contract import ON_SHARDS, Tensor, divisor, finite, like, operator
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes

STATISTICS, MOMENT = 4, 5  # rows of the statistics; with the first moment
FACTORS = 6  # of a row of the gradient


def _statistics_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return MOMENT if attributes["moment"] else STATISTICS, shapes["logits"][0]


Logits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 3))]
Labels = Annotated[Array, Tensor(INTEGERS, lambda shapes, _: shapes["logits"][:1], "the number of rows of logits")]
Weight = Annotated[Array, Tensor(FLOATS, lambda shapes, _: shapes["logits"][1:], "the number of classes of the shard")]
Factors = Annotated[
    Array,
    Tensor(
        ("float32", "float64"), lambda shapes, _: (FACTORS, shapes["logits"][0]), "six factors for each row of logits"
    ),
]
Softcap = Annotated[float, finite]
Temperature = Annotated[float, divisor]


def _scaled(logits: Array, softcap: float, temperature: float) -> Array:
    """The logits that the softmax is taken of."""
    capped = softcap * np.tanh(logits / softcap) if softcap else logits
    return np.asarray(capped / temperature)


def _own(labels: Array, first: int, classes: int) -> tuple[Array, Array]:
    """For each row whether its label is a class of the shard, and which; 0 where it is none."""
    own = (labels >= first) & (labels < first + classes)
    return own, np.where(own, labels - first, 0)


@operator(
    "max(z), sum(exp(z - max)), z[label], sum(weight * z) of each row's classes in this shard",
    support=ON_SHARDS,
    results={
        "statistics": Tensor(
            ("float32", "float64"),
            _statistics_shape,
            "four or five statistics for each row of logits",
            dtype_of="logits",
        )
    },
)
def cross_entropy_shard(
    logits: Logits, labels: Labels, weight: Weight | None = None, first: int = 0,
    softcap: Softcap = 0.0, temperature: Temperature = 1.0, moment: bool = False, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """What a shard of the classes adds to the cross-entropy of each row, in one pass over its logits.

    logits: shape (N, C), the logits of the classes from `first` to `first` + C - 1; float32, float64, float16 or
        bfloat16. C may be 0.
    labels: shape (N,); int32 or int64 classes of all shards. One that is none of this shard picks no logit.
    weight: shape (C,), one of the four dtypes; a factor for each class in the sum of the logits; None: all 1.
    first: the number of the shard's first class.
    softcap: the largest magnitude that a logit may have, z = softcap * tanh(x / softcap); 0: any.
    temperature: what the logits are divided by, after the softcap; not 0.
    moment: whether the fifth statistic is computed.
    out: where to write.

    Returns statistics of shape (4, N) or (5, N), float64 for float64 logits, else float32: the largest logit (-inf
    without classes), the sum of exp(z - largest) (0 where all are -inf), the logit of the label (0 if that is no
    class of the shard), the sum of weight * z and, with moment, the sum of exp(z - largest) * z.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or a temperature of 0.

    Formula: z = softcap * tanh(logits / softcap) / temperature; M = max_r(max[r]) over all shards r;
    lse = M + log(sum_r(sum[r] * exp(max[r] - M))).
    Source: Megatron-LM, vocabulary-parallel cross-entropy (arXiv 1909.08053, section 3).

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> opgrad.cross_entropy_shard(logits, np.array([0, 5]), first=3)  # this shard has classes 3, 4 and 5
    array([[2.    , 3.    ],
           [1.5032, 1.0996],
           [0.    , 0.    ],
           [3.    , 3.    ]], dtype=float32)
    """
    z = _scaled(logits, softcap, temperature)
    largest = np.max(z, 1, initial=-np.inf)
    e = np.exp(z - np.where(largest == -np.inf, 0, largest)[:, np.newaxis])
    own, place = _own(labels, first, logits.shape[1])
    target = np.zeros(len(z))
    target[own] = z[own, place[own]]
    found = [largest, e.sum(1), target, (z if weight is None else z * weight).sum(1)]
    if moment:
        found.append(np.where(e == 0, 0, e * z).sum(1))
    return np.stack(found)


@operator(
    "dlogits = (p * (a + e * z) + b * [k == label] + c * weight) * dz/dx, p = exp(z - m - log_s)",
    support=ON_SHARDS,
    results={"dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
)
def cross_entropy_shard_grad(
    logits: Logits, labels: Labels, factors: Factors, weight: Weight | None = None, first: int = 0,
    softcap: Softcap = 0.0, temperature: Temperature = 1.0, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of a loss that is made of log-sum-exps, labels' logits and sums of logits over all shards, for one.

    logits, labels, weight, first, softcap, temperature: as given to cross_entropy_shard.
    factors: shape (6, N), float32 or float64: for each row the largest logit m of all shards, log_s, the logarithm of
        the sum of exp(z - m) over all shards, and the loss's gradients with respect to the log-sum-exp (a), the logit
        of the label (b), the sum of weight * z (c) and the mean of z (e); to a belongs e * (1 - mean).
    out: where to write; may be logits.

    Returns dlogits, of the shape and dtype of logits; exactly 0 where a, b, c and e are 0, whatever the logits are.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or a temperature of 0.

    Formula: p = exp(z[i, k] - m[i] - log_s[i]);
    dlogits[i, k] = (p * (a[i] + e[i] * z[i, k]) + b[i] * [k + first == labels[i]] + c[i] * weight[k]) * dz/dx;
    dz/dx = (1 - tanh(x / softcap)**2) / temperature.
    Source: Megatron-LM, vocabulary-parallel cross-entropy (arXiv 1909.08053, section 3).

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> factors = np.array([[2.0, 3.0], [0.4, 0.1], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    >>> opgrad.cross_entropy_shard_grad(logits, np.array([3, 5]), factors, first=3)
    array([[-0.3297,  0.0907,  0.2466],
           [ 0.045 ,  0.9048, -0.955 ]], dtype=float32)
    """
    z = _scaled(logits, softcap, temperature)
    m, log_s, a, b, c, e = (each[:, np.newaxis] for each in factors)
    p = np.exp(z - m - log_s)
    own, place = _own(labels, first, logits.shape[1])
    onehot = own[:, np.newaxis] & (place[:, np.newaxis] == np.arange(logits.shape[1]))
    dz = p * (a + np.where(p == 0, 0, e * z)) + b * onehot + c * (1.0 if weight is None else weight)
    slope = (1 - np.tanh(logits / softcap) ** 2 if softcap else 1.0) / temperature
    silent = (a == 0) & (b == 0) & (c == 0) & (e == 0)
    return np.where(silent, 0, dz * slope)
