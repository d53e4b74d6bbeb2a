"""The gradient of every operator, the gradients of gradients among them, in terms of operators and torch functions.

That of an operator whose gradient is declared, such as tanh, needs no line here.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_tensors import execute, is_direct, is_transformed
from opgrad.ops.reference import loss_options
from opgrad.ops.reference.gradient_formulas import SHARED
from opgrad.torch.operators import OPERATORS, Gradient, TensorOperator, pulled_back, wide

Gradients = dict[str, Tensor | None]
Needs = Mapping[str, bool]

softmax_grad, log_softmax_grad = OPERATORS["softmax_grad"].call, OPERATORS["log_softmax_grad"].call
loss_grad = OPERATORS["softmax_cross_entropy_loss_grad"].call
loss_and_grad = OPERATORS["softmax_cross_entropy_loss_and_grad"].call
gather, gather_grad = OPERATORS["gather"].call, OPERATORS["gather_grad"].call
scale = OPERATORS["scale"].call

# What formulas that JAX shares are made of.
XP = SimpleNamespace(
    where=torch.where,
    exp=torch.exp,
    sigmoid=torch.sigmoid,
    silu=functional.silu,
    gelu=lambda x, by_tanh: functional.gelu(x, approximate="tanh" if by_tanh else "none"),
    amax=torch.amax,
    tril=torch.tril,
    ones_like=torch.ones_like,
    bool=torch.bool,
    repeat=torch.repeat_interleave,
    constant=Tensor.detach,
    pulled=lambda function, arrays, dy: pulled_back(function, arrays, [dy]),
)


def gradient(name: str) -> Callable[[Gradient], Gradient]:
    """Give an operator its gradient; `Derivative` says what the function is given."""

    def give(formula: Gradient) -> Gradient:
        OPERATORS[name].differentiate(formula)
        return formula

    return give


def formula(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give an operator the derivatives of a formula: its results in PyTorch's operations, by its arguments' names.

    The formula is given floating-point arrays in the dtype of sums; class weights are constants.
    """

    def give(results: Callable[..., Any]) -> Callable[..., Any]:
        differentiate(OPERATORS[name], results)
        return results

    return give


def differentiate(operator: TensorOperator, results: Callable[..., Any], names: Sequence[str] = ()) -> None:
    """Give an operator the derivatives of a formula, as `formula` does. names: of the formula's arguments."""
    names, count = names or tuple(inspect.signature(results).parameters), len(operator.op.results)
    inputs = [name for name in operator.op.inputs if name != "weight"]

    def gradient(*values: Any) -> Gradients:
        given = dict(zip(names, values[count:], strict=True))
        moved = [name for name in inputs if isinstance(given.get(name), Tensor) and given[name].is_floating_point()]

        def of(*now: Tensor) -> Any:
            exact = (each.to(wide(each.dtype)) for each in now)
            return results(**{**given, **dict(zip(moved, exact, strict=True))})

        found = pulled_back(of, [given[name] for name in moved], values[:count])
        return dict.fromkeys(inputs) | dict(zip(moved, found, strict=True))

    operator.differentiate(gradient, wanted=names)


# --- softmax, activations, accumulation -----------------------------------------------------------------------------


for _name in SHARED.keys() & OPERATORS.keys():
    differentiate(OPERATORS[_name], functools.partial(SHARED[_name], XP))


@gradient("scale")
def _scale(dy: Tensor, needs: Needs, x: Tensor, factor: Tensor, scale_down: bool) -> Gradients:
    by_factor = None
    if needs["factor"]:
        number, exact = factor.to(x.dtype), wide(x.dtype)
        product = -dy * x.to(exact) / (number * number) if scale_down else dy * x.to(exact)
        by_factor = product.sum().reshape(factor.shape)
    return {"x": scale(dy, factor, scale_down) if needs["x"] else None, "factor": by_factor}


# --- cross-entropy --------------------------------------------------------------------------------------------------


@gradient("softmax_cross_entropy_loss")
def _loss(
    dloss: Tensor | None,
    dlog_prob: Tensor | None,
    log_prob: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    logits_dtype: torch.dtype,
) -> Gradients:
    by_log_prob = None if dlog_prob is None else log_softmax_grad(dlog_prob, log_prob, 1)
    if dloss is None:
        return {"logits": by_log_prob}
    arguments = (log_prob, labels, weight, by_log_prob, ignore_index, reduction, logits_dtype, False)
    return {"logits": loss_grad(dloss, *arguments)}


@gradient("softmax_cross_entropy_loss_only")
def _loss_only(
    dloss: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int | None, reduction: str
) -> Gradients:
    _, dlogits = loss_and_grad(logits, labels, weight, ignore_index, reduction, None, None, False)
    return {"logits": scaled(dlogits, dloss)}


@gradient("softmax_cross_entropy_loss_and_grad")
def _loss_and_grad(
    dloss: Tensor | None,
    ddlogits: Tensor | None,
    dlogits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    logits_dtype: torch.dtype,
) -> Gradients:
    by_loss = None if dloss is None else scaled(dlogits, dloss)
    if ddlogits is None:
        return {"logits": by_loss}
    # dlogits = f * (p - onehot) for a factor f of each sample, from which p, the softmax, is had again.
    f = factors(labels, weight, ignore_index, reduction, dlogits)
    p = dlogits / torch.where(f == 0, 1, f) + onehot(labels, dlogits.shape[1], f.dtype)
    by_dlogits = torch.where(f == 0, 0, f * softmax_grad(ddlogits.to(f.dtype), p, 1)).to(logits_dtype)
    return {"logits": by_dlogits if by_loss is None else by_loss + by_dlogits}


@formula("softmax_cross_entropy_loss_grad")
def _loss_grad(
    dy: Tensor,
    log_prob: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ignore_index: int | None,
    reduction: str,
) -> Tensor:
    f = factors(labels, weight, ignore_index, reduction, log_prob)
    upstream = dy.unsqueeze(1) if reduction == "none" else dy.reshape(())
    found = torch.where(f == 0, 0, f * upstream * (log_prob.exp() - onehot(labels, log_prob.shape[1], f.dtype)))
    return found if bias is None else found + bias


def scaled(dlogits: Tensor, dloss: Tensor) -> Tensor:
    """dlogits * dloss, where dloss is one number or one for each sample, in the dtype of dlogits.

    A product of half precision with float32 is formed in float32: the factors of torch.amp.GradScaler are too
    large for float16.
    """
    if dloss.dim() == 0:
        return scale(dlogits, dloss, False)
    factor = dloss.unsqueeze(1)
    if torch.is_grad_enabled() or is_transformed() or factor.dtype == dlogits.dtype:
        return (dlogits * factor).to(dlogits.dtype)
    return torch.mul(dlogits, factor, out=torch.empty_like(dlogits))


def scale_in_place(dlogits: Tensor, dloss: Tensor) -> Tensor:
    """The same without a new tensor, and without a gradient."""
    if dloss.dim() == 0 and is_direct((dlogits, dloss)):
        return execute(OPERATORS["scale"].op, {"x": dlogits, "factor": dloss, "out": dlogits})
    # A number on the device would be rounded to the dtype of dlogits first; a tensor with dimensions is not.
    return dlogits.mul_(dloss.unsqueeze(1) if dloss.dim() else dloss.reshape(1))


def sample_weights(labels: Tensor, weight: Tensor | None, ignore_index: int | None, dtype: torch.dtype) -> Tensor:
    """The weight of each sample's class, 0 for ignored samples."""
    weight = None if weight is None else weight.detach().to(dtype)
    each: Tensor = loss_options.sample_weights(torch, labels.long(), weight, ignore_index, dtype)
    return each


def factors(labels: Tensor, weight: Tensor | None, ignore_index: int | None, reduction: str, like: Tensor) -> Tensor:
    """The factor f of dlogits = f * (softmax - onehot), broadcast over the classes on axis 1."""
    dtype = wide(like.dtype)
    f = sample_weights(labels, weight, ignore_index, dtype)
    if reduction == "mean":
        f = (f * loss_options.over(torch, f.sum(dtype=torch.float64))).to(dtype)
    return f.unsqueeze(1)


def onehot(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """1 for the sample's label and 0 for other classes, on axis 1."""
    every = torch.arange(classes, device=labels.device).view(-1, *[1] * (labels.dim() - 1))
    return (labels.unsqueeze(1) == every).to(dtype)


# --- gather and rotary embedding ------------------------------------------------------------------------------------


@gradient("gather_grad")
def _gather_grad(g: Tensor, indices: Tensor, axis: int) -> Gradients:
    return {"dy": gather(g, indices, axis, False)}


def _turned(name: str, array: str, by: Callable[..., Tensor]) -> None:
    """Give a rotation the gradient of its first array: another rotation by the same angles."""

    @gradient(name)
    def turned(
        g: Tensor, cos_cache: Tensor, sin_cache: Tensor, position_ids: Tensor | None, interleaved: bool,
        rotary_embedding_dim: int, num_heads: int, layout: str,
    ) -> Gradients:  # fmt: skip
        options = (interleaved, rotary_embedding_dim, num_heads, layout)
        return {array: by(g, cos_cache, sin_cache, position_ids, *options)}


_turned("rotary_embedding", "x", OPERATORS["rotary_embedding_grad"].call)
_turned("rotary_embedding_grad", "dy", OPERATORS["rotary_embedding"].call)


# --- gradients that are operators themselves --------------------------------------------------------------------------


def direct(name: str, by: Callable[..., Tensor], saved: Sequence[str]) -> None:
    """Give an operator the gradient of its first argument by one function, called with dy and what is saved.

    saved: what `Derivative` knows by these names; tensors come first, as they are the first that operators take.
    """
    operator = OPERATORS[name]
    x = operator.op.arrays[0]

    def formula(*dy_and_saved: Any) -> Gradients:
        return {x: by(*dy_and_saved)}

    operator.differentiate(formula, by, saved)


direct("relu", OPERATORS["relu_grad"].call, ("y",))
# The input has the right sign for every alpha, the output for positive ones alone.
direct("leaky_relu", OPERATORS["leaky_relu_grad"].call, ("x", "alpha"))
direct(
    "gather",
    lambda dy, indices, axis, x_shape: gather_grad(x_shape, indices, dy, axis, False),
    ("indices", "axis", "x_shape"),
)
for backward in OPERATORS.values():
    forward = OPERATORS.get(backward.op.forward or "")
    if forward is not None and forward.eager is None:
        direct(forward.op.name, backward.call, backward.names[1:])
