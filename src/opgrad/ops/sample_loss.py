"""Cross-entropy with all its options, sample by sample: what losses are made of.

z = softcap * tanh(logits / softcap) / temperature, without softcap logits / temperature; p is its softmax, and q the
target distribution: (1 - label_smoothing) times one-hot labels or probabilities, plus label_smoothing / C.
"""

from typing import Annotated

import numpy as np

from opgrad.contract import IN_LOSSES, like, operator, reference, shaped_like
from opgrad.contract.attributes import FINITE, Array, number_that
from opgrad.ops.cross_entropy import Labels, Logits, Weight

Share = Annotated[float, number_that(FINITE, (lambda value: 0 <= value <= 1, "a number from 0 to 1"))]
Positive = Annotated[float, number_that(FINITE, (lambda value: value > 0, "a number above 0"))]
AtLeastZero = Annotated[float, number_that(FINITE, (lambda value: value >= 0, "a number of at least 0"))]
Probabilities = Annotated[Array, shaped_like("logits")]
OfSample = Annotated[Array, shaped_like("labels", role="sample")]

WIDE = shaped_like("labels", ("float32", "float64"), role="sample", dtype_of="logits")
CLASS = shaped_like("labels", ("int64",), role="sample")
SAMPLES = {"loss": WIDE, "lse": WIDE, "log_prob": WIDE, "entropy": WIDE, "predicted": CLASS}


def _scaled(logits: Array, softcap: float, temperature: float) -> tuple[Array, Array]:
    """z, and its slope."""
    if not softcap:
        return logits / temperature, np.full(logits.shape, 1 / temperature)
    bent = np.tanh(logits / softcap)
    return softcap * bent / temperature, (1 - bent**2) / temperature


def _targets(
    logits: Array, labels: Array, weight: Array | None, probabilities: Array | None, smoothing: float
) -> tuple[Array, Array]:
    """One-hot labels, and weight * q."""
    classes = np.arange(logits.shape[1]).reshape(1, -1, *[1] * (labels.ndim - 1))
    onehot = np.expand_dims(labels, 1) == classes
    q = (1 - smoothing) * (onehot if probabilities is None else probabilities) + smoothing / max(logits.shape[1], 1)
    return onehot, q if weight is None else q * weight.reshape(classes.shape)


@operator(
    "loss = sum(weight * q * (lse - z)), lse, log_prob[label], entropy, argmax of each sample",
    kind="classes",
    support=IN_LOSSES,
    results=SAMPLES,
)
def sample_losses(
    logits: Logits, labels: Labels, weight: Weight | None = None, probabilities: Probabilities | None = None,
    *, ignore_index: int | None = None, label_smoothing: Share = 0.0, softcap: AtLeastZero = 0.0,
    temperature: Positive = 1.0, check: bool = False, out: tuple[Array, Array, Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    """What each sample's row of logits gives: its loss, log-sum-exp, log-probability, entropy and largest class.

    logits: shape (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16.
    labels: shape (N,) or (N, D1, …, Dk); int32 or int64 classes in [0, C).
    weight: shape (C,), one of the four dtypes; a factor for each class's term of the loss; None: all 1.
    probabilities: of the shape of logits; what the loss takes in place of one-hot labels; None: these.
    ignore_index: of samples with this label all results are 0, predicted is -1; None: none.
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    softcap: at least 0; bounds logits to (-softcap, softcap); 0: none. temperature: above 0; divides them then.
    check: on CUDA, wait for the device and raise for labels out of range instead of giving NaN; the CPU always
        checks.
    out: a tuple of arrays for the results.

    Returns (loss, lse, log_prob, entropy, predicted), each of the shape of labels; float32, or float64 for float64,
    predicted int64. predicted is the first NaN of the logits or the first of the largest. Raises TypeError for a wrong
    dtype; ValueError for a wrong shape or option, or a label outside [0, C) that is not ignored, before anything is
    written.

    Formula: lse = log(sum(exp(z))), log_prob = z[label] - lse, entropy = lse - sum(p * z),
    loss = sum(weight * q * (lse - z)), where terms with weight * q = 0 count 0.
    """
    z, _ = _scaled(logits, softcap, temperature)
    onehot, target = _targets(logits, labels, weight, probabilities, label_smoothing)
    m = np.max(z, 1, initial=-np.inf)
    lse = m + np.log(np.exp(z - np.expand_dims(m, 1)).sum(1))
    below = np.expand_dims(lse, 1) - z
    p = np.exp(-below)
    loss = np.where(target == 0, 0, target * below).sum(1) + 0 * lse
    entropy = np.where(p == 0, 0, p * below).sum(1) + 0 * lse
    log_prob = -np.where(onehot, below, 0).sum(1)
    predicted = np.argmax(logits, 1) if logits.shape[1] else np.full(labels.shape, -1)
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    kept = [np.where(ignored, 0, each) for each in (loss, lse, log_prob, entropy)]
    return kept[0], kept[1], kept[2], kept[3], np.where(ignored, -1, predicted)


@operator(
    "the same, and dlogits for gradients of loss, lse, lse**2, log_prob and entropy",
    forward="sample_losses",
    kind="classes",
    support=IN_LOSSES,
    results={**SAMPLES, "dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
)
def sample_losses_and_grad(
    logits: Logits, labels: Labels, weight: Weight | None = None, probabilities: Probabilities | None = None,
    dloss: OfSample | None = None, dlse: OfSample | None = None, dlse_square: OfSample | None = None,
    dlog_prob: OfSample | None = None, dentropy: OfSample | None = None,
    *, ignore_index: int | None = None, label_smoothing: Share = 0.0, softcap: AtLeastZero = 0.0,
    temperature: Positive = 1.0, check: bool = False,
    out: tuple[Array, Array, Array, Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array, Array, Array, Array]:  # fmt: skip
    """The results of sample_losses, and the gradient with respect to logits, in one pass over them.

    The arguments are those of sample_losses, and gradients of the shape of labels, of any of the four dtypes:
    dloss: with respect to loss; None: all 1.
    dlse, dlse_square: with respect to lse, and to its square, of which the z-loss is made; None: 0.
    dlog_prob, dentropy: with respect to log_prob and entropy; None: 0.
    out: a tuple of arrays for the results; the last may be logits.

    Returns (loss, lse, log_prob, entropy, predicted, dlogits), dlogits of the shape and dtype of logits, exactly 0
    for ignored samples. Raises what sample_losses raises.

    Formula: dz = p * (dloss * sum(weight * q) + dlse + 2 * lse * dlse_square - dlog_prob + dentropy * (lse - entropy
    - z)) - dloss * weight * q + dlog_prob * onehot(label), dlogits = dz times the slope of z.
    """
    options = {"label_smoothing": label_smoothing, "softcap": softcap, "temperature": temperature}
    results = reference("sample_losses")(logits, labels, weight, probabilities, ignore_index=ignore_index, **options)
    upstream = (np.ones(labels.shape) if dloss is None else dloss, dlse, dlse_square, dlog_prob, dentropy)
    by_loss, by_lse, by_square, by_log_prob, by_entropy = [
        np.expand_dims(np.zeros(labels.shape) if each is None else each, 1) for each in upstream
    ]
    z, slope = _scaled(logits, softcap, temperature)
    onehot, target = _targets(logits, labels, weight, probabilities, label_smoothing)
    ignored = np.expand_dims(np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index, 1)
    lse, entropy = np.expand_dims(results[1], 1), np.expand_dims(results[3], 1)
    p = np.exp(z - lse)
    constant = by_loss * target.sum(1, keepdims=True) + by_lse + 2 * lse * by_square - by_log_prob
    curved = np.where(p == 0, 0, p * by_entropy * (lse - entropy - z))
    dz = p * constant + curved - by_loss * target + by_log_prob * onehot
    return *results, np.where(ignored, 0, dz * slope)
