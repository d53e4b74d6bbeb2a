"""Divergences between a student's and a teacher's linear layer for NumPy arrays: neither's logits are all stored."""

from typing import Any

import numpy as np

from opgrad.call.operators import softmax_divergence_and_grad
from opgrad.call.sample_reduction import (
    checked_array,
    layer_gradients,
    logits_of,
    moved_labels,
    precision_of,
    reduction_of,
)
from opgrad.contract.attributes import Array
from opgrad.ops.reference.loss_options import IGNORED, check_share, read_options


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
    return _of_layers("linear_kl_div", *layers, labels, 0.0, shift, (reduction, ignore_index, temperature, num_items))[
        0
    ]


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
    (x, w, b), (y, v, c) = (_layer(name, who, each) for who, each in (("student", student), ("teacher", teacher)))
    if len(y) != len(x) or len(v) != len(w):
        what = f"teacher_input has {len(y)} rows and teacher_weight {len(v)} classes"
        raise ValueError(f"{name}: {what}, expected {len(x)} and {len(w)}, those of the student")
    chosen_labels = np.zeros(len(x), np.int64) if labels is None else checked_array(name, "labels", labels)
    if chosen_labels.shape != (len(x),) or chosen_labels.dtype.kind not in "iu":
        what = f"labels has shape {chosen_labels.shape} and dtype {chosen_labels.dtype.name}"
        raise ValueError(f"{name}: {what}, expected {(len(x),)} and integers")
    reduction_name, ignored, temperature, num_items = options
    ignored = ignored if shift or labels is not None else None
    given = reduction_name, ignored, 0.0, 0.0, None, temperature, num_items
    chosen = read_options(name, *given)
    chosen_labels = moved_labels(name, chosen_labels, shift, ignored)
    reduction = reduction_of(chosen_labels, None, chosen)
    number = precision_of(x)
    losses, slopes = np.zeros(len(x), number), reduction.upstream(1.0 if dloss is None else dloss)["dloss"]
    kept = np.arange(len(x)) if ignored is None else np.flatnonzero(chosen_labels != ignored)
    v, c = v.astype(number), None if c is None else c.astype(number)

    def compute(rows: Array, logits: Array) -> Array | None:
        others = logits_of(y[rows].astype(number), v, c)
        losses[rows], dlogits = softmax_divergence_and_grad(logits, others, slopes[rows], beta, temperature)
        return None if dloss is None else dlogits

    grads = layer_gradients(x, w, b, kept, compute, layers=2)
    return reduction.reduced(losses), *grads


def _layer(name: str, who: str, given: Any) -> tuple[Array, Array, Array | None]:
    """A layer's arrays. Raises TypeError or ValueError unless they fit together."""
    x, w, b = given
    x, w = checked_array(name, f"{who}_input", x), checked_array(name, f"{who}_weight", w)
    b = None if b is None else checked_array(name, f"{who}_bias", b)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        shapes = f"{who}_input has shape {x.shape} and {who}_weight {w.shape}"
        raise ValueError(f"{name}: {shapes}, expected (N, H) and (C, H)")
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"{name}: {who}_bias has shape {b.shape}, expected {w.shape[:1]}")
    if w.dtype != x.dtype:
        kinds = f"{who}_weight has dtype {w.dtype.name}"
        raise TypeError(f"{name}: {kinds}, expected {x.dtype.name}, the dtype of {who}_input")
    return x, w, b
