"""What autograd and torch.func have to know of an operator: its gradients, its tangents and its batching rule."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import BaseTorchDispatchMode

from opgrad.contract import Operator

Gradient = Callable[..., Mapping[str, Tensor | None]]


class Derivative:
    """An operator's gradients, tangents and batching rule, as the parts of a torch.autograd.Function.

    names: those of the arguments.
    gradient: is called with the gradients of the results (None where there is none), then by name with what else its
        parameters name: arguments and results, which are saved; the shape or dtype of an argument x as `x_shape` and
        `x_dtype`; `needs`, which says of each argument whether its gradient is wanted. It returns gradients by
        argument.
    tangent: is given the tangents of those arguments that have one, and all arguments and results, both by name. It
        returns the tangent of each result, None for zeros, alone or in a tuple.
    batching: is given the number of calls that are made at once, the place of their axis in each argument (None: it
        has none) and the arguments. It returns results, and the place of that axis in each.
    """

    def __init__(self, op: Operator, names: Sequence[str], gradient: Gradient):
        self.op, self.names, self.gradient = op, names, gradient
        self.tangent: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Any] | None = None
        self.batching: Callable[[int, Sequence[Any], Sequence[Any]], tuple[Any, Any]] | None = None
        self.wanted = tuple(inspect.signature(gradient).parameters)[len(op.results) :]
        self.saved = tuple(name for name in self.wanted if name in op.inputs or name in op.results)
        self.places = {name: place for place, name in enumerate(names)}
        self.places |= {name: place - len(op.results) for place, name in enumerate(op.results)}

    def function(self, run: Callable[..., Any]) -> Any:
        """The operator, computed by `run`, as a torch.autograd.Function for the backward pass alone."""
        return self._function(forward=_noting(run, self._setup_context()))

    def forward_mode(self, run: Callable[..., Any]) -> Any:
        """The same with tangents."""
        setup_context = _keeping_all(self._setup_context())
        return self._function(forward=_noting(run, setup_context), jvp=self._jvp)

    def transformable(self, run: Callable[..., Any]) -> Any:
        """The same, open to torch.func; binding its arguments costs 35 µs a call."""
        setup_context = _keeping_all(self._setup_context())
        return self._function(forward=run, setup_context=setup_context, jvp=self._jvp, vmap=self._vmap)

    def _function(self, **methods: Callable[..., Any]) -> Any:
        methods["backward"] = self._backward()
        static = {name: staticmethod(method) for name, method in methods.items()}
        return type(self.op.name, (torch.autograd.Function,), static)

    def _setup_context(self) -> Callable[..., None]:
        places, wanted = self.places, self.wanted
        saved = [places[name] for name in self.saved]
        kept = [(name, places[name]) for name in wanted if name in places and name not in self.saved]
        described = [name for name in wanted if name not in places and name != "needs"]
        parts = [(name, places[name.rpartition("_")[0]], name.rpartition("_")[2]) for name in described]

        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            values = (*inputs, *output) if isinstance(output, tuple | list) else (*inputs, output)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*[values[place] for place in saved])
            ctx.kept = {name: values[place] for name, place in kept}
            for name, place, part in parts:
                ctx.kept[name] = getattr(values[place], part)

        return setup_context

    def _backward(self) -> Callable[..., Any]:
        saved, nothing = self.saved, (None,) * (len(self.names) + 1)

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            if all(gradient is None for gradient in gradients):
                return nothing
            values = ctx.kept | dict(zip(saved, ctx.saved_tensors, strict=True))
            needs = dict(zip(self.names, ctx.needs_input_grad, strict=False))
            if any(gradient is not None and is_batched(gradient) for gradient in gradients):
                # The dispatcher alone knows such tensors; under a dispatch mode every call is left to it.
                with BaseTorchDispatchMode():
                    return self._gradients(gradients, values, needs)
            return self._gradients(gradients, values, needs)

        return backward

    def _gradients(self, gradients: Sequence[Any], values: dict[str, Any], needs: Mapping[str, bool]) -> Any:
        """The gradients of the arguments, and None for what the dispatcher's function is given beside them."""
        if "needs" in self.wanted:
            values["needs"] = needs
        found = self.gradient(*gradients, **values)
        for name in self.op.inputs:
            if needs[name] and name not in found:
                raise self.missing(name)
        return *[found.get(name) if needs[name] else None for name in self.names], None

    def known(self, name: str, values: Mapping[str, Any]) -> Any:
        """What a parameter of the gradient stands for, given all arguments and results by name."""
        if name in self.places:
            return values[name]
        argument, _, part = name.rpartition("_")
        return getattr(values[argument], part)

    def missing(self, name: str) -> Exception:
        return NotImplementedError(f"{self.op.name}: no gradient with respect to {name}; detach it")

    def _jvp(self, ctx: Any, *tangents: Tensor | None) -> Any:
        if self.tangent is None:
            raise NotImplementedError(f"{self.op.name}: forward-mode differentiation is not supported; use backward()")
        given = {name: t for name, t in zip(self.names, tangents, strict=False) if t is not None}
        # PyTorch calls this with forward mode switched off, for the levels outside of this one, too.
        with forward_ad._set_fwd_grad_enabled(True):
            primals = [value if value is None else torch._unpack_dual(value, 0)[0] for value in ctx.saved_tensors]
            every = [b if a is None else a for a, b in zip(primals, ctx.others, strict=True)]
            values = {name: every[place] for name, place in self.places.items()}
            found = self.tangent(given, values)
            return self._tangents(found, values)

    def _tangents(self, found: Any, values: Mapping[str, Any]) -> Any:
        """The tangents of the results, in their dtypes."""
        several = found if isinstance(found, tuple) else (found,)
        results = [values[name] for name in self.op.results]
        pairs = zip(several, results, strict=True)
        cast = tuple(torch.zeros_like(result) if t is None else t.to(result.dtype) for t, result in pairs)
        return cast if len(cast) > 1 else cast[0]

    def _vmap(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        if self.batching is None:
            raise NotImplementedError(
                f"{self.op.name}: torch.vmap is not supported; give the batch as an axis of its own"
            )
        return self.batching(info.batch_size, in_dims, arguments)


def _noting(run: Callable[..., Any], setup_context: Callable[..., None]) -> Callable[..., Any]:
    """A Function's `forward` that does the work of `setup_context`, too."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        setup_context(ctx, arguments, output)
        return output

    return forward


def _keeping_all(setup_context: Callable[..., None]) -> Callable[..., None]:
    """A Function's `setup_context` that gives `jvp` all arguments and results."""

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        setup_context(ctx, inputs, output)
        values = (*inputs, *output) if isinstance(output, tuple | list) else (*inputs, output)
        ctx.save_for_forward(*[value if isinstance(value, Tensor) else None for value in values])
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]

    return keep


def is_batched(gradient: Tensor) -> bool:
    """Whether it is a batch of gradients, as torch.autograd.grad(is_grads_batched=True) makes them."""
    found: bool = torch._C._functorch.is_legacy_batchedtensor(gradient)
    return found
