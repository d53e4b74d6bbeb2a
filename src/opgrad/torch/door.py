"""PyTorch tensors, taken as they are: straight to the kernels, or to `opgrad.torch` where autograd has to know.

Softmax with attributes, or with mixed or narrow dtypes, is differentiable once and not traceable. Its forward pass
keeps the probabilities, or their logarithms, before any attribute (`save=True`), and its backward pass is the general
form of the gradient operator.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.call import owners
from opgrad.call.libraries import torch_tensors
from opgrad.call.libraries.torch_calls import noted, unseen
from opgrad.call.libraries.torch_private import is_batched
from opgrad.call.libraries.torch_tensors import (
    NAME,
    PLAIN_DTYPES,
    REMEDY,
    broadcast,
    check_untraced,
    execute,
    expanded,
    is_direct,
    is_traced,
    is_transformed,
    library,
    note_written,
    owns,
    spec,
    state,
    total,
)
from opgrad.contract import Operator, check_arrays
from opgrad.contract.signature import plain
from opgrad.ops import operators
from opgrad.ops.reference.primitive import SCALARS, gradient_name
from opgrad.torch.operators import call, wide

# A `Library`, and `Arrays`.
__all__ = ["NAME", "broadcast", "called", "owns", "run", "spec", "state", "total"]


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on tensors given by parameter name; differentiated where one of them requires grad.

    Raises what the operator raises, ValueError for tensors on several devices, NotImplementedError for devices and
    layouts that have no kernels, and RuntimeError for an `out` that would have to be differentiated.
    """
    if "shape" in op.attributes:
        given = {**given, "shape": _sizes(op, given["shape"])}
    if op.general is not None:
        if torch.compiler.is_compiling():
            # The arguments of a plain call, to which a compiler is held, since it cannot follow how calls are expanded.
            assert op.general is not None
            for name in op.general.keywords:
                if given.get(name) is not None:
                    raise NotImplementedError(f"{op.name}: {name} is given under torch.compile: {REMEDY}")
            given = {name: value for name, value in given.items() if name not in op.general.keywords}
        elif not _is_plain(op, given):
            return unseen(_run_in_form)(op, given)
    return _run(op, given)


def _run(op: Operator, given: Mapping[str, Any]) -> Any:
    if given.get("out") is not None:
        return _run_into(op, given)
    if is_direct([value for value in given.values() if isinstance(value, torch.Tensor)]):
        return execute(op, given)
    return call(op, given)


def called(
    op: Operator, named: Callable[..., dict[str, Any]], entries: Any, runners: Any, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Answer a public function's call, whose first array is a tensor.

    named: gives the call's arguments by name. entries: the function's, for native calls. runners: what the function
    keeps by signature, here what answers calls on CUDA.
    """
    key: Any = torch_tensors.key(args, kwargs)  # None: not by what is kept
    answer = key and runners.get(key)
    if answer:
        return answer(args, kwargs)
    given = named(args, kwargs)
    result = noted(entries, lambda *args, **kwargs: owners.run(op, given), args, kwargs)
    is_kept = key and (op.general is None or _is_plain(op, given))
    if is_kept and (answer := torch_tensors.call_of(op, given, args, kwargs)):
        runners.keep(key, answer)
    return result


def _is_plain(op: Operator, given: Mapping[str, Any]) -> bool:
    """Whether a call is plain at first sight, which takes a tenth of the time of `expanded`."""
    assert op.general is not None
    dtypes = {value.dtype for value in given.values() if isinstance(value, torch.Tensor)}
    return len(dtypes) == 1 and dtypes <= PLAIN_DTYPES and given.keys().isdisjoint(op.general.keywords)


def _run_in_form(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run a call, expanded if it is not plain: to an operator of its own, `general` with its arguments."""
    general, arguments = expanded(op, given)
    if general is op:
        return _run(op, arguments)
    if given.get("out") is not None:
        return _run_into(general, arguments)
    if is_direct([value for value in arguments.values() if isinstance(value, torch.Tensor)]):
        return execute(general, arguments)
    owners.check_owners(general, arguments, library())
    tensors: dict[str, torch.Tensor] = {}
    owners.over_arrays(op, given, tensors.setdefault)
    if any(tensor.is_neg() for tensor in tensors.values()):
        return run(op, owners.over_arrays(op, given, lambda _, tensor: tensor.resolve_neg()))
    return _run_recorded(op, given)


def _run_into(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run with `out`, for which nothing may have to be differentiated."""
    arrays = owners.arrays_of(op, given)
    tensors = [tensor for tensor in arrays.values() if isinstance(tensor, torch.Tensor)]
    if not is_direct(tensors):
        owners.check_owners(op, given, library())
        if is_transformed():
            raise RuntimeError(
                f"{op.name}: a call with out= is not open to torch.func, torch.vmap and forward-mode differentiation: "
                "leave out= away"
            )
        for name, tensor in arrays.items():
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise RuntimeError(
                    f"{op.name}: {name} requires grad, and a call with out= is not differentiated: "
                    "leave out= away, or call under torch.no_grad()"
                )
        if is_traced(tensors):
            check_untraced(op)
            return _traced_into(op, given)
    results = execute(op, given)
    note_written(results if isinstance(results, tuple) else (results,))
    return results


def _traced_into(op: Operator, given: Mapping[str, Any]) -> Any:
    """Compute and copy: the registered operators write nothing that they are given."""
    out, results = given["out"], call(op, {**given, "out": None})
    pairs = zip(out, results, strict=True) if isinstance(out, tuple) else ((out, results),)
    for name, (destination, result) in zip(op.results, pairs, strict=True):
        if destination.dtype != result.dtype or destination.shape != result.shape:
            found = f"{destination.dtype} of shape {tuple(destination.shape)}"
            expected = f"{result.dtype} of shape {tuple(result.shape)}"
            raise ValueError(f"{op.name}: out for {name} is {found}, expected {expected}")
        destination.copy_(result)
    return out


def _sizes(op: Operator, shape: Any) -> Any:
    """The attribute `shape` as a tuple, so that it can be part of a key."""
    if isinstance(shape, torch.Tensor):
        if shape.device.type != "cpu":
            raise ValueError(f"{op.name}: shape is a tensor on {shape.device}, expected one in CPU memory or a tuple")
        if shape.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op.name}: shape has dtype {shape.dtype}, expected int32 or int64")
        shape = shape.tolist()
    return tuple(shape) if isinstance(shape, list) else shape


GRADIENTS = {op.forward: op for op in operators().values() if op.forward and op.general}
ATTRIBUTES = ("axis", "where", "logit_scale", "result_scale", "dropout", "post_ops", "out_scale")  # of the gradients
OF_LOGITS = ("axis", "where", "logit_scale")  # those between x and the saved probabilities


def _run_recorded(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run a general call of which autograd or another part of PyTorch has to know, with its caller's arguments.

    Raises NotImplementedError for what is traced or transformed, and for a gradient that requires grad.
    """
    tensors: dict[str, Tensor] = {}
    owners.over_arrays(op, given, tensors.setdefault)
    if is_transformed() or is_traced(list(tensors.values())):
        general, arguments = expanded(op, given)
        attributes = {**general.attributes, **{k: v for k, v in arguments.items() if k in general.attributes}}
        check_arrays(general, {name: spec(arguments[name]) for name in general.inputs}, attributes)
        check_untraced(general)
    if op.forward is not None:
        raise NotImplementedError(
            f"{op.name}: a call with attributes, or of mixed or narrow dtypes, has no gradient: detach its arguments"
        )
    settled = plain(op, given, ("axis", *SCALARS))  # backward() reads them again
    named = owners.over_arrays(op, settled, lambda name, _: name)
    if given.get("dropout") is not None:
        named["dropout"] = dataclasses.replace(given["dropout"])  # its seed may have changed when backward() runs
    return _general(op, named, tuple(tensors), *tensors.values())


def _results(op: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a call by name."""
    general, arguments = expanded(op, given)
    results = execute(general, arguments)
    return dict(zip(general.results, results if isinstance(results, tuple) else (results,), strict=True))


def _put_back(
    op: Operator, named: Mapping[str, Any], names: Sequence[str], tensors: Sequence[Tensor]
) -> dict[str, Any]:
    """Arguments with tensors for their names."""
    found = dict(zip(names, tensors, strict=True))
    return owners.over_arrays(op, named, lambda _, name: found[name])


class _General(torch.autograd.Function):
    """softmax or log_softmax; `named` are the arguments with names in place of `tensors`, of which x is the first."""

    @staticmethod
    def forward(ctx: Any, op: Operator, named: Mapping[str, Any], names: Sequence[str], *tensors: Tensor) -> Any:
        found = _results(op, {**_put_back(op, named, names, tensors), "save": True})
        ctx.op, ctx.named, ctx.names, ctx.dtype = op, named, names, tensors[0].dtype
        ctx.save_for_backward(found["saved"], *tensors[1:])
        ctx.set_materialize_grads(False)
        ctx.results = [name for name in found if name != "saved" or named.get("save")]
        results = tuple(found[name] for name in ctx.results)
        ctx.mark_non_differentiable(*[result for result in results if not result.is_floating_point()])
        return results[0] if len(results) == 1 else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        op, named = ctx.op, ctx.named
        if is_transformed() or any(gradient is not None and is_batched(gradient) for gradient in gradients):
            raise NotImplementedError(
                f"{op.name}: the gradient of a call with attributes, or of mixed or narrow dtypes, is not open to "
                "torch.func, torch.vmap, forward-mode differentiation and batches of gradients"
            )
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{op.name}: a call with attributes, or of mixed or narrow dtypes, is differentiable once, without "
                "create_graph=True; the plain form is differentiable twice"
            )
        saved, *tensors = ctx.saved_tensors
        backward = GRADIENTS[op.name]
        attributes = {name: named[name] for name in ATTRIBUTES if name in named}
        attributes = _put_back(backward, attributes, ctx.names[1:], tensors)
        given = {"y": saved, "out_dtype": ctx.dtype if ctx.dtype.is_floating_point else None}
        by: dict[str, Any] = dict(zip(ctx.results, gradients, strict=True))
        by = {name: None if each is None else each.resolve_neg() for name, each in by.items()}
        found: dict[str, Tensor] = {}
        parts = []
        if by["y"] is not None:
            wanted = any(ctx.needs_input_grad[4:])
            found = _results(backward, {**given, **attributes, "dy": by["y"], "post_op_grads": wanted})
            parts.append(found["dx"])
        if by.get("saved") is not None:
            of_logits = {name: attributes[name] for name in OF_LOGITS if name in attributes}
            parts.append(_results(backward, {**given, **of_logits, "dy": by["saved"]})["dx"])
        if by.get("stats") is not None:
            # The gradient of the log-sum-exp: the probabilities.
            exact = saved.to(wide(saved.dtype))
            probabilities = exact.exp() if op.name == "log_softmax" else exact
            parts.append(probabilities * (by["stats"] * named.get("logit_scale", 1.0)))
        operands = [found.get(gradient_name(name)) for name in ctx.names[1:]]
        return None, None, None, _sum(parts, ctx.dtype), *operands


_general: Callable[..., Any] = _General.apply


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The sum of gradients, formed in float32 or float64."""
    if len(parts) < 2 and all(part.dtype == dtype for part in parts):
        return parts[0] if parts else None
    return sum((part.to(wide(dtype)) for part in parts[1:]), parts[0].to(wide(dtype))).to(dtype)
