"""Cross-entropy of classes that are shared out, and of a linear layer whose logits exist in chunks.

A part of the classes, a shard or a chunk, gives a few numbers for each row of logits (opgrad.ops.cross_entropy). Those
of all parts together give the row's results, which are those of `sample_losses`, and the factors of every part's
gradient. The logits of a chunk lie in a buffer, and so does their gradient.

Chunks by samples: a chunk has some rows of the input and all classes. Each chunk adds to the gradient of the layer's
weight, which is summed in float32, or in float64 for float64. Chunks by classes: a chunk has all rows and some
classes. Its logits are computed first for the log-sum-exp and again for the gradient. Then the gradient of these
classes' weights is one product, which is written once, and no float32 sum of the weight's size is needed. This takes
four products, chunks by samples take three.

A CPU without instructions for products in half precision takes 5 to 40 times as long for them as for float32. On such a
CPU parts of the layer are converted to float32 one after the other, and the logits are float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opgrad.call.libraries.torch_tensors import execute
from opgrad.cpu.compiler.target import host
from opgrad.ops import graph_operators
from opgrad.ops.reference.loss_options import LossOptions, bent
from opgrad.torch.losses.samples import LOSSES
from opgrad.torch.operators import OPERATORS, pulled_back, wide

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

    def given(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        """The arguments that both operators have."""
        part = {name: getattr(self, name) for name in ("weight", "first", "softcap", "temperature")}
        return {"logits": logits.detach().contiguous(), "labels": labels.contiguous(), **part}


def statistics_of(logits: Tensor, labels: Tensor, part: ClassPart) -> Tensor:
    """The statistics [numbers, rows] of logits [rows, classes of the part]."""
    found: Tensor = execute(_statistics_of, part.given(logits, labels) | {"moment": part.moment})
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
    more = {"factors": factors.to(wide(logits.dtype)), "out": out}
    found: Tensor = execute(_gradient_of, part.given(logits, labels) | more)
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
    z, classes = bent(torch, logits.to(wide(logits.dtype)), part.softcap, part.temperature), logits.shape[1]
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
    m, s, target, sums, *others = combined(parts, part, is_dense).unbind()
    lse = torch.where(s == 0, torch.nan, m + s.log())  # of a row whose logits are all -inf
    mean = others.pop(0) / s if part.moment else None
    mass = others.pop(0) if is_dense else None
    counts = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    wrong = counts & ((labels < 0) | (labels >= total))
    nll = torch.where(wrong, torch.nan, 1.0) * (lse - target)  # the gradient of a wrong label is NaN, too
    losses = nll
    if mass is not None:
        losses = mass * lse - target
    elif weight is not None:
        losses = weight.detach().double()[torch.where(counts & ~wrong, labels, 0).long()] * nll
    if isinstance(smoothing, Tensor) or smoothing:
        every = total.double() if isinstance(total, Tensor) else total  # an integer tensor gives float32
        of_all = total if weight is None else weight.detach().double().sum()
        losses = (1 - smoothing) * losses + smoothing / every * (lse * of_all - sums)
    entropy = None if mean is None else lse - mean
    floats = [
        None if value is None else torch.where(counts, value, 0.0).to(wide(dtype)) for value in (lse, -nll, entropy)
    ]
    predicted = None
    if part.predicted:
        # A part without classes has none; its largest logit is that of a row whose logits are all -inf.
        known = others[0].clamp(min=0)
        predicted = torch.where(counts & (total > 0), known, -1.0).long()
    return torch.where(counts, losses, 0.0), *floats, predicted


_losses_and_grad = LOSSES["sample_losses_and_grad"].op
_add = OPERATORS["in_place_accumulator"].op

LEAST_BUFFER = 32 << 20  # the least bytes of the buffer of logits
SHARE_OF_BUFFER = 0.11  # of the arguments and their gradients, if that is more: peak memory stays within 1.15 of these
FEWEST_ROWS = 64  # the fewest rows of a chunk: in products of fewer rows the processor waits for the weight
MOST_IN_FLOAT32 = 128 << 20  # bytes of the float32 sum of a half-precision gradient; above, classes are chunked
PART = 16 << 20  # bytes of the part that is converted to float32 at a time
# LLVM's names of the instructions that multiply numbers of a dtype.
INSTRUCTIONS = {
    torch.bfloat16: {"+avx512bf16", "+amx-bf16", "+bf16"},
    torch.float16: {"+avx512fp16", "+amx-fp16", "+fullfp16"},
}
Slopes = tuple[Tensor | None, Tensor | None, Tensor | None]  # gradients of x, w and b
OfLogits = Callable[[slice, slice, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """x: shape (N, H). w: (C, H). b: (C,) or None. labels: (N,). weight: (C,) or None, of classes."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    labels: Tensor
    weight: Tensor | None

    @property
    def number(self) -> torch.dtype:
        """The dtype of sums."""
        return wide(self.x.dtype)

    @property
    def product(self) -> torch.dtype:
        """The dtype of logits, in which the layer is multiplied."""
        return torch.float32 if not self.x.is_cuda and _is_slow(self.x.dtype) else self.x.dtype

    def logits(self, rows: slice, classes: slice, buffer: Tensor) -> Tensor:
        """The logits of these rows and classes, in the buffer."""
        x, w, product = self.x[rows].to(self.product), self.w[classes], self.product
        b = None if self.b is None else self.b[classes].to(product)
        out = buffer[: len(x) * len(w)].view(len(x), len(w))
        for part in _parts(w, product):
            of_part = w[part].to(product).t()
            if b is None:
                torch.mm(x, of_part, out=out[:, part])
            else:
                torch.addmm(b[part], x, of_part, out=out[:, part])
        return out


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions for products of a dtype, and those of float32 are faster."""
    return dtype in INSTRUCTIONS and INSTRUCTIONS[dtype].isdisjoint(host()[1].split(","))


def _parts(matrix: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of rows to convert to a dtype at a time; one slice of all rows if the dtype already matches."""
    rows, width = matrix.shape
    step = max(rows, 1) if matrix.dtype == dtype else max(PART // (4 * max(width, 1)), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


@dataclass(frozen=True)
class Chunks:
    """The division of the work: some rows with all classes at a time, or some classes with all rows."""

    by_classes: bool
    size: int

    def over(self, layer: Layer) -> Iterator[tuple[slice, slice]]:
        """The rows and the classes of each chunk."""
        every, total = slice(None), layer.w.shape[0] if self.by_classes else layer.x.shape[0]
        for start in range(0, total, self.size):
            some = slice(start, min(start + self.size, total))
            yield (every, some) if self.by_classes else (some, every)

    def logits(self, layer: Layer) -> Iterator[tuple[slice, slice, Tensor]]:
        """The rows, the classes and the logits of each chunk; the next one's overwrite them."""
        (n, _), c = layer.x.shape, layer.w.shape[0]
        size = n * min(self.size, c) if self.by_classes else min(self.size, n) * c
        buffer = layer.x.new_empty(size, dtype=layer.product)
        for rows, classes in self.over(layer):
            yield rows, classes, layer.logits(rows, classes, buffer)


def chunks_of(layer: Layer, rows: int | None, with_gradient: bool) -> Chunks:
    """The chunks for a layer; `rows` of a chunk if the caller says so."""
    (n, h), c, item, of_logits = layer.x.shape, layer.w.shape[0], layer.x.element_size(), layer.product.itemsize
    if rows is not None:
        return Chunks(False, rows)
    budget = max(LEAST_BUFFER, int(SHARE_OF_BUFFER * 2 * item * (c + n) * h))
    fitting = budget // (max(c, 1) * of_logits)
    sums = 4 * c * h if with_gradient and layer.number != layer.x.dtype else 0
    # A single chunk needs no float32 sum of the gradient and no product beside it, so the logits may use that memory.
    without = sums + c * h * item if 0 < sums <= MOST_IN_FLOAT32 else 0
    if n * c * of_logits <= budget + without:
        return Chunks(False, max(n, 1))
    finite = layer.b is None or layer.b.device.type != "cpu" or bool(torch.isfinite(layer.b).all())
    if finite and (fitting < FEWEST_ROWS or sums > MOST_IN_FLOAT32):
        return Chunks(True, max(budget // (4 * n * of_logits) // 16 * 16, 16))
    return Chunks(False, max(fitting // 16 * 16, 1))


# --- statistics ----------------------------------------------------------------------------------------------------


def statistics_of_layer(layer: Layer, part: ClassPart, chunks: Chunks) -> Tensor:
    """The statistics of the layer's logits; those of several chunks of classes in float64."""
    if not chunks.by_classes:
        found = [layer.x.new_empty(part.numbers, 0, dtype=layer.number)]
        found += [statistics_of(logits, layer.labels[rows], part) for rows, _, logits in chunks.logits(layer)]
        return torch.cat(found, 1)
    check_exact(part, len(layer.w), layer.number)
    every: list[Tensor] = []
    for _, classes, logits in chunks.logits(layer):
        chunk = statistics_of(logits, *_of_chunk(layer.labels, part, classes)).double()
        if part.predicted:
            chunk[4 + part.moment] += part.first + classes.start
        every = [combined(torch.stack([*every, chunk]), part)]
    return every[0]


def _of_chunk(labels: Tensor, part: ClassPart, classes: slice) -> tuple[Tensor, ClassPart]:
    """The labels and the part for some of the part's classes, counted from the first of them.

    So all chunks are calls of one signature, whose plan is kept.
    """
    weight = None if part.weight is None else part.weight[classes]
    return labels - (part.first + classes.start), part._replace(weight=weight, first=0)


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients_of(
    layer: Layer, needs: Sequence[bool], chunks: Chunks, of_logits: OfLogits, dx_dtype: torch.dtype | None = None
) -> Slopes:
    """The wanted gradients of x, w and b, where `of_logits` makes the gradient of a chunk's logits in their place.

    It is given the chunk's rows, classes and logits. dx_dtype: that of x's gradient; None: that of x.
    """
    # Gradients that are summed over chunks are summed in float32; those of a single product are written by it.
    # Without samples there is no chunk, and the sum is 0.
    several = len(list(chunks.over(layer))) != 1
    sums_x, sums_w = several and chunks.by_classes, several and not chunks.by_classes
    dx = _room_for(layer.x, dx_dtype or (layer.number if sums_x else layer.x.dtype), sums_x) if needs[0] else None
    dw = _room_for(layer.w, layer.number if sums_w else layer.w.dtype, sums_w) if needs[1] else None
    db = torch.zeros(len(layer.w), dtype=layer.number, device=layer.w.device) if needs[2] else None
    for rows, classes, logits in chunks.logits(layer):
        dlogits = of_logits(rows, classes, logits)
        if dx is not None:
            multiply(dx[rows], dlogits, layer.w[classes], sums_x)
        if dw is not None:
            multiply(dw[classes], dlogits.t(), layer.x[rows], sums_w)
        if db is not None:
            db[classes] += dlogits.sum(0, dtype=layer.number)
    dx = None if dx is None else dx.to(dx_dtype or layer.x.dtype)
    dw = None if dw is None else dw.to(layer.w.dtype)
    return dx, dw, None if db is None else db.to(layer.x.dtype if layer.b is None else layer.b.dtype)


def _room_for(like: Tensor, dtype: torch.dtype, adds: bool) -> Tensor:
    """Memory for a gradient, with zeros in it where chunks are added."""
    return (torch.zeros_like if adds else torch.empty_like)(like, dtype=dtype)


def multiply(out: Tensor, a: Tensor, b: Tensor, adds: bool) -> None:
    """out = a @ b, or out += a @ b where it `adds`, in the dtype of a."""
    if a.dtype == b.dtype and adds and out.dtype != a.dtype:
        # This takes one pass; PyTorch would first make a float32 copy of the product.
        execute(_add, {"buffer": out, "value": torch.mm(a, b), "out": out})
    elif out.dtype != a.dtype:
        for rows in _parts(out, a.dtype):
            wide_rows = out.new_empty(out[rows].shape, dtype=a.dtype)
            multiply(wide_rows, a[rows], b, False)
            out[rows] = wide_rows
    else:
        for part in _parts(b, a.dtype):
            if adds or part.start:
                out.addmm_(a[:, part], b[part].to(a.dtype))
            else:
                torch.mm(a[:, part], b[part].to(a.dtype), out=out)


def gradients_of_statistics(
    layer: Layer, part: ClassPart, factors: Tensor, needs: Sequence[bool], chunks: Chunks,
    dx_dtype: torch.dtype | None = None,
) -> Slopes:  # fmt: skip
    """The gradients of the layer, given the factors of cross_entropy_shard_grad."""

    def of_chunk(rows: slice, classes: slice, logits: Tensor) -> Tensor:
        labels, own = layer.labels[rows], part
        if chunks.by_classes:
            labels, own = _of_chunk(labels, part, classes)
        return gradient_of(logits, labels, own, factors[:, rows], logits)

    return gradients_of(layer, needs, chunks, of_chunk, dx_dtype)


def gradients(
    layer: Layer, dloss: Tensor, dlse_square: Tensor | None, options: LossOptions, needs: Sequence[bool], chunks: Chunks
) -> tuple[Tensor, Tensor, Slopes]:
    """The samples' losses and lse, and the gradients for those of the losses and of the squares of lse."""
    if chunks.by_classes:
        part = ClassPart.of(options, layer.weight)
        found = statistics_of_layer(layer, part, chunks)
        given = (layer.labels, part, len(layer.w), layer.weight, options, layer.number, options.label_smoothing)

        def samples(statistics: Tensor) -> tuple[Any, Any, Any]:
            loss, lse, *_ = samples_of_parts(statistics.unsqueeze(0), *given)
            return loss, lse, cast(Tensor, lse) ** 2

        loss, lse, _ = samples(found)
        (slopes,) = pulled_back(samples, [found], [dloss, None, dlse_square])
        factors = factors_of_slopes(found, slopes, part)
        return loss, lse, gradients_of_statistics(layer, part, factors, needs, chunks)
    number, count = layer.number, len(layer.x)
    every = [layer.x.new_empty(count, dtype=each) for each in (number, number, number, number, torch.int64)]

    def of_rows(rows: slice, classes: slice, logits: Tensor) -> Tensor:
        given = {"logits": logits, "labels": layer.labels[rows], "weight": layer.weight, **options.attributes}
        given |= {"dloss": dloss[rows], "dlse_square": None if dlse_square is None else dlse_square[rows]}
        execute(_losses_and_grad, given | {"out": (*[each[rows] for each in every], logits)})
        return logits

    return every[0], every[1], gradients_of(layer, needs, chunks, of_rows)
