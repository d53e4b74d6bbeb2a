"""The statistics of a shard of the classes, and the gathering of those of all shards, as registered operators.

The gradient of every operator that communicates is its counterpart: the gradient of a value that all processes hold is
the same on all of them, and the gradient of a value of which each process holds a part is distributed like the value.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.contract import graph_operators
from opgrad.interop.torch_private import group_of
from opgrad.interop.torch_tensors import execute, is_transformed
from opgrad.torch.flops import count_flops
from opgrad.torch.formulas import wide
from opgrad.torch.losses.chunks import Layer, multiply
from opgrad.torch.losses.linear_operators import counted, kept_arguments, register
from opgrad.torch.losses.samples import scaled
from opgrad.torch.schema import LIBRARY, TAGS

_statistics_of, _gradient_of = (graph_operators()[name] for name in ("cross_entropy_shard", "cross_entropy_shard_grad"))

HEADER = 4  # words before the statistics: the first class, the end of the classes, the numbers of rows and statistics
EXACT = 1 << 24  # float32 represents all integers up to here
CHUNK = 1 << 24  # elements of the logits that exist at a time where a linear layer makes them: 64 MiB of float32

_CLASSES = "Tensor labels, Tensor? weight, SymInt first, float softcap, float temperature, bool moment, bool predicted"
_LAYER = f"Tensor x, Tensor w, Tensor? b, {_CLASSES}, SymInt? ignore_index, str group"
_SLOPES = "Tensor statistics, Tensor slopes"
for _written in (
    f"shard_statistics(Tensor logits, {_CLASSES}) -> Tensor",
    f"shard_statistics_grad(Tensor logits, {_CLASSES}, {_SLOPES}) -> Tensor",
    f"shard_linear_statistics({_LAYER}) -> Tensor",
    f"shard_linear_statistics_grad({_LAYER}, {_SLOPES}) -> (Tensor, Tensor, Tensor)",
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
shard_linear_statistics = _ops.shard_linear_statistics.default
shard_linear_statistics_grad = _ops.shard_linear_statistics_grad.default
shard_gather, shard_part, shard_parts = _ops.shard_gather.default, _ops.shard_part.default, _ops.shard_parts.default
shard_copy, shard_sum = _ops.shard_copy.default, _ops.shard_sum.default


# --- statistics of logits --------------------------------------------------------------------------------------------


def _bends(softcap: float, temperature: float) -> bool:
    return bool(softcap) or temperature != 1.0


def statistics_count(softcap: float, temperature: float, moment: bool, predicted: bool) -> int:
    """How many numbers each row has: m, s, z[label], sum(weight * z); moment; largest class, largest logit."""
    return 4 + moment + predicted * (1 + _bends(softcap, temperature))


def largest_class(logits: Tensor, first: int, bends: bool) -> list[Tensor]:
    """The first of the shard's classes with the largest logit, and that logit where z may have others equal to it."""
    dtype, (rows, classes) = wide(logits.dtype), logits.shape
    if not classes:
        return [logits.new_full((rows,), value, dtype=dtype) for value in (-1.0, -torch.inf)[: 1 + bends]]
    if first + classes > EXACT and dtype != torch.float64:
        raise ValueError(f"predicted_tokens of {first + classes} classes, expected at most {EXACT} but for float64")
    value, place = logits.detach().max(1)
    return [each.to(dtype) for each in (place + first, value)[: 1 + bends]]


def _statistics(
    logits: Tensor, labels: Tensor, weight: Tensor | None, first: int, softcap: float, temperature: float,
    moment: bool, predicted: bool,
) -> Tensor:  # fmt: skip
    given: dict[str, Any] = {"logits": logits.detach().contiguous(), "labels": labels.contiguous(), "weight": weight}
    given["first"] = first
    given |= {"softcap": softcap, "temperature": temperature, "moment": moment}
    found: Tensor = execute(_statistics_of, given)
    if predicted:
        more = largest_class(logits, first, _bends(softcap, temperature))
        found = torch.cat([found, torch.stack(more)])
    return found


def _statistics_fake(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(statistics_count(*others[3:7]), logits.shape[0], dtype=wide(logits.dtype))


def _statistics_grad(
    logits: Tensor, labels: Tensor, weight: Tensor | None, first: int, softcap: float, temperature: float,
    moment: bool, predicted: bool, statistics: Tensor, slopes: Tensor,
) -> Tensor:  # fmt: skip
    """By the operator of the gradient, whose exponentials are taken of z - m here: log_s is 0."""
    m, nothing = statistics[0], torch.zeros_like(statistics[0])
    by_moment = slopes[4] if moment else nothing
    both = slopes[1] + torch.where(by_moment == 0, 0.0, by_moment)
    m = torch.where(m == -torch.inf, 0.0, m)
    factors = torch.stack([m, nothing, both, slopes[2], slopes[3], by_moment])
    given: dict[str, Any] = {"logits": logits.detach().contiguous(), "labels": labels.contiguous(), "weight": weight}
    given["first"] = first
    given |= {"factors": factors.to(wide(logits.dtype)), "softcap": softcap, "temperature": temperature}
    found: Tensor = execute(_gradient_of, given)
    return found


def composed_statistics(
    logits: Tensor, labels: Tensor, weight: Tensor | None, first: int, softcap: float, temperature: float,
    moment: bool, predicted: bool, probabilities: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in PyTorch's functions.

    With probabilities q: sum(weight * q * z) in place of z[label], and sum(weight * q) behind the moment.
    """
    z, classes = scaled(logits, softcap, temperature), logits.shape[1]
    m = z.detach().amax(1) if classes else z.detach().new_full(z.shape[:1], -torch.inf)
    e = torch.exp(z - torch.where(m == -torch.inf, 0.0, m).unsqueeze(1))
    w = None if weight is None else weight.to(z.dtype)
    found = [m, e.sum(1)]
    if probabilities is not None:
        q = probabilities.to(z.dtype) if w is None else probabilities.to(z.dtype) * w
        found.append((q * torch.where(q == 0, 0.0, z)).sum(1))
    elif classes:
        own = (labels >= first) & (labels < first + classes)
        place = torch.where(own, labels - first, 0).long().unsqueeze(1)
        found.append(torch.where(own, z.gather(1, place).squeeze(1), 0.0))
    else:
        found.append(z.sum(1))
    found.append((z if w is None else z * w).sum(1))
    if moment:
        found.append((e * torch.where(e == 0, 0.0, z)).sum(1))
    if probabilities is not None:
        found.append(q.sum(1))
    if predicted:
        found += largest_class(logits, first, _bends(softcap, temperature))
    return torch.stack(found)


def _statistics_keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """All arguments, and the result; the group of a layer stands where it did."""
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    ctx.save_for_backward(*tensors, output)
    ctx.others = [*(None if isinstance(each, Tensor) else (each,) for each in inputs), None]


def _statistics_backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    logits, *given, statistics = kept_arguments(ctx)
    nothing = (None,) * len(given)
    if not torch.is_grad_enabled():
        return shard_statistics_grad(logits, *given, statistics, slopes), *nothing
    return *_differentiable(lambda x: composed_statistics(x, *given), [logits], slopes), *nothing


def _differentiable(make: Callable[..., Tensor], tensors: Sequence[Tensor], slopes: Tensor) -> Sequence[Tensor | None]:
    """The vector-Jacobian product of a composition, differentiable itself."""
    if is_transformed():
        vjp: Any = torch.func.vjp
        found: Sequence[Tensor] = vjp(make, *tensors)[1](slopes)
        return found
    # PyTorch's function takes five seconds for its imports.
    wanted = [each for each in tensors if each.requires_grad]
    grads = iter(torch.autograd.grad(make(*tensors), wanted, slopes, create_graph=True))
    return [next(grads) if each.requires_grad else None for each in tensors]


def _once(ctx: Any, *slopes: Any) -> Any:
    raise NotImplementedError(
        "this gradient is not differentiable; the operator that it belongs to is, any number of times"
    )


register(shard_statistics, _statistics, _statistics_fake, _statistics_backward, _statistics_keep)
register(shard_statistics_grad, _statistics_grad, lambda logits, *_: torch.empty_like(logits), _once)


# --- statistics of a linear layer, whose logits exist in chunks ------------------------------------------------------


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    """At least one, so that without rows there are statistics, too."""
    step = max(CHUNK // max(classes, 1), 1)
    return (slice(start, start + step) for start in range(0, max(rows, 1), step))


def _layer(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor) -> tuple[Layer, Tensor]:
    """The layer, and memory for the logits of a chunk."""
    layer = Layer(x.detach(), w.detach(), None if b is None else b.detach(), labels, None)
    rows = min(max(CHUNK // max(len(w), 1), 1), len(x))
    return layer, layer.x.new_empty(rows * len(w), dtype=layer.product)


def _linear_statistics(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, first: int, softcap: float,
    temperature: float, moment: bool, predicted: bool, ignore_index: int | None, group: str,
) -> Tensor:  # fmt: skip
    kept, count = counted(labels, ignore_index), len(x)
    if kept is not None:
        x, labels = x.index_select(0, kept), labels.index_select(0, kept)
    given = (weight, first, softcap, temperature, moment, predicted)
    layer, buffer = _layer(x, w, b, labels)
    of_chunk: Callable[[slice], Tensor] = lambda rows: layer.logits(rows, slice(None), buffer)  # noqa: E731
    found = torch.cat([_statistics(of_chunk(rows), labels[rows], *given) for rows in _chunks(len(x), len(w))], 1)
    return found if kept is None else found.new_zeros(len(found), count).index_copy_(1, kept, found)


def _linear_fake(x: Tensor, *others: Any) -> Tensor:
    count_flops()
    return x.new_empty(statistics_count(*others[5:9]), x.shape[0], dtype=wide(x.dtype))


def _linear_grad(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, first: int, softcap: float,
    temperature: float, moment: bool, predicted: bool, ignore_index: int | None, group: str,
    statistics: Tensor, slopes: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums over chunks in float32; dx summed over the group, since each process has a part of it."""
    kept, whole, sums = counted(labels, ignore_index), x, wide(x.dtype)
    if kept is not None:
        x, labels = x.index_select(0, kept), labels.index_select(0, kept)
        statistics, slopes = statistics.index_select(1, kept), slopes.index_select(1, kept)
    given = (weight, first, softcap, temperature, moment, predicted)
    dx, dw = torch.zeros_like(x, dtype=sums), torch.zeros_like(w, dtype=sums)
    db = x.new_zeros(0 if b is None else len(b), dtype=sums)
    layer, buffer = _layer(x, w, b, labels)
    for rows in _chunks(len(x), len(w)):
        logits = layer.logits(rows, slice(None), buffer)
        dlogits = _statistics_grad(logits, labels[rows], *given, statistics[:, rows], slopes[:, rows])
        multiply(dx[rows], dlogits, layer.w, False)
        multiply(dw, dlogits.t(), layer.x[rows], True)
        if b is not None:
            db += dlogits.sum(0, dtype=sums)
    if group:
        dist.all_reduce(dx, group=group_of(group))
    dx = dx.to(x.dtype)
    dx = dx if kept is None else torch.zeros_like(whole).index_copy_(0, kept, dx)
    return dx, dw.to(w.dtype), db.to(x.dtype)


def _linear_grad_fake(x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w), x.new_empty(0 if b is None else b.shape[0])


def _linear_backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    x, w, b, *given, statistics = kept_arguments(ctx)
    nothing, (*classes, _, group) = (None,) * len(given), given
    if not torch.is_grad_enabled():
        dx, dw, db = shard_linear_statistics_grad(x, w, b, *given, statistics, slopes)
        return dx, dw, None if b is None else db, *nothing

    def stored(*layer: Tensor) -> Tensor:
        own = shard_copy(layer[0], group) if group else layer[0]
        return composed_statistics(functional.linear(own, *layer[1:]), *classes)

    found = _differentiable(stored, [each for each in (x, w, b) if each is not None], slopes)
    return *found, *(None,) * (3 - len(found)), *nothing


register(shard_linear_statistics, _linear_statistics, _linear_fake, _linear_backward, _statistics_keep)
register(shard_linear_statistics_grad, _linear_grad, _linear_grad_fake, _once)


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
        _check_labels(labels, int(headers[-1, 1]), ignore_index, who)
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


def _check_labels(labels: Tensor, total: int, ignore_index: int | None, who: str) -> None:
    wrong = (labels < 0) | (labels >= total)
    wrong = wrong if ignore_index is None else wrong & (labels != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise ValueError(f"{who}: target is {int(labels[place])} at {place}, expected 0 to {total - 1}")


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
