"""Logits whose classes are split over the processes of a group: what all shards' rows come to, with one all-gather.

Each process finds four numbers for each of its rows (opgrad.ops.vocab_parallel) and gathers those of all. It puts them
together in the order of the ranks, in float64, so that every process has the same bits. The gradient is written in one
pass over the logits, in their dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opgrad.contract import graph_operators
from opgrad.interop.torch_tensors import execute

_statistics, _gradient = (graph_operators()[name] for name in ("cross_entropy_shard", "cross_entropy_shard_grad"))

HEADER = 4  # words before the statistics: the first class, the one behind the last, the rows, the statistics
# PyTorch 2.13 renamed it.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
CHUNK = 1 << 24  # elements of the logits that exist at a time where a linear layer makes them: 64 MiB of float32


@dataclass(frozen=True)
class Scale:
    """z = softcap * tanh(x / softcap) / temperature; without a softcap, 0, x / temperature."""

    softcap: float = 0.0
    temperature: float = 1.0

    def given(self) -> dict[str, float]:
        return {"softcap": self.softcap, "temperature": self.temperature}


@dataclass(frozen=True)
class Shard:
    """The classes of one process: those from `first` on, of all that the group has together."""

    group: Any
    first: int
    classes: int
    scale: Scale
    moment: bool

    def given(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> dict[str, Any]:
        """The arguments that both operators take."""
        return {"logits": logits, "labels": labels, "weight": weight, "first": self.first, **self.scale.given()}

    def statistics(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        found: Tensor = execute(_statistics, {**self.given(logits, labels, weight), "moment": self.moment})
        return found

    def gradient(self, logits: Tensor, labels: Tensor, weight: Tensor | None, factors: Tensor) -> Tensor:
        found: Tensor = execute(_gradient, {**self.given(logits, labels, weight), "factors": factors})
        return found


class Rows(NamedTuple):
    """Of each row, over the classes of all processes, in float64: differentiable, but for the largest logit.

    mean: of z under the softmax, 0 unless it was asked for. total: how many classes all processes have.
    """

    lse: Tensor
    target: Tensor
    sum: Tensor
    mean: Tensor
    largest: Tensor
    total: Any


# --- the collective --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _header(words: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The words as bits of a dtype; kept, since a copy to a device waits for it."""
    return torch.tensor(words, dtype=torch.int64, device=device).view(dtype)


def gathered(statistics: Tensor, shard: Shard) -> tuple[Tensor, Any]:
    """The statistics of all processes, [processes, statistics, rows] in float64, and the number of all classes.

    Raises ValueError on the CPU, on every process, unless the shards are neighbours that begin with class 0.
    """
    count, rows = statistics.shape
    words = shard.first, shard.first + shard.classes, rows, count
    header = _header(words, statistics.dtype, statistics.device)
    own = torch.cat([header, statistics.reshape(-1)])
    every = own.new_empty(dist.get_world_size(shard.group), own.numel())
    _gather(every.view(-1), own, group=shard.group)
    headers = every[:, : header.numel()].reshape(-1).view(torch.int64).view(-1, HEADER)
    total: Any = headers[-1, 1]
    if statistics.device.type == "cpu":
        _check_ranges(headers.tolist())
        total = int(total)
    return every[:, header.numel() :].reshape(-1, count, rows).double(), total


def _check_ranges(headers: Sequence[Sequence[int]]) -> None:
    expected = 0
    for rank, (first, last, *sizes) in enumerate(headers):
        if first != expected:
            raise ValueError(
                f"vocab_range is [{first}, {last}) on rank {rank}, expected one that begins with {expected}, "
                "behind the classes of the ranks before"
            )
        if sizes != headers[0][2:]:
            raise ValueError(
                f"input has {sizes[0]} rows on rank {rank}, expected {headers[0][2]}, as on rank 0, with equal options"
            )
        expected = last


def merged(parts: Tensor) -> tuple[Tensor, ...]:
    """m, log_s, the labels' logits, the sums and the means of z, of all processes' statistics in rank order."""
    m = parts[:, 0].amax(0)
    shift = torch.where(m == -torch.inf, 0.0, m)
    s, target, total, moment = (torch.zeros_like(m) for _ in range(4))
    for part in parts:
        scale = (part[0] - shift).exp()
        s = s + part[1] * scale
        target, total = target + part[2], total + part[3]
        if len(part) > HEADER:
            moment = moment + part[4] * scale
    return m, s.log(), target, total, moment / s


def _factors(gradients: Sequence[Tensor], m: Tensor, log_s: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """What the operator of the gradient takes for each row."""
    a, b, c, e = gradients
    return torch.stack([m, log_s, a + torch.where(e == 0, 0.0, e * (1 - mean)), b, c, e]).to(dtype)


# --- logits ----------------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _OfLogits(torch.autograd.Function):
    """What the rows of all shards come to, for logits that exist."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor | None, shard: Shard) -> Any:
        parts, total = gathered(shard.statistics(logits, labels, weight), shard)
        m, log_s, target, sums, mean = merged(parts)
        ctx.save_for_backward(logits, labels, weight, m, log_s, mean)
        ctx.shard = shard
        ctx.mark_non_differentiable(m)
        return m + log_s, target, sums, mean, m, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, labels, weight, m, log_s, mean = ctx.saved_tensors
        factors = _factors(gradients[:4], m, log_s, mean, _wide(logits.dtype))
        return ctx.shard.gradient(logits, labels, weight, factors), None, None, None


# --- a linear layer, whose logits never exist ------------------------------------------------------------------------


class _OfLinear(torch.autograd.Function):
    """The same for logits that a linear layer makes, a chunk of rows at a time, once more for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weight: Tensor | None, shard: Shard
    ) -> Any:
        found = [
            shard.statistics(torch.nn.functional.linear(x[rows], w, bias), labels[rows], weight)
            for rows in _chunks(len(x), len(w))
        ]
        parts, total = gathered(torch.cat(found, 1), shard)
        m, log_s, target, sums, mean = merged(parts)
        ctx.save_for_backward(x, w, bias, labels, weight, m, log_s, mean)
        ctx.shard = shard
        ctx.mark_non_differentiable(m)
        return m + log_s, target, sums, mean, m, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w, bias, labels, weight, m, log_s, mean = ctx.saved_tensors
        factors = _factors(gradients[:4], m, log_s, mean, _wide(x.dtype))
        sums, needs = _wide(w.dtype), ctx.needs_input_grad
        dx = torch.empty_like(x, dtype=sums) if needs[0] else None
        dw = torch.zeros_like(w, dtype=sums) if needs[1] else None
        dbias = torch.zeros_like(bias, dtype=sums) if bias is not None and needs[2] else None
        for rows in _chunks(len(x), len(w)):
            logits = torch.nn.functional.linear(x[rows], w, bias)
            dlogits = ctx.shard.gradient(logits, labels[rows], weight, factors[:, rows].contiguous())
            if dx is not None:
                dx[rows] = dlogits @ w
            if dw is not None:
                dw += dlogits.t() @ x[rows]
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=sums)
        if dx is not None:  # every process has a part of it
            dist.all_reduce(dx, group=ctx.shard.group)
        narrow = (each if each is None else each.to(like.dtype) for each, like in ((dx, x), (dw, w), (dbias, bias)))
        return *narrow, None, None, None


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    """At least one, so that without rows there are statistics, too."""
    step = max(CHUNK // max(classes, 1), 1)
    return (slice(start, start + step) for start in range(0, max(rows, 1), step))


_of_logits: Callable[..., Any] = _OfLogits.apply
_of_linear: Callable[..., Any] = _OfLinear.apply


def of_logits(logits: Tensor, labels: Tensor, weight: Tensor | None, shard: Shard) -> Rows:
    """What rows [N, classes of the shard] come to, labels [N] being classes of all shards, weight of this one."""
    return Rows(*_of_logits(logits, labels, weight, shard))


def of_linear(x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weight: Tensor | None, shard: Shard) -> Rows:
    """The same for the logits x [N, H] @ w [classes of the shard, H]^T + bias; dx is summed over the group."""
    return Rows(*cast(Any, _of_linear(x, w, bias, labels, weight, shard)))
