"""Cross-entropy with all its options for NumPy arrays: of logits, and of a linear layer whose logits are not stored."""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from opgrad.call.public import public
from opgrad.call.sample_reduction import (
    SampleReduction,
    checked_array,
    layer_gradients,
    moved_labels,
    precision_of,
    reduction_of,
)
from opgrad.contract.attributes import Array
from opgrad.ops import sample_loss
from opgrad.ops.reference.loss_options import (
    IGNORED,
    LossOptions,
    check_labels,
    check_layer,
    read_options,
)

sample_losses, sample_losses_and_grad = public(sample_loss.sample_losses), public(sample_loss.sample_losses_and_grad)


class CrossEntropyOutput(NamedTuple):
    """A loss and what else its pass over the logits gives.

    loss: of the samples' shape for reduction "none", else (); float32, or float64 for float64. z_loss: what
    lse_square_scale adds to it. lse, log_prob, entropy, predicted_tokens: of each sample; 0 and -1 for ignored ones.
    token_accuracy: the share of the samples that count whose largest logit is that of their label; 0 if there is none.
    """

    loss: Array
    z_loss: Array
    lse: Array
    log_prob: Array
    entropy: Array
    token_accuracy: Array
    predicted_tokens: Array


def cross_entropy(
    logits: Array, labels: Array, weight: Array | None = None, *, ignore_index: int | None = None,
    reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | None = None,
) -> CrossEntropyOutput:  # fmt: skip
    """Cross-entropy between softmax(logits) over axis 1 and labels or class probabilities.

    logits: shape (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16.
    labels: int32 or int64 classes in [0, C), of the samples' shape (N, D1, …, Dk); or probabilities, of the shape of
        logits, one of the four dtypes.
    weight: shape (C,), one of the four dtypes; a factor for each class; None: all 1.
    ignore_index: samples with this label have loss 0 and do not count; None: none.
    reduction: "none", "sum", or "mean": the sum divided by the sum of the samples' weights, for probabilities by
        their number; 0 if that is 0.
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    lse_square_scale: this times the square of each sample's log-sum-exp is added to its loss; for "mean", divided by
        the number of samples that count.
    softcap: logits are softcap * tanh(logits / softcap); None: as they are. temperature: they are divided by it then.
    shift: sample i is compared with the label `shift` places behind it on the last axis; the last ones do not count.
    num_items: what "mean" divides by; None: what counts.

    Returns a CrossEntropyOutput. Raises TypeError for a wrong dtype; ValueError for a wrong shape, option or label.

    Formula: loss_i = sum(weight * q_i * (lse_i - z_i)) + lse_square_scale * lse_i ** 2, where q is the target and z
    are the logits. Source: torch.nn.functional.cross_entropy.
    """
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    output, _ = _of_logits("cross_entropy", logits, labels, weight, shift, options)
    return output


def cross_entropy_and_grad(
    logits: Array, labels: Array, weight: Array | None = None, *, ignore_index: int | None = None,
    reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | None = None, dloss: Array | float = 1.0,
    dlse: Array | None = None, dlog_prob: Array | None = None, dentropy: Array | None = None,
) -> tuple[CrossEntropyOutput, Array]:  # fmt: skip
    """The results of cross_entropy and the gradient with respect to logits, in one pass over them.

    dloss: the gradient with respect to loss: a number, or for reduction "none" an array of the samples' shape.
    dlse, dlog_prob, dentropy: those with respect to these results, of the samples' shape; None: 0.
    The other arguments, and what is raised, are those of cross_entropy.

    Returns (output, dlogits), dlogits of the shape and dtype of logits. Formula and source: those of cross_entropy.
    """
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    upstream = {"dlse": dlse, "dlog_prob": dlog_prob, "dentropy": dentropy}
    output, dlogits = _of_logits("cross_entropy_and_grad", logits, labels, weight, shift, options, dloss, **upstream)
    return output, cast(Array, dlogits)


def linear_cross_entropy(
    x: Array, linear_weight: Array, labels: Array, linear_bias: Array | None = None, weight: Array | None = None,
    *, ignore_index: int | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None,
) -> CrossEntropyOutput:  # fmt: skip
    """Cross-entropy of the logits x @ linear_weight.T + linear_bias, of which some rows at a time are computed.

    x: shape (N, H). linear_weight: shape (C, H). linear_bias: shape (C,), or None. All of one of the four dtypes;
        products are computed by NumPy, in float32 for half precision.
    labels: shape (N,); int32 or int64. The other arguments are those of cross_entropy; ignored samples are left out.

    Returns a CrossEntropyOutput. Raises TypeError, ValueError.

    Formula: cross_entropy(x @ linear_weight.T + linear_bias, labels). Source:
    torch.nn.functional.linear_cross_entropy.
    """
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    return _of_layer("linear_cross_entropy", x, linear_weight, labels, linear_bias, weight, shift, options)[0]


def linear_cross_entropy_and_grad(
    x: Array, linear_weight: Array, labels: Array, linear_bias: Array | None = None, weight: Array | None = None,
    *, ignore_index: int | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None, dloss: Array | float = 1.0,
) -> tuple[CrossEntropyOutput, Array, Array, Array | None]:  # fmt: skip
    """The results of linear_cross_entropy, and the gradients with respect to x, linear_weight and linear_bias.

    dloss: the gradient with respect to loss: a number, or for reduction "none" an array of shape (N,).
    The other arguments, formula and source, and what is raised, are those of linear_cross_entropy.

    Returns (output, dx, dlinear_weight, dlinear_bias), gradients in the shapes and dtypes of what they are for, None
    without a bias; sums over chunks are formed in float32, or float64 for float64.
    """
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    name = "linear_cross_entropy_and_grad"
    output, grads = _of_layer(name, x, linear_weight, labels, linear_bias, weight, shift, options, dloss)
    return output, *grads


# --- how samples count ---------------------------------------------------------------------------------------------


def _read(name: str, shift: int, options: tuple[Any, ...]) -> LossOptions:
    """The options, with a label that is ignored where one is needed for what has no later label."""
    chosen = read_options(name, *options)
    return replace(chosen, ignore_index=IGNORED) if shift and chosen.ignore_index is None else chosen


def _output(reduction: SampleReduction, found: Any) -> CrossEntropyOutput:
    (loss, lse, log_prob, entropy, predicted), labels, options = found, reduction.labels, reduction.options
    z_loss = (options.lse_square_scale * lse * lse).astype(lse.dtype)
    if options.reduction != "none":
        loss = np.asarray(loss.sum(dtype=np.float64) * reduction.by_weight)
        z_loss = np.asarray(z_loss.sum(dtype=np.float64) * reduction.by_count)
    counts = np.ones(labels.shape, bool) if options.ignore_index is None else labels != options.ignore_index
    accuracy = np.asarray(np.float32((counts & (predicted == labels)).sum() / max(counts.sum(), 1)))
    total = np.asarray(loss + z_loss).astype(lse.dtype)
    return CrossEntropyOutput(total, z_loss.astype(lse.dtype), lse, log_prob, entropy, accuracy, predicted)


def _of_logits(
    name: str, logits: Any, labels: Any, weight: Array | None, shift: int, options: tuple[Any, ...],
    dloss: Array | float | None = None, **upstream: Any,
) -> tuple[CrossEntropyOutput, Array | None]:  # fmt: skip
    """The results, and the gradient with respect to logits if dloss is given."""
    logits, labels = checked_array(name, "logits", logits), checked_array(name, "labels", labels)
    chosen, is_dense = _read(name, shift, options), labels.dtype.kind not in "iu"
    if is_dense and (shift or chosen.ignore_index is not None):
        raise ValueError(f"{name}: labels are class probabilities, expected neither shift nor ignore_index")
    probabilities = labels if is_dense else None
    if is_dense:
        labels = np.zeros(logits.shape[:1] + logits.shape[2:], np.int64)
    labels = moved_labels(name, labels, shift, chosen.ignore_index, is_dense)
    if not is_dense and logits.ndim > 1:
        check_labels(name, "labels", labels, logits.shape[1], chosen.ignore_index)
    given: dict[str, Any] = {"labels": labels, "weight": weight, "probabilities": probabilities, **chosen.attributes}
    counted = None if is_dense else weight
    if dloss is None:
        found = sample_losses(logits, **given)
        return _output(reduction_of(labels, counted, chosen), found), None
    reduction = reduction_of(labels, counted, chosen)
    *results, dlogits = sample_losses_and_grad(logits, **given, **reduction.upstream(dloss), **upstream)
    return _output(reduction, results), dlogits


# --- a linear layer ------------------------------------------------------------------------------------------------


def _of_layer(
    name: str, x: Any, w: Any, labels: Any, b: Array | None, weight: Array | None, shift: int,
    options: tuple[Any, ...], dloss: Array | float | None = None,
) -> tuple[CrossEntropyOutput, tuple[Array, Array, Array | None]]:  # fmt: skip
    """The results, and the gradients, which are 0 unless dloss is given."""
    named = {"x": x, "linear_weight": w, "labels": labels}
    x, w, labels = (checked_array(name, argument, value) for argument, value in named.items())
    check_layer(name, labels, labels.dtype.kind in "iu", x, w, b, weight)
    chosen = _read(name, shift, options)
    labels = moved_labels(name, labels, shift, chosen.ignore_index)
    check_labels(name, "labels", labels, len(w), chosen.ignore_index)
    reduction = reduction_of(labels, weight, chosen)
    kept = np.arange(len(x)) if chosen.ignore_index is None else np.flatnonzero(labels != chosen.ignore_index)
    found = [np.zeros(len(x), precision_of(x)) for _ in range(4)] + [np.full(len(x), -1, np.int64)]
    upstream = {} if dloss is None else reduction.upstream(dloss)

    def compute(rows: Array, logits: Array) -> Array | None:
        given: dict[str, Any] = {"labels": labels[rows], "weight": weight, **chosen.attributes}
        dlogits, results = None, list[Array]()
        if dloss is None:
            results += sample_losses(logits, **given)
        else:
            given |= {each: values[rows] for each, values in upstream.items()}
            *results, dlogits = sample_losses_and_grad(logits, **given)
        for whole, values in zip(found, results, strict=True):
            whole[rows] = values
        return dlogits

    grads = layer_gradients(x, w, b, kept, compute)
    return _output(reduction, found), grads
