"""A linear layer and its loss, computed in chunks: the logits of a chunk lie in a buffer, and so does their gradient.

Chunks by samples: a chunk has some rows of the input and all classes. Each chunk adds to the gradient of the layer's
weight, which is summed in float32, or in float64 for float64. Chunks by classes: a chunk has all rows and some
classes. Its logits are computed first for the log-sum-exp and again for the gradient. Then the gradient of these
classes' weights is one product, which is written once, and no float32 sum of the weight's size is needed. This takes
four products, chunks by samples take three.

A CPU without instructions for products in half precision takes 5 to 40 times as long for them as for float32. On such a
CPU parts of the layer are converted to float32 one after the other, and the logits are float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opgrad.cpu.compiler.target import host
from opgrad.interop.torch_tensors import execute
from opgrad.torch.formulas import wide
from opgrad.torch.losses.samples import LOSSES, Settings
from opgrad.torch.operators import OPERATORS

_plain, _plain_with_grad = (OPERATORS[f"softmax_cross_entropy_loss{name}"].op for name in ("_only", "_and_grad"))
_losses, _losses_and_grad = (LOSSES[f"sample_losses{name}"].op for name in ("", "_and_grad"))
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
Upstream = Mapping[str, Tensor]  # gradients of the samples' results, as sample_losses_and_grad takes them


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
    """The rows of a matrix that are converted to a dtype at a time; all of them where none has to be."""
    rows, width = matrix.shape
    step = max(rows, 1) if matrix.dtype == dtype else max(PART // (4 * max(width, 1)), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@dataclass(frozen=True)
class Chunks:
    """How the work is divided: some rows with all classes at a time, or some classes with all rows."""

    by_classes: bool
    size: int

    def over(self, layer: Layer) -> Iterator[slice]:
        total = layer.w.shape[0] if self.by_classes else layer.x.shape[0]
        for start in range(0, total, self.size):
            yield slice(start, min(start + self.size, total))

    def buffer(self, layer: Layer) -> Tensor:
        """A buffer for the logits of a chunk."""
        (n, _), c = layer.x.shape, layer.w.shape[0]
        size = n * min(self.size, c) if self.by_classes else min(self.size, n) * c
        return layer.x.new_empty(size, dtype=layer.product)


def chunks_of(layer: Layer, rows: int | None, with_gradient: bool) -> Chunks:
    """The chunks for a layer; `rows` of a chunk if the caller says so."""
    (n, h), c, item, of_logits = layer.x.shape, layer.w.shape[0], layer.x.element_size(), layer.product.itemsize
    if rows is not None:
        return Chunks(False, rows)
    budget = max(LEAST_BUFFER, int(SHARE_OF_BUFFER * 2 * item * (c + n) * h))
    fitting = budget // (c * of_logits)
    sums = 4 * c * h if with_gradient and layer.number != layer.x.dtype else 0
    # A single chunk needs no float32 sum of the gradient and no product beside it, so the logits may use that memory.
    without = sums + c * h * item if 0 < sums <= MOST_IN_FLOAT32 else 0
    if n * c * of_logits <= budget + without:
        return Chunks(False, max(n, 1))
    finite = layer.b is None or layer.b.device.type != "cpu" or bool(torch.isfinite(layer.b).all())
    if finite and (fitting < FEWEST_ROWS or sums > MOST_IN_FLOAT32):
        return Chunks(True, max(budget // (4 * n * of_logits) // 16 * 16, 16))
    return Chunks(False, max(fitting // 16 * 16, 1))


# --- results of samples --------------------------------------------------------------------------------------------


def new_results(n: int, like: Tensor) -> list[Tensor]:
    """loss, lse, log_prob, entropy and predicted of n samples."""
    floats = [torch.empty(n, dtype=wide(like.dtype), device=like.device) for _ in range(4)]
    return [*floats, torch.empty(n, dtype=torch.int64, device=like.device)]


def attributes(settings: Settings, **changed: Any) -> dict[str, Any]:
    """The operators' attributes by name, without ignore_index: ignored samples have been removed before."""
    _, smoothing, softcap, temperature = settings
    return {"label_smoothing": smoothing, "softcap": softcap, "temperature": temperature} | changed


def sample_results(layer: Layer, settings: Settings, chunks: Chunks) -> list[Tensor]:
    """The results of `sample_losses` for the layer's logits."""
    if chunks.by_classes:
        return Merged.of(layer, settings, chunks).results()
    buffer, found = chunks.buffer(layer), new_results(len(layer.x), layer.x)
    for rows in chunks.over(layer):
        logits = layer.logits(rows, slice(None), buffer)
        given = {"logits": logits, "labels": layer.labels[rows], "weight": layer.weight}
        execute(_losses, given | attributes(settings, out=tuple(each[rows] for each in found)))
    return found


@dataclass
class Merged:
    """The statistics of the samples over each slice of the classes, and over all classes."""

    layer: Layer
    settings: Settings
    slices: list[slice]
    lse_of: Tensor  # [slices, N], as `entropy_of`
    entropy_of: Tensor
    lse: Tensor
    entropy: Tensor
    spread: Tensor  # sum(weight * (lse - z)) / C
    below: Tensor  # lse - z of the labels
    predicted: Tensor

    @classmethod
    def of(cls, layer: Layer, settings: Settings, chunks: Chunks) -> "Merged":
        buffer, number, n = chunks.buffer(layer), layer.number, len(layer.x)
        slices = list(chunks.over(layer))
        lse_of, entropy_of, spread_of = (
            torch.empty(len(slices), n, dtype=number, device=layer.x.device) for _ in "123"
        )
        z_of_label, top = torch.zeros_like(lse_of[0]), torch.full_like(lse_of[0], float("-inf"))
        predicted = torch.full_like(layer.labels, -1, dtype=torch.int64)
        for place, classes in enumerate(slices):
            logits = layer.logits(slice(None), classes, buffer)
            inside, found = _in_slice(layer, classes), new_results(n, layer.x)
            labels = torch.where(inside, layer.labels - classes.start, 0)
            weight = None if layer.weight is None else layer.weight[classes]
            given = {"logits": logits, "labels": labels, "weight": weight}
            execute(_losses, given | _over_slice(settings, out=tuple(found)))
            spread_of[place], lse_of[place], log_prob, entropy_of[place], largest = found
            z_of_label = torch.where(inside, log_prob + lse_of[place], z_of_label)
            value = logits.gather(1, largest.clamp(min=0).unsqueeze(1)).squeeze(1).to(number)
            predicted = torch.where(value > top, largest + classes.start, predicted)
            top = torch.maximum(top, value)
        # A label out of range makes its sample NaN; on the CPU it has raised an error before.
        valid = (layer.labels >= 0) & (layer.labels < layer.w.shape[0])
        lse = torch.where(valid, lse_of.logsumexp(0), float("nan"))
        expected = ((lse_of - lse).exp() * (lse_of - entropy_of)).sum(0)
        spread = torch.zeros_like(lse)
        for place, classes in enumerate(slices):
            size, mass = classes.stop - classes.start, mass_of(layer, classes)
            spread += spread_of[place] * (size / layer.w.shape[0]) + (lse - lse_of[place]) * mass
        return cls(
            layer, settings, slices, lse_of, entropy_of, lse, lse - expected, spread, lse - z_of_label, predicted
        )

    def of_label(self) -> Tensor | float:
        """(1 - label_smoothing) * weight[label] of each sample."""
        share = 1 - self.settings[1]
        weight = self.layer.weight
        return share if weight is None else share * weight.to(self.lse.dtype)[self.layer.labels.long()]

    def results(self) -> list[Tensor]:
        smoothing = self.settings[1]
        loss = self.of_label() * self.below
        loss = loss + smoothing * self.spread if smoothing else loss
        return [loss, self.lse, -self.below, self.entropy, torch.where(self.lse.isnan(), -1, self.predicted)]

    def upstream(self, place: int, given: Upstream) -> dict[str, Tensor]:
        """The gradients of a slice's results for which the slice's kernel gives its part of the whole gradient.

        The kernel computes the softmax over the slice alone, whose log-sum-exp is smaller than that over all classes;
        `dlse` corrects for that. The labels' part of the gradient is passed as `dlog_prob`, in the slice with the
        label. The part of label smoothing is passed as `dloss`, as the kernel is called with a label_smoothing of 1.
        """
        layer, smoothing, classes = self.layer, self.settings[1], self.slices[place]
        lse, mine, entropy = self.lse, self.lse_of[place], self.entropy_of[place]
        zero = torch.zeros_like(lse)
        dloss, dlog_prob, dentropy = (given.get(name, zero) for name in ("dloss", "dlog_prob", "dentropy"))
        mass = self.of_label() + smoothing * mass_of(layer, slice(0, layer.w.shape[0]))
        constant = dloss * mass + given.get("dlse", zero) + 2 * lse * given.get("dlse_square", zero) - dlog_prob
        constant = constant + dentropy * ((lse - self.entropy) - (mine - entropy))
        ratio, share = (mine - lse).exp(), smoothing * (classes.stop - classes.start) / layer.w.shape[0]
        of_label = torch.where(_in_slice(layer, classes), dlog_prob - dloss * self.of_label(), 0)
        dlse = ratio * constant - dloss * smoothing * mass_of(layer, classes) + of_label
        return {"dloss": dloss * share, "dlse": dlse, "dlog_prob": of_label, "dentropy": dentropy * ratio}


def mass_of(layer: Layer, classes: slice) -> Tensor | float:
    """The sum of the weights of these classes, divided by the number of all classes."""
    count = layer.w.shape[0]
    if layer.weight is None:
        return (classes.stop - classes.start) / count
    return layer.weight[classes].sum(dtype=torch.float64).to(layer.number) / count


def _in_slice(layer: Layer, classes: slice) -> Tensor:
    return (layer.labels >= classes.start) & (layer.labels < classes.stop)


def _over_slice(settings: Settings, **more: Any) -> dict[str, Any]:
    """The attributes of a slice's kernels: label_smoothing is 1 or 0, as labels only count through `dlog_prob`."""
    return attributes(settings, **more) | {"label_smoothing": 1.0 if settings[1] else 0.0}


# --- gradients -----------------------------------------------------------------------------------------------------


class Gradients:
    """The wanted ones of the gradients of x, w and b, to which the chunks add."""

    def __init__(self, layer: Layer, needs: Sequence[bool], chunks: Chunks):
        self.layer, self.by_classes = layer, chunks.by_classes
        # Gradients that are summed over chunks are summed in float32; those of a single product are written by it.
        # Without samples there is no chunk, and the sum is 0.
        several = len(list(chunks.over(layer))) != 1
        x_dtype, w_dtype = (
            layer.number if several and by else layer.x.dtype for by in (self.by_classes, not self.by_classes)
        )
        make = torch.zeros_like if several else torch.empty_like
        self.dx = (make if self.by_classes else torch.empty_like)(layer.x, dtype=x_dtype) if needs[0] else None
        self.dw = (torch.empty_like if self.by_classes else make)(layer.w, dtype=w_dtype) if needs[1] else None
        self.db = torch.zeros(len(layer.w), dtype=layer.number, device=layer.w.device) if needs[2] else None
        self.several = several

    def add(self, dlogits: Tensor, rows: slice, classes: slice) -> None:
        """Add the gradients that follow from the gradient of the logits of these rows and classes."""
        x, w = self.layer.x[rows], self.layer.w[classes]
        if self.dx is not None:
            multiply(self.dx[rows], dlogits, w, self.several and self.by_classes)
        if self.dw is not None:
            multiply(self.dw[classes], dlogits.t(), x, self.several and not self.by_classes)
        if self.db is not None:
            self.db[classes] += dlogits.sum(0, dtype=self.layer.number)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of the layer."""
        layer = self.layer
        b_dtype = layer.b.dtype if layer.b is not None else layer.x.dtype
        dx, dw, db = self.dx, self.dw, self.db
        self.dx = self.dw = self.db = None
        return (
            None if dx is None else dx.to(layer.x.dtype),
            None if dw is None else dw.to(layer.w.dtype),
            None if db is None else db.to(b_dtype),
        )


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


def gradients(
    layer: Layer, upstream: Upstream, settings: Settings, needs: Sequence[bool], chunks: Chunks
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The samples' results, and the gradients for those of these results."""
    if chunks.by_classes:
        return _gradients_by_classes(layer, upstream, settings, needs, chunks)
    buffer, found, sums = chunks.buffer(layer), new_results(len(layer.x), layer.x), Gradients(layer, needs, chunks)
    for rows in chunks.over(layer):
        logits = layer.logits(rows, slice(None), buffer)
        given = {"logits": logits, "labels": layer.labels[rows], "weight": layer.weight}
        given |= {name: each[rows] for name, each in upstream.items()}
        out = (*[each[rows] for each in found], logits)
        execute(_losses_and_grad, given | attributes(settings, out=out))
        sums.add(logits, rows, slice(None))
    return found, sums.results()


def _gradients_by_classes(
    layer: Layer, upstream: Upstream, settings: Settings, needs: Sequence[bool], chunks: Chunks
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    merged = Merged.of(layer, settings, chunks)
    buffer, sums, scratch = chunks.buffer(layer), Gradients(layer, needs, chunks), new_results(len(layer.x), layer.x)
    for place, classes in enumerate(merged.slices):
        logits = layer.logits(slice(None), classes, buffer)
        labels = torch.where(_in_slice(layer, classes), layer.labels - classes.start, 0)
        weight = None if layer.weight is None or not settings[1] else layer.weight[classes]
        given = {"logits": logits, "labels": labels, "weight": weight} | merged.upstream(place, upstream)
        execute(_losses_and_grad, given | _over_slice(settings, out=(*scratch, logits)))
        sums.add(logits, slice(None), classes)
    return merged.results(), sums.results()


def plain_gradients(
    layer: Layer, factor: Tensor | float, needs: Sequence[bool], chunks: Chunks
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """factor * the loss of each sample without options, and the gradients of the sum of these, by the fused kernel.

    The factor is multiplied into the class weights, so that the gradient is multiplied by it before it is rounded.
    """
    ones = torch.ones(len(layer.w), dtype=layer.number, device=layer.w.device)
    weight = (ones if layer.weight is None else layer.weight.to(layer.number)) * factor
    buffer, sums = chunks.buffer(layer), Gradients(layer, needs, chunks)
    loss = torch.empty(len(layer.x), dtype=layer.number, device=layer.x.device)
    for rows in chunks.over(layer):
        logits = layer.logits(rows, slice(None), buffer)
        given = {"logits": logits, "labels": layer.labels[rows], "weight": weight, "reduction": "none"}
        given |= {"out_dtype": (loss.dtype, logits.dtype), "out": (loss[rows], logits)}
        execute(_plain_with_grad, given)
        sums.add(logits, rows, slice(None))
    return loss, sums.results()
