"""A linear layer and cross-entropy in one: the logits are never stored as a whole.

An eager call whose loss is one number computes the gradients in the forward pass, while the logits exist, and returns
them in the backward pass. All other calls use two registered operators: one for the samples' results, and one for the
gradients of the layer, which computes the logits again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.interop import torch_private
from opgrad.interop.torch_private import is_batched
from opgrad.interop.torch_tensors import PLAIN
from opgrad.torch.autocast import narrows_products
from opgrad.torch.flops import count_flops
from opgrad.torch.formulas import over
from opgrad.torch.losses.chunks import Chunks, Layer, chunks_of, gradients, plain_gradients
from opgrad.torch.losses.linear_operators import NAME, layer_of, linear_samples, rows_of_all
from opgrad.torch.losses.logits import of_options as of_logits
from opgrad.torch.losses.options import IGNORED, LossOptions, divisors, read_options, shifted
from opgrad.torch.losses.reduced import reduced
from opgrad.torch.losses.samples import settings
from opgrad.torch.losses.shards import is_class_sharded
from opgrad.torch.operators import is_exported
from opgrad.torch.schema import is_recording


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: Any = None, lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | Tensor | None = None, return_z_loss: bool = False,
    return_lse: bool = False, return_log_prob: bool = False, return_entropy: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of linear(input, linear_weight, linear_bias), whose logits are computed a chunk at a time.

    input: shape (H,), (N, H) or (…, H); float32, float64, float16 or bfloat16.
    linear_weight: shape (C, H), or (C, D1, …, Dk, H) with input of shape (N, H); input's dtype.
    target: classes in [0, C) of shape (), (N,) or (…), or (N, D1, …, Dk); int32, int64 or uint8. Or probabilities of
        the logits' shape, floating-point: the logits are stored for these, and for k > 0.
        DTensors that are sharded along the classes: as by vocab_parallel_linear_cross_entropy.
    linear_bias: shape (C,), or (C, D1, …, Dk); None: none.
    ignore_index: samples with this class have loss and gradient 0, do not count, and their logits are not computed;
        None: -100. On CUDA that waits for their number.
    options: torch.nn.LinearCrossEntropyOptions, whose batch_chunk_size is how many rows a chunk has; None: chosen so
        that peak memory stays close to that of the arguments and their gradients.
    weight, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items, return_…: as for
        cross_entropy. shift: as there, along the last axis of target.

    Returns the loss, in the dtype of the logits, float32 under autocast; with other results asked for, a
    CrossEntropyOutput. Differentiable any number of times, of which the first needs no logits. Gradients are summed
    over chunks in float32, or float64 for float64, and written once.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option or class.

    Formula: cross_entropy(input @ linear_weight.T + linear_bias, target). Source:
    torch.nn.functional.linear_cross_entropy.
    """
    returned = {
        "z_loss": return_z_loss, "lse": return_lse, "log_prob": return_log_prob, "entropy": return_entropy,
        "token_accuracy": return_token_accuracy, "predicted_tokens": return_predicted_tokens,
    }  # fmt: skip
    ignored = IGNORED if ignore_index is None else ignore_index
    bent = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    chosen = read_options(NAME, reduction, ignored, *bent, **returned)
    if isinstance(target, Tensor) and target.is_floating_point() and ignore_index is not None:
        raise ValueError(f"{NAME}: ignore_index is {ignore_index}, expected none for class probabilities")
    if options is not None and not hasattr(options, "batch_chunk_size"):
        raise TypeError(f"{NAME}: options is {type(options).__name__}, expected torch.nn.LinearCrossEntropyOptions")
    rows = None if options is None else options.batch_chunk_size
    return of_options(input, linear_weight, target, linear_bias, weight, chosen, shift, rows)


def of_options(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    chosen: LossOptions, shift: int = 0, rows: int | None = None,
) -> Any:  # fmt: skip
    """linear_cross_entropy with its options read. rows: of a chunk; None: chosen here."""
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}
    _check(tensors | {name: each for name, each in optional.items() if each is not None})
    if is_class_sharded(linear_weight, 0) and linear_weight.dim() == 2:
        from opgrad.torch.losses import vocab_parallel

        return vocab_parallel.of_dtensor_layer(input, linear_weight, linear_bias, target, weight, chosen, shift)
    if target.is_floating_point() or linear_weight.dim() != 2 or not input.numel() or not linear_weight.numel():
        return _by_logits(input, linear_weight, target, linear_bias, weight, chosen, shift)
    labels = shifted(NAME, target.int() if target.dtype == torch.uint8 else target, shift, chosen.ignore_index)
    if _needs_composition([each for each in (*tensors.values(), *optional.values()) if each is not None]):
        return _by_logits(input, linear_weight, labels, linear_bias, weight, chosen, 0)
    shape = labels.shape
    x, w, b, dtype = _autocast(input.reshape(-1, input.shape[-1]), linear_weight, linear_bias)
    found = _loss(x, w, b, labels.reshape(-1), weight, chosen, chosen.dtype or dtype, rows)
    return _in_shape(found, shape, chosen)


# --- checks --------------------------------------------------------------------------------------------------------


def _check(tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{NAME}: {name} is {type(value).__name__}, expected a PyTorch tensor")
    x, w, target = tensors["input"], tensors["linear_weight"], tensors["target"]
    if not x.dim():
        raise ValueError(f"{NAME}: input has 0 dimensions, expected at least 1")
    if w.dim() < 2:
        raise ValueError(f"{NAME}: linear_weight has {w.dim()} dimensions, expected at least 2")
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{NAME}: input has {x.shape[-1]} features, expected {w.shape[-1]}, those of linear_weight")
    if w.dim() > 2 and x.dim() != 2:
        raise ValueError(f"{NAME}: input has {x.dim()} dimensions, expected 2 beside a linear_weight of {w.dim()}")
    expected = (*x.shape[:-1], *w.shape[1:-1])
    dense = (*x.shape[:-1], *w.shape[:-1])
    if target.shape != (dense if target.is_floating_point() else expected):
        shape = dense if target.is_floating_point() else expected
        raise ValueError(f"{NAME}: target has shape {tuple(target.shape)}, expected {shape}")
    if not target.is_floating_point() and target.dtype not in (torch.int32, torch.int64, torch.uint8):
        raise TypeError(f"{NAME}: target has dtype {target.dtype}, expected int32, int64 or uint8, or a float")
    for name, shape in (("linear_bias", w.shape[:-1]), ("weight", w.shape[:1])):
        value = tensors.get(name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{NAME}: {name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    weight = tensors.get("weight")
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{NAME}: weight requires grad, and the loss has no gradient for it: detach it")
    for name, value in tensors.items():
        if value.device != x.device:
            raise ValueError(f"{NAME}: {name} is on {value.device}, expected {x.device}, the device of input")
        if name in ("linear_weight", "linear_bias") and value.dtype != x.dtype and not narrows_products(x):
            raise TypeError(f"{NAME}: {name} has dtype {value.dtype}, expected {x.dtype}, the dtype of input")


def _autocast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """The layer as autocast wants it, and the dtype of the loss."""
    if not narrows_products(x):
        return x, w, b, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), torch.float32


def _needs_composition(tensors: Sequence[Tensor]) -> bool:
    """Whether a transformation is active that must see the operations inside the loss: any of them except grad."""
    if is_recording() or is_exported() or torch_private.is_forward_mode():
        return True
    if torch.compiler.is_compiling():
        return False
    if any(type(each) not in PLAIN and not torch_private.is_wrapped(each) for each in tensors):
        return True
    return not torch_private.are_gradients_alone()


def _by_logits(
    input: Tensor,
    w: Tensor,
    target: Tensor,
    b: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    shift: int,
) -> Any:
    """The loss of logits that are stored."""
    logits = functional.linear(input, w.flatten(0, -2), None if b is None else b.flatten())
    if w.dim() > 2:
        logits = logits.reshape(*input.shape[:-1], *w.shape[:-1])
    elif logits.dim() > 2:
        logits = logits.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    return of_logits(logits, target, weight, options, shift)


# --- the loss of rows ----------------------------------------------------------------------------------------------


def _loss(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    rows: int | None,
) -> Any:
    """The loss of rows of input, with fields in the rows' shape."""
    needs = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w, b))
    one_number = options.reduction != "none" and not options.returned
    watched = torch.compiler.is_compiling() or torch_private.transforms_active()
    if needs and one_number and not watched and not torch_private.dispatch_modes():
        return _fused(x, w, b, labels, weight, options, dtype, rows)
    if not torch.compiler.is_compiling():
        count_flops()
    found = linear_samples(x, w, b, labels, weight, *settings(options), rows)
    return reduced(found, labels, weight, False, options, dtype)


def _in_shape(found: Any, shape: torch.Size, options: LossOptions) -> Any:
    """The fields of samples in the shape of target."""
    if isinstance(found, Tensor):
        return found.reshape(shape) if options.reduction == "none" else found
    of_samples = {"lse", "log_prob", "entropy", "predicted_tokens"}
    of_samples |= {"loss", "z_loss"} if options.reduction == "none" else set()
    fields = found._asdict()
    return type(found)(**{
        name: each.reshape(shape) if each is not None and name in of_samples else each for name, each in fields.items()
    })  # fmt: skip


# --- one number, with its gradients --------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    """The reduced loss, whose gradients are computed with it and handed out in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, w, b, labels, weight, options, dtype, rows = arguments
        ctx.save_for_backward(x, w, b, labels, weight)
        ctx.options = options, dtype, rows
        total, ctx.grads, ctx.later = _total(x, w, b, labels, weight, options, rows, ctx.needs_input_grad)
        return (total * ctx.later).to(dtype)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        nothing, grads = (None,) * 5, ctx.grads
        if torch.is_grad_enabled():
            return *_differentiable(ctx, dloss), *nothing
        if grads is None:
            options, _, rows = ctx.options
            x, w, b, labels, weight = ctx.saved_tensors
            _, grads, _ = _total(x, w, b, labels, weight, options, rows, ctx.needs_input_grad)
        factor = dloss * ctx.later
        if is_batched(dloss):
            return *(None if each is None else each * factor for each in grads), *nothing
        # The gradients are returned without keeping a reference, so that autograd takes over their memory; another
        # backward pass computes them again.
        ctx.grads = None
        if factor.is_cuda or float(factor) != 1.0:
            for each in grads:
                if each is not None:  # a 0-dimensional factor on CUDA would be rounded to its dtype first
                    each.mul_(factor.reshape([1] * each.dim()))
        return *grads, *nothing


_fused: Callable[..., Tensor] = _Fused.apply


def _total(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    rows: int | None,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], Tensor | float]:
    """The loss in float64 and its gradients, both without a common factor, and that factor."""
    layer, kept = layer_of(x, w, b, labels, weight, options.ignore_index)
    by_weight, by_count = divisors(labels, weight, False, options, layer.number)
    inverse, of_square = over(by_weight), options.lse_square_scale * over(by_count)
    now: Any = inverse
    later: Any = 1.0
    if x.dtype == torch.float16:  # a mean's gradient would underflow float16; see cross_entropy
        now, later, of_square = 1.0, inverse, of_square * by_weight
    chunks = chunks_of(layer, rows, with_gradient=True)
    total, (dx, dw, db) = _with_gradients(layer, options, now, of_square, needs[:3], chunks)
    return total, [rows_of_all(dx, kept, len(x)), dw, db], later


def _with_gradients(
    layer: Layer,
    options: LossOptions,
    now: Tensor | float,
    of_square: Tensor | float,
    needs: Sequence[bool],
    chunks: Chunks,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """now * sum(loss) + of_square * sum(lse**2) in float64, and its gradients."""
    if options.is_plain and not chunks.by_classes:
        loss, grads = plain_gradients(layer, now, needs, chunks)
        return loss.sum(dtype=torch.float64), grads
    upstream = {"dloss": _of_each(layer, now)}
    if options.lse_square_scale:
        upstream["dlse_square"] = _of_each(layer, of_square)
    (loss, lse, *_), grads = gradients(layer, upstream, settings(options), needs, chunks)
    total = loss.sum(dtype=torch.float64) * now
    if options.lse_square_scale:
        total = total + (lse * lse).sum(dtype=torch.float64) * of_square
    return total, grads


def _of_each(layer: Layer, value: Tensor | float) -> Tensor:
    """A number, expanded to all samples."""
    made = torch.empty(len(layer.x), dtype=layer.number, device=layer.x.device)
    return made.copy_(value) if isinstance(value, Tensor) else made.fill_(value)


def _differentiable(ctx: Any, dloss: Tensor) -> list[Tensor | None]:
    """The gradients by the operators, which are differentiable themselves."""
    x, w, b, labels, weight = ctx.saved_tensors
    options, dtype, rows = ctx.options
    found = linear_samples(x, w, b, labels, weight, *settings(options), rows)
    loss = reduced(found, labels, weight, False, options, dtype)
    wanted = [place for place in range(3) if ctx.needs_input_grad[place]]
    slopes = torch.autograd.grad(loss, [(x, w, b)[place] for place in wanted], dloss, create_graph=True)
    grads: list[Tensor | None] = [None] * 3
    for place, slope in zip(wanted, slopes, strict=True):
        grads[place] = slope
    return grads
