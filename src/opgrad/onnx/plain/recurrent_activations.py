"""The activations of recurrent layers: what they compute, and their derivatives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opgrad.onnx.graph.formulas import Value

DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
NO_CLIPPING = 3.4e38  # from here on: onnxruntime-training writes the largest float32 where nothing is clipped

# of z, alpha and beta; of z, the result, alpha and beta. Numbers are values beside z: inside of a scan theirs is the
# only type that is known.
Function = Callable[[Value, Any, Any], Value]
Slope = Callable[[Value, Value, Any, Any], Value]


class Activation(NamedTuple):
    """An activation.

    alpha, beta: where a layer gives none: those of onnxruntime, which are 0 where ONNX has no operator of this name,
    and of ThresholdedRelu; None: the activation has no such number. by_result: whether the derivative needs no z.
    """

    function: Function
    slope: Slope
    alpha: float | None = None
    beta: float | None = None
    by_result: bool = False


class Gate(NamedTuple):
    """An activation with its numbers."""

    activation: Activation
    alpha: float | None = None
    beta: float | None = None

    def of(self, z: Value) -> Value:
        """The result for z, whose type is known."""
        return self.activation.function(z, *self._numbers(z))

    def slope(self, z: Value, y: Value) -> Value:
        """The derivative at z, where the result is y."""
        return self.activation.slope(z, y, *self._numbers(y))

    def _numbers(self, like: Value) -> list[Value | None]:
        return [None if each is None else like.body.number(each, like) for each in (self.alpha, self.beta)]


def _number(value: float, like: Value) -> Value:
    return like.body.number(value, like)


def _where(condition: Value, x: Value, y: Value) -> Value:
    return condition.body.where(condition, x, y)


def _hard_sigmoid(z: Value, a: Value, b: Value) -> Value:
    return z.body.node("Max", z.body.node("Min", z * a + b, _number(1.0, z)), _number(0.0, z))


def _inside(y: Value, slope: Value) -> Value:
    """The derivative of what is bounded by 0 and 1."""
    return _where((y > 0.0) & (y < 1.0), slope, _number(0.0, y))


ACTIVATIONS = {
    "Sigmoid": Activation(lambda z, a, b: z.apply("Sigmoid"), lambda z, y, a, b: y * (1.0 - y), by_result=True),
    "Tanh": Activation(lambda z, a, b: z.apply("Tanh"), lambda z, y, a, b: 1.0 - y * y, by_result=True),
    "Relu": Activation(
        lambda z, a, b: z.apply("Relu"),
        lambda z, y, a, b: _where(y > 0.0, _number(1.0, y), _number(0.0, y)),
        by_result=True,
    ),
    "Affine": Activation(lambda z, a, b: z * a + b, lambda z, y, a, b: a.expand(y.shape()), 0.0, 0.0, True),
    "LeakyRelu": Activation(
        lambda z, a, b: _where(z < 0.0, z * a, z), lambda z, y, a, b: _where(z < 0.0, a, _number(1.0, z)), 0.01
    ),
    "ThresholdedRelu": Activation(
        lambda z, a, b: _where(z > a, z, _number(0.0, z)),
        lambda z, y, a, b: _where(z > a, _number(1.0, z), _number(0.0, z)),
        0.0,
    ),
    "ScaledTanh": Activation(
        lambda z, a, b: (z * b).apply("Tanh") * a,
        lambda z, y, a, b: (1.0 - (z * b).apply("Tanh") ** 2.0) * (a * b),
        0.0,
        0.0,
    ),
    "HardSigmoid": Activation(_hard_sigmoid, lambda z, y, a, b: _inside(y, a), 0.2, 0.5, True),
    "Elu": Activation(
        lambda z, a, b: _where(z < 0.0, (z.apply("Exp") - _number(1.0, z)) * a, z),
        lambda z, y, a, b: _where(z < 0.0, y + a, _number(1.0, z)),
        1.0,
    ),
    "Softsign": Activation(
        lambda z, a, b: z / (z.apply("Abs") + _number(1.0, z)),
        lambda z, y, a, b: (1.0 - y.apply("Abs")) ** 2.0,
        by_result=True,
    ),
    "Softplus": Activation(
        lambda z, a, b: z.apply("Softplus"), lambda z, y, a, b: 1.0 - (-y).apply("Exp"), by_result=True
    ),
}

BY_NAME = {name.lower(): each for name, each in ACTIVATIONS.items()}  # onnxruntime's GRU and LSTM take any case


def gates(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Gate]:
    """The activations of these names; each takes the next numbers of the lists that it needs, while there are any."""
    found, left = [], (list(alphas), list(betas))
    for name in names:
        activation = BY_NAME[name.lower()]
        given = [
            default if default is None or not numbers else numbers.pop(0)
            for default, numbers in zip((activation.alpha, activation.beta), left, strict=True)
        ]
        found.append(Gate(activation, *given))
    return found
