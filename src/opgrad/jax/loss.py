"""Cross-entropy on JAX arrays, of logits and of linear layers, and divergences from a teacher's layer.

One kernel computes the loss and its gradient, in one pass over the logits. What the mean is divided by, a traced
temperature and the squares of log-sum-exp are JAX's own arithmetic around the kernel, so they may be traced and are
differentiated as JAX does.

Of linear layers XLA forms the products, in a loop over chunks of rows, whose logits are never all stored. With one
number as loss, the chunk's gradient takes the place of its logits, and what follows from it is added up at once; else,
and for divergences, the backward pass computes the chunk's logits again.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from opgrad.call.libraries.jax_private import is_traced
from opgrad.jax.calls import alike, automatic, call
from opgrad.jax.operators import scaled, weighted_losses, wide
from opgrad.ops import graph_operators, loss_operators, operators
from opgrad.ops.reference.loss_options import (
    IGNORED,
    LossOptions,
    bent,
    check_layer,
    check_share,
    divisors,
    in_int32,
    over,
    read_ignore_index,
    read_options,
    shifted,
)

_plain = {each: operators()[f"softmax_cross_entropy_loss{each}"] for each in ("_only", "_and_grad")}
_samples, _samples_and_grad = (loss_operators()[f"sample_losses{each}"] for each in ("", "_and_grad"))


class Targets(NamedTuple):
    """The targets of a loss: labels, class weights, and probabilities in place of labels."""

    labels: Array
    weight: Array | None = None
    probabilities: Array | None = None


def divided(options: LossOptions, targets: Targets, reduction: str, num_items: Any, dtype: Any) -> tuple[Array, Array]:
    """The factors of the sums of losses and of squares of lse, which contain the mean's divisors."""
    weight = None if targets.probabilities is not None else targets.weight
    items = None if num_items is None else jnp.asarray(num_items, dtype).reshape(())
    chosen = LossOptions(reduction, options.ignore_index, num_items=items)
    both = divisors(jnp, targets.labels, weight, chosen, dtype, lambda array, to: array.astype(to))
    by_weight, by_count = (jnp.asarray(over(jnp, each), dtype) for each in both)
    return by_weight, by_count


# --- sums and means -------------------------------------------------------------------------------------------------


def _plain_sum(which: str, options: LossOptions, logits: Array, targets: Targets, factor: Array) -> tuple[Array, ...]:
    """The sum of the losses of labels without options, times a factor, by the kernel that is made for it.

    The factor is multiplied into the class weights, so that the gradient is multiplied by it before it is rounded.
    """
    dtype = wide(logits.dtype)
    ones = jnp.ones(logits.shape[1], dtype)
    weight = factor * (ones if targets.weight is None else targets.weight.astype(dtype))
    dtypes = (np.dtype(dtype).name, logits.dtype.name)
    asked = {"out_dtype": dtypes if which == "_and_grad" else dtypes[0]}
    attributes = {"ignore_index": options.ignore_index, "reduction": "sum", **asked}
    return call(_plain[which], {"logits": logits, "labels": targets.labels, "weight": weight}, attributes, options.name)


@functools.lru_cache(1024)
def _total(options: LossOptions, squares: bool, is_plain: bool) -> Any:
    """by_weight times the sum of the losses, and by_count times that of the squares of lse, with all options."""

    @jax.custom_vjp
    def total(logits: Array, targets: Targets, by_weight: Array, by_count: Array) -> Array:
        if is_plain:
            return _plain_sum("_only", options, logits, targets, by_weight)[0]
        losses, lse = sample_losses(options)(logits, targets)
        return _summed(losses.sum(), (lse * lse).sum(), by_weight, by_count)

    def _summed(losses: Array, square: Array, by_weight: Array, by_count: Array) -> Array:
        return losses * by_weight + square * by_count if squares else losses * by_weight

    def forward(logits: Any, targets: Any, by_weight: Any, by_count: Any) -> tuple[Array, Any]:
        plain, wanted = _values(targets), _wanted(targets)
        if is_plain:
            found, dlogits = _plain_sum("_and_grad", options, logits.value, plain, by_weight.value)
            losses, square = found * over(jnp, by_weight.value), jnp.zeros_like(found)
        else:
            shape = plain.labels.shape
            upstream = {"dloss": jnp.broadcast_to(by_weight.value, shape)}
            upstream |= {"dlse_square": jnp.broadcast_to(by_count.value, shape)} if squares else {}
            each, lse, dlogits = with_gradient(options, logits.value, plain, upstream)
            losses, square = each.sum(), (lse * lse).sum() if squares else jnp.zeros_like(by_weight.value)
            found = _summed(losses, square, by_weight.value, by_count.value)
        others = (logits.value, plain) if wanted else None
        return found, (dlogits, losses, square, by_weight.value, others, wanted)

    def backward(kept: Any, dtotal: Any) -> tuple[Any, ...]:
        dlogits, losses, square, by_weight, others, wanted = kept
        if isinstance(dtotal, SymbolicZero):
            return None, None, None, None
        grads = {}
        if others is not None:
            logits, targets = others
            each = jnp.broadcast_to(dtotal * by_weight, targets.labels.shape)
            grads = target_gradients(options, wanted, logits, targets, each)
        return scaled(dlogits, dtotal), _as_targets(grads), dtotal * losses, dtotal * square

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


# --- sample by sample -----------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def sample_losses(options: LossOptions) -> Any:
    """A function of logits and targets that gives the loss and the log-sum-exp of each sample."""

    @jax.custom_vjp
    def losses(logits: Array, targets: Targets) -> tuple[Array, Array]:
        given = {"logits": logits, **targets._asdict()}
        loss, lse, *_ = call(_samples, given, options.attributes, options.name)
        return loss, lse

    def forward(logits: Any, targets: Any) -> tuple[Any, Any]:
        plain = _values(targets)
        return losses(logits.value, plain), (logits.value, plain, _wanted(targets))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, Any]:
        logits, targets, wanted = kept
        given = zip(("dloss", "dlse"), cotangents, strict=True)
        upstream = {name: each for name, each in given if not isinstance(each, SymbolicZero)}
        each = upstream.setdefault("dloss", jnp.zeros(targets.labels.shape, wide(logits.dtype)))
        *_, dlogits = with_gradient(options, logits, targets, upstream)
        return dlogits, _as_targets(target_gradients(options, wanted, logits, targets, each) if wanted else {})

    losses.defvjp(forward, backward, symbolic_zeros=True)
    return losses


def with_gradient(
    options: LossOptions, logits: Array, targets: Targets, upstream: Mapping[str, Array]
) -> tuple[Array, Array, Array]:
    """Loss and log-sum-exp of each sample, and the gradient of the logits for these of the samples' results."""
    given = {"logits": logits, **targets._asdict(), **upstream}
    loss, lse, *_, dlogits = call(_samples_and_grad, given, options.attributes, options.name)
    return loss, lse, dlogits


# --- gradients of targets -------------------------------------------------------------------------------------------


def _values(targets: Any) -> Targets:
    """The arrays of what custom_vjp gives its forward function."""
    weight, probabilities = (None if each is None else each.value for each in (targets.weight, targets.probabilities))
    return Targets(targets.labels.value, weight, probabilities)


def _wanted(targets: Any) -> dict[str, tuple[()]]:
    """The names of the targets that are differentiated, as a structure without arrays."""
    pairs = targets._asdict().items()
    return {name: () for name, each in pairs if name != "labels" and each is not None and each.perturbed}


def target_gradients(
    options: LossOptions, wanted: Mapping[str, Any], logits: Array, targets: Targets, each: Array
) -> dict[str, Array]:
    """The gradients of class weights and probabilities, given those of the samples' losses."""
    dtype = wide(logits.dtype)
    z = bent(jnp, logits.astype(dtype), options.softcap, options.temperature)
    below = jax.nn.logsumexp(z, 1, keepdims=True) - z

    def losses(changing: Mapping[str, Array]) -> Array:
        chosen = {**targets._asdict(), **changing}
        return weighted_losses(below, **chosen, **options.attributes)

    _, pull = jax.vjp(losses, {name: getattr(targets, name) for name in wanted})
    (found,) = pull(each.astype(dtype))
    return dict(found)


def _as_targets(grads: Mapping[str, Array]) -> Targets:
    return Targets(None, grads.get("weight"), grads.get("probabilities"))  # type: ignore[arg-type]


# --- options ---------------------------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether a number is an array of JAX or NumPy, which may be traced, and no number of Python."""
    return isinstance(value, jax.Array | np.ndarray)


def read(
    name: str, labels: Any, shift: int, ignore_index: int | None, reduction: str, label_smoothing: float = 0.0,
    softcap: Any = None, temperature: Any = 1.0, num_items: Any = None, lse_square_scale: Any = 0.0,
) -> tuple[Array, LossOptions]:  # fmt: skip
    """The labels, of 32 or 64 bits and moved, or probabilities as they are; and the options that kernels get.

    These are constants when a function is traced; numbers in arrays are left to JAX. Raises TypeError, ValueError.
    """
    found = jnp.asarray(labels)
    is_dense = jnp.issubdtype(found.dtype, jnp.floating)
    if not is_dense and not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name}: labels has dtype {found.dtype.name}, expected integers or probabilities")
    if not is_dense and found.dtype not in (jnp.int32, jnp.int64):
        if found.dtype in (jnp.uint32, jnp.uint64):  # what int32 cannot hold is no class either way
            found = jnp.minimum(found, jnp.asarray(2**31 - 1, found.dtype))
        found = found.astype(jnp.int32)
    ignored = read_ignore_index(name, ignore_index)
    if not is_dense and found.dtype == jnp.int32 and not in_int32(ignored):
        ignored = None  # no label is it
    ignored = IGNORED if shift and not is_dense and ignored is None else ignored
    found = shifted(jnp, name, found, shift, ignored, is_dense)
    if is_traced(label_smoothing):
        raise TypeError(f"{name}: label_smoothing is traced, expected a number that is known when it is traced")

    def is_left(option: str, value: Any) -> bool:
        return is_array(value) and option != "label_smoothing"

    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    chosen = read_options(name, reduction, ignored, *numbers, is_left=is_left)
    if is_dense:
        if ignored is not None and ignored >= 0:
            raise ValueError(f"{name}: ignore_index is {ignored}, expected none for class probabilities")
        ignored = None
    by_jax = is_array(softcap) or is_array(temperature)
    bend = (0.0, 1.0) if by_jax else (chosen.softcap, chosen.temperature)
    statics = LossOptions(ignore_index=ignored, label_smoothing=chosen.label_smoothing, name=name)
    return found, replace(statics, softcap=bend[0], temperature=bend[1])


def bend_by_jax(softcap: Any, temperature: Any) -> Callable[[Array], Array] | None:
    """The function that bounds and divides logits where a number is in an array; None where kernels do it."""
    if not (is_array(softcap) or is_array(temperature)):
        return None
    bound, divisor = (each.reshape(()) if is_array(each) else each for each in (softcap, temperature))
    return lambda logits: bent(jnp, logits.astype(wide(logits.dtype)), bound, divisor)


CHUNK = 32 << 20  # bytes of logits that are computed at a time


class Dense(NamedTuple):
    """A linear layer: (C, H), and (C,) or None."""

    weight: Array
    bias: Array | None = None


def _rows(layer: Dense, dtype: Any) -> int:
    return max(CHUNK // max(layer.weight.shape[0] * jnp.dtype(dtype).itemsize, 1), 1)


def over_chunks(body: Callable[..., Any], carry: Any, arrays: Any, rows: int) -> tuple[Any, Any]:
    """The result of jax.lax.scan for a body that takes `rows` rows of the arrays at a time, and the rest at the end."""
    count = jax.tree.leaves(arrays)[0].shape[0]
    whole = count // rows * rows
    made = None
    if whole:
        split = jax.tree.map(lambda a: a[:whole].reshape(whole // rows, rows, *a.shape[1:]), arrays)
        carry, made = jax.lax.scan(body, carry, split)
        made = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), made)
    if whole < count or not count:
        carry, last = body(carry, jax.tree.map(lambda a: a[whole:], arrays))
        made = last if made is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), made, last)
    return carry, made


def each_chunk(of_chunk: Callable[..., Any], arrays: Any, rows: int) -> Any:
    """The results of a function of `rows` rows at a time; JAX differentiates the loop, which keeps no logits."""
    kept = jax.checkpoint(of_chunk)
    return over_chunks(lambda carry, part: (carry, kept(*part)), None, arrays, rows)[1]


def logits_of(x: Array, weight: Array, bias: Array | None) -> Array:
    """The logits of some rows, in the precision of the loss."""
    found = jnp.matmul(x.astype(weight.dtype), weight.T)
    return found if bias is None else found + bias.astype(weight.dtype)


def _by_jax(options: LossOptions, x: Array, layer: Dense, targets: Targets, bend: Any) -> tuple[Array, Array]:
    """Loss and log-sum-exp of each sample."""
    dtype = wide(x.dtype)

    def of_chunk(x: Array, labels: Array) -> Any:
        logits = logits_of(x, layer.weight.astype(dtype), layer.bias)
        return sample_losses(options)(logits if bend is None else bend(logits), Targets(labels, targets.weight))

    losses, lse = each_chunk(of_chunk, (x, targets.labels), _rows(layer, dtype))
    return losses, lse


@functools.lru_cache(1024)
def _layer_total(options: LossOptions) -> Any:
    """by_weight times the sum of the losses, and by_count times that of the squares of lse."""

    @jax.custom_vjp
    def total(x: Array, layer: Dense, targets: Targets, by_weight: Array, by_count: Array) -> Array:
        losses, lse = _by_jax(options, x, layer, targets, None)
        return losses.sum() * by_weight + (lse * lse).sum() * by_count

    def forward(x: Any, layer: Any, targets: Any, by_weight: Any, by_count: Any) -> tuple[Array, Any]:
        given = jax.tree.map(
            lambda each: each.value, (x, layer, targets), is_leaf=lambda each: hasattr(each, "perturbed")
        )
        by_class = targets.weight is not None and targets.weight.perturbed
        (value, grads), dx = _one_pass(options, by_class, by_weight.value, by_count.value, *given)
        return value, (dx, *grads, given[1])

    def backward(kept: Any, dtotal: Any) -> tuple[Any, ...]:
        if isinstance(dtotal, SymbolicZero):
            return (None,) * 5
        dx, by_layer, by_class, losses, squares, layer = kept
        by_layer = jax.tree.map(lambda each, like: (each * dtotal).astype(like.dtype), by_layer, layer)
        targets = _as_targets({} if by_class is None else {"weight": by_class * dtotal})
        return (dx * dtotal).astype(dx.dtype), by_layer, targets, dtotal * losses, dtotal * squares

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


def _one_pass(
    options: LossOptions, by_class: bool, by_weight: Array, by_count: Array, x: Array, layer: Dense, targets: Targets
) -> tuple[tuple[Array, tuple[Any, ...]], Array]:
    """The total over all samples with its gradients, summed in the precision of the loss, and that of x.

    by_class: whether class weights have a gradient, which is None else. The last two are the factors' gradients.
    """
    dtype, of_logits = wide(x.dtype), _total(options, True, False)

    def of_rows(rows: Array, changing: Any, labels: Array) -> Array:
        own, weight, *factors = changing
        chosen = Targets(labels, weight if by_class else targets.weight)
        return cast(Array, of_logits(logits_of(rows, *own), chosen, *factors))

    def body(sums: Any, part: tuple[Array, Array]) -> tuple[Any, Array]:
        value, (dx, grads) = jax.value_and_grad(of_rows, (0, 1))(part[0], changing, part[1])
        return jax.tree.map(jnp.add, sums, (value, grads)), dx

    own = jax.tree.map(lambda each: each.astype(dtype), layer)
    changing = own, targets.weight if by_class else None, by_weight, by_count
    first, x = alike((jax.tree.map(jnp.zeros_like, (by_weight, changing)), x))
    return over_chunks(body, first, (x, targets.labels), _rows(layer, dtype))


# --- divergences from a teacher's layer ------------------------------------------------------------------------------


_divergence_operator = graph_operators()["softmax_divergence_and_grad"]


@functools.lru_cache(1024)
def _row_divergence(name: str, beta: float, temperature: float) -> Any:
    """The divergence of each row of logits from others, differentiable once, by the logits."""
    options = {"beta": beta, "temperature": temperature}

    @jax.custom_vjp
    def divergence(logits: Array, others: Array) -> Array:
        return forward(logits, others)[0]

    def forward(logits: Array, others: Array) -> tuple[Array, Array]:
        loss, dlogits = call(_divergence_operator, {"logits": logits, "teacher_logits": others}, options, name)
        return loss, dlogits

    def backward(dlogits: Array, dloss: Array) -> tuple[Array, None]:
        return dlogits * dloss[:, None], None

    divergence.defvjp(forward, backward)
    return divergence


# --- losses -----------------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Array, labels: Array, weight: Array | None = None, *, ignore_index: int | None = IGNORED,
    reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float | Array = 0.0,
    softcap: float | Array | None = None, temperature: float | Array = 1.0, shift: int = 0,
    num_items: float | Array | None = None,
) -> Array:  # fmt: skip
    """The loss of opgrad.cross_entropy, with its gradient computed in the same pass where one is wanted.

    logits: shape (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16.
    labels: classes, of any integer dtype and the samples' shape; or probabilities, of the shape of logits.
    weight: shape (C,); a factor for each class. It and probabilities have gradients, too.
    ignore_index: samples with this label have loss 0 and do not count; None: none.
    lse_square_scale, softcap, temperature, num_items: numbers, or arrays with one, which may be traced and are
        differentiated; a new number in an array compiles nothing anew. The other options: those of
        opgrad.cross_entropy, known when the function is traced.

    Returns the loss, () or of the samples' shape for reduction "none"; float32, or float64 for float64. Raises
    TypeError, ValueError; what depends on the numbers of a traced array, such as a wrong label, XLA raises with the
    same words. Derivatives are of the first order, in reverse. Formula and source: opgrad.cross_entropy.
    """
    name = "cross_entropy"
    logits, classes = jnp.asarray(logits), None if weight is None else jnp.asarray(weight)
    numbers = (softcap, temperature, num_items, lse_square_scale)
    found, options = read(name, labels, shift, ignore_index, reduction, label_smoothing, *numbers)

    def of(
        found: Array, logits: Array, classes: Any, softcap: Any, temperature: Any, number: Any, square: Any
    ) -> Array:
        bend = bend_by_jax(softcap, temperature)
        logits, found, classes = alike((logits if bend is None else bend(logits), found, classes))
        targets = Targets(found, classes)
        if not jnp.issubdtype(found.dtype, jnp.integer):
            if found.shape != logits.shape:
                raise ValueError(
                    f"{name}: labels has shape {found.shape}, expected {logits.shape}, the shape of logits"
                )
            targets = Targets(jnp.zeros(logits.shape[:1] + logits.shape[2:], jnp.int32), classes, found)
        squares = isinstance(square, jax.Array) or bool(square)
        if reduction == "none":
            loss, lse = sample_losses(options)(logits, targets)
            return loss + square * lse * lse if squares else loss
        by_weight, by_count = divided(options, targets, reduction, number, wide(logits.dtype))
        if targets.probabilities is not None or options.label_smoothing or options.bends or squares:
            return _total(options, squares, False)(*alike((logits, targets, by_weight, by_count * square)))
        total, one = _total(options, False, True), jnp.ones_like(by_weight)
        if logits.dtype == jnp.float16:  # most of a mean's gradient would underflow, so it is divided last
            return total(*alike((logits, targets, one, one))) * by_weight
        return total(*alike((logits, targets, by_weight, one)))

    samples = (logits.ndim - 1) if reduction == "none" else 0
    return automatic(of, samples, found, logits, classes, *numbers)


def linear_cross_entropy(
    x: Array, linear_weight: Array, labels: Array, linear_bias: Array | None = None, weight: Array | None = None,
    *, ignore_index: int | None = IGNORED, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float | Array = 0.0, softcap: float | Array | None = None, temperature: float | Array = 1.0,
    shift: int = 0, num_items: float | Array | None = None,
) -> Array:  # fmt: skip
    """The loss of opgrad.linear_cross_entropy, whose logits are never stored; XLA forms the products.

    x: shape (N, H). linear_weight: shape (C, H). labels: shape (N,), of any integer dtype. linear_bias: shape (C,).
    weight: shape (C,), with a gradient. The other arguments, and what is raised, are those of cross_entropy.

    Returns the loss, () or (N,) for reduction "none". Formula and source: opgrad.linear_cross_entropy.
    """
    name = "linear_cross_entropy"
    arrays = [None if each is None else jnp.asarray(each) for each in (x, linear_weight, linear_bias, weight)]
    numbers = (softcap, temperature, num_items, lse_square_scale)
    found, options = read(name, labels, shift, ignore_index, reduction, label_smoothing, *numbers)
    check_layer(name, found, jnp.issubdtype(found.dtype, jnp.integer), *arrays)

    def of(found: Array, arrays: Any, softcap: Any, temperature: Any, number: Any, square: Any) -> Array:
        (x, w, b, classes), found = alike((arrays, found))
        layer, targets, bend = Dense(w, b), Targets(found, classes), bend_by_jax(softcap, temperature)
        by_weight, by_count = divided(options, targets, reduction, number, wide(x.dtype))
        if reduction != "none" and bend is None:
            return _layer_total(options)(*alike((x, layer, targets, by_weight, by_count * square)))
        losses, lse = _by_jax(options, x, layer, targets, bend)
        if reduction == "none":
            return losses + square * lse * lse
        return losses.sum() * by_weight + square * (lse * lse).sum() * by_count

    return automatic(of, int(reduction == "none"), found, arrays, *numbers)


def linear_kl_div(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | Array | None = None,
) -> Array:  # fmt: skip
    """KL(teacher || student) of the softmax of two linear layers: linear_jsd with beta=0, which has the arguments.

    Formula and source: opgrad.linear_kl_div.
    """
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    return _divergence("linear_kl_div", *layers, labels, 0.0, (shift, ignore_index, reduction, temperature, num_items))


def linear_jsd(
    student_input: Array, student_weight: Array, teacher_input: Array, teacher_weight: Array,
    labels: Array | None = None, *, student_bias: Array | None = None, teacher_bias: Array | None = None,
    beta: float = 0.5, reduction: str = "mean", ignore_index: int = IGNORED, temperature: float = 1.0, shift: int = 0,
    num_items: float | Array | None = None,
) -> Array:  # fmt: skip
    """The divergence of opgrad.linear_jsd, whose logits are never stored; XLA forms the products.

    Shapes, and what the arguments mean: opgrad.linear_jsd. labels are of any integer dtype; num_items may be an array
    with one number, which may be traced; the other options are known when the function is traced.

    Returns the divergence, () or (N,) for reduction "none"; float32, or float64 for float64. The teacher gets no
    gradient. Derivatives are of the first order, in reverse. Raises TypeError, ValueError. Formula and source:
    opgrad.linear_jsd.
    """
    layers = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    return _divergence("linear_jsd", *layers, labels, beta, (shift, ignore_index, reduction, temperature, num_items))


def _divergence(name: str, student: Any, teacher: Any, labels: Any, beta: float, given: tuple[Any, ...]) -> Array:
    shift, ignore_index, reduction, temperature, num_items = given
    arrays: Any = [None if each is None else jnp.asarray(each) for each in (*student, *teacher)]
    x, w, b, y, v, c = arrays
    is_counted = labels is not None or shift
    labels = jnp.zeros(len(x), jnp.int32) if labels is None else labels
    numbers = {"temperature": temperature, "num_items": num_items}
    found, options = read(name, labels, shift, ignore_index if is_counted else None, reduction, **numbers)
    for rows, weight, bias in ((x, w, b), (y, v, c)):
        check_layer(name, found, jnp.issubdtype(found.dtype, jnp.integer), rows, weight, bias, None)
    dtype, of = wide(x.dtype), _row_divergence(name, check_share(name, "beta", beta), options.temperature)

    def of_chunk(x: Array, y: Array) -> Array:
        pairs = zip((x, y), layers, strict=True)
        logits, others = (logits_of(rows, each.weight.astype(dtype), each.bias) for rows, each in pairs)
        return cast(Array, of(logits, others))

    x, y, layers = alike((x, y, (Dense(w, b), Dense(v, c))))
    y, layers = jax.lax.stop_gradient(y), (layers[0], jax.lax.stop_gradient(layers[1]))
    rows = max(CHUNK // max(2 * w.shape[0] * jnp.dtype(dtype).itemsize, 1), 1)
    losses: Array = each_chunk(of_chunk, (x, y), rows)
    losses = losses if options.ignore_index is None else jnp.where(found == options.ignore_index, 0, losses)
    if reduction == "none":
        return losses
    by, _ = divided(options, Targets(found), reduction, num_items, losses.dtype)
    return losses.sum() * by
