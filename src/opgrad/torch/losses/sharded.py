"""Registered operators: statistics of a shard of the classes or of a linear layer, and those of all shards gathered.

A layer may have all classes, or a shard of them: then the gradient of its input is summed over the group, and the
results of samples are combined from the statistics of all processes.

The gradient of every operator that communicates is its counterpart: the gradient of a value that all processes hold is
the same on all of them, and the gradient of a value of which each process holds a part is distributed like the value.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import unseen
from opgrad.call.libraries.torch_private import group_of
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.functions import autocast_layer
from opgrad.torch.losses.samples import check_dense, check_labels, check_target, check_tensors, check_weight, shaped
from opgrad.torch.losses.statistics import (
    CLASSES,
    SLOPES,
    ClassPart,
    Layer,
    chunks_of,
    composed_statistics,
    factors_of_slopes,
    gradient_of,
    gradients_of_statistics,
    samples_of_parts,
    statistics_of,
    statistics_of_layer,
)
from opgrad.torch.operators import one_by_one, pulled_back, wide
from opgrad.torch.schema import LIBRARY, TAGS


def keep_all(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    """Keep all arguments, and the result."""
    ctx.save_for_backward(*[each for each in inputs if isinstance(each, Tensor)], output)
    ctx.others = [*(None if isinstance(each, Tensor) else (each,) for each in inputs), None]


def kept(ctx: Any) -> list[Any]:
    """The arguments, and the result."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if each is None else each[0] for each in ctx.others]


def keep_place(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.place = [each for each in inputs if isinstance(each, int | str)]


def once(ctx: Any, *slopes: Any) -> Any:
    raise NotImplementedError(
        "this gradient is not differentiable; the operator that it belongs to is, any number of times"
    )


def registered(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any] = once,
    setup: Callable[..., None] = keep_all,
) -> Any:  # fmt: skip
    """An operator with its kernel, its shapes and its gradient; the latter for transformations of torch.func, too."""
    LIBRARY.define(schema, tags=TAGS)
    name = schema.partition("(")[0]
    overload: Any = getattr(torch.ops.opgrad, name).default
    torch.library.impl(f"opgrad::{name}", ("cpu", "cuda"), run, lib=LIBRARY)
    torch.library.register_fake(f"opgrad::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"opgrad::{name}", backward, setup_context=setup, lib=LIBRARY)
    methods = {"forward": overload, "setup_context": setup, "backward": backward}
    methods["vmap"] = lambda info, dims, *given: one_by_one(overload, info.batch_size, dims, given)
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})

    def transform(*arguments: Any) -> Any:
        defaults = [each.default_value for each in overload._schema.arguments[len(arguments) :]]
        return unseen(function.apply)(*arguments, *defaults)

    torch_private.implement_transform(LIBRARY, name, transform)
    return overload


# --- statistics of logits --------------------------------------------------------------------------------------------


def _of_logits_grad(logits: Tensor, labels: Tensor, *others: Any) -> Tensor:
    *given, statistics, slopes = others
    part = ClassPart(*given)
    return gradient_of(logits, labels, part, factors_of_slopes(statistics, slopes, part))


def _of_logits_backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    logits, *given, statistics = kept(ctx)
    nothing = (None,) * len(given)
    if not torch.is_grad_enabled():
        return shard_statistics_grad(logits, *given, statistics, slopes), *nothing
    labels, *part = given
    return *pulled_back(lambda x: composed_statistics(x, labels, ClassPart(*part)), [logits], [slopes]), *nothing


shard_statistics: Any = registered(
    f"shard_statistics(Tensor logits, {CLASSES}) -> Tensor",
    lambda logits, labels, *part: statistics_of(logits, labels, ClassPart(*part)),
    lambda logits, _, *part: logits.new_empty(ClassPart(*part[:6]).numbers, len(logits), dtype=wide(logits.dtype)),
    _of_logits_backward,
)
shard_statistics_grad: Any = registered(
    f"shard_statistics_grad(Tensor logits, {CLASSES}, {SLOPES}) -> Tensor",
    _of_logits_grad,
    lambda logits, *_: torch.empty_like(logits),
)


# --- the statistics of all processes ---------------------------------------------------------------------------------

HEADER = 4  # words before the statistics: the first class, the end of the classes, the numbers of rows and statistics


@lru_cache(maxsize=64)
def _header(words: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The words as bits of a dtype; kept, since a copy to a device waits for it."""
    return torch.tensor(words, dtype=torch.int64, device=device).view(dtype)


def _of_all(own: Tensor, processes: int, group: str, caller: str) -> Tensor:
    """The same flat tensor of every process of the group, in rank order. Raises RuntimeError if one is lost."""
    every = own.new_empty(processes, own.numel())
    # PyTorch 2.13 renamed it.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    try:
        all_gather(every.view(-1), own, group=group_of(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}: no answer from all {processes} processes of the group, one of which may have ended: {error}"
        ) from error
    return every


def _gather(
    statistics: Tensor, labels: Tensor, first: int, classes: int, ignore_index: int | None, rank: int,
    processes: int, group: str, caller: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The statistics [processes, statistics, rows] in float64, and the number of all classes.

    Raises ValueError on the CPU, on every process, unless the shards are neighbours that begin with class 0 and the
    labels are classes.
    """
    count, rows = statistics.shape
    header = _header((first, first + classes, rows, count), statistics.dtype, statistics.device)
    every = _of_all(torch.cat([header, statistics.reshape(-1)]), processes, group, caller)
    headers = every[:, : header.numel()].reshape(-1).view(torch.int64).view(-1, HEADER)
    if statistics.device.type == "cpu":
        _check_ranges(headers.tolist(), caller)
        check_labels(caller, labels, int(headers[-1, 1]), ignore_index)
    parts = every[:, header.numel() :].reshape(-1, count, rows)
    return parts.to(torch.float64, copy=True), headers[-1, 1].clone()


def _check_ranges(headers: Sequence[Sequence[int]], caller: str) -> None:
    expected = 0
    for rank, (first, last, *sizes) in enumerate(headers):
        if first != expected:
            raise ValueError(
                f"{caller}: vocab_range is [{first}, {last}) on rank {rank}, expected one that begins with {expected}, "
                "behind the classes of the ranks before"
            )
        if sizes != headers[0][2:]:
            raise ValueError(
                f"{caller}: input has {sizes[0]} rows on rank {rank}, expected {headers[0][2]}, as on rank 0, with "
                "equal options"
            )
        expected = last


def _gather_keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.dtype, ctx.place = inputs[0].dtype, inputs[5:8]


def _sum(x: Tensor, group: str) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group_of(group))
    return total


shard_gather: Any = registered(
    "shard_gather(Tensor statistics, Tensor labels, SymInt first, SymInt classes, SymInt? ignore_index, int rank, "
    "int processes, str group, str caller) -> (Tensor, Tensor)",
    _gather,
    lambda statistics, *others: (
        statistics.new_empty((others[5], *statistics.shape), dtype=torch.float64),
        statistics.new_empty((), dtype=torch.int64),
    ),
    lambda ctx, slopes, _: (shard_part(slopes, *ctx.place).to(ctx.dtype), *(None,) * 8),
    _gather_keep,
)
shard_part: Any = registered(
    "shard_part(Tensor parts, int rank, int processes, str group) -> Tensor",
    lambda parts, rank, processes, group: parts[rank].clone(),
    lambda parts, *_: parts.new_empty(parts.shape[1:]),
    lambda ctx, slope: (shard_parts(slope, *ctx.place), None, None, None),
    keep_place,
)
shard_parts: Any = registered(
    "shard_parts(Tensor part, int rank, int processes, str group) -> Tensor",
    lambda part, rank, processes, group: _of_all(
        part.reshape(-1), processes, group, "a gradient of a gradient over shards"
    ).view(-1, *part.shape),
    lambda part, rank, processes, group: part.new_empty((processes, *part.shape)),
    lambda ctx, slopes: (shard_part(slopes, *ctx.place), None, None, None),
    keep_place,
)
# A copy to all processes: its gradient is the sum over the processes, and the gradient of the sum is a copy.
shard_copy: Any = registered(
    "shard_copy(Tensor x, str group) -> Tensor",
    lambda x, group: x.clone(),
    lambda x, group: torch.empty_like(x),
    lambda ctx, slope: (shard_sum(slope, *ctx.place), None),
    keep_place,
)
shard_sum: Any = registered(
    "shard_sum(Tensor x, str group) -> Tensor",
    _sum,
    lambda x, group: torch.empty_like(x),
    lambda ctx, slope: (shard_copy(slope, *ctx.place), None),
    keep_place,
)


# --- a layer whose logits exist in chunks ----------------------------------------------------------------------------

NAME = "linear_cross_entropy"
_LAYER = f"Tensor x, Tensor w, Tensor? b, {CLASSES}, SymInt? ignore_index, SymInt? rows, str group"


def layer_of(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None
) -> tuple[Layer, Tensor | None]:
    """The layer with only the samples that count, and their numbers; None if all count."""
    x, w = x.detach(), w.detach()
    b, weight = (None if each is None else each.detach() for each in (b, weight))
    if ignore_index is None or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return Layer(x, w, b, labels, weight), None
    counting = (labels != ignore_index).nonzero().squeeze(1)  # on CUDA this waits for the device
    if len(counting) == len(labels):
        return Layer(x, w, b, labels, weight), None
    return Layer(x.index_select(0, counting), w, b, labels.index_select(0, counting), weight), counting


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


layer_statistics: Any = registered(f"layer_statistics({_LAYER}) -> Tensor", _statistics, _fake, _backward)
layer_statistics_grad: Any = registered(
    f"layer_statistics_grad({_LAYER}, {SLOPES}) -> (Tensor, Tensor, Tensor)",
    _grad,
    lambda x, w, b, *_: (
        torch.empty_like(x),
        torch.empty_like(w),
        x.new_empty(0) if b is None else torch.empty_like(b),
    ),
)


# --- the results of all classes ---------------------------------------------------------------------------------------


FORMULAS = ("torch", "megatron")  # of label smoothing


@dataclass(frozen=True)
class LossCall:
    """The loss that is wanted, and by whom. weight: of all classes. formula: how labels are smoothed."""

    caller: str
    options: LossOptions
    formula: str = "torch"
    weight: Tensor | None = None

    def check(self, input: Any, target: Any) -> None:
        """Raise TypeError or ValueError for arguments that do not fit."""
        check_tensors(self.caller, ("weight",), input=input, target=target, weight=self.weight)
        check_target(self.caller, target)
        if not input.dim():
            raise ValueError(f"{self.caller}: input has 0 dimensions, expected at least 1")
        if self.formula not in FORMULAS:
            raise ValueError(f"{self.caller}: smoothing_formula is {self.formula!r}, expected {' or '.join(FORMULAS)}")
        if self.weight is not None and self.formula == "megatron":
            raise ValueError(f"{self.caller}: weight is given, expected none with Megatron's formula")
        check_weight(self.caller, self.weight)
        if target.is_floating_point():
            check_dense(self.caller, self.options)
            for name in {"log_prob", "token_accuracy"}.intersection(self.options.returned):
                expected = "expected it with classes alone"
                raise ValueError(f"{self.caller}: return_{name} is given with class probabilities, {expected}")


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


def member_of(caller: str, group: Any) -> tuple[int, int, str]:
    """The `member` of ClassRange for this process in a group; None: in the default one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{caller}: there is no process group, expected torch.distributed to be initialised")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{caller}: this process is not in the group, expected one of its own")
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
    parts, total = shard_gather(statistics, labels, own.first, own.classes, ignored, *own.member, call.caller)
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
