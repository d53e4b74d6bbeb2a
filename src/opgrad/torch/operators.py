"""Every declared operator as `torch.ops.opgrad.NAME`, and the fast path from an eager call to its kernels.

The schema follows from the declaration: arrays are tensors, attributes have their annotated types, and an
`out_dtype` for several results becomes a dtype for each. A compiler sees the registered operator with its fake
implementation and its gradient. PyTorch's dispatcher takes 15 to 40 µs for an operator written in Python, so eager
calls bypass it: they go straight to the kernels, or through a `torch.autograd.Function` with the same gradient.

Every road to a derivative leads to such a Function, with `backward`, `jvp` and `vmap` as `Derivative` makes them.
`torch.library.register_autograd` knows no tangents; so the dispatcher has two kernels that call the Function: under the
key Autograd, for gradients and for the tangents of `dual_level`, and under the key where it meets the transformations
of torch.func, which take the Function apart level by level.
"""

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch

from opgrad import contract
from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import answer_whole, native, unseen
from opgrad.call.libraries.torch_tensors import (
    TORCH_DTYPES,
    execute,
    is_direct,
    is_traced,
    is_transformed,
    numpy_dtypes,
)
from opgrad.call.owners import check_owners, library_of
from opgrad.call.runners import model_of
from opgrad.contract import Operator, Spec
from opgrad.contract.signature import PLAIN, is_plain, plain, result_specs
from opgrad.ops import tensor_operators
from opgrad.torch.derivative import Derivative, Gradient, spec_of
from opgrad.torch.schema import LIBRARY, REGISTERED, Registered, is_recording


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
                return self._exported(*self._listed(arguments))
            return self._dispatch(*arguments)
        if self.eager is None:
            raise NotImplementedError(f"{self.op.name}: no gradient; detach its arguments")
        return answer_whole(self.eager, arguments)

    def _dispatch(self, *arguments: Any) -> Any:
        return self.overload(*self._listed(arguments))

    def _exported(self, *arguments: Any) -> Any:
        from opgrad.torch import export

        return export.on_export(self, arguments)

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
        dtypes = [_torch_dtype(self.op, each) for each in several]
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
        results = [self._empty_result(given, name, spec) for name, spec in specs.items()]
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

    def _empty_result(self, given: Mapping[str, Any], name: str, spec: Spec) -> torch.Tensor:
        dtype, model = TORCH_DTYPES[spec.dtype], model_of(self.op, name)
        if model is not None:
            return torch.empty_like(given[model], dtype=dtype)
        return given[self.op.arrays[0]].new_empty(spec.shape, dtype=dtype)

    # --- derivatives ---

    def _checked_call(self, inputs: Mapping[str, Spec | None], arguments: Sequence[Any]) -> dict[str, Any]:
        return self.checked(inputs, self.given(arguments))

    def differentiate(self, gradient: Gradient, direct: Callable[..., torch.Tensor] | None = None) -> None:
        """Give the operator its gradient, which `Derivative` describes."""
        self.derivative = Derivative(self.op, self.names, gradient, direct, self, self._checked_call)
        self.eager = torch_private.direct_apply(self.derivative.function(self.run))
        self.dispatched = self.derivative.forward_mode(self._below)
        self.transformed = self.derivative.transformable(self._dispatch)
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


def _torch_dtype(op: Operator, dtype: Any) -> torch.dtype | None:
    """A dtype, as NumPy's users write it too, as PyTorch's."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    attributes = {"out_dtype": dtype}
    contract.normalise(op, attributes, {})
    found: torch.dtype = TORCH_DTYPES[attributes["out_dtype"]]
    return found


def call(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator, differentiated or traced, on tensors given by parameter name."""
    library = library_of(torch.Tensor)
    assert library is not None
    check_owners(op, given, library)
    operator = cast(TensorOperator, REGISTERED[op.name])
    return operator(*operator.arguments(given))


OPERATORS = {name: TensorOperator(op) for name, op in tensor_operators().items()}
REGISTERED.update(OPERATORS)


ERRORS = (TypeError, ValueError, NotImplementedError)  # what operators raise


def in_words(error: Exception, words: Mapping[str, str]) -> Exception:
    """An error with other names for operators and arguments."""
    found = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, words)) + r")(?!\w)")
    return type(error)(found.sub(lambda match: words[match[0]], str(error)))
