"""The statistics of a shard of the classes, and the gathering of those of all shards, as registered operators.

The gradient of every operator that communicates is its counterpart: the gradient of a value that all processes hold is
the same on all of them, and the gradient of a value of which each process holds a part is distributed like the value.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import unseen
from opgrad.call.libraries.torch_private import group_of
from opgrad.torch.derivative import one_by_one, pulled_back, wide
from opgrad.torch.losses.options import check_labels
from opgrad.torch.losses.statistics import (
    CLASSES,
    SLOPES,
    ClassPart,
    composed_statistics,
    factors_of_slopes,
    gradient_of,
    statistics_of,
)
from opgrad.torch.schema import LIBRARY, TAGS


def register(
    overload: Any,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., None],
) -> None:
    """Give an operator its kernel, its shapes and its gradient; the latter for transformations of torch.func, too."""
    name = overload.name().removesuffix(".default")
    torch.library.impl(name, ("cpu", "cuda"), run, lib=LIBRARY)
    torch.library.register_fake(name, fake, lib=LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup, lib=LIBRARY)
    methods = {"forward": overload, "setup_context": setup, "backward": backward}
    methods["vmap"] = lambda info, dims, *given: one_by_one(overload, info.batch_size, dims, given)
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})

    def transform(*arguments: Any) -> Any:
        defaults = [each.default_value for each in overload._schema.arguments[len(arguments) :]]
        return unseen(function.apply)(*arguments, *defaults)

    torch_private.implement_transform(LIBRARY, name.partition("::")[2], transform)


# --- gradients -------------------------------------------------------------------------------------------------------


def keep_all(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    """Keep all arguments, and the result."""
    ctx.save_for_backward(*[each for each in inputs if isinstance(each, Tensor)], output)
    ctx.others = [*(None if isinstance(each, Tensor) else (each,) for each in inputs), None]


def kept(ctx: Any) -> list[Any]:
    """The arguments, and the result."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if each is None else each[0] for each in ctx.others]


def once(ctx: Any, *slopes: Any) -> Any:
    raise NotImplementedError(
        "this gradient is not differentiable; the operator that it belongs to is, any number of times"
    )


HEADER = 4  # words before the statistics: the first class, the end of the classes, the numbers of rows and statistics

for _written in (
    f"shard_statistics(Tensor logits, {CLASSES}) -> Tensor",
    f"shard_statistics_grad(Tensor logits, {CLASSES}, {SLOPES}) -> Tensor",
    "shard_gather(Tensor statistics, Tensor labels, SymInt first, SymInt classes, SymInt? ignore_index, int rank, "
    "int processes, str group, str who) -> (Tensor, Tensor)",
    "shard_part(Tensor parts, int rank, int processes, str group) -> Tensor",
    "shard_parts(Tensor part, int rank, int processes, str group) -> Tensor",
    "shard_copy(Tensor x, str group) -> Tensor",
    "shard_sum(Tensor x, str group) -> Tensor",
):
    LIBRARY.define(_written, tags=TAGS)
_ops: Any = torch.ops.opgrad
shard_statistics, shard_statistics_grad = _ops.shard_statistics.default, _ops.shard_statistics_grad.default
shard_gather, shard_part, shard_parts = _ops.shard_gather.default, _ops.shard_part.default, _ops.shard_parts.default
shard_copy, shard_sum = _ops.shard_copy.default, _ops.shard_sum.default


# --- statistics of logits --------------------------------------------------------------------------------------------


def _statistics_fake(logits: Tensor, labels: Tensor, *part: Any) -> Tensor:
    return logits.new_empty(ClassPart(*part[:6]).numbers, logits.shape[0], dtype=wide(logits.dtype))


def _statistics_grad(logits: Tensor, labels: Tensor, *others: Any) -> Tensor:
    *given, statistics, slopes = others
    part = ClassPart(*given)
    return gradient_of(logits, labels, part, factors_of_slopes(statistics, slopes, part))


def _statistics_backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    logits, *given, statistics = kept(ctx)
    nothing = (None,) * len(given)
    if not torch.is_grad_enabled():
        return shard_statistics_grad(logits, *given, statistics, slopes), *nothing
    labels, *part = given
    return *pulled_back(lambda x: composed_statistics(x, labels, ClassPart(*part)), [logits], [slopes]), *nothing


register(
    shard_statistics,
    lambda logits, labels, *part: statistics_of(logits, labels, ClassPart(*part)),
    _statistics_fake,
    _statistics_backward,
    keep_all,
)
register(shard_statistics_grad, _statistics_grad, lambda logits, *_: torch.empty_like(logits), once, keep_all)


# --- the statistics of all processes ---------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _header(words: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The words as bits of a dtype; kept, since a copy to a device waits for it."""
    return torch.tensor(words, dtype=torch.int64, device=device).view(dtype)


def _gathered(own: Tensor, processes: int, group: str, who: str) -> Tensor:
    """The same flat tensor of every process of the group, in rank order. Raises RuntimeError if one is lost."""
    every = own.new_empty(processes, own.numel())
    # PyTorch 2.13 renamed it.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    try:
        all_gather(every.view(-1), own, group=group_of(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"{who}: no answer from all {processes} processes of the group, one of which may have ended: {error}"
        ) from error
    return every


def _gather(
    statistics: Tensor, labels: Tensor, first: int, classes: int, ignore_index: int | None, rank: int,
    processes: int, group: str, who: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The statistics [processes, statistics, rows] in float64, and the number of all classes.

    Raises ValueError on the CPU, on every process, unless the shards are neighbours that begin with class 0 and the
    labels are classes.
    """
    count, rows = statistics.shape
    header = _header((first, first + classes, rows, count), statistics.dtype, statistics.device)
    every = _gathered(torch.cat([header, statistics.reshape(-1)]), processes, group, who)
    headers = every[:, : header.numel()].reshape(-1).view(torch.int64).view(-1, HEADER)
    if statistics.device.type == "cpu":
        _check_ranges(headers.tolist(), who)
        check_labels(who, labels, int(headers[-1, 1]), ignore_index)
    parts = every[:, header.numel() :].reshape(-1, count, rows)
    return parts.to(torch.float64, copy=True), headers[-1, 1].clone()


def _check_ranges(headers: Sequence[Sequence[int]], who: str) -> None:
    expected = 0
    for rank, (first, last, *sizes) in enumerate(headers):
        if first != expected:
            raise ValueError(
                f"{who}: vocab_range is [{first}, {last}) on rank {rank}, expected one that begins with {expected}, "
                "behind the classes of the ranks before"
            )
        if sizes != headers[0][2:]:
            raise ValueError(
                f"{who}: input has {sizes[0]} rows on rank {rank}, expected {headers[0][2]}, as on rank 0, with equal"
                " options"
            )
        expected = last


def _gather_fake(statistics: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    every = statistics.new_empty((others[5], *statistics.shape), dtype=torch.float64)
    return every, statistics.new_empty((), dtype=torch.int64)


def _place_keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.dtype, ctx.place = inputs[0].dtype, [each for each in inputs if isinstance(each, int | str)]


def _gather_keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.dtype, ctx.place = inputs[0].dtype, inputs[5:8]


def _gather_backward(ctx: Any, slopes: Tensor, _: Any) -> tuple[Any, ...]:
    return shard_part(slopes, *ctx.place).to(ctx.dtype), *(None,) * 8


register(shard_gather, _gather, _gather_fake, _gather_backward, _gather_keep)
register(
    shard_part,
    lambda parts, rank, processes, group: parts[rank].clone(),
    lambda parts, *_: parts.new_empty(parts.shape[1:]),
    lambda ctx, slope: (shard_parts(slope, *ctx.place), None, None, None),
    _place_keep,
)
register(
    shard_parts,
    lambda part, rank, processes, group: _gathered(
        part.reshape(-1), processes, group, "a gradient of a gradient over shards"
    ).view(-1, *part.shape),
    lambda part, rank, processes, group: part.new_empty((processes, *part.shape)),
    lambda ctx, slopes: (shard_part(slopes, *ctx.place), None, None, None),
    _place_keep,
)


def _sum(x: Tensor, group: str) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group_of(group))
    return total


# A copy to all processes: its gradient is the sum over the processes, and the gradient of the sum is a copy.
register(
    shard_copy,
    lambda x, group: x.clone(),
    lambda x, group: torch.empty_like(x),
    lambda ctx, slope: (shard_sum(slope, *ctx.place), None),
    _place_keep,
)
register(
    shard_sum,
    _sum,
    lambda x, group: torch.empty_like(x),
    lambda ctx, slope: (shard_copy(slope, *ctx.place), None),
    _place_keep,
)
