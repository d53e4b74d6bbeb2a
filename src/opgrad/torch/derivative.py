"""The derivatives of an operator for autograd and torch.func: gradients, tangents and the batching rule.

An operator declares its gradient alone. Its tangent is the gradient transposed: a gradient is linear in the gradients
of the results, so the vector-Jacobian product of the gradient is the Jacobian-vector product of the operator. Many
calls under torch.vmap are one call with a batch axis, or one call after the other.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_private import is_batched
from opgrad.call.libraries.torch_tensors import numpy_dtype
from opgrad.contract import Operator, Spec

Gradient = Callable[..., Mapping[str, Tensor | None]]


Make = Callable[..., Tensor | Sequence[Tensor | None]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors and sums of this one are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pulled_back(make: Make, tensors: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """The vector-Jacobian product of a function of these tensors, differentiable itself.

    slopes: the gradients of the function's results, None for zeros. A result that is None has no gradient either.
    """
    # One tensor may be two arguments, and one may be of a level of torch.func that has ended: views are of this level.
    views = [each.view_as(each) for each in tensors]
    upstream: list[Tensor] = []

    def results(*now: Tensor) -> tuple[Tensor, ...]:
        made = make(*now)
        every = zip((made,) if isinstance(made, Tensor) else made, slopes, strict=True)
        pairs = [(each.view_as(each), slope) for each, slope in every if each is not None and slope is not None]
        upstream[:] = [slope.to(each.dtype).view_as(slope) for each, slope in pairs]
        return tuple(each for each, _ in pairs)

    if torch_private.transforms_active():
        vjp: Any = torch.func.vjp
        _, pull = vjp(results, *views)
        found: Sequence[Tensor] = pull(tuple(upstream))
        return found
    records = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [each if records and each.requires_grad else each.detach().requires_grad_() for each in views]
        made = results(*leaves)
        return torch.autograd.grad(made, leaves, upstream, create_graph=records, materialize_grads=True)


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
    call: the operator. checked: what checks the specs and the arguments of a call, and returns its attributes.
    """

    def __init__(
        self, op: Operator, names: Sequence[str], gradient: Gradient, direct: Callable[..., Tensor] | None,
        call: Callable[..., Any], checked: Callable[[Mapping[str, Spec | None], Sequence[Any]], dict[str, Any]],
    ):  # fmt: skip
        self.op, self.names, self.gradient, self.direct = op, names, gradient, direct
        self.call, self.checked = call, checked
        self.wanted = tuple(inspect.signature(gradient).parameters)[len(op.results) :]
        self.saved = tuple(name for name in self.wanted if name in op.inputs or name in op.results)
        self.indices = {name: index for index, name in enumerate(names)}
        self.indices |= {name: index - len(op.results) for index, name in enumerate(op.results)}
        self.kept = tuple(name for name in self.wanted if name not in self.saved and name != "needs")
        self.differentiable = [(name, index) for index, name in enumerate(names) if name in op.inputs]
        self.asks, self.order = "needs" in self.wanted, self._order()

    def function(self, run: Callable[..., Any]) -> Any:
        """The operator, computed by `run`, as a torch.autograd.Function for the backward pass alone."""
        if not torch_private.has_fields:
            return self._function(forward=_noting(run, self._setup_context()))
        saved, described = _picker([self.indices[name] for name in self.saved]), self._described()
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
        # It has no argument for the dispatcher's keys, which come last.
        torch.library.register_autograd(
            name, lambda *given: backward(*given)[:-1], setup_context=self._setup_context(), lib=library
        )

    def _function(self, **methods: Callable[..., Any]) -> Any:
        methods["backward"] = self._backward()
        static = {name: staticmethod(method) for name, method in methods.items()}
        return type(self.op.name, (torch.autograd.Function,), static)

    def _described(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A function that picks the values for the gradient's parameters that are not saved tensors."""
        whole = [self.indices[name] for name in self.kept if name in self.indices]
        if len(whole) == len(self.kept):
            return _picker(whole)
        found = [(name, None) if name in self.indices else name.rpartition("_")[::2] for name in self.kept]
        parts = [(self.indices[name], part) for name, part in found]
        return lambda values: tuple([getattr(values[at], part) if part else values[at] for at, part in parts])

    def _setup_context(self) -> Callable[..., None]:
        saved, described = _picker([self.indices[name] for name in self.saved]), self._described()

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
        """The indices of the gradient's parameters in the list: saved tensors, other kept values, needs."""
        every = [*self.saved, *self.kept, "needs"]
        return [every.index(name) for name in self.wanted]

    def _gradients(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """The gradients of the arguments, and None for what the dispatcher's function is given beside them."""
        needed = ctx.needs_input_grad
        every = [*ctx.saved_tensors, *(ctx.kept if self.kept else ())]
        if self.asks:
            every.append(dict(zip(self.names, needed, strict=False)))
        found = self.gradient(*gradients, *[every[index] for index in self.order])
        answers: list[Any] = [None] * (len(self.names) + 1)
        for name, index in self.differentiable:
            if needed[index]:
                if name not in found:
                    raise self.missing(name)
                answers[index] = found[name]
        return tuple(answers)

    def missing(self, name: str) -> Exception:
        return NotImplementedError(f"{self.op.name}: no gradient with respect to {name}; detach it")

    def _jvp(self, ctx: Any, *tangents: Tensor | None) -> Any:
        given = {name: t for name, t in zip(self.names, tangents, strict=False) if t is not None}
        # PyTorch calls this with forward mode switched off, also for outer levels of it.
        with torch_private.forward_grad_enabled(True):
            primals = [
                value if value is None else torch_private.unpack_dual(value, 0)[0] for value in ctx.saved_tensors
            ]
            every = [b if a is None else a for a, b in zip(primals, ctx.others, strict=True)]
            return self._tangents(given, {name: every[index] for name, index in self.indices.items()})

    def _tangents(self, given: Mapping[str, Tensor], values: Mapping[str, Any]) -> Any:
        """The tangents of the results, in their dtypes, by the gradient transposed; None for a mask, which has none."""
        results = [values[name] for name in self.op.results]
        floats = [each for each in results if each.is_floating_point()]
        needs = {name: name in given for name in self.names}
        known = [needs if name == "needs" else self._known(name, values) for name in self.wanted]

        def gradients(*slopes: Tensor) -> list[Tensor | None]:
            rest = iter(slopes)
            found = self.gradient(*[next(rest) if each.is_floating_point() else None for each in results], *known)
            for name in given:
                if name not in found:
                    raise self.missing(name)
            return [found[name] for name in given]

        made = iter(pulled_back(gradients, [torch.zeros_like(each) for each in floats], list(given.values())))
        tangents = tuple(next(made).to(each.dtype) if each.is_floating_point() else None for each in results)
        return tangents if len(tangents) > 1 else tangents[0]

    def _known(self, name: str, values: Mapping[str, Any]) -> Any:
        """The value of a parameter of the gradient, given all arguments and results by name."""
        if name in self.indices:
            return values[name]
        argument, _, part = name.rpartition("_")
        return getattr(values[argument], part)

    def _vmap(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        op, size = self.op, info.batch_size
        roles = {tensor.role for tensor in (*op.inputs.values(), *op.results.values())}
        if op.kind not in ("elements", "rows") or roles != {"element"}:
            return one_by_one(self.call, size, in_dims, arguments)
        pairs = zip(self.names, arguments, in_dims, strict=True)
        given = {name: value.movedim(at, 0) if isinstance(at, int) else value for name, value, at in pairs}
        batched = {name for name, at in zip(self.names, in_dims, strict=True) if isinstance(at, int)}
        specs = {name: spec_of(given[name], name in batched) for name in op.inputs}
        attributes = self.checked(specs, arguments)  # so that messages speak of a single call's shapes
        for name in op.inputs:
            if given[name] is not None and name not in batched:
                given[name] = given[name].expand(size, *given[name].shape)
        if op.kind == "rows":
            given["axis"] = [axis + 1 for axis in attributes["axis"]]
        results = self.call(*given.values())
        return results, (0,) * len(results) if isinstance(results, tuple) else 0


def spec_of(tensor: Tensor | None, batched: bool = False) -> Spec | None:
    """The shape and dtype of an argument of one call."""
    return None if tensor is None else Spec(tuple(tensor.shape[batched:]), numpy_dtype(tensor.dtype))


def one_by_one(
    call: Callable[..., Any], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """One call after the other, and where the batch is in the results: no more memory is used than by one call."""
    pairs = list(zip(arguments, in_dims, strict=True))
    calls = [
        call(*(value.select(at, index) if isinstance(at, int) else value for value, at in pairs))
        for index in range(size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])


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


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the values at these indices as a tuple."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        (only,) = indices
        return lambda values: (values[only],)
    return itemgetter(*indices)
