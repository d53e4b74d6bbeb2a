"""The samples' results of a linear layer and cross-entropy, and the layer's gradients, as registered operators."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.interop.torch_calls import unseen
from opgrad.torch.flops import count_flops
from opgrad.torch.formulas import wide
from opgrad.torch.losses.checks import check_labels
from opgrad.torch.losses.chunks import Layer, chunks_of, gradients, sample_results
from opgrad.torch.losses.samples import UPSTREAM, Settings, composed_gradient
from opgrad.torch.schema import LIBRARY, TAGS

NAME = "linear_cross_entropy"

_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor? b, Tensor labels, Tensor? weight, SymInt? ignore_index, float label_smoothing, "
    "float softcap, float temperature, SymInt? rows"
)
_GIVEN = ", ".join(f"Tensor? {name}" for name in UPSTREAM)
LIBRARY.define(f"linear_sample_losses({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=TAGS)
LIBRARY.define(f"linear_sample_losses_grad({_ARGUMENTS}, {_GIVEN}) -> (Tensor, Tensor, Tensor)", tags=TAGS)
linear_samples: Any = torch.ops.opgrad.linear_sample_losses.default
linear_samples_grad: Any = torch.ops.opgrad.linear_sample_losses_grad.default


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


def put_back(found: Tensor, kept: Tensor | None, count: int, ignored: int = 0, axis: int = 0) -> Tensor:
    """What was computed of the samples that count, for all of them along an axis; `ignored` for the others."""
    if kept is None:
        return found
    shape = (*found.shape[:axis], count, *found.shape[axis + 1 :])
    return found.new_full(shape, ignored).index_copy_(axis, kept, found)


def _samples(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *settings_and_rows: Any
) -> tuple[Tensor, ...]:
    *settings, rows = settings_and_rows
    check_labels(NAME, labels, len(w), settings[0])
    layer, kept = layer_of(x, w, b, labels, weight, settings[0])
    found = sample_results(layer, tuple(settings), chunks_of(layer, rows, False))
    return tuple(put_back(each, kept, len(x), 0 if each.is_floating_point() else -1) for each in found)


def _samples_fake(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    count_flops()
    floats = [x.new_empty(x.shape[0], dtype=wide(x.dtype)) for _ in range(4)]
    return *floats, x.new_empty(x.shape[0], dtype=torch.int64)


def _samples_grad(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    settings, rows, given = others[:4], others[4], others[5:]
    check_labels(NAME, labels, len(w), settings[0])
    layer, kept = layer_of(x, w, b, labels, weight, settings[0])
    upstream = {name: each for name, each in zip(UPSTREAM, given, strict=True) if each is not None}
    upstream = upstream if "dloss" in upstream else {**upstream, "dloss": torch.zeros_like(labels, dtype=layer.number)}
    if kept is not None:
        upstream = {name: each.index_select(0, kept) for name, each in upstream.items()}
    _, (dx, dw, db) = gradients(layer, upstream, settings, (True, True, b is not None), chunks_of(layer, rows, True))
    assert dx is not None
    assert dw is not None
    return put_back(dx, kept, len(x)), dw, x.new_empty(0) if db is None else db


def _samples_grad_fake(x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w), x.new_empty(0) if b is None else torch.empty_like(b)


def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(each, Tensor) else (each,) for each in inputs]
    ctx.set_materialize_grads(False)


def kept_arguments(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if each is None else each[0] for each in ctx.others]


def _samples_backward(ctx: Any, dloss: Any, dlse: Any, dlog_prob: Any, dentropy: Any, _: Any) -> tuple[Any, ...]:
    arguments = kept_arguments(ctx)
    if all(each is None for each in (dloss, dlse, dlog_prob, dentropy)):
        return (None,) * len(arguments)
    dx, dw, db = linear_samples_grad(*arguments, dloss, dlse, None, dlog_prob, dentropy)
    return dx, dw, None if arguments[2] is None else db, *(None,) * (len(arguments) - 3)


def _samples_grad_backward(ctx: Any, *directions: Any) -> tuple[Any, ...]:
    """The gradient of the gradients: the vector-Jacobian product of the composition, which stores the logits."""
    arguments = kept_arguments(ctx)
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


def register(
    overload: Any,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., None] = keep,
) -> None:
    """Give an operator its kernel, its shapes and its gradient; the latter for transformations of torch.func, too."""
    name = overload.name().removesuffix(".default")
    torch.library.impl(name, ("cpu", "cuda"), run, lib=LIBRARY)
    torch.library.register_fake(name, fake, lib=LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup, lib=LIBRARY)
    methods = {"forward": overload, "setup_context": setup, "backward": backward}
    methods["vmap"] = partial(_one_by_one, overload)
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})

    def transform(*arguments: Any) -> Any:
        defaults = [each.default_value for each in overload._schema.arguments[len(arguments) :]]
        return unseen(function.apply)(*arguments, *defaults)

    LIBRARY.impl(name.partition("::")[2], transform, "FuncTorchDynamicLayerFrontMode")


def _one_by_one(overload: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
    """The rule for torch.vmap: one call after the other, so that no more logits exist at a time than in one call."""
    calls = [
        overload(*(each if at is None else each.select(at, place) for at, each in zip(in_dims, arguments, strict=True)))
        for place in range(info.batch_size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])


register(linear_samples, _samples, _samples_fake, _samples_backward)
register(linear_samples_grad, _samples_grad, _samples_grad_fake, _samples_grad_backward)
