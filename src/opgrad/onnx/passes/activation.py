"""Recognition of Gelu, exact and by tanh, and of x * sigmoid(alpha * x): QuickGelu, SiLU, Swish."""

import math

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT
from opgrad.onnx.passes.patterns import at_each, factors, is_near, plus, power, same_shape, without

GELU_FROM, SWISH_FROM = 20, 24  # the first opsets with Gelu and Swish
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # tanh(SLOPE * (x + CUBIC * x^3)) is nearly erf(x / sqrt(2))


@at_each("Mul")
def fuse_gelu(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * (1 + erf(x / sqrt(2))) / 2, or with tanh, becomes Gelu."""
    return _replace(graph, node, None if graph.plain and graph.opset < GELU_FROM else _gelu(graph, node))


@at_each("Mul")
def fuse_swish(graph: Graph, node: onnx.NodeProto) -> bool:
    """x * sigmoid(alpha * x) becomes QuickGelu, or Swish of ONNX."""
    return _replace(graph, node, None if graph.plain and graph.opset < SWISH_FROM else _swish(graph, node))


def _replace(graph: Graph, node: onnx.NodeProto, by: onnx.NodeProto | None) -> bool:
    if by is not None:
        graph.substitute(node, [by])
    return by is not None


# --- Gelu ---


def _gelu(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    names = factors(graph, node)
    halves = [name for name in names if is_near(graph, name, 0.5)]
    if len(names) != 3 or len(halves) != 1:
        return None
    names = without(names, halves[0])
    for x, bracket in (names, names[::-1]):
        found = plus(graph, bracket)
        if found is None or not math.isclose(found[1], 1) or not same_shape(graph, node.output[0], x):
            continue
        if _is_erf(graph, found[0], x):
            return _gelu_node(graph, node, x, "Gelu")
        if _is_tanh(graph, found[0], x):
            return _gelu_node(graph, node, x, "FastGelu")
    return None


def _gelu_node(graph: Graph, node: onnx.NodeProto, x: str, op: str) -> onnx.NodeProto | None:
    if graph.element_type(x) != TensorProto.FLOAT:  # the only type that onnxruntime has kernels for
        return None
    if not graph.plain:
        return graph.node(op, [x], node.output, MICROSOFT)
    return graph.node("Gelu", [x], node.output, approximate="none" if op == "Gelu" else "tanh")


def _is_erf(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is erf(x / sqrt(2))."""
    erf = graph.maker(name, "Erf") if graph.inner(name) else None
    scaled = graph.maker(erf.input[0], "Div", "Mul") if erf is not None and graph.inner(erf.input[0]) else None
    if scaled is None:
        return False
    if scaled.op_type == "Div":
        return scaled.input[0] == x and is_near(graph, scaled.input[1], math.sqrt(2))
    names = list(scaled.input)
    return len(names) == 2 and x in names and is_near(graph, without(names, x)[0], math.sqrt(0.5))


def _is_tanh(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is tanh(SLOPE * (x + CUBIC * x^3))."""
    tanh = graph.maker(name, "Tanh") if graph.inner(name) else None
    product = graph.maker(tanh.input[0], "Mul") if tanh is not None and graph.inner(tanh.input[0]) else None
    if product is None:
        return False
    names = factors(graph, product)
    slopes = [each for each in names if is_near(graph, each, SLOPE)]
    rest = without(names, slopes[0]) if slopes else []
    if len(rest) == 1:
        return _is_cubic(graph, rest[0], x)
    return len(rest) == 2 and x in rest and _is_square_part(graph, without(rest, x)[0], x)


def _is_cubic(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is x + CUBIC * x^3."""
    total = graph.maker(name, "Add") if graph.inner(name) else None
    if total is None or x not in total.input or len(total.input) != 2:
        return False
    return _is_power(graph, without(total.input, x)[0], x, 3)


def _is_square_part(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is 1 + CUBIC * x^2."""
    found = plus(graph, name)
    return found is not None and math.isclose(found[1], 1) and _is_power(graph, found[0], x, 2)


def _is_power(graph: Graph, name: str, x: str, exponent: int) -> bool:
    """Whether a value is CUBIC * x^exponent."""
    product = graph.maker(name, "Mul") if graph.inner(name) else None
    if product is None:
        return False
    names = factors(graph, product)
    numbers = [each for each in names if is_near(graph, each, CUBIC)]
    rest = without(names, numbers[0]) if numbers else []
    return rest == [x] * exponent or (len(rest) == 1 and power(graph, rest[0], exponent) == x)


# --- Swish ---


def _swish(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    for x, name in (tuple(node.input), tuple(node.input)[::-1]):
        sigmoid = graph.maker(name, "Sigmoid") if graph.inner(name) and x != name else None
        alpha = _multiple(graph, sigmoid.input[0], x) if sigmoid is not None else None
        if alpha is not None and graph.element_type(x) in FLOATS and same_shape(graph, node.output[0], x):
            if graph.plain:
                return graph.node("Swish", [x], node.output, alpha=alpha)
            return graph.node("QuickGelu", [x], node.output, MICROSOFT, alpha=alpha)
    return None


def _multiple(graph: Graph, name: str, x: str) -> float | None:
    """alpha of alpha * x."""
    if name == x:
        return 1.0
    product = graph.maker(name, "Mul") if graph.inner(name) else None
    if product is None or x not in product.input:
        return None
    return graph.scalar(without(product.input, x)[0])
