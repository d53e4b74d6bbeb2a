"""The statistics of a linear layer whose logits exist in chunks, and its gradients, as registered operators.

The layer may have all classes, or a shard of them: then the gradient of its input is summed over the group, and the
results of samples are combined from the statistics of all processes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_private import group_of
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.autocast import autocast_layer
from opgrad.torch.derivative import pulled_back, wide
from opgrad.torch.losses.chunks import Layer, chunks_of, gradients_of_statistics, statistics_of_layer
from opgrad.torch.losses.options import check_dense, check_labels, check_target, check_tensors, check_weight
from opgrad.torch.losses.reduced import shaped
from opgrad.torch.losses.shard_operators import (
    keep_all,
    kept,
    once,
    register,
    shard_copy,
    shard_gather,
    shard_statistics,
)
from opgrad.torch.losses.statistics import (
    CLASSES,
    SLOPES,
    ClassPart,
    composed_statistics,
    factors_of_slopes,
    samples_of_parts,
)
from opgrad.torch.schema import LIBRARY, TAGS

NAME = "linear_cross_entropy"
_LAYER = f"Tensor x, Tensor w, Tensor? b, {CLASSES}, SymInt? ignore_index, SymInt? rows, str group"
LIBRARY.define(f"layer_statistics({_LAYER}) -> Tensor", tags=TAGS)
LIBRARY.define(f"layer_statistics_grad({_LAYER}, {SLOPES}) -> (Tensor, Tensor, Tensor)", tags=TAGS)
layer_statistics: Any = torch.ops.opgrad.layer_statistics.default
layer_statistics_grad: Any = torch.ops.opgrad.layer_statistics_grad.default


def layer_of(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None
) -> tuple[Layer, Tensor | None]:
    """The layer with only the samples that count, and their numbers; None if all count."""
    x, w, b = x.detach(), w.detach(), None if b is None else b.detach()
    kept = counted(labels, ignore_index)
    if kept is not None:
        x, labels = x.index_select(0, kept), labels.index_select(0, kept)
    return Layer(x, w, b, labels, None if weight is None else weight.detach()), kept


def counted(labels: Tensor, ignore_index: int | None) -> Tensor | None:
    """The numbers of the samples that count; None if all count. On CUDA this waits for the device."""
    if ignore_index is None or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    kept = (labels != ignore_index).nonzero().squeeze(1)
    return None if len(kept) == len(labels) else kept


def put_back(found: Tensor, kept: Tensor | None, count: int, axis: int = 0) -> Tensor:
    """Values of the samples that count, spread over all samples along an axis; 0 for the others."""
    if kept is None:
        return found
    shape = (*found.shape[:axis], count, *found.shape[axis + 1 :])
    return found.new_zeros(shape).index_copy_(axis, kept, found)


def _statistics(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *others: Any) -> Tensor:
    *given, ignore_index, rows, group = others
    if not group:  # the labels of a shard are classes of all of them
        check_labels(NAME, labels, len(w), ignore_index)
    layer, counting = layer_of(x, w, b, labels, weight, ignore_index)
    found = statistics_of_layer(layer, ClassPart(weight, *given), chunks_of(layer, rows, with_gradient=False))
    return put_back(found.to(layer.number), counting, len(x), axis=1)


def _fake(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, *part: Any) -> Tensor:
    count_flops()
    return x.new_empty(ClassPart(*part[:6]).numbers, x.shape[0], dtype=wide(x.dtype))


def _grad(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over chunks, and over the group, are formed in float32."""
    *given, ignore_index, rows, group, statistics, slopes = others
    part = ClassPart(weight, *given)
    layer, counting = layer_of(x, w, b, labels, weight, ignore_index)
    factors = factors_of_slopes(statistics, slopes, part)
    factors = factors if counting is None else factors.index_select(1, counting)
    needs, dx_dtype = (True, True, b is not None), layer.number if group else None
    chunks = chunks_of(layer, rows, with_gradient=True)
    dx, dw, db = gradients_of_statistics(layer, part, factors, needs, chunks, dx_dtype)
    assert dx is not None
    assert dw is not None
    if group:
        dist.all_reduce(dx, group=group_of(group))
    return put_back(dx.to(x.dtype), counting, len(x)), dw, x.new_zeros(0) if db is None else db


def _grad_fake(x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w), x.new_empty(0) if b is None else torch.empty_like(b)


def _backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    """The first gradient computes the logits again in chunks; for further ones they are stored."""
    x, w, b, *given, statistics = kept(ctx)
    nothing, (labels, *part, _, _, group) = (None,) * len(given), given
    if not torch.is_grad_enabled():
        dx, dw, db = layer_statistics_grad(x, w, b, *given, statistics, slopes)
        return dx, dw, None if b is None else db, *nothing

    def stored(*layer: Tensor) -> Tensor:
        own = shard_copy(layer[0], group) if group else layer[0]
        return composed_statistics(functional.linear(own, *layer[1:]), labels, ClassPart(*part))

    found = pulled_back(stored, [each for each in (x, w, b) if each is not None], [slopes])
    return *found, *(None,) * (3 - len(found)), *nothing


register(layer_statistics, _statistics, _fake, _backward, keep_all)
register(layer_statistics_grad, _grad, _grad_fake, once, keep_all)


# --- the results of all classes ---------------------------------------------------------------------------------------


FORMULAS = ("torch", "megatron")  # of label smoothing


@dataclass(frozen=True)
class LossCall:
    """The loss that is wanted, and by whom. weight: of all classes. formula: how labels are smoothed."""

    who: str
    options: LossOptions
    formula: str = "torch"
    weight: Tensor | None = None

    def check(self, input: Any, target: Any) -> None:
        """Raise TypeError or ValueError for arguments that do not fit."""
        check_tensors(self.who, ("weight",), input=input, target=target, weight=self.weight)
        check_target(self.who, target)
        if not input.dim():
            raise ValueError(f"{self.who}: input has 0 dimensions, expected at least 1")
        if self.formula not in FORMULAS:
            raise ValueError(f"{self.who}: smoothing_formula is {self.formula!r}, expected {' or '.join(FORMULAS)}")
        if self.weight is not None and self.formula == "megatron":
            raise ValueError(f"{self.who}: weight is given, expected none with Megatron's formula")
        check_weight(self.who, self.weight)
        if target.is_floating_point():
            check_dense(self.who, self.options)
            for name in {"log_prob", "token_accuracy"}.intersection(self.options.returned):
                expected = "expected it with classes alone"
                raise ValueError(f"{self.who}: return_{name} is given with class probabilities, {expected}")


@dataclass(frozen=True)
class ClassRange:
    """The classes of one process, those from `first` on, of all that its group has together.

    member: the process's rank in its group, the number of processes there, and the group's name.
    """

    call: LossCall
    first: int
    classes: int
    member: tuple[int, int, str]

    @property
    def part(self) -> ClassPart:
        weight = self.call.weight
        own = None if weight is None else weight[self.first : self.first + self.classes].contiguous()
        return ClassPart.of(self.call.options, own, self.first)


def member_of(who: str, group: Any) -> tuple[int, int, str]:
    """The `member` of ClassRange for this process in a group; None: in the default one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{who}: there is no process group, expected torch.distributed to be initialised")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{who}: this process is not in the group, expected one of its own")
    return rank, dist.get_world_size(group), group.group_name


# --- the samples' results --------------------------------------------------------------------------------------------


def of_logits(
    logits: Tensor, labels: Tensor, probabilities: Tensor | None, own: ClassRange, dtype: torch.dtype
) -> Sequence[Any]:
    """The results of logits [..., classes of the process], in the shape of the labels [...] of all classes.

    With probabilities, which have the logits' shape, all samples count; the results are differentiable in both.
    """
    x, y = logits.reshape(labels.numel(), own.classes), labels.reshape(-1)
    if probabilities is None:
        found = shard_statistics(x, y, *own.part)
    else:
        found = composed_statistics(x, y, own.part, probabilities.reshape(x.shape))
    return shaped(_gathered(found, y, own, probabilities is not None, dtype), labels.shape)


def of_layer(
    input: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, probabilities: Tensor | None, own: ClassRange,
    dtype: torch.dtype,
) -> Sequence[Any]:  # fmt: skip
    """The results for the logits of a linear layer, in autocast's dtype; with probabilities logits are stored."""
    x, y = input.reshape(labels.numel(), input.shape[-1]), labels.reshape(-1)
    x, w, b, _ = autocast_layer(x, w, b)
    if probabilities is not None:
        logits = functional.linear(shard_copy(x, own.member[2]), w, b)
        return of_logits(logits, labels, probabilities, own, dtype)
    if not torch.compiler.is_compiling():
        count_flops()
    found = layer_statistics(x, w, b, y, *own.part, own.call.options.ignore_index, None, own.member[2])
    return shaped(_gathered(found, y, own, False, dtype), labels.shape)


def _gathered(
    statistics: Tensor, labels: Tensor, own: ClassRange, is_dense: bool, dtype: torch.dtype
) -> Sequence[Tensor | None]:
    """The results over the classes of all processes, from the statistics of this one's."""
    call, options = own.call, own.call.options
    ignored, smoothing = None if is_dense else options.ignore_index, options.label_smoothing
    parts, total = shard_gather(statistics, labels, own.first, own.classes, ignored, *own.member, call.who)
    if smoothing and call.formula == "megatron":
        smoothing = smoothing * total.double() / (total.double() - 1)
    return samples_of_parts(parts, labels, own.part, total, call.weight, options, dtype, smoothing, is_dense)


# --- floating-point operations ---------------------------------------------------------------------------------------


# The products of each operator; the gradients compute the logits again.
PRODUCTS = {"layer_statistics": 1, "layer_statistics_grad": 3}


def count_flops() -> None:
    """Register the formulas if torch.utils.flop_counter is imported."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    registries = [
        getattr(getattr(mode, "counter", None), "flop_registry", None) for mode in torch_private.active_modes()
    ]
    for registry in (getattr(counting, "flop_registry", None), *registries):
        if registry is not None:
            for name, products in PRODUCTS.items():
                registry.setdefault(getattr(torch.ops.opgrad, name), partial(_flops_of, products))


def _flops_of(products: int, x: Any, w: Any, *others: Any, **named: Any) -> int:
    """The floating-point operations of so many products of x [N, H] with w [C, H], tensors or their shapes."""
    (rows, features), (classes, _) = (getattr(each, "shape", each) for each in (x, w))
    return int(2 * products * rows * features * classes)
