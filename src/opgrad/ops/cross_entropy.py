"""Softmax cross-entropy from integer labels: plain, with all options sample by sample, and of a shard of the classes.

z = softcap * tanh(logits / softcap) / temperature, without softcap logits / temperature; p is its softmax, and q the
target distribution: (1 - label_smoothing) times one-hot labels or probabilities, plus label_smoothing / C.
"""

from typing import Annotated, Any

import numpy as np

from opgrad.contract import (
    IN_LOSSES,
    ON_SHARDS,
    FloatDtypes,
    OnnxName,
    Reduction,
    Tensor,
    divisor,
    finite,
    like,
    operator,
    shaped_like,
)
from opgrad.contract.attributes import FINITE, FLOATS, INTEGERS, Array, Attributes, Shape, Shapes, number_that
from opgrad.ops.softmax import log_softmax


def logits_of(shapes: Shapes) -> Shape:
    """The shape of the logits, or of their log-probabilities."""
    return shapes["logits" if "logits" in shapes else "log_prob"]


def _samples(shapes: Shapes, _: Attributes) -> Shape:
    logits = logits_of(shapes)
    return logits[:1] + logits[2:]


def _loss_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["labels"] if attributes["reduction"] == "none" else ()


def _loss_grad_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    if attributes["reduction"] == "none":
        return _samples(shapes, attributes)
    return (1,) if shapes["dy"] == (1,) else ()


Logits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 65))]
Labels = Annotated[Array, Tensor(INTEGERS, _samples, "that of the logits without axis 1", role="sample")]
Weight = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: logits_of(shapes)[1:2], "the number of classes", role="alone")
]
LossGrad = Annotated[Array, Tensor(FLOATS, _loss_grad_shape, "what the reduction gives", role="sample")]
Bias = Annotated[Array, shaped_like("log_prob")]

LOSS = Tensor(FLOATS, _loss_shape, "what the reduction gives", dtype_of="logits", role="sample")

WITH_INDEX = {"reduction": "mean", "ignore_index": -1}


def _ignored(labels: Array, ignore_index: int | None) -> Array:
    return np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index


def _class_weights(
    labels: Array, weight: Array | None, ignore_index: int | None, classes: int
) -> tuple[Array, Array, Array]:
    """Per sample: whether it is ignored, and the class to read and the weight, which are 0 where it is."""
    ignored = _ignored(labels, ignore_index)
    picked = np.where(ignored, 0, labels)
    by_class = np.ones(max(classes, 1)) if weight is None else weight.astype(np.float64)
    return ignored, picked, np.where(ignored, 0.0, by_class[picked] if classes else 0.0)


def reduced(loss: Array, weights: Array, reduction: str) -> Any:
    if reduction == "none":
        return loss
    total = weights.sum() if reduction == "mean" else 1.0
    return loss.sum() / total if total != 0 else np.zeros(())


@operator(
    kind="classes",
    results={"loss": LOSS, "log_prob": like("logits")},
    in_place={"log_prob": ("logits",)},
    onnx=OnnxName(
        "SoftmaxCrossEntropyLossInternal",
        ("logits", "labels", "weight?", "ignore_index?"),
        ("loss", "log_prob"),
        {"reduction": "mean", "output_type": None},
    ),
)
def softmax_cross_entropy_loss(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Cross-entropy between softmax(logits) over axis 1 and integer labels.

    logits: shape (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16.
    labels: shape (N,) or (N, D1, …, Dk); int32 or int64 classes in [0, C).
    weight: shape (C,), one of the four dtypes; a factor for the samples of each class; None: all 1.
    ignore_index: samples with this label have loss 0 and do not count; None: none.
    reduction: "none" (a loss for each sample), "sum", or "mean" (sum divided by the sum of the samples' weights;
        0 if that is 0).
    out_dtype: the dtype of both results, or a tuple with one for each; None: that of logits.

    Returns (loss, log_prob): loss of shape labels.shape or (), log_prob = log_softmax(logits, 1).

    Formula: loss_i = -weight[label_i] * log_prob[i, label_i]; log_prob = log_softmax(logits, 1). Source: ONNX
    SoftmaxCrossEntropyLoss-13, com.microsoft SoftmaxCrossEntropyLossInternal.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.softmax_cross_entropy_loss(logits, labels)
    (array(1.7513, dtype=float32), array([[-0.4076, -2.4076, -1.4076],
           [-3.0949, -0.0949, -3.0949]], dtype=float32))
    """
    log_prob = log_softmax(logits, 1)
    ignored, picked, weights = _class_weights(labels, weight, ignore_index, logits.shape[1])
    if not logits.shape[1]:
        return reduced(np.zeros(labels.shape), weights, reduction), log_prob
    nll = -np.take_along_axis(log_prob, np.expand_dims(picked, 1), 1)[:, 0]
    return reduced(np.where(ignored, 0, nll * weights), weights, reduction), log_prob


@operator(kind="classes", results={"loss": LOSS})
def softmax_cross_entropy_loss_only(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: Array | None = None,
) -> Array:  # fmt: skip
    """The loss alone, for evaluation: the logits are read from memory once, and nothing of their size is written.

    The arguments are those of softmax_cross_entropy_loss.
    out_dtype: the dtype of the loss; None: that of logits.
    out: where to write the loss.

    Returns loss, of shape labels.shape for reduction "none", else ().

    Formula: loss_i = -weight[label_i] * log_softmax(logits, 1)[i, label_i]. Source: ONNX
    SoftmaxCrossEntropyLoss-13 without its second output.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> opgrad.softmax_cross_entropy_loss_only(logits, labels, reduction="none")
    array([0.4076, 3.0949], dtype=float32)
    """
    return softmax_cross_entropy_loss(logits, labels, weight, ignore_index=ignore_index, reduction=reduction)[0]


@operator(
    forward="softmax_cross_entropy_loss",
    kind="classes",
    results={"dlogits": like("log_prob")},
    in_place={"dlogits": ("log_prob", "bias")},
    onnx=(
        OnnxName("SoftmaxCrossEntropyLossGrad", ("dy", "log_prob", "labels", "weight?"), ("dlogits",), WITH_INDEX),
        OnnxName(
            "SoftmaxCrossEntropyLossInternalGrad",
            ("dy", "log_prob", "labels", "weight?", "ignore_index?", "bias?"),
            ("dlogits",),
            {"reduction": "mean", "output_type": None},
            types={"bias": "B"},
        ),
    ),
)
def softmax_cross_entropy_loss_grad(
    dy: LossGrad, log_prob: Logits, labels: Labels, weight: Weight | None = None, bias: Bias | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of softmax_cross_entropy_loss with respect to logits.

    dy: gradient with respect to loss: shape labels.shape for reduction "none", else () or (1,).
    log_prob: the second result of the forward function, shape (N, C, D1, …, Dk). It is not normalised again.
    labels, weight, ignore_index, reduction: as given to the forward function.
    bias: added to the result, in the shape of log_prob; None: nothing.
    out_dtype: the dtype of the result; None: that of log_prob.

    Returns dlogits, of the shape of log_prob; exactly 0 (+ bias) for ignored samples and where the mean's divisor is 0.

    Formula: dlogits[i, k] = weight[label_i] * dy_i * (exp(log_prob[i, k]) - [k == label_i]) / W, where W is
    the sum of the samples' weights for "mean", else 1. Source: com.microsoft SoftmaxCrossEntropyLossGrad,
    SoftmaxCrossEntropyLossInternalGrad.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, 2])
    >>> _, log_prob = opgrad.softmax_cross_entropy_loss(logits, labels)
    >>> opgrad.softmax_cross_entropy_loss_grad(np.float32(1.0), log_prob, labels)
    array([[-0.1674,  0.045 ,  0.1224],
           [ 0.0226,  0.4547, -0.4774]], dtype=float32)
    """
    classes = log_prob.shape[1]
    ignored, picked, weights = _class_weights(labels, weight, ignore_index, classes)
    total = weights.sum() if reduction == "mean" else 1.0
    upstream = dy if reduction == "none" else dy.reshape(())
    factor = np.expand_dims(np.zeros(weights.shape) if total == 0 else weights * upstream / total, 1)
    onehot = np.expand_dims(picked, 1) == np.arange(classes).reshape(1, -1, *[1] * (labels.ndim - 1))
    dlogits = np.where(np.expand_dims(ignored, 1) | (total == 0), 0, factor * (np.exp(log_prob) - onehot))
    return dlogits if bias is None else dlogits + bias


@operator(
    forward="softmax_cross_entropy_loss",
    kind="classes",
    results={"loss": LOSS, "dlogits": like("logits")},
    in_place={"dlogits": ("logits",)},
    onnx=OnnxName("SoftmaxCrossEntropyLossAndGrad", attributes=WITH_INDEX),
)
def softmax_cross_entropy_loss_and_grad(
    logits: Logits, labels: Labels, weight: Weight | None = None,
    *, ignore_index: int | None = None, reduction: Reduction = "mean", out_dtype: FloatDtypes = None,
    check: bool = False, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The loss and its gradient for dy = 1, in one pass over the logits.

    The arguments are those of softmax_cross_entropy_loss. The logits are read from memory once, the gradient
    is written once, and nothing else of their size is allocated.
    out_dtype: as there; ("float32", "bfloat16") stores the loss in float32, the gradient in bfloat16.

    Returns (loss, dlogits), dlogits of the shape of logits, for reduction "none" the gradient of the sum of the losses.

    Formula: dlogits[i, k] = weight[label_i] * (softmax(logits)[i, k] - [k == label_i]) / W, where W is the
    sum of the samples' weights for "mean", else 1. Source: ONNX
    SoftmaxCrossEntropyLoss; in graphs SoftmaxCrossEntropyLossAndGrad, a name of opgrad's own in com.microsoft.

    Example:
    >>> logits = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32)
    >>> labels = np.array([0, -1])
    >>> opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, ignore_index=-1)
    (array(0.4076, dtype=float32), array([[-0.3348,  0.09  ,  0.2447],
           [ 0.    ,  0.    ,  0.    ]], dtype=float32))
    """
    options: Attributes = {"ignore_index": ignore_index, "reduction": reduction}
    loss, log_prob = softmax_cross_entropy_loss(logits, labels, weight, **options)
    return loss, softmax_cross_entropy_loss_grad(np.ones(loss.shape), log_prob, labels, weight, **options)


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

    Returns (loss, lse, log_prob, entropy, predicted), each of the shape of labels; float32, or float64 for float64,
    predicted int64. predicted is the first NaN of the logits or the first of the largest.

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
    ignored = _ignored(labels, ignore_index)
    kept = [np.where(ignored, 0, result) for result in (loss, lse, log_prob, entropy)]
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

    Returns (loss, lse, log_prob, entropy, predicted, dlogits), dlogits of the shape and dtype of logits, exactly 0 for
    ignored samples.

    Formula: dz = p * (dloss * sum(weight * q) + dlse + 2 * lse * dlse_square - dlog_prob + dentropy * (lse - entropy
    - z)) - dloss * weight * q + dlog_prob * onehot(label), dlogits = dz times the slope of z.
    """
    options: Attributes = {"label_smoothing": label_smoothing, "softcap": softcap, "temperature": temperature}
    results = sample_losses(logits, labels, weight, probabilities, ignore_index=ignore_index, **options)
    upstream = (np.ones(labels.shape) if dloss is None else dloss, dlse, dlse_square, dlog_prob, dentropy)
    by_loss, by_lse, by_square, by_log_prob, by_entropy = [
        np.expand_dims(np.zeros(labels.shape) if each is None else each, 1) for each in upstream
    ]
    z, slope = _scaled(logits, softcap, temperature)
    onehot, target = _targets(logits, labels, weight, probabilities, label_smoothing)
    ignored = np.expand_dims(_ignored(labels, ignore_index), 1)
    lse, entropy = np.expand_dims(results[1], 1), np.expand_dims(results[3], 1)
    p = np.exp(z - lse)
    constant = by_loss * target.sum(1, keepdims=True) + by_lse + 2 * lse * by_square - by_log_prob
    curved = np.where(p == 0, 0, p * by_entropy * (lse - entropy - z))
    dz = p * constant + curved - by_loss * target + by_log_prob * onehot
    return *results, np.where(ignored, 0, dz * slope)


STATISTICS, MOMENT = 4, 5  # rows of the statistics; with the first moment
FACTORS = 6  # of a row of the gradient


def _statistics_shape(shapes: Shapes, attributes: Attributes) -> Shape:
    return MOMENT if attributes["moment"] else STATISTICS, shapes["logits"][0]


ShardLogits = Annotated[Array, Tensor(FLOATS, ranks=range(2, 3))]
ShardLabels = Annotated[Array, Tensor(INTEGERS, lambda shapes, _: shapes["logits"][:1], "the number of rows of logits")]
ShardWeight = Annotated[
    Array, Tensor(FLOATS, lambda shapes, _: shapes["logits"][1:], "the number of classes of the shard")
]
Factors = Annotated[
    Array,
    Tensor(
        ("float32", "float64"), lambda shapes, _: (FACTORS, shapes["logits"][0]), "six factors for each row of logits"
    ),
]
Softcap = Annotated[float, finite]
Temperature = Annotated[float, divisor]


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
    logits: ShardLogits, labels: ShardLabels, weight: ShardWeight | None = None, first: int = 0,
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

    Returns statistics of shape (4, N) or (5, N), float64 for float64 logits, else float32: the largest logit (-inf
    without classes), the sum of exp(z - largest) (0 where all are -inf), the logit of the label (0 if that is no class
    of the shard), the sum of weight * z and, with moment, the sum of exp(z - largest) * z.

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
    z, _ = _scaled(logits, softcap, temperature)
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
    logits: ShardLogits, labels: ShardLabels, factors: Factors, weight: ShardWeight | None = None, first: int = 0,
    softcap: Softcap = 0.0, temperature: Temperature = 1.0, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of a loss that is made of log-sum-exps, labels' logits and sums of logits over all shards, for one.

    logits, labels, weight, first, softcap, temperature: as given to cross_entropy_shard.
    factors: shape (6, N), float32 or float64: for each row the largest logit m of all shards, log_s, the logarithm of
        the sum of exp(z - m) over all shards, and the loss's gradients with respect to the log-sum-exp (a), the logit
        of the label (b), the sum of weight * z (c) and the mean of z (e); to a belongs e * (1 - mean).

    Returns dlogits, of the shape and dtype of logits; exactly 0 where a, b, c and e are 0, whatever the logits are.

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
    z, slope = _scaled(logits, softcap, temperature)
    m, log_s, a, b, c, e = (each[:, np.newaxis] for each in factors)
    p = np.exp(z - m - log_s)
    own, place = _own(labels, first, logits.shape[1])
    onehot = own[:, np.newaxis] & (place[:, np.newaxis] == np.arange(logits.shape[1]))
    dz = p * (a + np.where(p == 0, 0, e * z)) + b * onehot + c * (1.0 if weight is None else weight)
    silent = (a == 0) & (b == 0) & (c == 0) & (e == 0)
    return np.where(silent, 0, dz * slope)
