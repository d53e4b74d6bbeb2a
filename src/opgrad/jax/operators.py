"""Operators on JAX arrays: at once on those that hold numbers; traced, or spread over devices, by XLA when it computes.

jax.grad differentiates them by the operators of their gradients, else by formulas in JAX's functions.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from opgrad.call import owners
from opgrad.call.arrays import expanded, one_or_tuple
from opgrad.call.libraries import jax_arrays
from opgrad.call.libraries.jax_arrays import NAME as NAME
from opgrad.contract import DTYPES, Operator, Shape, Spec
from opgrad.contract.declaration import only
from opgrad.contract.signature import plain
from opgrad.jax.calls import alike, call
from opgrad.ops import graph_operators, tensor_operators
from opgrad.ops.reference import loss_options
from opgrad.ops.reference.gradient_formulas import SHARED, attended

Values = Mapping[str, Any]
Attributes = tuple[tuple[str, Any], ...]
ATTENTION = "dot_product_attention"
OPERATORS = tensor_operators()
LOSS_ONLY = OPERATORS["softmax_cross_entropy_loss_only"]
# Operators of which functions here give the first result alone: others have no gradient.
LAYERS = graph_operators()
LAYERS["attention"] = only(LAYERS["attention"], ("y", "lse"))
LAYERS["attention_grad"] = only(LAYERS["attention_grad"], ("dq", "dk", "dv"))


# --- operators in JAX's own functions: gradients of gradients, and with respect to class weights and masks ------------


XP = SimpleNamespace(
    where=jnp.where,
    exp=jnp.exp,
    sigmoid=jax.nn.sigmoid,
    silu=jax.nn.silu,
    gelu=jax.nn.gelu,
    amax=jnp.max,
    tril=jnp.tril,
    ones_like=jnp.ones_like,
    bool=jnp.bool_,
    repeat=jnp.repeat,
    constant=jax.lax.stop_gradient,
    pulled=lambda function, arrays, dy: jax.vjp(function, *arrays)[1](dy),
)
Formula = Callable[..., Any]


def wide(dtype: Any) -> Any:
    """The dtype in which factors and sums of this one are formed."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def exactly(shared: Formula) -> Formula:
    """A formula that PyTorch shares, of arrays of any dtype."""

    def of_arrays(**arguments: Any) -> Any:
        floats = {
            name: value.astype(wide(value.dtype))
            for name, value in arguments.items()
            if jnp.issubdtype(getattr(value, "dtype", bool), np.floating)
        }
        return shared(XP, **{**arguments, **floats})

    return of_arrays


FORMULAS: dict[str, Formula] = {name: exactly(shared) for name, shared in SHARED.items()}


def formula(function: Formula) -> Formula:
    FORMULAS[function.__name__] = function
    return function


@formula
def scale(x: Array, factor: Array, scale_down: bool = False) -> Array:
    number = factor.astype(x.dtype).reshape(())
    return x / number if scale_down else x * number


# --- cross-entropy --------------------------------------------------------------------------------------------------


def sample_weights(labels: Array, weight: Array | None, ignore_index: int | None, dtype: Any) -> Array:
    """The weight of each sample's class, 0 for ignored samples and for wrong labels."""
    weight = None if weight is None else weight.astype(dtype)
    return cast(Array, loss_options.sample_weights(jnp, labels, weight, ignore_index, dtype))


def picked(values: Array, labels: Array) -> Array:
    """The value at each sample's label on axis 1; 0 for labels that are no classes."""
    place = jnp.where((labels >= 0) & (labels < values.shape[1]), labels, values.shape[1])
    return jnp.take_along_axis(values, place[:, None], 1, mode="fill", fill_value=0)[:, 0]


def loss_of(
    log_prob: Array, labels: Array, weight: Array | None = None, ignore_index: int | None = None,
    reduction: str = "mean", **_: Any,
) -> Array:  # fmt: skip
    """The loss of log-probabilities."""
    dtype = wide(log_prob.dtype)
    each = sample_weights(labels, weight, ignore_index, dtype)
    losses = jnp.where(each == 0, 0, -each * picked(log_prob.astype(dtype), labels))
    if reduction == "none":
        return losses
    return losses.sum() * (loss_options.over(jnp, each.sum()) if reduction == "mean" else 1)


@formula
def softmax_cross_entropy_loss_only(logits: Array, labels: Array, weight: Array | None = None, **options: Any) -> Array:
    return loss_of(jax.nn.log_softmax(logits.astype(wide(logits.dtype)), 1), labels, weight, **options)


@formula
def softmax_cross_entropy_loss_and_grad(
    logits: Array, labels: Array, weight: Array | None = None, **options: Any
) -> tuple[Array, Array]:
    def total(x: Array) -> tuple[Array, Array]:
        loss = softmax_cross_entropy_loss_only(x, labels, weight, **options)
        return loss.sum(), loss

    dlogits, loss = jax.grad(total, has_aux=True)(logits)
    return loss, dlogits


@formula
def softmax_cross_entropy_loss_grad(
    dy: Array, log_prob: Array, labels: Array, weight: Array | None = None, bias: Array | None = None,
    ignore_index: int | None = None, reduction: str = "mean", **_: Any,
) -> Array:  # fmt: skip
    dtype = wide(log_prob.dtype)
    each = sample_weights(labels, weight, ignore_index, dtype)
    factor = each * (loss_options.over(jnp, each.sum()) if reduction == "mean" else 1)
    factor = (factor * (dy if reduction == "none" else dy.reshape(()))).astype(dtype)[:, None]
    classes = jnp.arange(log_prob.shape[1]).reshape(1, -1, *[1] * (labels.ndim - 1))
    dlogits = factor * (jnp.exp(log_prob.astype(dtype)) - (labels[:, None] == classes))
    dlogits = jnp.where(factor == 0, 0, dlogits)
    return dlogits if bias is None else dlogits + bias


def weighted_losses(
    below: Array, labels: Array, weight: Array | None = None, probabilities: Array | None = None,
    ignore_index: int | None = None, label_smoothing: float = 0.0, **_: Any,
) -> Array:  # fmt: skip
    """The samples' losses sum(weight * q * (lse - z)), given lse - z; linear in weight and in probabilities."""
    w = 1 if weight is None else weight.astype(below.dtype).reshape(-1, *[1] * (below.ndim - 2))
    if probabilities is not None:
        chosen = (w * probabilities.astype(below.dtype) * below).sum(1)
    else:
        chosen = picked(w * below, labels)
    spread = label_smoothing / max(below.shape[1], 1) * (w * below).sum(1) if label_smoothing else 0
    losses = (1 - label_smoothing) * chosen + spread
    return losses if ignore_index is None else jnp.where(labels == ignore_index, 0, losses)


# --- rules ------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """The rule that differentiates an operator.

    saved: the names of arguments and results that are kept. gradient: is given these, the gradients of the results by
    name (only those that are not zero), the attributes, and the names of the arguments whose gradients are wanted;
    returns gradients by argument.
    """

    saved: tuple[str, ...]
    gradient: Callable[[Values, Values, dict[str, Any], Sequence[str]], Values]


def differentiable(
    op: Operator, given: Mapping[str, Array], attributes: Mapping[str, Any], caller: str = ""
) -> tuple[Array, ...]:
    """The results of an operator, in order; the arrays are given by name. caller: the function that calls a layer."""
    settled = tuple(sorted(attributes.items()))
    return cast(tuple[Array, ...], _function(op, tuple(given), settled, caller)(*alike(list(given.values()))))


@functools.lru_cache(1024)
def _function(op: Operator, names: tuple[str, ...], attributes: Attributes, caller: str) -> Any:
    rule, options = rule_of(op, caller), dict(attributes)

    @jax.custom_vjp
    def function(*arrays: Array) -> tuple[Array, ...]:
        return call(op, dict(zip(names, arrays, strict=True)), options, caller)

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


def rule_of(op: Operator, caller: str = "") -> Rule:
    """The rule of an operator; a general call, which is an operator of its own, has none."""
    operators = LAYERS if caller else OPERATORS
    is_known = op is operators.get(op.name)
    if is_known and op.name in _RULES:
        return _RULES[op.name]
    if is_known and (backward := operators.get(f"{op.name}_grad")) is not None:
        saved = tuple(name for name in backward.arrays if name != "dy")
        return Rule(saved, functools.partial(_by_operator, op, backward, caller))
    if is_known and op.name in FORMULAS:
        return Rule(op.arrays, functools.partial(_by_formula, op, FORMULAS[op.name]))

    def refuse(*_: Any) -> Values:
        what = f"{op.name}: no gradient of a call with these attributes under jax.grad"
        raise NotImplementedError(f"{what}: jax.custom_vjp can name one")

    return Rule((), refuse)


def _by_operator(
    op: Operator, backward: Operator, caller: str, saved: Values, upstream: Values, attributes: dict[str, Any],
    wanted: Sequence[str],
) -> Values:  # fmt: skip
    """By the operator of the gradient, which has the attributes, too, if the first result is differentiated."""
    dy = upstream.get(next(iter(op.results)))
    if dy is None:
        return {}
    shared = {name: value for name, value in attributes.items() if name in backward.attributes}
    found = differentiable(backward, {"dy": dy, **saved}, shared, caller)
    return {name.removeprefix("d"): each for name, each in zip(backward.results, found, strict=True)}


def _by_formula(
    op: Operator, formula: Callable[..., Any], saved: Values, upstream: Values, attributes: dict[str, Any],
    wanted: Sequence[str],
) -> Values:  # fmt: skip
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
        y, pull = jax.vjp(lambda mask: exactly(attended)(**given, mask=mask, **attributes), saved["mask"])
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
        kept, dloss = {"log_prob": log_prob, **given}, {"loss": upstream["loss"]}
        found |= _by_formula(LOSS_ONLY, loss_of, kept, dloss, attributes, ("weight",))
    return found


def _loss_only(saved: Values, upstream: Values, attributes: dict[str, Any], wanted: Sequence[str]) -> Values:
    """Of the loss alone, by computing it anew with its gradient."""
    found: dict[str, Array] = {}
    if "logits" in wanted:
        options = {**attributes, "out_dtype": ("float32", saved["logits"].dtype.name)}
        _, dlogits = differentiable(OPERATORS["softmax_cross_entropy_loss_and_grad"], saved, options)
        found["logits"] = scaled(dlogits, upstream["loss"])
    if "weight" in wanted:
        found |= _by_formula(LOSS_ONLY, FORMULAS[LOSS_ONLY.name], saved, upstream, attributes, ("weight",))
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


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays given by parameter name.

    Raises TypeError for `out`, for attributes that are traced and for float64 without jax_enable_x64, ValueError for
    arrays on several devices of which none is spread over them, NotImplementedError for devices that have no kernels,
    besides what the operator raises.
    """
    library = owners.library_of(jax.Array)
    assert library is not None
    found = jax_arrays.check(op, given, library)
    if not (jax_arrays.is_traced(found.values()) or jax_arrays.is_spread(found.values())):
        return jax_arrays.run(op, given, found)
    of, settled = expanded(op, dict(given), _LIBRARY)
    settled = dict(plain(of, settled))
    found = {name: settled[name] for name in of.arrays if settled.get(name) is not None}
    attributes = {name: settled[name] for name in of.attributes if name in settled}
    results = differentiable(of, found, attributes)
    return (of.finish or one_or_tuple)(results)


class _JaxLibrary:
    """`opgrad.contract.declaration.Arrays` for JAX's."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def spec(self, array: Any) -> Spec:
        return Spec(tuple(np.shape(array)), np.dtype(jnp.result_type(array)))

    def broadcast(self, array: Any, shape: Shape, like: Any) -> Any:
        number = isinstance(array, int | float) and not isinstance(array, bool)
        found = jnp.asarray(array, jnp.result_type(float)) if number else jnp.asarray(array)
        return found if found.shape == shape else jnp.broadcast_to(found, shape)

    def state(self, words: np.ndarray[Any, Any], like: Any) -> Any:
        return jnp.array(words.view(np.int32))  # as JAX has no int64 by itself

    def total(self, array: Any, axes: tuple[int, ...], shape: Shape, dtype: str) -> Any:
        summed = array.astype(jnp.result_type(float)).sum(axes).reshape(shape) if axes else array
        return summed.astype(DTYPES[dtype])


_LIBRARY = _JaxLibrary()
