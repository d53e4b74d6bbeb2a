"""Every declared operator as `torch.ops.opgrad.NAME`, with derivatives, and the fast path from a call to its kernels.

A compiler sees the registered operator with its fake implementation and its gradient. PyTorch's dispatcher takes 15 to
40 µs for an operator written in Python, so eager calls bypass it: they go straight to the kernels, or through a
`torch.autograd.Function` with the same gradient.

An operator declares its gradient alone. Its tangent is the gradient transposed: a gradient is linear in the gradients
of the results, so the vector-Jacobian product of the gradient is the Jacobian-vector product of the operator. Many
calls under torch.vmap are one call with a batch axis, or one call after the other.

`torch.library.register_autograd` knows no tangents; so the dispatcher has two kernels that call a Function: under the
key Autograd, for gradients and for the tangents of `dual_level`, and under the key where it meets the transformations
of torch.func, which take the Function apart level by level.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from opgrad import contract
from opgrad.call.arrays import model_of
from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import answer_whole, native, unseen
from opgrad.call.libraries.torch_private import is_batched
from opgrad.call.libraries.torch_tensors import (
    TORCH_DTYPES,
    execute,
    is_direct,
    is_traced,
    is_transformed,
    numpy_dtype,
    numpy_dtypes,
)
from opgrad.call.owners import check_owners, library_of
from opgrad.contract import Operator, Spec
from opgrad.contract.signature import PLAIN, is_plain, plain, result_specs
from opgrad.ops import tensor_operators
from opgrad.torch.schema import LIBRARY, REGISTERED, Registered, is_recording

Gradient = Callable[..., Mapping[str, Tensor | None]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors and sums of this one are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pulled_back(
    make: Callable[..., Any], tensors: Sequence[Tensor], slopes: Sequence[Tensor | None]
) -> Sequence[Tensor]:
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


class Derivative:
    """An operator's gradients, tangents and batching rule, as the parts of a torch.autograd.Function.

    gradient: is called with the gradients of the results (None where there is none), then with what is `wanted`, by
        default what its other parameters name: arguments and results, which are saved; the shape or dtype of an
        argument x as `x_shape` and `x_dtype`; `needs`, which says of each argument whether its gradient is needed. It
        returns gradients by argument.
    direct: a function that is called with the same, but what is saved first, and returns the gradient of the first
        argument, the only one.
    """

    def __init__(
        self, operator: "TensorOperator", gradient: Gradient, direct: Callable[..., Tensor] | None,
        wanted: Sequence[str] | None,
    ):  # fmt: skip
        op, names = operator.op, operator.names
        self.operator, self.op, self.names, self.gradient, self.direct = operator, op, names, gradient, direct
        named = list(inspect.signature(gradient).parameters)[len(op.results) :]
        self.wanted = tuple(named if wanted is None else wanted)
        self.saved = tuple(name for name in self.wanted if name in op.inputs or name in op.results)
        self.indices = {name: index for index, name in enumerate(names)}
        self.indices |= {name: index - len(op.results) for index, name in enumerate(op.results)}
        self.kept = tuple(name for name in self.wanted if name not in self.saved and name != "needs")
        self.differentiable = [(name, index) for index, name in enumerate(names) if name in op.inputs]
        every = [*self.saved, *self.kept, "needs"]
        self.order = [every.index(name) for name in self.wanted]

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

    def for_transforms(self, below: Callable[..., Any], dispatch: Callable[..., Any]) -> tuple[Any, Any]:
        """The operator with tangents: below autograd; and for torch.func, where it takes 35 µs to bind arguments."""
        keep = _keeping_all(self._setup_context())
        whole = self._function(forward=dispatch, setup_context=keep, jvp=self._jvp, vmap=self._vmap)
        return self._function(forward=_noting(below, keep), jvp=self._jvp), whole

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

    def _gradients(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """The gradients of the arguments, and None for what the dispatcher's function is given beside them."""
        needed = ctx.needs_input_grad
        every = [*ctx.saved_tensors, *(ctx.kept if self.kept else ())]
        if "needs" in self.wanted:
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
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        parts = {f"{n}_{part}": getattr(each, part) for n, each in tensors.items() for part in ("shape", "dtype")}
        known = {**parts, **values, "needs": {name: name in given for name in self.names}}

        def gradients(*slopes: Tensor) -> list[Tensor | None]:
            rest = iter(slopes)
            upstream = [next(rest) if each.is_floating_point() else None for each in results]
            found = self.gradient(*upstream, *[known[name] for name in self.wanted])
            for name in given:
                if name not in found:
                    raise self.missing(name)
            return [found[name] for name in given]

        made = iter(pulled_back(gradients, [torch.zeros_like(each) for each in floats], list(given.values())))
        tangents = tuple(next(made).to(each.dtype) if each.is_floating_point() else None for each in results)
        return tangents if len(tangents) > 1 else tangents[0]

    def _vmap(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        op, size = self.op, info.batch_size
        roles = {tensor.role for tensor in (*op.inputs.values(), *op.results.values())}
        if op.kind not in ("elements", "rows") or roles != {"element"}:
            return one_by_one(self.operator, size, in_dims, arguments)
        pairs = zip(self.names, arguments, in_dims, strict=True)
        given = {name: value.movedim(at, 0) if isinstance(at, int) else value for name, value, at in pairs}
        batched = {name for name, at in zip(self.names, in_dims, strict=True) if isinstance(at, int)}
        specs = {name: spec_of(given[name], name in batched) for name in op.inputs}
        # A single call is checked, so that messages speak of its shapes.
        attributes = self.operator.checked(specs, self.operator.given(arguments))
        for name in op.inputs:
            if given[name] is not None and name not in batched:
                given[name] = given[name].expand(size, *given[name].shape)
        if op.kind == "rows":
            given["axis"] = [axis + 1 for axis in attributes["axis"]]
        results = self.operator(*given.values())
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


class TensorOperator(Registered):
    """A declared operator on tensors, called with all arguments in the order of its schema."""

    def __init__(self, op: Operator):
        super().__init__(op)
        self.attributes = [index for index, name in enumerate(self.names) if name not in op.inputs]
        self.axes = next((index for index, each in enumerate(self.schema.values()) if "[1]" in each), None)
        torch.library.impl(f"opgrad::{op.name}", ("cpu", "cuda"), self.execute, lib=LIBRARY)
        torch.library.register_fake(f"opgrad::{op.name}", self._fake, lib=LIBRARY)
        self.defaults = tuple(op.attributes.get(name) for name in self.names)
        self.call = native(self.__call__)
        self.run = native(self.execute, watched=False)
        self.eager: Any = None
        self.dispatched: Any = None
        self.transformed: Any = None

    def __call__(self, *arguments: Any) -> Any:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if is_direct(tensors):
            return self.execute(*arguments)
        arguments = self._settled(arguments)
        if is_transformed() or is_traced(tensors):
            if is_recording() or is_exported():
                from opgrad.torch import export

                return export.on_export(self, self._listed(arguments))
            return self._dispatch(*arguments)
        if self.eager is None:
            raise NotImplementedError(f"{self.op.name}: no gradient; detach its arguments")
        return answer_whole(self.eager, arguments)

    def _dispatch(self, *arguments: Any) -> Any:
        return self.overload(*self._listed(arguments))

    def _settled(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with plain attributes, which the backward pass reads again; a compiler's may be symbols."""
        if torch.compiler.is_compiling():
            return arguments
        for index in self.attributes:
            value = arguments[index]
            if type(value) not in PLAIN and not is_plain(value):
                return tuple(self.arguments(plain(self.op, self.given(arguments))))
        return arguments

    def _listed(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments with axes as a list: a symbol is not taken for a list of one, as a number is."""
        if self.axes is None or isinstance(arguments[self.axes], tuple | list):
            return arguments
        return *arguments[: self.axes], [arguments[self.axes]], *arguments[self.axes + 1 :]

    def execute(self, *arguments: Any) -> Any:
        """Run the kernels. The dispatcher leaves trailing defaults out and makes lists of tuples."""
        return execute(self.op, self.given(arguments))

    def arguments(self, given: Mapping[str, Any]) -> list[Any]:
        """A call's arguments, given by parameter name, in the order of the schema."""
        dtype = given.get("out_dtype")
        several = dtype if isinstance(dtype, tuple) else (dtype,) * len(self.dtypes)
        if len(several) != len(self.dtypes):
            raise TypeError(f"{self.op.name}: out_dtype is {dtype!r}, expected one dtype or {len(self.dtypes)}")
        dtypes = []
        for each in several:  # as NumPy's users write them, too
            if each is not None and not isinstance(each, torch.dtype):
                attributes = {"out_dtype": each}
                contract.normalise(self.op, attributes, {})
                each = TORCH_DTYPES[attributes["out_dtype"]]
            dtypes.append(each)
        given = {**self.op.attributes, **given} | dict(zip(self.dtypes, dtypes, strict=True))
        return [given.get(name) for name in self.names]

    def given(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The inverse of `arguments`."""
        given = dict(zip(self.names, arguments, strict=False))
        for name in ("axis", "shape"):
            value = given.get(name)
            if type(value) is list:
                given[name] = value[0] if name == "axis" and len(value) == 1 else tuple(value)
        if len(self.dtypes) > 1:
            dtypes = tuple(given.pop(name, None) for name in self.dtypes)
            if any(dtypes):
                given["out_dtype"] = dtypes
        return given

    def _fake(self, *arguments: Any) -> Any:
        """Tensors of the results' shapes, dtypes and strides, without numbers; sizes may be symbols."""
        if "torch.distributed.tensor" in sys.modules:
            _register_shardings()  # DTensor asks for the results' shapes first, and then for a rule
        given = self.given(arguments)
        inputs = {name: spec_of(given.get(name)) for name in self.op.inputs}
        attributes = self.checked(inputs, given)
        specs = result_specs(self.op, inputs, attributes)
        results = []
        for name, spec in specs.items():
            dtype, model = TORCH_DTYPES[spec.dtype], model_of(self.op, name)
            first = given[self.op.arrays[0] if model is None else model]
            like = (
                torch.empty_like(first, dtype=dtype) if model is not None else first.new_empty(spec.shape, dtype=dtype)
            )
            results.append(like)
        return results[0] if len(results) == 1 else tuple(results)

    def checked(self, inputs: Mapping[str, Spec | None], given: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes in the contract's form. Raises what it raises for a wrong call; sizes may be symbols."""
        op = self.op
        attributes = dict(op.attributes) | {name: given[name] for name in op.attributes if name in given}
        if "out_dtype" in attributes:
            attributes["out_dtype"] = numpy_dtypes(attributes["out_dtype"])
        shape = attributes.pop("shape", None)
        if shape is None:
            contract.check_arrays(op, inputs, attributes)
        else:  # the contract would take its symbols for the numbers that they are now
            contract.normalise(op, attributes, {"shape": shape})
            attributes["shape"] = shape
        return attributes

    # --- derivatives ---

    def differentiate(
        self, gradient: Gradient, direct: Callable[..., Tensor] | None = None, wanted: Sequence[str] | None = None
    ) -> None:
        """Give the operator its gradient, which `Derivative` describes."""
        self.derivative = Derivative(self, gradient, direct, wanted)
        self.eager = torch_private.direct_apply(self.derivative.function(self.run))
        self.dispatched, self.transformed = self.derivative.for_transforms(self._below, self._dispatch)
        if torch_private.can_redispatch:
            LIBRARY.impl(self.op.name, self._autograd, "Autograd", with_keyset=True)
        else:
            self.derivative.register(f"opgrad::{self.op.name}", LIBRARY)
        torch_private.implement_transform(LIBRARY, self.op.name, self._transform)

    def _autograd(self, keys: Any, *arguments: Any) -> Any:
        """The dispatcher's call where autograd has its turn."""
        if _differentiates(arguments):
            return self.dispatched.apply(*self._filled(arguments), keys)
        with torch_private.below_autograd():
            return self.overload.redispatch(keys & torch_private.after_autograd, *arguments)

    def _transform(self, *arguments: Any) -> Any:
        """The dispatcher's call where a transformation of torch.func is at work."""
        return unseen(self.transformed.apply)(*self._filled(arguments))

    def _filled(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments with the trailing defaults that the dispatcher leaves out."""
        return *arguments, *self.defaults[len(arguments) :]

    def _below(self, *arguments_and_keys: Any) -> Any:
        """The dispatcher's call of what comes after autograd, for a Function, which passes the keys last."""
        *arguments, keys = arguments_and_keys
        with torch_private.below_autograd():
            return self.overload.redispatch(keys & torch_private.after_autograd, *self._listed(arguments))


@cache
def _register_shardings() -> None:
    try:
        from opgrad.torch import sharding

        sharding.register()
    except (ImportError, AttributeError) as error:  # nobody else gets an error
        lacking = f"PyTorch {torch.__version__} has another DTensor than the known ones ({error})"
        warnings.warn(f"opgrad: {lacking}: its operators are not shared out", RuntimeWarning, stacklevel=2)


def is_exported() -> bool:
    """Whether torch.onnx.export is at work."""
    if torch.compiler.is_dynamo_compiling():
        return False
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


def _differentiates(arguments: Sequence[Any]) -> bool:
    """Whether autograd has to know of a call: an argument requires grad or has a tangent."""
    records = torch.is_grad_enabled()
    for each in arguments:
        # Compiled code enters a level of forward mode that torch.autograd.forward_ad does not know of; so the tensors
        # themselves are asked.
        if isinstance(each, torch.Tensor) and (
            (records and each.requires_grad)
            or (each.is_floating_point() and torch_private.unpack_dual(each, 0)[1] is not None)
        ):
            return True
    return False


def call(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator, differentiated or traced, on tensors given by parameter name."""
    library = library_of(torch.Tensor)
    assert library is not None
    check_owners(op, given, library)
    operator = cast(TensorOperator, REGISTERED[op.name])
    return operator(*operator.arguments(given))


OPERATORS = {name: TensorOperator(op) for name, op in tensor_operators().items()}


def worded(words: Mapping[str, str], call: Callable[..., Any], *arguments: Any) -> Any:
    """call(*arguments), whose errors have other names for operators and arguments."""
    try:
        return call(*arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        names = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, words)) + r")(?!\w)")
        raise type(error)(names.sub(lambda match: words[match[0]], str(error))) from None
