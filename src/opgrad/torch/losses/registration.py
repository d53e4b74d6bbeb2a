"""How the losses' own operators are registered, and what their gradients have in common."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import unseen
from opgrad.call.libraries.torch_tensors import is_transformed
from opgrad.torch.schema import LIBRARY


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
    methods["vmap"] = partial(_one_by_one, overload)
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})

    def transform(*arguments: Any) -> Any:
        defaults = [each.default_value for each in overload._schema.arguments[len(arguments) :]]
        return unseen(function.apply)(*arguments, *defaults)

    torch_private.implement_transform(LIBRARY, name.partition("::")[2], transform)


def _one_by_one(overload: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
    """The rule for torch.vmap: one call after the other, so that no more logits exist at a time than in one call."""
    calls = [
        overload(*(each if at is None else each.select(at, place) for at, each in zip(in_dims, arguments, strict=True)))
        for place in range(info.batch_size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])


# --- gradients -------------------------------------------------------------------------------------------------------


def keep_all(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    """Keep all arguments, and the result."""
    ctx.save_for_backward(*[each for each in inputs if isinstance(each, Tensor)], output)
    ctx.others = [*(None if isinstance(each, Tensor) else (each,) for each in inputs), None]


def kept(ctx: Any) -> list[Any]:
    """The arguments, and the result."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if each is None else each[0] for each in ctx.others]


def differentiable(make: Callable[..., Tensor], tensors: Sequence[Tensor], slopes: Tensor) -> Sequence[Tensor | None]:
    """The vector-Jacobian product of a composition, differentiable itself."""
    if is_transformed():
        vjp: Any = torch.func.vjp
        found: Sequence[Tensor] = vjp(make, *tensors)[1](slopes)
        return found
    # PyTorch's function takes five seconds for its imports.
    wanted = [each for each in tensors if each.requires_grad]
    grads = iter(torch.autograd.grad(make(*tensors), wanted, slopes, create_graph=True))
    return [next(grads) if each.requires_grad else None for each in tensors]


def once(ctx: Any, *slopes: Any) -> Any:
    raise NotImplementedError(
        "this gradient is not differentiable; the operator that it belongs to is, any number of times"
    )
