"""Softmax with attributes, or with mixed or narrow dtypes, on tensors: it is differentiable once and not traceable.

The forward pass keeps the probabilities, or their logarithms, before any attribute (`save=True`), and the backward
pass is the general form of the gradient operator.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.call import owners
from opgrad.call.libraries.torch_private import is_batched
from opgrad.call.libraries.torch_tensors import check_untraced, execute, expanded, is_traced, is_transformed, spec
from opgrad.contract import Operator, check_arrays
from opgrad.contract.signature import plain
from opgrad.ops import operators
from opgrad.ops.reference.primitive import SCALARS, gradient_name
from opgrad.torch.derivative import wide

GRADIENTS = {op.forward: op for op in operators().values() if op.forward and op.general}
ATTRIBUTES = ("axis", "where", "logit_scale", "result_scale", "dropout", "post_ops", "out_scale")  # of the gradients
OF_LOGITS = ("axis", "where", "logit_scale")  # those between x and the saved probabilities


def call(op: Operator, given: Mapping[str, Any]) -> Any:
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


def _run(op: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
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
        found = _run(op, {**_put_back(op, named, names, tensors), "save": True})
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
            found = _run(backward, {**given, **attributes, "dy": by["y"], "post_op_grads": wanted})
            parts.append(found["dx"])
        if by.get("saved") is not None:
            of_logits = {name: attributes[name] for name in OF_LOGITS if name in attributes}
            parts.append(_run(backward, {**given, **of_logits, "dy": by["saved"]})["dx"])
        if by.get("stats") is not None:
            parts.append(_by_stats(op, by["stats"], saved, named.get("logit_scale", 1.0)))
        operands = [found.get(gradient_name(name)) for name in ctx.names[1:]]
        return None, None, None, _sum(parts, ctx.dtype), *operands


_general: Callable[..., Any] = _General.apply


def _by_stats(op: Operator, dstats: Tensor, saved: Tensor, logit_scale: float) -> Tensor:
    """The gradient of the log-sum-exp: the probabilities."""
    exact = saved.to(wide(saved.dtype))
    return (exact.exp() if op.name == "log_softmax" else exact) * (dstats * logit_scale)


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The sum of gradients, formed in float32 or float64."""
    if len(parts) < 2 and all(part.dtype == dtype for part in parts):
        return parts[0] if parts else None
    return sum((part.to(wide(dtype)) for part in parts[1:]), parts[0].to(wide(dtype))).to(dtype)
