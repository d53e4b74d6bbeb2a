"""Losses of samples, and divergences of distillation, for NumPy arrays: logits, or linear layers in chunks of rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from opgrad.call.arrays import public
from opgrad.call.operators import softmax_divergence_and_grad
from opgrad.contract.attributes import Array
from opgrad.ops import cross_entropy as declared
from opgrad.ops.reference.loss_options import (
    IGNORED,
    LossOptions,
    check_labels,
    check_layer,
    check_share,
    divisors,
    in_int32,
    over,
    read_options,
    shifted,
)

CHUNK = 32 << 20  # bytes of logits that are computed at a time


class _SampleReduction(NamedTuple):
    """How the losses of samples are reduced.

    by_weight, by_count: what the sums of losses and of squares of lse are multiplied by.
    """

    labels: Array
    options: LossOptions
    by_weight: float
    by_count: float

    def upstream(self, dloss: Array | float) -> dict[str, Any]:
        """The gradients of the samples' losses and squares of lse."""
        given = np.broadcast_to(np.asarray(dloss, np.float64), self.labels.shape)
        found = {"dloss": given * self.by_weight}
        if self.options.lse_square_scale:
            found["dlse_square"] = given * (self.options.lse_square_scale * self.by_count)
        return {name: np.ascontiguousarray(each) for name, each in found.items()}

    def reduced(self, loss: Array) -> Array:
        """One number, or the samples' losses for reduction "none"."""
        if self.options.reduction == "none":
            return loss
        return np.asarray(loss.sum(dtype=np.float64) * self.by_weight).astype(loss.dtype)


def _reduction_of(labels: Array, weight: Array | None, options: LossOptions) -> _SampleReduction:
    """The reduction of samples with these labels. weight: None for class probabilities, whose samples count alike."""
    weight = None if weight is None else np.asarray(weight)
    both = divisors(np, labels, weight, options, np.float64, lambda array, dtype: np.asarray(array).astype(dtype))
    return _SampleReduction(labels, options, float(over(np, both[0])), float(over(np, both[1])))


def _checked_array(name: str, argument: str, value: Any) -> Array:
    """NumPy's array of an argument. Raises TypeError for another library's."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        library = type(value).__module__.partition(".")[0]
        where = {"torch": "opgrad.torch", "jax": "opgrad.jax", "jaxlib": "opgrad.jax"}.get(library, "numpy.asarray")
        raise TypeError(f"{name}: {argument} is a {type(value).__name__}, expected a NumPy array: use {where}")
    return np.asarray(value)


def _precision_of(x: Array) -> np.dtype[Any]:
    """The dtype in which a layer is computed."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def _logits_of(x: Array, w: Array, b: Array | None) -> Array:
    found: Array = x @ w.T
    return found if b is None else found + b


def _layer_gradients(
    x: Array, w: Array, b: Array | None, kept: Array, compute: Callable[[Array, Array], Array | None], layers: int = 1
) -> tuple[Array, Array, Array | None]:
    """The gradients of a linear layer, of which the logits of some rows at a time are computed.

    kept: the rows that count. compute: given rows and their logits, stores the rows' results and returns the gradient
    with respect to the logits, or None. layers: how many layers' logits there are at a time.
    """
    number, bias = _precision_of(x), None if b is None else np.asarray(b).astype(_precision_of(x))
    wide = w.astype(number, copy=False)
    dx, dw, db = np.zeros(x.shape, number), np.zeros(w.shape, number), np.zeros(len(w), number)
    count = max(CHUNK // max(layers * len(w) * number.itemsize, 1), 1)
    for start in range(0, len(kept), count):
        rows = kept[start : start + count]
        part = x[rows].astype(number)
        dlogits = compute(rows, _logits_of(part, wide, bias))
        if dlogits is not None:
            dx[rows] = dlogits @ wide
            dw += dlogits.T @ part
            db += dlogits.sum(0)
    dx, dw, db = (each.astype(x.dtype, copy=False) for each in (dx, dw, db))
    return dx, dw, None if b is None else db


sample_losses, sample_losses_and_grad = public(declared.sample_losses), public(declared.sample_losses_and_grad)


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


def _read(
    name: str, labels: Array, shift: int, options: tuple[Any, ...], classes: int | None = None
) -> tuple[LossOptions, Array]:
    """The options, and the labels moved by `shift`, in a dtype that ignore_index fits.

    classes: how many there are, if the labels are checked.
    """
    chosen = read_options(name, *options)
    if shift and chosen.ignore_index is None:  # a label is needed for what has no later label
        chosen = replace(chosen, ignore_index=IGNORED)
    wide = labels if in_int32(chosen.ignore_index) else labels.astype(np.int64)
    moved: Array = shifted(np, name, wide, shift, chosen.ignore_index, False)
    if classes is not None:
        check_labels(name, "labels", moved, classes, chosen.ignore_index)
    return chosen, moved


def _output(reduction: _SampleReduction, found: Any) -> CrossEntropyOutput:
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
    logits, labels = _checked_array(name, "logits", logits), _checked_array(name, "labels", labels)
    is_dense, probabilities = labels.dtype.kind not in "iu", None
    if is_dense:
        _, ignore_index, *_ = options
        if shift or ignore_index is not None:
            raise ValueError(f"{name}: labels are class probabilities, expected neither shift nor ignore_index")
        labels, probabilities = np.zeros(logits.shape[:1] + logits.shape[2:], np.int64), labels
    classes = None if is_dense or logits.ndim < 2 else logits.shape[1]
    chosen, labels = _read(name, labels, shift, options, classes)
    given: dict[str, Any] = {"labels": labels, "weight": weight, "probabilities": probabilities, **chosen.attributes}
    counted = None if is_dense else weight
    if dloss is None:
        found = sample_losses(logits, **given)
        return _output(_reduction_of(labels, counted, chosen), found), None
    reduction = _reduction_of(labels, counted, chosen)
    *results, dlogits = sample_losses_and_grad(logits, **given, **reduction.upstream(dloss), **upstream)
    return _output(reduction, results), dlogits


# --- a linear layer ------------------------------------------------------------------------------------------------


def _of_layer(
    name: str, x: Any, w: Any, labels: Any, b: Array | None, weight: Array | None, shift: int,
    options: tuple[Any, ...], dloss: Array | float | None = None,
) -> tuple[CrossEntropyOutput, tuple[Array, Array, Array | None]]:  # fmt: skip
    """The results, and the gradients, which are 0 unless dloss is given."""
    named = {"x": x, "linear_weight": w, "labels": labels}
    x, w, labels = (_checked_array(name, argument, value) for argument, value in named.items())
    check_layer(name, labels, labels.dtype.kind in "iu", x, w, b, weight)
    chosen, labels = _read(name, labels, shift, options, len(w))
    reduction = _reduction_of(labels, weight, chosen)
    kept = np.arange(len(x)) if chosen.ignore_index is None else np.flatnonzero(labels != chosen.ignore_index)
    found = [np.zeros(len(x), _precision_of(x)) for _ in range(4)] + [np.full(len(x), -1, np.int64)]
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

    grads = _layer_gradients(x, w, b, kept, compute)
    return _output(reduction, found), grads


def linear_kl_div(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None,
) -> Array:  # fmt: skip
    """KL(teacher || student) of the softmax of two linear layers: linear_jsd with beta=0, which has the arguments.

    Formula: sum(p * log(p / q)), p and q the softmax of the teacher's and the student's logits / temperature.
    Source: torch.nn.functional.kl_div.
    """
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    options = reduction, ignore_index, temperature, num_items
    return _of_layers("linear_kl_div", *layers, labels, 0.0, shift, options)[0]


def linear_kl_div_and_grad(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None, dloss: Array | float = 1.0,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """linear_kl_div with its gradients: linear_jsd_and_grad with beta=0. Formula and source: linear_kl_div."""
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    options = reduction, ignore_index, temperature, num_items
    return _of_layers("linear_kl_div_and_grad", *layers, labels, 0.0, shift, options, dloss)


def linear_jsd(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    beta: float = 0.5, reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None,
) -> Array:  # fmt: skip
    """Generalized Jensen-Shannon divergence of two linear layers' softmax, some rows of which are computed at once.

    student_input: shape (N, H); student_weight: shape (C, H); student_bias: shape (C,), or None; of one of the four
        dtypes. Products are computed by NumPy, in float32 for half precision.
    teacher_input: shape (N, K); teacher_weight: shape (C, K); teacher_bias: shape (C,), or None; likewise.
    labels: shape (N,), int32 or int64: rows with the label ignore_index do not count; other labels are not looked at.
        None: all rows count.
    beta: in [0, 1], the teacher's share of the mixture; 0 stands for KL(teacher || student), 1 for KL(student ||
        teacher).
    reduction: "none", "sum", or "mean" over the rows that count, 0 if none does. num_items: what "mean" divides by.
    temperature: above 0; divides all logits. shift: row i belongs to the label `shift` places behind it.

    Returns the divergence, () or (N,) for reduction "none"; float32, or float64 for float64. Raises TypeError,
    ValueError.

    Formula: with p and q the softmax of the teacher's and the student's logits / temperature, and
    m = beta * p + (1 - beta) * q: sum(beta * p * log(p / m) + (1 - beta) * q * log(q / m)).
    Source: Agarwal et al., "On-Policy Distillation of Language Models", 2024.
    """
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    return _of_layers("linear_jsd", *layers, labels, beta, shift, (reduction, ignore_index, temperature, num_items))[0]


def linear_jsd_and_grad(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    beta: float = 0.5, reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | None = None, dloss: Array | float = 1.0,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """linear_jsd, and its gradients with respect to student_input, student_weight and student_bias.

    dloss: the gradient with respect to the divergence: a number, or for reduction "none" an array of shape (N,).
    The other arguments, formula and source, and what is raised, are those of linear_jsd.

    Returns (divergence, dstudent_input, dstudent_weight, dstudent_bias), gradients in the shapes and dtypes of what
    they are for, None without a bias; sums over chunks are formed in float32, or float64 for float64.
    """
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    options = reduction, ignore_index, temperature, num_items
    return _of_layers("linear_jsd_and_grad", *layers, labels, beta, shift, options, dloss)


def _of_layers(
    name: str, student: Any, teacher: Any, labels: Any, beta: float, shift: int, options: tuple[Any, ...],
    dloss: Array | float | None = None,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """The divergence, and the gradients, which are 0 unless dloss is given."""
    beta = check_share(name, "beta", beta)
    (x, w, b), (y, v, c) = (_layer(name, which, each) for which, each in (("student", student), ("teacher", teacher)))
    if len(y) != len(x) or len(v) != len(w):
        what = f"teacher_input has {len(y)} rows and teacher_weight {len(v)} classes"
        raise ValueError(f"{name}: {what}, expected {len(x)} and {len(w)}, those of the student")
    chosen_labels = np.zeros(len(x), np.int64) if labels is None else _checked_array(name, "labels", labels)
    if chosen_labels.shape != (len(x),) or chosen_labels.dtype.kind not in "iu":
        what = f"labels has shape {chosen_labels.shape} and dtype {chosen_labels.dtype.name}"
        raise ValueError(f"{name}: {what}, expected {(len(x),)} and integers")
    reduction_name, ignored, temperature, num_items = options
    ignored = ignored if shift or labels is not None else None
    given = reduction_name, ignored, 0.0, 0.0, None, temperature, num_items
    chosen, chosen_labels = _read(name, chosen_labels, shift, given)
    reduction = _reduction_of(chosen_labels, None, chosen)
    number = _precision_of(x)
    losses, slopes = np.zeros(len(x), number), reduction.upstream(1.0 if dloss is None else dloss)["dloss"]
    kept = np.arange(len(x)) if ignored is None else np.flatnonzero(chosen_labels != ignored)
    v, c = v.astype(number), None if c is None else c.astype(number)

    def compute(rows: Array, logits: Array) -> Array | None:
        others = _logits_of(y[rows].astype(number), v, c)
        losses[rows], dlogits = softmax_divergence_and_grad(logits, others, slopes[rows], beta, temperature)
        return None if dloss is None else dlogits

    grads = _layer_gradients(x, w, b, kept, compute, layers=2)
    return reduction.reduced(losses), *grads


def _layer(name: str, which: str, given: Any) -> tuple[Array, Array, Array | None]:
    """A layer's arrays. Raises TypeError or ValueError unless they fit together."""
    x, w, b = given
    x, w = _checked_array(name, f"{which}_input", x), _checked_array(name, f"{which}_weight", w)
    b = None if b is None else _checked_array(name, f"{which}_bias", b)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        shapes = f"{which}_input has shape {x.shape} and {which}_weight {w.shape}"
        raise ValueError(f"{name}: {shapes}, expected (N, H) and (C, H)")
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"{name}: {which}_bias has shape {b.shape}, expected {w.shape[:1]}")
    if w.dtype != x.dtype:
        kinds = f"{which}_weight has dtype {w.dtype.name}"
        raise TypeError(f"{name}: {kinds}, expected {x.dtype.name}, the dtype of {which}_input")
    return x, w, b
