"""Divergences between a student's and a teacher's linear layer: neither's logits are ever stored as a whole.

An eager call whose loss is one number computes the gradients in the forward pass, as cross-entropy of a linear layer
does; for reduction "none" the backward pass computes the logits again. Compiled and transformed calls, exports and
gradients of gradients store the logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_tensors import execute
from opgrad.ops import graph_operators
from opgrad.ops.reference.loss_options import IGNORED, check_share
from opgrad.torch.functions import autocast_layer, narrows_products
from opgrad.torch.losses import samples, statistics
from opgrad.torch.losses.cross_entropy import needs_composition
from opgrad.torch.losses.sharded import layer_of, put_back
from opgrad.torch.operators import wide

_divergence = graph_operators()["softmax_divergence_and_grad"]
LAYERS = ("student_input", "student_weight", "student_bias", "teacher_input", "teacher_weight", "teacher_bias")


def linear_kl_div(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    labels: Tensor | None = None, *, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """KL(teacher || student) of the softmax of two linear layers, whose logits are computed a chunk at a time.

    The arguments, and what is returned and raised, are those of linear_jsd with beta=0. What Hinton et al. minimize is
    temperature ** 2 times this.

    Formula: sum(p * log(p / q)), p and q the softmax of the teacher's and the student's logits / temperature.
    Source: torch.nn.functional.kl_div(log_softmax(student), log_softmax(teacher), log_target=True).
    """
    given = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    options = reduction, ignore_index, temperature, num_items
    return _of_layers("linear_kl_div", *given, labels, 0.0, shift, options)


def linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    labels: Tensor | None = None, *, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    beta: float = 0.5, reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Generalized Jensen-Shannon divergence of the softmax of two linear layers, whose logits are never stored.

    student_input: shape (…, H); student_weight: shape (C, H); student_bias: shape (C,); float32, float64, float16 or
        bfloat16, all of one dtype.
    teacher_input: shape (…, K), with the rows of student_input; teacher_weight: shape (C, K); teacher_bias: (C,);
        likewise. The teacher gets no gradient.
    labels: of the rows' shape; int32, int64 or uint8. Rows with the label ignore_index have divergence and gradient 0,
        do not count, and their logits are not computed; other labels are not looked at. None: all rows count.
    beta: in [0, 1], the teacher's share of the mixture; 0 stands for KL(teacher || student), 1 for KL(student ||
        teacher).
    reduction: "none", "sum", or "mean" over the rows that count, 0 if none does.
    temperature: above 0; divides all logits.
    shift: row i belongs to the label `shift` places behind it on the last axis; the last ones do not count.
    num_items: what "mean" divides by, a number or a tensor with one; None: what counts.

    Returns the divergence, in the dtype of student_input, float32 under autocast; of the rows' shape for "none".
    Gradients are summed over chunks in float32, or float64 for float64. Differentiable twice, then with logits stored.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device or option.

    Formula: with p and q the softmax of the teacher's and the student's logits / temperature, and
    m = beta * p + (1 - beta) * q: sum(beta * p * log(p / m) + (1 - beta) * q * log(q / m)).
    Source: Agarwal et al., "On-Policy Distillation of Language Models", 2024.
    """
    given = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    options = reduction, ignore_index, temperature, num_items
    return _of_layers("linear_jsd", *given, labels, beta, shift, options)


Three = tuple[Tensor, Tensor, Tensor | None]  # an input, a weight, a bias


def _of_layers(
    caller: str, student: Three, teacher: Three, labels: Tensor | None, beta: float, shift: int, given: tuple[Any, ...]
) -> Tensor:
    reduction, ignore_index, temperature, num_items = given
    chosen = samples.read_options(caller, reduction, ignore_index, temperature=temperature, num_items=num_items)
    share = check_share(caller, "beta", beta)
    _check(caller, student, teacher, labels)
    if labels is None:
        found = torch.zeros(student[0].shape[:-1], dtype=torch.int64, device=student[0].device)
        chosen = chosen if shift else replace(chosen, ignore_index=None)
    else:
        found = labels
    found = samples.read_labels(caller, found, shift, chosen.ignore_index)
    x, w, b, dtype = autocast_layer(student[0].reshape(-1, student[0].shape[-1]), *student[1:])
    y, v, c, _ = autocast_layer(teacher[0].reshape(-1, teacher[0].shape[-1]), *teacher[1:])
    others = [None if each is None else each.detach() for each in (y, v, c)]
    way = _DivergencePass(chosen, dtype, beta=share)
    rows = _rows(way, (x, w, b, *others, found.reshape(-1)))
    return rows.reshape(found.shape) if reduction == "none" else rows


def _check(caller: str, student: Three, teacher: Three, labels: Tensor | None) -> None:
    tensors: dict[str, Any] = dict(zip(LAYERS, (*student, *teacher), strict=True))
    samples.check_tensors(caller, (LAYERS[2], LAYERS[5], "labels"), **tensors, labels=labels)
    for first in (0, 3):
        (x_name, x), (w_name, w), (b_name, b) = list(tensors.items())[first : first + 3]
        if not x.dim():
            raise ValueError(f"{caller}: {x_name} has 0 dimensions, expected at least 1")
        samples.check_shape(caller, w_name, w, (student[1].shape[0] if w.dim() else 0, x.shape[-1]))
        samples.check_shape(caller, b_name, b, w.shape[:1])
        for other, value in ((w_name, w), (b_name, b)):
            if value is not None and value.dtype != x.dtype and not narrows_products(x):
                raise TypeError(f"{caller}: {other} has dtype {value.dtype}, expected {x.dtype}, the dtype of {x_name}")
    for key, value in (*tensors.items(), ("labels", labels)):
        if value is None:
            continue
        if value.device != student[0].device:
            of = f"expected {student[0].device}, the device of student_input"
            raise ValueError(f"{caller}: {key} is on {value.device}, {of}")
        if key != "labels" and not value.is_floating_point():
            raise TypeError(f"{caller}: {key} has dtype {value.dtype}, expected a float")
    samples.check_shape(caller, "teacher_input", teacher[0], (*student[0].shape[:-1], teacher[0].shape[-1]))
    samples.check_shape(caller, "labels", labels, student[0].shape[:-1], "the rows of student_input")
    if labels is not None and labels.dtype not in (torch.int32, torch.int64, torch.uint8):
        raise TypeError(f"{caller}: labels has dtype {labels.dtype}, expected int32, int64 or uint8")


def _rows(way: "_DivergencePass", tensors: Sequence[Any]) -> Tensor:
    """The loss of rows of both inputs."""
    given = [each for each in tensors if each is not None]
    if torch.compiler.is_compiling() or torch_private.transforms_active() or needs_composition(given):
        return way.differentiable(tensors)
    if torch_private.dispatch_modes() or not (tensors[0].numel() and tensors[1].numel()):
        return way.differentiable(tensors)
    if way.options.reduction == "none":
        return _of_each(way, *tensors)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors[:3]):
        return way(*tensors)[0]
    return way.compute(tensors, (False,) * 3).loss


@dataclass(frozen=True)
class _DivergencePass(samples.OnePass):
    """Two layers whose logits exist in chunks: x, w, b of the student, those of the teacher, and labels."""

    beta: float = 0.5
    hands_out = True

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> samples.Found:
        *_, labels = tensors
        of_loss, _, later = samples.upstream_of(labels, None, False, self.options, tensors[0].dtype)
        losses, slopes = self.of_rows(tensors, needs, samples.same_for_each(labels, of_loss, wide(tensors[0].dtype)))
        return samples.Found((losses.sum(dtype=torch.float64) * of_loss * later).to(self.dtype), slopes, later)

    def of_rows(self, tensors: Sequence[Any], needs: Sequence[bool], dloss: Tensor) -> tuple[Tensor, statistics.Slopes]:
        """The divergence of each row, and the gradients for those of the rows."""
        x, w, b, y, v, c, labels = tensors
        student, counting = layer_of(x, w, b, labels, None, self.options.ignore_index)
        teacher, _ = layer_of(y, v, c, labels, None, self.options.ignore_index)
        dloss = dloss if counting is None else dloss.index_select(0, counting)
        losses, (dx, dw, db) = _in_chunks(student, teacher, dloss, self, needs)
        dx = None if dx is None else put_back(dx, counting, len(x))
        return put_back(losses, counting, len(x)), (dx, dw, db)

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        x, w, b, y, v, c, labels = tensors
        losses = composed(functional.linear(x, w, b), functional.linear(y, v, c), self.beta, self.options.temperature)
        if self.options.ignore_index is not None:
            losses = torch.where(labels == self.options.ignore_index, 0, losses)
        if self.options.reduction == "none":
            return losses.to(self.dtype)
        loss: Tensor = samples.reduced((losses, None), labels, None, False, self.options, self.dtype)
        return loss


class _OfEach(torch.autograd.Function):
    """The divergence of each row, whose gradients the backward pass computes from the logits, once more in chunks."""

    @staticmethod
    def forward(ctx: Any, way: _DivergencePass, *tensors: Any) -> Tensor:
        ctx.way, ctx.count = way, len(tensors)
        ctx.save_for_backward(*tensors)
        losses, _ = way.of_rows(tensors, (False,) * 3, torch.ones_like(tensors[-1], dtype=wide(tensors[0].dtype)))
        return losses.to(way.dtype)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> Any:
        if torch.is_grad_enabled() or torch_private.is_batched(dlosses):
            return None, *samples.again(ctx, dlosses)
        _, slopes = ctx.way.of_rows(ctx.saved_tensors, ctx.needs_input_grad[1:4], dlosses.to(wide(dlosses.dtype)))
        return None, *slopes, *(None,) * 4


_of_each: Callable[..., Tensor] = _OfEach.apply


def _in_chunks(
    student: statistics.Layer, teacher: statistics.Layer, dloss: Tensor, way: _DivergencePass, needs: Sequence[bool]
) -> tuple[Tensor, statistics.Slopes]:
    """The divergence of each row of both layers, and the student's gradients."""
    (n, h), c = student.x.shape, len(student.w)
    item = student.product.itemsize + max(teacher.product.itemsize, student.product.itemsize)
    budget = max(statistics.LEAST_BUFFER, int(statistics.SHARE_OF_BUFFER * 2 * student.x.element_size() * (c + n) * h))
    rows = max(min(max(budget // (c * item) // 16 * 16, statistics.FEWEST_ROWS), n), 1)
    losses = torch.empty(n, dtype=student.number, device=student.x.device)
    buffer = teacher.x.new_empty(rows * c, dtype=teacher.product)
    options = {"beta": way.beta, "temperature": way.options.temperature}

    def of_rows(rows: slice, classes: slice, logits: Tensor) -> Tensor:
        others = teacher.logits(rows, classes, buffer).to(logits.dtype)
        if logits.is_cuda:
            return _by_autograd(logits, others, dloss[rows], losses[rows], **options)
        given = {"logits": logits, "teacher_logits": others, "dloss": dloss[rows], **options}
        execute(_divergence, given | {"out": (losses[rows], logits)})
        return logits

    return losses, statistics.gradients_of(student, needs, statistics.Chunks(False, rows), of_rows)


def _by_autograd(
    logits: Tensor, others: Tensor, dloss: Tensor, out: Tensor, beta: float, temperature: float
) -> Tensor:  # fmt: skip
    """The gradient of some rows' logits where no kernel computes it; their divergences are written to `out`."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = composed(leaf, others, beta, temperature)
    out.copy_(losses.detach())
    return torch.autograd.grad(losses, leaf, dloss)[0]


def composed(logits: Tensor, others: Tensor, beta: float, temperature: float) -> Tensor:
    """The divergence of each row of logits from others, in float32 or float64, in PyTorch's functions."""
    number = wide(logits.dtype)
    log_q, log_p = ((each.to(number) / temperature).log_softmax(-1) for each in (logits, others))
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return _share(p, log_p, log_q).sum(-1)
    if beta == 1:
        return _share(q, log_q, log_p).sum(-1)
    m = beta * p + (1 - beta) * q
    log_m = torch.where(m == 0, 1, m).log()
    return (beta * _share(p, log_p, log_m) + (1 - beta) * _share(q, log_q, log_m)).sum(-1)


def _share(p: Tensor, log_p: Tensor, log_m: Tensor) -> Tensor:
    """p * log(p / m), and 0 where p is, whatever the ratio is there."""
    is_none = p == 0
    return p * (torch.where(is_none, 0, log_p) - torch.where(is_none, 0, log_m))
