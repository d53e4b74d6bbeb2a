"""Sums of gradients and small operators of every training graph.

Nothing is written in place: what the original wrote into an input becomes an output that the caller feeds back.
"""

import numpy as np

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.registry import Call, Results, lowers


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
