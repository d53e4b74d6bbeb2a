"""Optimizer steps and clipping over sequences of tensors, as loops; sums, norms and checks of gradients.

Nothing is written in place: what the original wrote into an input, such as new parameters and moments, becomes an
output that the caller feeds back.
"""

import math
from collections.abc import Sequence
from functools import reduce
from operator import add, or_

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value, fused_product
from opgrad.onnx.graph.messages import HALVES
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers

NORM_EPSILON = 1e-6  # what the original adds to the norm that it divides by


def _signal(call: Call, index: int) -> Value | None:
    """Whether to update at all."""
    signal = call.input(index)
    return None if signal is None else signal.scalar()


def _done(call: Call, signal: Value | None) -> Value:
    return call.body.constant(np.array([True])) if signal is None else signal.reshape([1])


def _unless_skipped(inner: Body, signal: Value | None, new: Value, old: Value) -> Value:
    return new if signal is None else inner.where(inner.outer(signal), new, old)


def sgd_step(p: Value, g: Value, rate: Value) -> Value:
    """p - rate * g."""
    return p - rate.like(p) * g.like(p)


def corrections(rate: Value, count: Value, decays: tuple[float, float], corrected: bool) -> tuple[Value, Value]:
    """1 - decay^count for both moments, 1 without bias correction, in the type of the learning rate.

    Of 1 - 0.999 float32 has four digits; 1 - exp(y) is -tanh(y / 2) * (1 + exp(y)), where nothing is lost.
    """
    found = []
    for decay in decays:
        if corrected and decay > 0:
            exponent = count.like(rate) * math.log(decay)
            found.append(-(exponent * 0.5).apply("Tanh") * (1 + exponent.apply("Exp")))
        else:
            found.append(rate.body.number(1.0, rate))
    return found[0], found[1]


def adamw_step(
    p: Value,
    m: Value,
    v: Value,
    g: Value,
    scalars: tuple[Value, Value, Value],
    *,
    alpha: float,
    beta: float,
    epsilon: float,
    weight_decay: float,
    adam_mode: int,
) -> tuple[Value, Value, Value]:
    """Parameter and moments after a step; scalars: learning rate and both corrections.

    m = alpha * m + (1 - alpha) * g; v = beta * v + (1 - beta) * g². Mode 0 decays first, p -= lr * decay * p, and then
    subtracts lr / c1 * m / (sqrt(v / c2) + epsilon); mode 1 subtracts lr * sqrt(c2) / c1 * m / (sqrt(v) + epsilon) and
    then decays.
    """
    lr, c1, c2 = (each.like(p) for each in scalars)
    gradient = g.like(m)
    new_m = m * alpha + gradient * (1 - alpha)
    new_v = v * beta + gradient * gradient * (1 - beta)
    if adam_mode == 0:
        decayed = p - lr * weight_decay * p
        new_p = decayed - lr / c1 * (new_m / ((new_v / c2.like(v)).apply("Sqrt") + epsilon)).like(p)
    else:
        moved = p - lr * c2.apply("Sqrt") / c1 * (new_m / (new_v.apply("Sqrt") + epsilon)).like(p)
        new_p = moved - lr * weight_decay * moved
    return new_p, new_m, new_v


def sum_of_squares(values: Sequence[Value]) -> Value:
    """The sum of the squares of all elements of all values, in float64, where the square of no float32 overflows."""
    wide = [each.cast(TensorProto.DOUBLE) for each in values]
    return reduce(add, ((each * each).sum(keepdims=False) for each in wide))


def clip_factor(squares: Value, max_norm: float) -> Value:
    """min(1, max_norm / norm) in float64; squares: the sum of the squares of all elements of all gradients."""
    body = squares.body
    factor = body.number(max_norm, squares) / (squares.apply("Sqrt") + NORM_EPSILON)
    return body.node("Min", factor, body.number(1.0, factor))


@lowers("SGDOptimizerV2")
def sgd_optimizer_v2(call: Call, rate: Value, parameters: Value, gradients: Value) -> Results:
    """p - lr * g."""
    rate, signal = rate.scalar(), _signal(call, 3)

    def step(inner: Body, p: Value, g: Value) -> list[Value]:
        return [_unless_skipped(inner, signal, sgd_step(p, g, inner.outer(rate)), p)]

    return _done(call, signal), call.body.each([parameters, gradients], step)[0]


@lowers("AdamWOptimizer")
def adamw_optimizer(
    call: Call, rate: Value, count: Value, parameters: Value, gradients: Value, means: Value, squares: Value
) -> Results:
    """Parameters and moments after a step; see `adamw_step`."""
    rate, count, signal = rate.scalar(), count.scalar(), _signal(call, 6)
    mode, alpha, beta = call.get("adam_mode", 0), call.get("alpha", 0.9), call.get("beta", 0.999)
    settings = {"epsilon": call.get("epsilon", 1e-8), "weight_decay": call.get("weight_decay", 1e-2)}
    if mode not in (0, 1):
        raise NoForm(f"adam_mode is {mode}, expected 0 or 1")
    factors = corrections(rate, count, (alpha, beta), bool(call.get("correct_bias", 1)))

    def step(inner: Body, p: Value, m: Value, v: Value, g: Value) -> list[Value]:
        lr, c1, c2 = (inner.outer(each) for each in (rate, *factors))
        new = adamw_step(p, m, v, g, (lr, c1, c2), alpha=alpha, beta=beta, adam_mode=mode, **settings)
        return [_unless_skipped(inner, signal, *pair) for pair in zip(new, (p, m, v), strict=True)]

    return _done(call, signal), *call.body.each([parameters, means, squares, gradients], step)[:3]


@lowers("InplaceClipGradNorm")
def inplace_clip_grad_norm(call: Call, gradients: Value) -> Value:
    """Every gradient times min(1, max_norm / norm), the norm being that of all of them together."""
    if call.get("norm_type", "fro") != "fro":
        raise NoForm(f"norm_type is {call.get('norm_type')!r}, expected 'fro'")
    body = call.body

    def add_square(inner: Body, rest: Value, total: Value) -> list[Value]:
        first = inner.constant(np.array(0))
        g = inner.node("SequenceAt", rest, first)
        return [inner.node("SequenceErase", rest, first), total + sum_of_squares([g])]

    total = body.loop(body.node("SequenceLength", gradients), [gradients, body.constant(np.array(0.0))], add_square)[1]
    factor = clip_factor(total, call.get("max_norm", 1.0))
    return body.each([gradients], lambda inner, g: [g * inner.outer(factor).like(g)])[0]


@lowers("InPlaceAccumulatorV2")
def in_place_accumulator_v2(call: Call, buffer: Value, value: Value) -> Results:
    """True, and value if overwrite else buffer + value."""
    overwrite = call.input(2)
    value = value.like(buffer)
    total = buffer + value
    if overwrite is not None:  # the buffer may hold anything then, NaN too, so it is chosen, not multiplied by 0
        total = call.body.where(overwrite.scalar(), value, total)
    return call.body.constant(np.array([True])), total


@lowers("InPlaceAccumulator")
def in_place_accumulator(call: Call, buffer: Value, value: Value) -> Value:
    """buffer + value, unless the signal is false."""
    signal = call.input(2)
    total = buffer + value.like(buffer)
    return total if signal is None else call.body.where(signal.scalar(), total, buffer)


lowers("ZeroGradient")(lambda call, gradient: call.body.full(gradient.shape(), 0, gradient))


lowers("PassThrough")(lambda call: [each.apply("Identity") for each in call.operands(call.outputs)])


@lowers("Scale")
@in_float32(0)
def scale(call: Call, x: Value, factor: Value) -> Value:
    """x * factor, or x / factor."""
    number = factor.like(x).scalar()
    return x / number if call.get("scale_down", 0) else x * number


lowers("FusedMatMul")(fused_product)


@lowers("IsAllFinite")
def is_all_finite(call: Call) -> Value:
    """Whether no element of any input is infinite or NaN; with isinf_only or isnan_only only one of the two counts."""
    infinite, not_a_number = not call.get("isnan_only", 0), not call.get("isinf_only", 0)
    if not (infinite or not_a_number):
        raise NoForm("isinf_only and isnan_only are both set")
    kinds = ("IsInf",) * infinite + ("IsNaN",) * not_a_number
    bad = [reduce(or_, (each.apply(kind) for kind in kinds)) for each in call.operands(len(call.inputs))]
    counts = [each.cast(TensorProto.FLOAT).sum(keepdims=False) for each in bad]
    return reduce(add, counts).equals(0)


@lowers("ReduceAllL2")
def reduce_all_l2(call: Call) -> Value:
    """The square root of the sum of the squares of all elements; float32 for halves."""
    values, target = call.operands(len(call.inputs)), call.output_types[0]
    if target is None and any(each in HALVES for each in call.input_types):
        target = TensorProto.FLOAT
    norm = sum_of_squares(values).apply("Sqrt")
    return norm.like(values[0]) if target is None else norm.cast(target)


@lowers("MixedPrecisionScale")
def mixed_precision_scale(call: Call) -> Results:
    """Every input times the scale, in another type; with fuse_outputs as one array behind each other.

    The product is formed in float64, in which that of float32 is exact, but where float32 is enough.
    """
    factor, *values = call.operands(len(call.inputs))
    target = call.get("to")
    if target is None:
        raise NoForm("it has no attribute to")
    is_single = call.input_types[-1] in (*HALVES, TensorProto.FLOAT)
    factor, *values = (each.cast(TensorProto.FLOAT if is_single else TensorProto.DOUBLE) for each in (factor, *values))
    scaled = [(each * factor.scalar()).cast(target) for each in values]
    return call.body.concat(*(each.reshape([-1]) for each in scaled)) if call.get("fuse_outputs", 0) else scaled
