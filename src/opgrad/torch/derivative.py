"""The derivatives of an operator for autograd and torch.func: gradients, tangents and the batching rule."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_private import is_batched
from opgrad.contract import Operator

Gradient = Callable[..., Mapping[str, Tensor | None]]


def describe(function: Any, names: Sequence[str]) -> None:
    """Tell `Derivative` by a signature what a function is given that takes any arguments."""
    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names]
    function.__signature__ = inspect.Signature(parameters)


class Derivative:
    """An operator's gradients, tangents and batching rule, as the parts of a torch.autograd.Function.

    names: those of the arguments.
    gradient: is called with the gradients of the results (None where there is none), then with what else its
        parameters name: arguments and results, which are saved; the shape or dtype of an argument x as `x_shape` and
        `x_dtype`; `needs`, which says of each argument whether its gradient is wanted. It returns gradients by
        argument.
    direct: a function that is called with the same, but what is saved first, and returns the gradient of the first
        argument, the only one.
    tangent: is given the tangents of those arguments that have one, and all arguments and results, both by name. It
        returns the tangent of each result, None for zeros, alone or in a tuple.
    batching: is given the number of calls that are made at once, the place of their axis in each argument (None: it
        has none) and the arguments. It returns results, and the place of that axis in each.
    """

    def __init__(
        self, op: Operator, names: Sequence[str], gradient: Gradient, direct: Callable[..., Tensor] | None = None
    ):
        self.op, self.names, self.gradient = op, names, gradient
        self.direct = direct
        self.tangent: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Any] | None = None
        self.batching: Callable[[int, Sequence[Any], Sequence[Any]], tuple[Any, Any]] | None = None
        self.wanted = tuple(inspect.signature(gradient).parameters)[len(op.results) :]
        self.saved = tuple(name for name in self.wanted if name in op.inputs or name in op.results)
        self.places = {name: place for place, name in enumerate(names)}
        self.places |= {name: place - len(op.results) for place, name in enumerate(op.results)}
        self.kept = tuple(name for name in self.wanted if name not in self.saved and name != "needs")
        self.differentiable = [(name, place) for place, name in enumerate(names) if name in op.inputs]
        self.asks, self.order = "needs" in self.wanted, self._order()

    def function(self, run: Callable[..., Any]) -> Any:
        """The operator, computed by `run`, as a torch.autograd.Function for the backward pass alone."""
        if not torch_private.has_fields:
            return self._function(forward=_noting(run, self._setup_context()))
        saved, described = _picker([self.places[name] for name in self.saved]), self._described()
        keeps = bool(self.kept)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(*arguments)
            values = arguments + output if type(output) is tuple else (*arguments, output)
            # This does what `set_materialize_grads` and `save_for_backward` do, which take a tenth of the call's time.
            ctx.materialize_grads = False
            ctx.to_save = saved(values)
            if keeps:  # an attribute makes a dictionary
                ctx.kept = described(values)
            return output

        made = self._function(forward=forward)
        if torch_private.has_node_class:
            # Autograd's node calls `apply`; the default one looks up `backward` and calls it, which takes 0.5 µs more.
            made._backward_cls.apply = made.backward
        return made

    def forward_mode(self, run: Callable[..., Any]) -> Any:
        """The operator as a torch.autograd.Function with gradients and tangents."""
        setup_context = _keeping_all(self._setup_context())
        return self._function(forward=_noting(run, setup_context), jvp=self._jvp)

    def transformable(self, run: Callable[..., Any]) -> Any:
        """The operator as a torch.autograd.Function for torch.func; binding its arguments takes 35 µs a call."""
        setup_context = _keeping_all(self._setup_context())
        return self._function(forward=run, setup_context=setup_context, jvp=self._jvp, vmap=self._vmap)

    def register(self, name: str, library: Any) -> None:
        """Register the backward pass with the dispatcher by PyTorch's documented functions, which know no tangents."""
        backward = self._backward()
        # It has no place for the dispatcher's keys, which come last.
        torch.library.register_autograd(
            name, lambda *given: backward(*given)[:-1], setup_context=self._setup_context(), lib=library
        )

    def _function(self, **methods: Callable[..., Any]) -> Any:
        methods["backward"] = self._backward()
        static = {name: staticmethod(method) for name, method in methods.items()}
        return type(self.op.name, (torch.autograd.Function,), static)

    def _described(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A function that picks the values for the gradient's parameters that are not saved tensors."""
        whole = [self.places[name] for name in self.kept if name in self.places]
        if len(whole) == len(self.kept):
            return _picker(whole)
        found = [(name, None) if name in self.places else name.rpartition("_")[::2] for name in self.kept]
        parts = [(self.places[name], part) for name, part in found]
        return lambda values: tuple([getattr(values[at], part) if part else values[at] for at, part in parts])

    def _setup_context(self) -> Callable[..., None]:
        saved, described = _picker([self.places[name] for name in self.saved]), self._described()

        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            values = (*inputs, *output) if isinstance(output, tuple | list) else (*inputs, output)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*saved(values))
            ctx.kept = described(values)

        return setup_context

    def _backward(self) -> Callable[..., Any]:
        if self.direct is not None:
            return self._direct_backward(self.direct)
        nothing = (None,) * (len(self.names) + 1)

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            for gradient in gradients:
                if gradient is not None and is_batched(gradient):
                    # Only the dispatcher can handle such tensors; under a dispatch mode it gets every call.
                    with torch_private.no_mode():
                        return self._gradients(ctx, gradients)
            for gradient in gradients:
                if gradient is not None:
                    return self._gradients(ctx, gradients)
            return nothing

        return backward

    def _direct_backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The backward pass of an operator with one differentiable argument, the first, by one other function."""
        rest, keeps = (None,) * len(self.names), bool(self.kept)

        def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
            if dy is None:
                return None, *rest
            values = (dy, *ctx.saved_tensors, *ctx.kept) if keeps else (dy, *ctx.saved_tensors)
            if is_batched(dy):
                with torch_private.no_mode():  # as above
                    return call(*values), *rest
            return call(*values), *rest

        return backward

    def _order(self) -> list[int]:
        """The places of the gradient's parameters in the list: saved tensors, other kept values, needs."""
        every = [*self.saved, *self.kept, "needs"]
        return [every.index(name) for name in self.wanted]

    def _gradients(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """The gradients of the arguments, and None for what the dispatcher's function is given beside them."""
        needed = ctx.needs_input_grad
        every = [*ctx.saved_tensors, *(ctx.kept if self.kept else ())]
        if self.asks:
            every.append(dict(zip(self.names, needed, strict=False)))
        found = self.gradient(*gradients, *[every[place] for place in self.order])
        answers: list[Any] = [None] * (len(self.names) + 1)
        for name, place in self.differentiable:
            if needed[place]:
                if name not in found:
                    raise self.missing(name)
                answers[place] = found[name]
        return tuple(answers)

    def known(self, name: str, values: Mapping[str, Any]) -> Any:
        """The value of a parameter of the gradient, given all arguments and results by name."""
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
        # PyTorch calls this with forward mode switched off, also for outer levels of it.
        with torch_private.forward_grad_enabled(True):
            primals = [
                value if value is None else torch_private.unpack_dual(value, 0)[0] for value in ctx.saved_tensors
            ]
            every = [b if a is None else a for a, b in zip(primals, ctx.others, strict=True)]
            values = {name: every[place] for name, place in self.places.items()}
            found = self.tangent(given, values)
            return self._tangents(found, values)

    def _tangents(self, found: Any, values: Mapping[str, Any]) -> Any:
        """The tangents of the results, in their dtypes; None for a mask, which has none."""
        several = found if isinstance(found, tuple) else (found,)
        results = [values[name] for name in self.op.results]
        pairs = zip(several, results, strict=True)
        zeros = [torch.zeros_like(each) if each.is_floating_point() else None for each in results]
        cast = tuple(zero if t is None else t.to(result.dtype) for (t, result), zero in zip(pairs, zeros, strict=True))
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


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the values at these places as a tuple."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        (only,) = places
        return lambda values: (values[only],)
    return itemgetter(*places)
