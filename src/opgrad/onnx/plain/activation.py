"""Activations, element by element or of whole rows, with or without a dropout behind them, and their gradients.

Masks of dropout are those that the forward graph has drawn.
"""

import math
from collections.abc import Callable

import numpy as np

from opgrad.onnx.graph.formulas import Value, biased_softmax
from opgrad.onnx.plain.lowering import Call, Results, lowers

SQRT_2_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the tanh approximation of Gelu


lowers("ReluGrad")(lambda call, dy, x: call.body.where(x > 0, dy, 0))


lowers("LeakyReluGrad")(lambda call, dy, y: call.body.where(y > 0, dy, dy * call.get("alpha", 0.01)))


lowers("SigmoidGrad")(lambda call, dy, y: dy * y * (1 - y))


lowers("TanhGrad")(lambda call, dy, y: dy * (1 - y * y))


lowers("QuickGelu")(lambda call, x: x * (x * call.get("alpha", 1.702)).apply("Sigmoid"))


@lowers("QuickGeluGrad")
def quick_gelu_grad(call: Call, dy: Value, x: Value) -> Value:
    """dx = dy * s * (1 + v * (1 - s)) with v = alpha * x, s = sigmoid(v)."""
    v = x * call.get("alpha", 1.702)
    s = v.apply("Sigmoid")
    return dy * s * (1 + v * (1 - s))


def _biased(call: Call, index: int) -> Value:
    """An input plus the bias behind it, if there is one."""
    x, bias = call.required(index), call.input(index + 1)
    return x if bias is None else x + bias


@lowers("Gelu", "BiasGelu")
def gelu(call: Call) -> Value:
    """y = x * cdf(x) of the normal distribution, or of x + bias."""
    x = _biased(call, 0)
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).apply("Erf"))


@lowers("GeluGrad", "BiasGeluGrad_dX")
def gelu_grad(call: Call) -> Value:
    """dx = dy * (cdf(x) + x * pdf(x)) of the normal distribution, or of x + bias."""
    x = _biased(call, 1)
    cdf = 0.5 * (1 + (x * math.sqrt(0.5)).apply("Erf"))
    return call.required(0) * (cdf + x * (x * x * -0.5).apply("Exp") * (1 / math.sqrt(2 * math.pi)))


@lowers("FastGelu")
def fast_gelu(call: Call) -> Value:
    """y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2, or of x + bias."""
    x = _biased(call, 0)
    return 0.5 * x * (1 + (x * SQRT_2_PI * (1 + x * x * CUBIC)).apply("Tanh"))


@lowers("FastGeluGrad", "BiasFastGeluGrad_dX")
def fast_gelu_grad(call: Call) -> Value:
    """dx = dy * fast_gelu'(x), or of x + bias."""
    x = _biased(call, 1)
    square = x * x
    t = (SQRT_2_PI * x * (1 + CUBIC * square)).apply("Tanh")
    slope = SQRT_2_PI * (1 + 3 * CUBIC * square)
    return call.required(0) * (0.5 * (1 + t + x * (1 - t * t) * slope))


def _softmax_grad(dy: Value, y: Value, axis: int) -> Value:
    return y * (dy - (y * dy).sum([axis]))


def _log_softmax_grad(dy: Value, y: Value, axis: int) -> Value:
    return dy - y.apply("Exp") * dy.sum([axis])


lowers("SoftmaxGrad_13")(lambda call, dy, y: _softmax_grad(dy, y, call.get("axis", -1)))


lowers("LogSoftmaxGrad_13")(lambda call, dy, y: _log_softmax_grad(dy, y, call.get("axis", -1)))


def _of_rows(call: Call, dy: Value, y: Value, gradient: Callable[[Value, Value, int], Value]) -> Value:
    """The gradient over the axes from `axis` on, which are one row."""
    axis = call.get("axis", 1)
    return gradient(dy.flatten(axis), y.flatten(axis), 1).in_shape(dy.shape())


lowers("SoftmaxGrad")(lambda call, dy, y: _of_rows(call, dy, y, _softmax_grad))
lowers("LogSoftmaxGrad")(lambda call, dy, y: _of_rows(call, dy, y, _log_softmax_grad))
lowers("BiasSoftmax")(biased_softmax)


RATIO = 0.5  # where the node has no ratio


def _through_mask(call: Call, dy: Value, mask: Value, ratio: Value | None) -> Value:
    """dy / (1 - ratio) where the element was kept, which all were if the ratio is 0."""
    if ratio is None:
        return call.body.where(mask, dy / (1 - RATIO), 0)
    ratio = ratio.scalar()
    return call.body.where(mask | ratio.equals(0), dy / (1 - ratio.like(dy)), 0)


@lowers("DropoutGrad")
def dropout_grad(call: Call, dy: Value, mask: Value) -> Value:
    """dx = dy / (1 - ratio) where kept; dy itself if the forward node was not training."""
    dx = _through_mask(call, dy, mask, call.input(2))
    training = call.input(3)
    return dx if training is None else call.body.where(training.scalar(), dx, dy)


@lowers("FakeQuantGrad")
def fake_quant_grad(call: Call, dy: Value, mask: Value) -> Value:
    """dx = dy where the mask lets it through."""
    return call.body.where(mask, dy, 0)


@lowers("BiasSoftmaxDropout")
def bias_softmax_dropout(call: Call) -> Results:
    """dropout(y), its mask, and y = softmax(x + bias) over the axes from `axis` on."""
    y = biased_softmax(call)
    seed = {"seed": call.get("seed")} if call.get("seed") is not None else {}
    ratio, training = call.input(2), call.body.constant(np.array(True))
    rate = None if ratio is None else ratio.scalar()
    dropped, mask = call.body.nodes_of("Dropout", 2, y, rate, training, **seed)
    return dropped, mask, y


@lowers("SoftmaxDropoutGrad")
def softmax_dropout_grad(call: Call, dy: Value, mask: Value, y: Value) -> Value:
    """The gradient of dropout(softmax(x)), the softmax over the axes from `axis` on."""
    return _of_rows(call, _through_mask(call, dy, mask, call.input(3)), y, _softmax_grad)
