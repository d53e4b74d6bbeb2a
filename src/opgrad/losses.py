"""Cross-entropy with all its options for NumPy arrays: of logits, and of a linear layer whose logits are not stored."""

from typing import Any, NamedTuple

import numpy as np

from opgrad.contract import REDUCTIONS
from opgrad.contract.dtypes import Array
from opgrad.ops.sample_loss import sample_losses, sample_losses_and_grad

CHUNK = 32 << 20  # bytes of logits that are computed at a time


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
    call = _Call(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    logits, labels = _array("cross_entropy", "logits", logits), _array("cross_entropy", "labels", labels)
    labels, probabilities, call = call.targets(logits, labels, shift)
    found = sample_losses(logits, labels, weight, probabilities, **call.attributes)
    return call.output(found, labels, weight, probabilities is not None)


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
    call = _Call(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    name = "cross_entropy_and_grad"
    logits, labels = _array(name, "logits", logits), _array(name, "labels", labels)
    labels, probabilities, call = call.targets(logits, labels, shift)
    upstream = call.upstream(labels, weight, probabilities is not None, dloss)
    upstream |= {"dlse": dlse, "dlog_prob": dlog_prob, "dentropy": dentropy}
    *found, dlogits = sample_losses_and_grad(logits, labels, weight, probabilities, **upstream, **call.attributes)
    return call.output(found, labels, weight, probabilities is not None), dlogits


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
    call = _Call(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    found, labels, _ = _over_chunks("linear_cross_entropy", x, linear_weight, labels, linear_bias, weight, call, shift)
    return call.ignoring(shift).output(found, labels, weight, False)


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
    call = _Call(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items)
    name = "linear_cross_entropy_and_grad"
    found, labels, grads = _over_chunks(name, x, linear_weight, labels, linear_bias, weight, call, shift, dloss)
    return call.ignoring(shift).output(found, labels, weight, False), *grads


# --- how samples count ---------------------------------------------------------------------------------------------


class _Call:
    """The options of a call."""

    def __init__(
        self, ignore_index: int | None, reduction: str, label_smoothing: float, lse_square_scale: float,
        softcap: float | None, temperature: float, num_items: float | None,
    ):  # fmt: skip
        if reduction not in REDUCTIONS:
            raise ValueError(f"cross_entropy: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
        if num_items is not None and (reduction != "mean" or not 0 < float(num_items) < float("inf")):
            what = f"{num_items} with reduction {reduction!r}"
            raise ValueError(f"cross_entropy: num_items is {what}, expected a number above 0 with 'mean'")
        if softcap is not None and not 0 < softcap < float("inf"):
            raise ValueError(f"cross_entropy: softcap is {softcap}, expected a finite number above 0")
        if not abs(float(lse_square_scale)) < float("inf"):
            raise ValueError(f"cross_entropy: lse_square_scale is {lse_square_scale}, expected a finite number")
        self.ignore_index, self.reduction, self.square, self.num_items = (
            ignore_index, reduction, float(lse_square_scale), num_items,
        )  # fmt: skip
        self.bent: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "softcap": softcap or 0.0,
            "temperature": temperature,
        }

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the operators."""
        return {"ignore_index": self.ignore_index, **self.bent}

    def ignoring(self, shift: int) -> "_Call":
        """The same, with a label that is ignored where one is needed for what has no later label."""
        if shift and self.ignore_index is None:
            self.ignore_index = -100
        return self

    def targets(self, logits: Array, labels: Array, shift: int) -> tuple[Array, Array | None, "_Call"]:
        """Labels, and probabilities if they take their place."""
        if labels.dtype.kind in "iu":
            moved = self.shifted(labels, shift)
            if logits.ndim > 1:
                _check_labels("cross_entropy", moved, logits.shape[1], self.ignore_index)
            return moved, None, self.ignoring(shift)
        if shift or self.ignore_index is not None:
            raise ValueError("cross_entropy: labels are class probabilities, expected neither shift nor ignore_index")
        return np.zeros(logits.shape[:1] + logits.shape[2:], np.int64), labels, self

    def shifted(self, labels: Array, shift: int) -> Array:
        if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0 or (shift and not labels.ndim):
            raise ValueError(f"cross_entropy: shift is {shift!r}, expected an int of at least 0, and samples")
        if not shift:
            return labels
        moved = np.full_like(labels, self.ignoring(shift).ignore_index)
        count = max(labels.shape[-1] - shift, 0)
        moved[..., :count] = labels[..., shift:] if count else 0
        return moved

    def divisors(self, labels: Array, weight: Array | None, is_dense: bool) -> tuple[float, float]:
        """What the sums of losses and of squares of lse are divided by."""
        if self.reduction != "mean":
            return 1.0, 1.0
        if self.num_items is not None:
            return float(self.num_items), float(self.num_items)
        counts = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        if weight is None or is_dense:
            return float(counts.sum()), float(counts.sum())
        picked = np.where(counts & (labels >= 0) & (labels < len(weight)), labels, 0)
        each = np.asarray(weight).astype(np.float64)[picked] if len(weight) else np.zeros(labels.shape)
        return float(np.where(counts, each, 0).sum()), float(counts.sum())

    def upstream(self, labels: Array, weight: Array | None, is_dense: bool, dloss: Array | float) -> dict[str, Any]:
        """The gradients of the samples' losses and squares of lse."""
        by_weight, by_count = self.divisors(labels, weight, is_dense)
        given = np.broadcast_to(np.asarray(dloss, np.float64), labels.shape)
        found = {"dloss": given * _over(by_weight)}
        if self.square:
            found["dlse_square"] = given * (self.square * _over(by_count))
        return {name: each.astype(np.float32, order="C") for name, each in found.items()}

    def output(self, found: Any, labels: Array, weight: Array | None, is_dense: bool) -> CrossEntropyOutput:
        loss, lse, log_prob, entropy, predicted = found
        z_loss = (self.square * lse * lse).astype(lse.dtype)
        if self.reduction != "none":
            by_weight, by_count = self.divisors(labels, weight, is_dense)
            loss = np.asarray(loss.sum(dtype=np.float64) * _over(by_weight))
            z_loss = np.asarray(z_loss.sum(dtype=np.float64) * _over(by_count))
        counts = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        accuracy = np.float32((counts & (predicted == labels)).sum() / max(counts.sum(), 1))
        total = np.asarray(loss + z_loss).astype(lse.dtype)
        return CrossEntropyOutput(
            total, z_loss.astype(lse.dtype), lse, log_prob, entropy, np.asarray(accuracy), predicted
        )


def _over(total: float) -> float:
    """1 / total, and 0 for 0: the mean over nothing is 0."""
    return 1 / total if total else 0.0


def _array(name: str, argument: str, value: Any) -> Array:
    """NumPy's array of an argument. Raises TypeError for another library's."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        library = type(value).__module__.partition(".")[0]
        where = {"torch": "opgrad.torch", "jax": "opgrad.jax", "jaxlib": "opgrad.jax"}.get(library, "numpy.asarray")
        raise TypeError(f"{name}: {argument} is a {type(value).__name__}, expected a NumPy array: use {where}")
    return np.asarray(value)


def _check_labels(name: str, labels: Array, classes: int, ignore_index: int | None) -> None:
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        place = tuple(int(each) for each in np.argwhere(wrong)[0])
        also = "" if ignore_index is None else f" or ignore_index {ignore_index}"
        where = ", ".join(map(str, place))
        raise ValueError(f"{name}: labels[{where}] is {labels[place]}, expected 0 to {classes - 1}{also}")


# --- a linear layer ------------------------------------------------------------------------------------------------


def _over_chunks(
    name: str, x: Array, w: Array, labels: Array, b: Array | None, weight: Array | None, call: _Call, shift: int,
    dloss: Array | float | None = None,
) -> tuple[list[Array], Array, tuple[Array, Array, Array | None]]:  # fmt: skip
    """The results of all samples, their labels, and gradients if dloss is given."""
    x, w, labels = _array(name, "x", x), _array(name, "linear_weight", w), _array(name, "labels", labels)
    _check_layer(name, x, w, labels, b)
    labels = call.shifted(labels, shift)
    _check_labels(name, labels, len(w), call.ignore_index)
    number = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    kept = np.arange(len(x)) if call.ignore_index is None else np.flatnonzero(labels != call.ignore_index)
    wide, bias = w.astype(number, copy=False), None if b is None else np.asarray(b).astype(number)
    found = [np.zeros(len(x), number) for _ in range(4)] + [np.full(len(x), -1, np.int64)]
    grads = np.zeros(x.shape, number), np.zeros(w.shape, number), np.zeros(len(w), number)
    upstream = {} if dloss is None else call.upstream(labels, weight, False, dloss)
    rows = max(CHUNK // max(len(w) * number.itemsize, 1), 1)
    for start in range(0, len(kept), rows):
        chosen = kept[start : start + rows]
        part = x[chosen].astype(number)
        logits = part @ wide.T
        if bias is not None:
            logits += bias
        if dloss is None:
            results: list[Array] = list(sample_losses(logits, labels[chosen], weight, **call.bent))
        else:
            given = {each: values[chosen] for each, values in upstream.items()}
            *results, dlogits = sample_losses_and_grad(logits, labels[chosen], weight, **given, **call.bent)
            grads[0][chosen] = dlogits @ wide
            grads[1][:] += dlogits.T @ part
            grads[2][:] += dlogits.sum(0)
        for whole, values in zip(found, results, strict=True):
            whole[chosen] = values
    dx, dw, db = (each.astype(x.dtype, copy=False) for each in grads)
    return found, labels, (dx, dw, None if b is None else db)


def _check_layer(name: str, x: Array, w: Array, labels: Array, b: Array | None) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name}: x has shape {x.shape} and linear_weight {w.shape}, expected (N, H) and (C, H)")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"{name}: labels has shape {labels.shape}, expected {x.shape[:1]}")
    if labels.dtype.kind not in "iu":
        raise TypeError(f"{name}: labels has dtype {labels.dtype.name}, expected int32 or int64")
    if b is not None and np.shape(b) != w.shape[:1]:
        raise ValueError(f"{name}: linear_bias has shape {np.shape(b)}, expected {w.shape[:1]}")
    if w.dtype != x.dtype:
        raise TypeError(f"{name}: linear_weight has dtype {w.dtype.name}, expected {x.dtype.name}, the dtype of x")
