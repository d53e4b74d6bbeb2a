"""Cross-entropy of classes that are shared out: statistics of each part, and how they are combined.

A part of the classes, a shard or a chunk, gives a few numbers for each row of logits (opgrad.ops.vocab_parallel). Those
of all parts together give the row's results, which are those of `sample_losses`, and the factors of every part's
gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opgrad.call.libraries.torch_tensors import execute
from opgrad.ops import graph_operators
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.derivative import wide
from opgrad.torch.losses.samples import scaled

_statistics_of, _gradient_of = (graph_operators()[name] for name in ("cross_entropy_shard", "cross_entropy_shard_grad"))
# The arguments of the operators of a part's statistics, and of their gradients, as schemas write them.
CLASSES = "Tensor labels, Tensor? weight, SymInt first, float softcap, float temperature, bool moment, bool predicted"
SLOPES = "Tensor statistics, Tensor slopes"
EXACT = 1 << 24  # float32 represents all integers up to here


class ClassPart(NamedTuple):
    """A part of the classes, and what its statistics are of.

    weight: of its classes. first: the number of its first class. moment: whether sum(exp(z - m) * z) is one of them,
    predicted: whether the class with the largest logit is.
    """

    weight: Tensor | None
    first: int
    softcap: float
    temperature: float
    moment: bool
    predicted: bool

    @classmethod
    def of(cls, options: LossOptions, weight: Tensor | None, first: int = 0) -> "ClassPart":
        """The statistics of these classes that the wanted results need."""
        predicted = bool({"predicted_tokens", "token_accuracy"}.intersection(options.returned))
        moment = "entropy" in options.returned
        weight = None if weight is None else weight.detach()
        return cls(weight, first, options.softcap, options.temperature, moment, predicted)

    @property
    def bends(self) -> bool:
        return bool(self.softcap) or self.temperature != 1.0

    @property
    def numbers(self) -> int:
        """The count of numbers of a row: m, s, z[label], sum(weight * z); moment; largest class, largest logit."""
        return 4 + self.moment + self.predicted * (1 + self.bends)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that both operators have."""
        names = ("weight", "first", "softcap", "temperature")
        return {name: getattr(self, name) for name in names}


def statistics_of(logits: Tensor, labels: Tensor, part: ClassPart) -> Tensor:
    """The statistics [numbers, rows] of logits [rows, classes of the part]."""
    given = {"logits": logits.detach().contiguous(), "labels": labels.contiguous(), "moment": part.moment}
    found: Tensor = execute(_statistics_of, given | part.attributes)
    if not part.predicted:
        return found
    largest = largest_class(logits, part)
    if not part.bends:
        found[0] = largest.pop()  # where a NaN is the largest logit
    return torch.cat([found, torch.stack(largest)])


def largest_class(logits: Tensor, part: ClassPart) -> list[Tensor]:
    """The first of the part's classes with a NaN or the largest logit, and that logit."""
    dtype, (rows, classes) = wide(logits.dtype), logits.shape
    if not classes:
        return [logits.new_full((rows,), value, dtype=dtype) for value in (-1.0, -torch.inf)]
    check_exact(part, classes, dtype)
    value, index = logits.detach().max(1)
    return [each.to(dtype) for each in (index + part.first, value)]


def check_exact(part: ClassPart, classes: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless a statistic of this dtype can be the number of any of the part's classes."""
    if part.predicted and part.first + classes > EXACT and dtype != torch.float64:
        raise ValueError(
            f"predicted_tokens of {part.first + classes} classes, expected at most {EXACT} but for float64"
        )


def gradient_of(logits: Tensor, labels: Tensor, part: ClassPart, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of a part's logits, for the factors of cross_entropy_shard_grad."""
    given = {"logits": logits.detach().contiguous(), "labels": labels.contiguous(), "out": out}
    found: Tensor = execute(_gradient_of, given | part.attributes | {"factors": factors.to(wide(logits.dtype))})
    return found


def factors_of_slopes(statistics: Tensor, slopes: Tensor, part: ClassPart) -> Tensor:
    """The factors for gradients of a part's own statistics: exponentials are taken of z - m, log_s is 0."""
    m, nothing = finite(statistics[0]), torch.zeros_like(statistics[0])
    by_moment = slopes[4] if part.moment else nothing
    both = slopes[1] + torch.where(by_moment == 0, 0.0, by_moment)
    return torch.stack([m, nothing, both, slopes[2], slopes[3], by_moment])


def finite(m: Tensor) -> Tensor:
    """The offset of the exponentials: the largest logit, 0 where all are -inf."""
    return torch.where(m == -torch.inf, 0.0, m)


def composed_statistics(logits: Tensor, labels: Tensor, part: ClassPart, probabilities: Tensor | None = None) -> Tensor:
    """`statistics_of` in PyTorch's functions.

    With probabilities q: sum(weight * q * z) in place of z[label], and sum(weight * q) behind the moment.
    """
    z, classes = scaled(logits, part.softcap, part.temperature), logits.shape[1]
    m = z.detach().amax(1) if classes else z.detach().new_full(z.shape[:1], -torch.inf)
    e = torch.exp(z - finite(m).unsqueeze(1))
    w = None if part.weight is None else part.weight.to(z.dtype)
    found = [m, e.sum(1)]
    if probabilities is not None:
        q = probabilities.to(z.dtype) if w is None else probabilities.to(z.dtype) * w
        found.append((q * torch.where(q == 0, 0.0, z)).sum(1))
    elif classes:
        own = (labels >= part.first) & (labels < part.first + classes)
        index = torch.where(own, labels - part.first, 0).long().unsqueeze(1)
        found.append(torch.where(own, z.gather(1, index).squeeze(1), 0.0))
    else:
        found.append(z.sum(1))
    found.append((z if w is None else z * w).sum(1))
    if part.moment:
        found.append((e * torch.where(e == 0, 0.0, z)).sum(1))
    if probabilities is not None:
        found.append(q.sum(1))
    if part.predicted:
        found += largest_class(logits, part)[: 1 + part.bends]
    return torch.stack(found)


# --- all parts together ----------------------------------------------------------------------------------------------


def combined(parts: Tensor, part: ClassPart, is_dense: bool = False) -> Tensor:
    """The statistics [numbers, rows] of all classes from those of the parts [parts, numbers, rows], in their order."""
    m = parts[:, 0].detach().amax(0)
    shift, end = finite(m), 4 + part.moment
    scales = [(each[0].detach() - shift).exp() for each in parts.unbind()]
    found = [m]
    for index in range(1, end + is_dense):
        sums = torch.zeros_like(m)
        for each, scale in zip(parts.unbind(), scales, strict=True):
            sums = sums + (each[index] * scale if index in (1, 4) and index < end else each[index])
        found.append(sums)
    if part.predicted:
        largest = parts[:, end + is_dense + 1 if part.bends else 0].detach()
        which = largest.max(0)[1].unsqueeze(0)  # the first part of those with the largest logit
        found += [each.detach().gather(0, which).squeeze(0) for each in parts[:, end + is_dense :].unbind(1)]
    return torch.stack(found)


class RowStats(NamedTuple):
    """Of each row, over all classes, in float64: differentiable, but for the predicted class.

    target: the label's z, or sum(weight * q * z) for probabilities q, with mass = sum(weight * q). sum: of weight * z.
    mean: of z under the softmax. mean, mass and predicted: None where nothing asks for them. total: how many classes.
    """

    lse: Tensor
    target: Tensor
    sum: Tensor
    mean: Tensor | None
    mass: Tensor | None
    predicted: Tensor | None
    total: Tensor | int


def rows_of(statistics: Tensor, part: ClassPart, total: Tensor | int, is_dense: bool = False) -> RowStats:
    """The results of each row, from the statistics of all classes in float64."""
    m, s, target, sums, *others = statistics.unbind()
    lse = torch.where(s == 0, torch.nan, m + s.log())  # of a row whose logits are all -inf
    mean = others.pop(0) / s if part.moment else None
    mass = others.pop(0) if is_dense else None
    return RowStats(lse, target, sums, mean, mass, others[0] if part.predicted else None, total)


def samples_of_parts(
    parts: Tensor, labels: Tensor, part: ClassPart, total: Tensor | int, weight: Tensor | None, options: LossOptions,
    dtype: torch.dtype, smoothing: Any = 0.0, is_dense: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of `sample_losses`, from the statistics of all parts; None for a result that is not wanted.

    Statistics of samples that do not count are set aside first, so that their gradients are 0.
    """
    ignored = None if is_dense else options.ignore_index
    if ignored is not None:
        silent = torch.zeros_like(parts[:, :1])
        silent = torch.cat([silent, silent + 1, *[silent] * (parts.shape[1] - 2)], 1)
        parts = torch.where(labels == ignored, silent, parts)
    rows = rows_of(combined(parts, part, is_dense), part, total, is_dense)
    return samples_of(rows, labels, weight, ignored, smoothing, dtype)


def samples_of(
    rows: RowStats, labels: Tensor, weight: Tensor | None, ignore_index: int | None, smoothing: Any, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """The results of `sample_losses`: loss in float64, lse, log_prob, entropy and the predicted class.

    weight: of all classes. smoothing: how much of each sample's probability all classes share. Entropy and predicted
    class are None where they are not asked for.
    """
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    wrong = counts & ((labels < 0) | (labels >= rows.total))
    target = torch.where(wrong, torch.nan, rows.target)
    losses = rows.lse - target
    if rows.mass is not None:
        losses = rows.mass * rows.lse - target
    elif weight is not None:
        losses = weights_of(labels, weight, counts & ~wrong) * losses
    if isinstance(smoothing, Tensor) or smoothing:
        losses = (1 - smoothing) * losses + share_of(smoothing, rows) * (rows.lse * mass_of(weight, rows) - rows.sum)
    entropy = None if rows.mean is None else rows.lse - rows.mean
    floats = [
        None if value is None else torch.where(counts, value, 0.0).to(wide(dtype))
        for value in (rows.lse, target - rows.lse, entropy)
    ]
    predicted = None
    if rows.predicted is not None:
        # A part without classes has none; its largest logit is that of a row whose logits are all -inf.
        known = rows.predicted.clamp(min=0)
        predicted = torch.where(counts & (rows.total > 0), known, -1.0).long()
    return torch.where(counts, losses, 0.0), *floats, predicted


def weights_of(labels: Tensor, weight: Tensor, valid: Tensor) -> Tensor:
    """The weight of each label's class."""
    return weight.detach().double()[torch.where(valid, labels, 0).long()]


def mass_of(weight: Tensor | None, rows: RowStats) -> Any:
    """The sum of the weights of all classes."""
    return rows.total if weight is None else weight.detach().double().sum()


def share_of(smoothing: Any, rows: RowStats) -> Any:
    """The share of each class in label smoothing; a number beside an integer tensor would be float32."""
    return smoothing / (rows.total.double() if isinstance(rows.total, Tensor) else rows.total)


def factors_of_results(
    statistics: Tensor, rows: RowStats, labels: Tensor, weight: Tensor | None, ignore_index: int | None,
    smoothing: float, dloss: Tensor, dlse_square: Tensor | None,
) -> Tensor:  # fmt: skip
    """The factors of every part's gradient, for gradients of the samples' losses and of the squares of lse.

    The losses are made of lse, of the label's z and of sum(weight * z), and so are their gradients.
    """
    valid = (labels >= 0) & (labels < rows.total)
    of_label = (1 - smoothing) * (1.0 if weight is None else weights_of(labels, weight, valid)) * dloss
    of_label = torch.where(valid, of_label, torch.nan)
    of_all = share_of(smoothing, rows) * dloss
    by_lse = of_label + of_all * mass_of(weight, rows)
    if dlse_square is not None:
        by_lse = by_lse + 2 * rows.lse * dlse_square
    nothing = torch.zeros_like(by_lse)
    found = torch.stack([finite(statistics[0]), statistics[1].log(), by_lse, -of_label, -of_all, nothing])
    return found if ignore_index is None else torch.where(labels == ignore_index, 0.0, found)
