"""Operators on JAX arrays that jax.grad differentiates: by the operators of their gradients, else by formulas."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero

from opgrad.contract import Operator
from opgrad.contract.lists import only
from opgrad.jax.calls import alike, call
from opgrad.jax.formulas import FORMULAS, attended, loss_of, wide
from opgrad.ops import graph_operators, tensor_operators

Values = Mapping[str, Any]
Attributes = tuple[tuple[str, Any], ...]
ATTENTION = "dot_product_attention"
OPERATORS = tensor_operators()
# Operators of which functions here give the first result alone: others have no gradient.
LAYERS = graph_operators()
LAYERS["attention"] = only(LAYERS["attention"], ("y", "lse"))
LAYERS["attention_grad"] = only(LAYERS["attention_grad"], ("dq", "dk", "dv"))


class Rule(NamedTuple):
    """How an operator is differentiated.

    saved: the names of arguments and results that are kept. gradient: is given these, the gradients of the results by
    name (only those that are not zero), the attributes, and the names of the arguments whose gradients are wanted;
    returns gradients by argument.
    """

    saved: tuple[str, ...]
    gradient: Callable[[Values, Values, dict[str, Any], Sequence[str]], Values]


def differentiable(
    op: Operator, given: Mapping[str, Array], attributes: Mapping[str, Any], who: str = ""
) -> tuple[Array, ...]:
    """The results of an operator, in order; the arrays are given by name. who: the function that has called a layer."""
    settled = tuple(sorted(attributes.items()))
    found: tuple[Array, ...] = _function(op, tuple(given), settled, who)(*alike(list(given.values())))
    return found


@functools.lru_cache(1024)
def _function(op: Operator, names: tuple[str, ...], attributes: Attributes, who: str) -> Any:
    rule, options = rule_of(op, who), dict(attributes)

    @jax.custom_vjp
    def function(*arrays: Array) -> tuple[Array, ...]:
        return call(op, dict(zip(names, arrays, strict=True)), options, who)

    def forward(*primals: Any) -> tuple[Any, Any]:
        results = function(*[each.value for each in primals])
        values = {name: each.value for name, each in zip(names, primals, strict=True)}
        every = values | dict(zip(op.results, results, strict=True))
        # Names and dtypes are a structure without arrays.
        wanted = {
            (name, values[name].dtype.name): () for name, each in zip(names, primals, strict=True) if each.perturbed
        }
        return results, ({name: every[name] for name in rule.saved if name in every}, wanted)

    def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        saved, dtypes = kept[0], dict(kept[1].keys())
        pairs = zip(op.results, cotangents, strict=True)
        upstream = {name: each for name, each in pairs if not isinstance(each, SymbolicZero)}
        found = rule.gradient(saved, upstream, options, tuple(dtypes)) if upstream else {}
        return tuple(found[name].astype(dtypes[name]) if name in dtypes and name in found else None for name in names)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def rule_of(op: Operator, who: str = "") -> Rule:
    """How this operator is differentiated; a call in general, which is an operator of its own, is not."""
    operators = LAYERS if who else OPERATORS
    if op is not operators.get(op.name):
        return Rule((), functools.partial(_refused, op))
    if op.name in _RULES:
        return _RULES[op.name]
    backward = operators.get(f"{op.name}_grad")
    if backward is not None:
        saved = tuple(name for name in backward.arrays if name != "dy")
        return Rule(saved, functools.partial(_by_operator, op, backward, who))
    if op.name in FORMULAS:
        return Rule(op.arrays, functools.partial(_by_formula, op, FORMULAS[op.name]))
    return Rule((), functools.partial(_refused, op))


def _refused(
    op: Operator, saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]
) -> Values:
    raise NotImplementedError(
        f"{op.name}: no gradient of a call with these attributes under jax.grad: jax.custom_vjp can name one"
    )


def _by_operator(
    op: Operator, backward: Operator, who: str, saved: Values, upstream: Values, attributes: dict[str, Any],
    wanted: Sequence[str],
) -> Values:  # fmt: skip
    """By the operator of the gradient, which has the attributes, too, if the first result is differentiated."""
    dy = upstream.get(next(iter(op.results)))
    if dy is None:
        return {}
    shared = {name: value for name, value in attributes.items() if name in backward.attributes}
    found = differentiable(backward, {"dy": dy, **saved}, shared, who)
    return {name.removeprefix("d"): each for name, each in zip(backward.results, found, strict=True)}


def _by_formula(
    op: Operator,
    formula: Callable[..., Any],
    saved: Values,
    upstream: Values,
    attributes: dict[str, Any],
    wanted: Sequence[str],
) -> Values:
    """By JAX's derivative of a formula, of the arguments that are wanted."""
    constant = {name: value for name, value in saved.items() if name not in wanted}

    def results(changing: Values) -> Values:
        found = formula(**changing, **constant, **attributes)
        every = dict(zip(op.results, found if isinstance(found, tuple) else (found,), strict=True))
        return {name: every[name].astype(upstream[name].dtype) for name in upstream}

    _, pull = jax.vjp(results, {name: saved[name] for name in wanted})
    (found,) = pull(dict(upstream))
    return dict(found)


# --- attention, gather and the losses ---------------------------------------------------------------------------------


def _attention(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    op, backward = LAYERS["attention"], LAYERS["attention_grad"]
    if "y" not in upstream:  # nobody is given the logarithms of sums of exponentials
        return {}
    found = dict(_by_operator(op, backward, ATTENTION, saved, upstream, attributes, wanted))
    if "mask" in wanted:
        given = {name: saved[name] for name in ("q", "k", "v")}
        y, pull = jax.vjp(lambda mask: attended(**given, mask=mask, **attributes), saved["mask"])
        (found["mask"],) = pull(upstream["y"].astype(y.dtype))
    return found


def _gather(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    options = {**attributes, "shape": saved["x"].shape}
    given = {"indices": saved["indices"], "dy": upstream["y"]}
    (dx,) = differentiable(OPERATORS["gather_grad"], given, options)
    return {"x": dx}


def _gather_grad(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    options = {name: value for name, value in attributes.items() if name != "shape"}
    (dy,) = differentiable(OPERATORS["gather"], {"x": upstream["dx"], "indices": saved["indices"]}, options)
    return {"dy": dy}


def _rotation(of: str, by: str, result: str) -> Rule:
    """The rule of a rotation, whose first array's gradient is another rotation by the same angles."""
    array, *tables = OPERATORS[of].arrays

    def turned(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
        if any(name != array for name in wanted):
            raise NotImplementedError(f"{of}: no gradient with respect to cos_cache and sin_cache under jax.grad")
        given = {OPERATORS[by].arrays[0]: upstream[result], **saved}
        return {array: differentiable(OPERATORS[by], given, attributes)[0]}

    return Rule(tuple(tables), turned)


def scaled(gradient: Array, factor: Array) -> Array:
    """A gradient of logits times a number, or one for each sample, in its dtype."""
    each = jax.numpy.expand_dims(factor, 1) if factor.ndim else factor
    return (gradient * each).astype(gradient.dtype)


def _loss(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    """Of the loss with its log-probabilities."""
    log_prob, found = saved["log_prob"], {}
    given = {name: saved[name] for name in ("labels", "weight") if name in saved}
    bias = None
    if "log_prob" in upstream:
        dlog_prob = upstream["log_prob"].astype(log_prob.dtype)
        (bias,) = differentiable(OPERATORS["log_softmax_grad"], {"dy": dlog_prob, "y": log_prob}, {"axis": 1})
    if "logits" in wanted:
        dlogits: Any = bias
        if "loss" in upstream:
            options = {**attributes, "out_dtype": None}
            arrays = {"dy": upstream["loss"], "log_prob": log_prob, **given} | ({} if bias is None else {"bias": bias})
            (dlogits,) = differentiable(OPERATORS["softmax_cross_entropy_loss_grad"], arrays, options)
        found["logits"] = dlogits
    if "weight" in wanted and "loss" in upstream:
        found["weight"] = _of_weight(log_prob, saved, upstream["loss"], attributes)
    return found


def _of_weight(log_prob: Array, saved: Values, dloss: Array, attributes: dict[str, Any]) -> Array:
    _, pull = jax.vjp(lambda weight: loss_of(log_prob, saved["labels"], weight, **attributes), saved["weight"])
    (found,) = pull(dloss.astype(jax.eval_shape(lambda: loss_of(log_prob, saved["labels"], **attributes)).dtype))
    return found


def _loss_only(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    """Of the loss alone, by computing it anew with its gradient."""
    logits, found, dloss = saved["logits"], {}, upstream["loss"]
    given = {name: saved[name] for name in ("logits", "labels", "weight") if name in saved}
    if "logits" in wanted:
        options = {**attributes, "out_dtype": ("float32", logits.dtype.name)}
        _, dlogits = differentiable(OPERATORS["softmax_cross_entropy_loss_and_grad"], given, options)
        found["logits"] = scaled(dlogits, dloss)
    if "weight" in wanted:
        log_prob = jax.nn.log_softmax(logits.astype(wide(logits.dtype)), 1)
        found["weight"] = _of_weight(log_prob, saved, dloss, attributes)
    return found


def _loss_and_grad(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    if set(upstream) == {"loss"} and set(wanted) == {"logits"}:
        return {"logits": scaled(saved["dlogits"], upstream["loss"])}
    op = OPERATORS["softmax_cross_entropy_loss_and_grad"]
    inputs = {name: value for name, value in saved.items() if name != "dlogits"}
    return _by_formula(op, FORMULAS[op.name], inputs, upstream, attributes, wanted)


def _of_argument(of: str, name: str) -> Rule:
    """The rule of an operator whose gradient takes one of its arrays, or its result, under another name."""
    backward = OPERATORS[f"{of}_grad"]

    def gradient(saved: Values, *rest: Any) -> Values:
        return _by_operator(OPERATORS[of], backward, "", {backward.arrays[1]: saved[name]}, *rest)

    return Rule((name,), gradient)


_RULES = {
    "relu": _of_argument("relu", "y"),
    "leaky_relu": _of_argument("leaky_relu", "x"),
    "attention": Rule(("q", "k", "v", "mask", "y", "lse"), _attention),
    "rotary_embedding": _rotation("rotary_embedding", "rotary_embedding_grad", "y"),
    "rotary_embedding_grad": _rotation("rotary_embedding_grad", "rotary_embedding", "dx"),
    "gather": Rule(("x", "indices"), _gather),
    "gather_grad": Rule(("indices",), _gather_grad),
    "softmax_cross_entropy_loss": Rule(("logits", "labels", "weight", "log_prob"), _loss),
    "softmax_cross_entropy_loss_only": Rule(("logits", "labels", "weight"), _loss_only),
    "softmax_cross_entropy_loss_and_grad": Rule(("logits", "labels", "weight", "dlogits"), _loss_and_grad),
}
