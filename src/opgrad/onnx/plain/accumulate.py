"""Sums, scales, norms and checks of gradients, and small operators of every training graph.

Nothing is written in place: what the original wrote into an input becomes an output that the caller feeds back.
"""

from functools import reduce
from operator import add, or_

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value, fused_product
from opgrad.onnx.graph.messages import HALVES
from opgrad.onnx.plain.lowering import Call, NoForm, Results, lowers


@lowers("InPlaceAccumulatorV2")
def in_place_accumulator_v2(call: Call) -> Results:
    """True, and value if overwrite else buffer + value."""
    buffer, value = call.operands(2)
    overwrite = call.input(2)
    value = value.like(buffer)
    total = buffer + value
    if overwrite is not None:  # the buffer may hold anything then, NaN too, so it is chosen, not multiplied by 0
        total = call.body.where(overwrite.scalar(), value, total)
    return call.body.constant(np.array([True])), total


@lowers("InPlaceAccumulator")
def in_place_accumulator(call: Call) -> Value:
    """buffer + value, unless the signal is false."""
    buffer, value = call.operands(2)
    signal = call.input(2)
    total = buffer + value.like(buffer)
    return total if signal is None else call.body.where(signal.scalar(), total, buffer)


@lowers("ZeroGradient")
def zero_gradient(call: Call) -> Value:
    """Zeros like the gradient."""
    (gradient,) = call.operands(1)
    return call.body.full(gradient.shape(), 0, gradient)


@lowers("PassThrough")
def pass_through(call: Call) -> Results:
    """Every input as it is."""
    return [each.apply("Identity") for each in call.operands(call.outputs)]


@lowers("Scale")
def scale(call: Call) -> Value:
    """x * factor, or x / factor."""
    x, factor = call.operands(2)
    number = factor.like(x).scalar()
    return x / number if call.get("scale_down", 0) else x * number


@lowers("FusedMatMul")
def fused_matmul(call: Call) -> Value:
    """y = alpha * a @ b, either of them transposed."""
    return fused_product(call)


# --- over many gradients ---


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
    """The square root of the sum of the squares of all elements, formed in float32 for halves."""
    values, target = call.operands(len(call.inputs)), call.output_types[0]
    if any(each in HALVES for each in call.input_types):
        values, target = [each.cast(TensorProto.FLOAT) for each in values], target or TensorProto.FLOAT
    total = reduce(add, ((each * each).sum(keepdims=False) for each in values)).apply("Sqrt")
    return total if target is None else total.cast(target)


@lowers("MixedPrecisionScale")
def mixed_precision_scale(call: Call) -> Results:
    """Every input times the scale, in another type; with fuse_outputs as one array behind each other."""
    factor, *values = call.operands(len(call.inputs))
    target = call.get("to")
    if target is None:
        raise NoForm("it has no attribute to")
    scaled = [(each.like(factor) * factor.scalar()).cast(target) for each in values]
    if call.get("fuse_outputs", 0):
        return call.body.concat(*(each.reshape([-1]) for each in scaled))
    return scaled
