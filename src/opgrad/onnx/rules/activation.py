"""Activations, element by element."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, formula, gradient

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


formula("Relu", "dx = dy where y > 0.", lambda n: n.microsoft("ReluGrad", n.dy, n.y))


@gradient("LeakyRelu")
def leaky_relu(node: Node) -> Value:
    """dx = dy where x > 0, else alpha * dy; y has the sign of x unless alpha is negative."""
    alpha = node.get("alpha", 0.01)
    return node.microsoft("LeakyReluGrad", node.dy, node.y if alpha >= 0 else node.x, alpha=alpha)


formula("ThresholdedRelu", "dx = dy where x > alpha.", lambda n: n.where(n.x > n.get("alpha", 1.0), n.dy, 0))


@gradient("PRelu")
def prelu(node: Node) -> Gradients:
    """dx = dy where x >= 0, else slope * dy; dslope = dy * x where x < 0."""
    x, slope = node.x, node.required(1)
    negative = x < 0
    dslope = node.unbroadcast(node.where(negative, node.dy * x, 0), 1)
    return [node.where(negative, node.dy * slope, node.dy), dslope]


formula("Shrink", "dx = dy where abs(x) > lambd.", lambda n: n.where(n.x.apply("Abs") > n.get("lambd", 0.5), n.dy, 0))
formula("Sigmoid", "dx = dy * y * (1 - y).", lambda n: n.microsoft("SigmoidGrad", n.dy, n.y))


@gradient("HardSigmoid")
def hard_sigmoid(node: Node) -> Value:
    """dx = dy * alpha where 0 < y < 1."""
    return node.where((node.y > 0) & (node.y < 1), node.dy * node.get("alpha", 0.2), 0)


@gradient("HardSwish")
def hard_swish(node: Node) -> Value:
    """dx = 0 where x <= -3, dy where x >= 3, dy * (x / 3 + 1 / 2) between."""
    slope = node.where(node.x > -3, node.x * (1 / 3) + 0.5, 0)
    return node.dy * node.where(node.x < 3, slope, 1)


@gradient("Elu")
def elu(node: Node) -> Value:
    """dx = dy where x > 0, else dy * (y + alpha)."""
    return node.where(node.x > 0, node.dy, node.dy * (node.y + node.get("alpha", 1.0)))


@gradient("Celu")
def celu(node: Node) -> Value:
    """dx = dy where x > 0, else dy * (y / alpha + 1)."""
    return node.where(node.x > 0, node.dy, node.dy * (node.y * (1 / node.get("alpha", 1.0)) + 1))


@gradient("Selu")
def selu(node: Node) -> Value:
    """dx = dy * gamma where x > 0, else dy * (y + gamma * alpha)."""
    alpha, gamma = node.get("alpha", SELU_ALPHA), node.get("gamma", SELU_GAMMA)
    return node.where(node.x > 0, node.dy * gamma, node.dy * (node.y + gamma * alpha))


formula("Softplus", "dx = dy * sigmoid(x).", lambda n: n.dy * n.x.apply("Sigmoid"))


@gradient("Softsign")
def softsign(node: Node) -> Value:
    """dx = dy / (1 + abs(x))**2."""
    bottom = 1 + node.x.apply("Abs")
    return node.dy / (bottom * bottom)


@gradient("Mish")
def mish(node: Node) -> Value:
    """dx = dy * (t + x * (1 - t * t) * sigmoid(x)), t = tanh(softplus(x))."""
    t = node.x.apply("Softplus").apply("Tanh")
    return node.dy * (t + node.x * (1 - t * t) * node.x.apply("Sigmoid"))


@gradient("Swish")
def swish(node: Node) -> Value:
    """dx = dy * s * (1 + v * (1 - s)), v = alpha * x, s = sigmoid(v)."""
    return node.microsoft("QuickGeluGrad", node.dy, node.x, alpha=node.get("alpha", 1.0))


@gradient("Gelu")
def gelu(node: Node) -> Value:
    """dx = dy * gelu'(x), of the exact form or the one with tanh."""
    op = "FastGeluGrad" if node.get("approximate", "none") == "tanh" else "GeluGrad"
    return node.microsoft(op, node.dy, node.x)
