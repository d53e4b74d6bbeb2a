"""How the losses' own operators are registered, and what their gradients have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import unseen
from opgrad.torch.derivative import one_by_one
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
