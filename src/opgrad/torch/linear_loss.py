"""A linear layer and cross-entropy in one: the logits are never stored as a whole.

An eager call whose loss is one number computes the gradients in the forward pass, from the logits that are there, and
hands them out in the backward pass. Everything else goes by two registered operators: the samples' results, and, for
their gradients, the gradients of the layer, for which the logits are computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn import functional

from opgrad.interop.torch_calls import unseen
from opgrad.interop.torch_tensors import PLAIN
from opgrad.torch.derivative import is_batched
from opgrad.torch.formulas import wide
from opgrad.torch.linear_chunks import Chunks, Layer, chunks_of, gradients, plain_gradients, sample_results
from opgrad.torch.loss import cross_entropy
from opgrad.torch.loss_options import IGNORED, LossOptions, divisors, over, read_options, shifted
from opgrad.torch.operators import is_exported
from opgrad.torch.reduced_loss import reduced
from opgrad.torch.sample_loss import UPSTREAM, Settings, composed_gradient, settings
from opgrad.torch.schema import LIBRARY, TAGS, is_recording

NAME = "linear_cross_entropy"


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
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}
    _check(tensors | {name: each for name, each in optional.items() if each is not None})
    if target.is_floating_point() and ignore_index is not None:
        raise ValueError(f"{NAME}: ignore_index is {ignore_index}, expected none for class probabilities")
    rows = getattr(options, "batch_chunk_size", None)
    if target.is_floating_point() or linear_weight.dim() != 2 or not input.numel() or not linear_weight.numel():
        return _by_logits(input, linear_weight, target, linear_bias, weight, chosen, shift)
    labels = shifted(NAME, target.int() if target.dtype == torch.uint8 else target, shift, ignored)
    if _needs_composition([each for each in (*tensors.values(), *optional.values()) if each is not None]):
        return _by_logits(input, linear_weight, labels, linear_bias, weight, chosen, 0)
    shape = labels.shape
    x, w, b, dtype = _autocast(input.reshape(-1, input.shape[-1]), linear_weight, linear_bias)
    found = _loss(x, w, b, labels.reshape(-1), weight, chosen, dtype, rows)
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
        if name in ("linear_weight", "linear_bias") and value.dtype != x.dtype and not _autocasts(x):
            raise TypeError(f"{NAME}: {name} has dtype {value.dtype}, expected {x.dtype}, the dtype of input")


def _autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _autocast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """The layer as autocast wants it, and the dtype of the loss."""
    if not _autocasts(x):
        return x, w, b, x.dtype
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), torch.float32


def _needs_composition(tensors: Sequence[Tensor]) -> bool:
    """Whether something is at work that must see what the loss is made of: all but grad among the transformations."""
    if is_recording() or is_exported() or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():
        return False
    if any(type(each) not in PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(each) for each in tensors):
        return True
    kinds = (each.key() for each in retrieve_all_functorch_interpreters())
    return any(kind != torch._C._functorch.TransformType.Grad for kind in kinds)


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
    given = {f"return_{name}": True for name in options.returned}
    cap = options.softcap or None
    return cross_entropy(
        logits, target, weight, None, options.ignore_index if options.ignore_index is not None else IGNORED, None,
        options.reduction, options.label_smoothing, lse_square_scale=options.lse_square_scale, softcap=cap,
        temperature=options.temperature, shift=shift, num_items=options.num_items, **given,
    )  # fmt: skip


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
    watched = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if needs and one_number and not watched and not torch._C._len_torch_dispatch_stack():
        return _fused(x, w, b, labels, weight, options, dtype, rows)
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


def _layer(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None
) -> tuple[Layer, Tensor | None]:
    """The layer with those samples alone that count, and which these are; None if they are all."""
    x, w, b = x.detach(), w.detach(), None if b is None else b.detach()
    weight = None if weight is None else weight.detach()
    _check_labels(labels, len(w), ignore_index)
    if ignore_index is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        kept = None
    else:
        kept = (labels != ignore_index).nonzero().squeeze(1)
        kept = None if len(kept) == len(labels) else kept
    if kept is not None:
        x, labels = x.index_select(0, kept), labels.index_select(0, kept)
    return Layer(x, w, b, labels, weight), kept


def _check_labels(labels: Tensor, classes: int, ignore_index: int | None) -> None:
    """Raise ValueError for a label out of range, on the CPU."""
    if labels.device.type != "cpu":
        return
    wrong = (labels < 0) | (labels >= classes)
    wrong = (wrong if ignore_index is None else wrong & (labels != ignore_index)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        also = "" if ignore_index is None else f" or ignore_index {ignore_index}"
        raise ValueError(f"{NAME}: target[{place}] is {int(labels[place])}, expected 0 to {classes - 1}{also}")


def _of_all(found: Sequence[Tensor], kept: Tensor | None, count: int) -> list[Tensor]:
    """The results of all samples: 0 for those left out, predicted -1."""
    if kept is None:
        return list(found)
    return [each.new_full((count,), 0 if each.is_floating_point() else -1).index_copy_(0, kept, each) for each in found]


def _rows_of_all(dx: Tensor | None, kept: Tensor | None, count: int) -> Tensor | None:
    if dx is None or kept is None:
        return dx
    return dx.new_zeros(count, dx.shape[1]).index_copy_(0, kept, dx)


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
        # Handed out and forgotten, so that autograd keeps them where they are; another pass computes them anew.
        ctx.grads = None
        if factor.is_cuda or float(factor) != 1.0:
            for each in grads:
                if each is not None:  # a number on the device would be rounded first, a tensor with dimensions is not
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
    """The loss in float64 but for a factor, its gradients but for the same factor, and that."""
    layer, kept = _layer(x, w, b, labels, weight, options.ignore_index)
    by_weight, by_count = divisors(labels, weight, False, options, layer.number)
    inverse, of_square = over(by_weight), options.lse_square_scale * over(by_count)
    now: Any = inverse
    later: Any = 1.0
    if x.dtype == torch.float16:  # as cross_entropy does: little of a mean's gradient is more than float16 holds
        now, later, of_square = 1.0, inverse, of_square * by_weight
    if not len(layer.x):
        nothing = [torch.zeros_like(each) if each is not None else None for each in (x, w, b)]
        return torch.zeros((), dtype=torch.float64, device=x.device), nothing, later
    chunks = chunks_of(layer, rows, with_gradient=True)
    total, (dx, dw, db) = _with_gradients(layer, options, now, of_square, needs[:3], chunks)
    return total, [_rows_of_all(dx, kept, len(x)), dw, db], later


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
    """The same number for each sample."""
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


# --- the registered operators --------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor? b, Tensor labels, Tensor? weight, SymInt? ignore_index, float label_smoothing, "
    "float softcap, float temperature, SymInt? rows"
)
_GIVEN = ", ".join(f"Tensor? {name}" for name in UPSTREAM)
LIBRARY.define(f"linear_sample_losses({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=TAGS)
LIBRARY.define(f"linear_sample_losses_grad({_ARGUMENTS}, {_GIVEN}) -> (Tensor, Tensor, Tensor)", tags=TAGS)
linear_samples: Any = torch.ops.opgrad.linear_sample_losses.default
linear_samples_grad: Any = torch.ops.opgrad.linear_sample_losses_grad.default


def _samples(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None,
    label_smoothing: float, softcap: float, temperature: float, rows: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer, kept = _layer(x, w, b, labels, weight, ignore_index)
    options = (None, label_smoothing, softcap, temperature)
    return tuple(_of_all(sample_results(layer, options, chunks_of(layer, rows, False)), kept, len(x)))


def _samples_fake(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    floats = [x.new_empty(x.shape[0], dtype=wide(x.dtype)) for _ in range(4)]
    return *floats, x.new_empty(x.shape[0], dtype=torch.int64)


def _samples_grad(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None,
    label_smoothing: float, softcap: float, temperature: float, rows: int | None, *given: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    layer, kept = _layer(x, w, b, labels, weight, ignore_index)
    upstream = {name: each for name, each in zip(UPSTREAM, given, strict=True) if each is not None}
    upstream = upstream if "dloss" in upstream else {**upstream, "dloss": torch.zeros_like(labels, dtype=layer.number)}
    if kept is not None:
        upstream = {name: each.index_select(0, kept) for name, each in upstream.items()}
    options, needs = (None, label_smoothing, softcap, temperature), (True, True, b is not None)
    _, (dx, dw, db) = gradients(layer, upstream, options, needs, chunks_of(layer, rows, True))
    dx = _rows_of_all(dx, kept, len(x))
    assert dx is not None
    assert dw is not None
    return dx, dw, x.new_empty(0) if db is None else db


def _samples_grad_fake(x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w), x.new_empty(0) if b is None else torch.empty_like(b)


def _keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(each, Tensor) else (each,) for each in inputs]
    ctx.set_materialize_grads(False)


def _kept(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if each is None else each[0] for each in ctx.others]


def _samples_backward(ctx: Any, dloss: Any, dlse: Any, dlog_prob: Any, dentropy: Any, _: Any) -> tuple[Any, ...]:
    arguments = _kept(ctx)
    if all(each is None for each in (dloss, dlse, dlog_prob, dentropy)):
        return (None,) * len(arguments)
    dx, dw, db = linear_samples_grad(*arguments, dloss, dlse, None, dlog_prob, dentropy)
    return dx, dw, None if arguments[2] is None else db, *(None,) * (len(arguments) - 3)


def _samples_grad_backward(ctx: Any, *directions: Any) -> tuple[Any, ...]:
    """By the vector-Jacobian product of the composition, whose logits are stored."""
    arguments = _kept(ctx)
    x, w, b, labels, weight, *attributes, _ = arguments[:10]
    given = dict(zip(UPSTREAM, arguments[10:], strict=True))
    directions = (*directions[:2], None if b is None else directions[2])
    if all(each is None for each in directions):
        return (None,) * len(arguments)
    options: Settings = tuple(attributes)
    values = {"x": x, "w": w, "b": b, **given}
    names = [name for name, each in values.items() if each is not None]

    def slopes(*moved: Tensor) -> tuple[Tensor, ...]:
        now: dict[str, Any] = dict(zip(names, moved, strict=True))
        logits = functional.linear(now["x"], now["w"], now.get("b"))
        upstream = {name: now[name] for name in UPSTREAM if name in now}
        dlogits = composed_gradient(logits, labels, weight, None, upstream, options)
        made = dlogits @ now["w"], dlogits.t() @ now["x"], dlogits.sum(0)
        return tuple(each for each, direction in zip(made, directions, strict=True) if direction is not None)

    wanted = [each for each in directions if each is not None]
    vjp: Any = torch.func.vjp
    _, pull = vjp(slopes, *(values[name] for name in names))
    found = dict(zip(names, pull(tuple(wanted)), strict=True))
    of_tensors = [found.get(name) for name in ("x", "w", "b")]
    return *of_tensors, *(None,) * 7, *(found.get(name) for name in UPSTREAM)


def _register(overload: Any, run: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Give an operator its kernel, its shapes and its gradient; the latter for transformations of torch.func, too."""
    name = overload.name().removesuffix(".default")
    torch.library.impl(name, ("cpu", "cuda"), run, lib=LIBRARY)
    torch.library.register_fake(name, fake, lib=LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=_keep, lib=LIBRARY)
    methods = {"forward": overload, "setup_context": _keep, "backward": backward}
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})

    def transform(*arguments: Any) -> Any:
        defaults = [each.default_value for each in overload._schema.arguments[len(arguments) :]]
        return unseen(function.apply)(*arguments, *defaults)

    LIBRARY.impl(name.partition("::")[2], transform, "FuncTorchDynamicLayerFrontMode")


_register(linear_samples, _samples, _samples_fake, _samples_backward)
_register(linear_samples_grad, _samples_grad, _samples_grad_fake, _samples_grad_backward)
