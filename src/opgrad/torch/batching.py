"""The batching rule of every operator for torch.vmap: one call with the batch as an additional axis.

Elementwise and row operators take the batch axis in front. The losses take it as part of the samples, whose losses are
then reduced for each call separately. Lookups take it as a further axis of x. If every call has its own indices and its
own table, all tables are concatenated, and the indices are shifted to their part of the result.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries.torch_tensors import numpy_dtype
from opgrad.contract import Spec
from opgrad.ops.reference.rotary import PACKED
from opgrad.torch.formulas import factors, wide
from opgrad.torch.operators import OPERATORS, TensorOperator

Batched = tuple[Any, Any]


@dataclass(frozen=True)
class Batch:
    """Many calls of an operator at once.

    given: the arguments by name; those in `batched` have the axis of the batch, in front.
    attributes: those of one call, checked.
    """

    operator: TensorOperator
    size: int
    given: dict[str, Any]
    batched: frozenset[str]
    attributes: dict[str, Any]

    def every(self, name: str) -> Any:
        """An argument with the axis of the batch, repeated if it has none; None if it is not given."""
        value = self.given[name]
        return value if value is None or name in self.batched else value.expand(self.size, *value.shape)

    def call(self, **changed: Any) -> Any:
        """The operator's results for these arguments in place of the batch's."""
        return self.operator(*[changed.get(name, value) for name, value in self.given.items()])


def batching(operator: TensorOperator, rule: Callable[[Batch], Batched]) -> Callable[..., Batched]:
    """`Derivative.batching` from a rule. One call is checked first, so that messages speak of its shapes."""

    def rule_of_calls(size: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> Batched:
        given = dict(zip(operator.names, arguments, strict=True))
        dims = dict(zip(operator.names, in_dims, strict=True))
        batched = frozenset(name for name in operator.op.inputs if dims.get(name) is not None)
        given |= {name: given[name].movedim(dims[name], 0) for name in batched}
        specs = {name: _spec(given.get(name), name in batched) for name in operator.op.inputs}
        attributes = operator.checked(specs, operator.given(arguments))
        try:
            return rule(Batch(operator, size, given, batched, attributes))
        except ValueError:  # a label or an index is out of range; the call that has it shall raise the error
            for call in range(size):
                operator(*[value[call] if name in batched else value for name, value in given.items()])
            raise

    return rule_of_calls


def _spec(tensor: Tensor | None, batched: bool) -> Spec | None:
    """The shape and dtype of an argument of one call."""
    return None if tensor is None else Spec(tuple(tensor.shape[batched:]), numpy_dtype(tensor.dtype))


# --- elements and rows ----------------------------------------------------------------------------------------------


def elements(batch: Batch) -> Batched:
    """All calls as one on arrays with the batch in front."""
    return batch.call(**{name: batch.every(name) for name in batch.operator.op.inputs}), 0


def _rows(batch: Batch) -> Batched:
    axes = [axis + 1 for axis in batch.attributes["axis"]]
    return batch.call(**{name: batch.every(name) for name in batch.operator.op.inputs}, axis=axes), 0


def _scale(batch: Batch) -> Batched:
    x = batch.every("x")
    if "factor" not in batch.batched:
        return batch.call(x=x), 0
    factor = batch.given["factor"].to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    return x / factor if batch.given["scale_down"] else x * factor, 0


# --- cross-entropy --------------------------------------------------------------------------------------------------


def _losses(batch: Batch) -> Batched:
    """A loss and its gradient for each sample, which are then multiplied and reduced as each call asks for."""
    operator, given = batch.operator, batch.given
    logits, labels = batch.every("logits"), batch.every("labels")
    f = _factors(batch, labels, logits)
    multiplied = {"loss"} if f is None else {"loss", "dlogits"}
    pairs = list(zip(operator.op.results, operator.dtypes, strict=True))
    computed = {dtype: wide(logits.dtype) for name, dtype in pairs if name in multiplied}
    samples = {"logits": logits.flatten(0, 1), "labels": labels.flatten(0, 1)} | _weight(batch, f)
    found = batch.call(**samples, **computed, reduction="none")
    results = []
    for (name, dtype), result in zip(pairs, found if isinstance(found, tuple) else (found,), strict=True):
        each = result.unflatten(0, logits.shape[:2])
        if f is not None and name in multiplied:
            each = each * (f.squeeze(2) if name == "loss" else f)
        if name == "loss" and given["reduction"] != "none":
            each = each.flatten(1).sum(1, dtype=torch.float64)
        results.append(each.to(given[dtype] or logits.dtype))
    return (results[0], 0) if len(results) == 1 else (tuple(results), (0, 0))


def _loss_grad(batch: Batch) -> Batched:
    log_prob, labels, bias = batch.every("log_prob"), batch.every("labels"), batch.every("bias")
    f = _factors(batch, labels, log_prob)
    dy = batch.every("dy")
    if batch.given["reduction"] != "none":
        dy = dy.reshape(-1, *[1] * (labels.dim() - 1)).expand(labels.shape)
    if f is not None:
        dy = dy.to(f.dtype) * f.squeeze(2)
    samples = {"dy": dy, "log_prob": log_prob, "labels": labels} | ({} if bias is None else {"bias": bias})
    flat = {name: each.flatten(0, 1) for name, each in samples.items()} | _weight(batch, f)
    return batch.call(**flat, reduction="none").unflatten(0, log_prob.shape[:2]), 0


def _factors(batch: Batch, labels: Tensor, like: Tensor) -> Tensor | None:
    """The factor of each sample, if it is not the operator's `weight` alone; else None."""
    weight, ignore_index, reduction = (batch.given[name] for name in ("weight", "ignore_index", "reduction"))
    if reduction != "mean" and "weight" not in batch.batched:
        return None
    call = functools.partial(factors, ignore_index=ignore_index, reduction=reduction, like=like)
    found: Tensor = torch.vmap(call, in_dims=(0, 0 if "weight" in batch.batched else None))(labels, weight)
    return found


def _weight(batch: Batch, f: Tensor | None) -> dict[str, Any]:
    return {"weight": batch.given["weight"] if f is None else None}


# --- gather ---------------------------------------------------------------------------------------------------------


def _gather(batch: Batch) -> Batched:
    axis, x, indices = batch.attributes["axis"].start, batch.given["x"], batch.given["indices"]
    if "indices" not in batch.batched:
        return batch.call(axis=axis + 1), 0
    if "x" in batch.batched:
        x = x.movedim(0, axis)
        indices = _shifted(indices, x.shape[axis + 1])
        x = x.flatten(axis, axis + 1)
    return batch.call(x=x, indices=indices, axis=axis), axis


def _gather_grad(batch: Batch) -> Batched:
    axis, shape = batch.attributes["axis"].start, tuple(batch.given["shape"])
    if "indices" not in batch.batched:
        return batch.call(shape=(batch.size, *shape), axis=axis + 1), 0
    rows = (batch.size, shape[axis])
    shape = (*shape[:axis], math.prod(rows), *shape[axis + 1 :])
    indices, dy = _shifted(batch.given["indices"], rows[1]), batch.every("dy").movedim(0, axis)
    return batch.call(shape=shape, indices=indices, dy=dy, axis=axis).unflatten(axis, rows), axis


def _shifted(indices: Tensor, size: int) -> Tensor:
    """Indices into tables of this size as indices into the concatenated tables; those out of range stay so."""
    indices = indices.long()
    tables = indices.shape[0]
    first = torch.arange(tables, device=indices.device).mul(size).view(-1, *[1] * (indices.dim() - 1))
    inside = first + torch.where(indices < 0, indices + size, indices)
    outside = torch.where(indices < 0, indices - tables * size, indices + tables * size)
    return torch.where((indices < -size) | (indices >= size), outside, inside)


# --- rotary embedding -------------------------------------------------------------------------------------------------


def _rotary(batch: Batch) -> Batched:
    """More sequences. Tables that each call has for itself become a row of angles for each of its tokens."""
    first = batch.operator.names[0]
    x, positions = batch.every(first), batch.given["position_ids"]
    changed: dict[str, Any] = {first: x.flatten(0, 1)}
    tables = [batch.given[name] for name in ("cos_cache", "sin_cache")]
    if batch.batched & {"cos_cache", "sin_cache"} or tables[0].dim() == PACKED:
        changed |= {name: _rows_of_tokens(batch, name, x) for name in ("cos_cache", "sin_cache")}
        changed["position_ids"] = None
    elif positions is not None:
        changed["position_ids"] = batch.every("position_ids").flatten(0, 1)
    return batch.call(**changed).unflatten(0, x.shape[:2]), 0


def _rows_of_tokens(batch: Batch, name: str, x: Tensor) -> Tensor:
    """A table as [calls * B, L, R / 2]."""
    table, given = batch.every(name), batch.given
    sequences, tokens = x.shape[1], x.shape[3 if x.dim() == 5 and given["layout"] == "BHLD" else 2]
    if given["position_ids"] is not None:
        positions = batch.every("position_ids").long()
        calls = torch.arange(batch.size, device=x.device).view(-1, 1, 1)
        return table[calls, positions].flatten(0, 1)
    table = table if table.dim() > PACKED else table[:, None, :tokens]
    return table.expand(batch.size, sequences, tokens, table.shape[-1]).flatten(0, 1)


RULES = {
    "rotary_embedding": _rotary,
    "rotary_embedding_grad": _rotary,
    "scale": _scale,
    "softmax_cross_entropy_loss_grad": _loss_grad,
    "gather": _gather,
    "gather_grad": _gather_grad,
}
RULES_BY_KIND = {"elements": elements, "rows": _rows, "classes": _losses}

for name, operator in OPERATORS.items():
    if operator.eager is None:  # it has no gradient, and so no batching rule from it
        continue
    operator.derivative.batching = batching(operator, RULES.get(name) or RULES_BY_KIND[operator.op.kind])
