"""Arithmetic, element by element, of values that are broadcast to one shape; and reductions."""

from functools import reduce

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.rules.node import Gradients, Node, element_count, formula, gradient, ratio
from opgrad.onnx.rules.quantization import scale_of


@gradient("Add", "Sum")
def add(node: Node) -> Gradients:
    """da = dy, db = dy, summed over what was broadcast."""
    return [node.unbroadcast(node.dy, index) for index in range(len(node.inputs))]


formula("Sub", "da = sum_to(dy, a); db = -sum_to(dy, b)")
formula("Mul", "da = sum_to(dy * b, a); db = sum_to(dy * a, b)")
formula("Where", "db = sum_to(where(a, dy, 0), b); dc = sum_to(where(a, 0, dy), c)", constant=(0,), integers=True)
formula("Expand", "dx = sum_to(dy, x)", constant=(1,), integers=True)
# The quotient is rounded, as bfloat16 cannot be by one operator.
formula("Mod", "whole = floor((a - y) / b + 0.5); da = sum_to(dy, a); db = -sum_to(dy * whole, b)")


@gradient("Div")
def div(node: Node) -> Gradients:
    """da = dy / b, db = -dy * a / b**2."""
    a, b = node.x, node.required(1)
    if 1 not in node.needed:
        return [node.unbroadcast(node.dy / b, 0)]
    return node.results("DivGrad", 2, node.dy, a, b)


@gradient("Mean")
def mean(node: Node) -> Gradients:
    """dx = dy / number of inputs."""
    dy = node.dy * (1 / len(node.inputs))
    return [node.unbroadcast(dy, index) for index in range(len(node.inputs))]


@gradient("Pow")
def power(node: Node) -> Gradients:
    """da = dy * b * a**(b - 1), db = dy * y * log(a), which is 0 where a is 0."""
    a, b = node.x, node.required(1)
    known = node.constant(1)
    if known is not None and 1 not in node.needed and (known == 2).all():
        return [node.unbroadcast(node.dy * (2 * a), 0)]
    if b.element_type != a.element_type and a.element_type is not None:
        b = b.cast(a.element_type)
    da = node.where(b.equals(0), 0, b * a ** (b - 1))
    if 1 not in node.needed:
        return [node.unbroadcast(node.dy * da, 0)]
    logarithm = node.where(a > 0, node.where(a > 0, a, 1).apply("Log"), 0)
    return [node.unbroadcast(node.dy * da, 0), node.unbroadcast(node.dy * node.y * logarithm, 1)]


@gradient("Max", "Min", integers=True)
def extremum(node: Node) -> Gradients:
    """dx = dy * (x == y) / number of inputs that are equal to y."""
    reached = [node.required(index).equals(node.y).like(node.dy) for index in range(len(node.inputs))]
    share = node.dy / reduce(Value.__add__, reached)
    return [node.unbroadcast(share * each, index) for index, each in enumerate(reached)]


@gradient("Clip", integers=True)
def clip(node: Node) -> Gradients:
    """dx = dy where y is x; the bounds get the rest. A low above high is not seen."""
    x, y, dy, low, high = node.x, node.y, node.dy, node.input(1), node.input(2)
    above = None if high is None else (x if low is None else node.body.node("Max", x, low)) > high
    below = None if low is None else (x < low if above is None else (x < low) & ~above)
    return [
        node.where(x.equals(y), dy, 0),
        None if below is None else node.unbroadcast(node.where(below, dy, 0), 1),
        None if above is None else node.unbroadcast(node.where(above, dy, 0), 2),
    ]


def extreme_share(node: Node, dy: Value, y: Value, axes: list[int] | Value | None) -> Value:
    """dy, shared by the elements along axes that are equal to y."""
    reached, wide = node.x.equals(y), widened(dy)
    share = wide / reached.cast(TensorProto.INT64).sum(axes).like(wide)
    return reached.like(dy) * share.like(dy)


formula("Identity", "dx = dy", integers=True)


@gradient("Cast", "CastLike", constant=(1,), integers=True)
def cast(node: Node) -> Value:
    """dx = dy, in the type of x; of integers that stand for floats dx = dy / scale."""
    dtype = node.x.element_type
    if dtype in (None, *FLOATS):
        return node.dy if dtype in (None, node.y.element_type) else node.dy.cast(dtype or 0)
    scale = scale_of(node, 0) if node.y.element_type in (None, *FLOATS) else None
    return node.dy if scale is None else node.dy / scale.like(node.dy)


formula("Neg", "dx = -dy")
formula("Abs", "dx = dy * sign(x)")
formula("Reciprocal", "dx = -(dy * y * y)")
formula("Sqrt", "dx = dy * (0.5 / y)")
formula("Exp", "dx = dy * y")
formula("Log", "dx = dy / x")
formula("Erf", "dx = dy * exp(-(x * x)) * (2 / pi**0.5)")
formula("Sin", "dx = dy * cos(x)")
formula("Cos", "dx = -(dy * sin(x))")
formula("Tan", "dx = dy * (1 + y * y)")
formula("Asin", "dx = dy / sqrt(1 - x * x)")
formula("Acos", "dx = -(dy / sqrt(1 - x * x))")
formula("Atan", "dx = dy / (1 + x * x)")
formula("Sinh", "dx = dy * cosh(x)")
formula("Cosh", "dx = dy * sinh(x)")
formula("Tanh", "dx = dy * (1 - y * y).", lambda n: n.microsoft("TanhGrad", n.dy, n.y))
formula("Asinh", "dx = dy / sqrt(x * x + 1)")
formula("Acosh", "dx = dy / sqrt(x * x - 1)")
formula("Atanh", "dx = dy / (1 - x * x)")


def _spread(node: Node, value: Value) -> Value:
    """A value of the result's shape, for every element that was reduced."""
    return node.kept(value).expand(node.x.shape())


def _reduced(node: Node) -> list[int] | Value | None:
    """The axes that were reduced, None for all."""
    axes = node.axes()
    return None if axes == [] and not node.get("noop_with_empty_axes", 0) else axes


def _shared(node: Node, dy: Value, axes: list[int] | Value | None) -> Value:
    """dy, divided by the number of elements that make one of the result, which halves cannot hold."""
    count, wide = None if isinstance(axes, Value) else element_count(node.x, axes), widened(dy)
    return (wide * ratio(node.y, node.x, wide) if count is None else wide * (1 / max(count, 1))).like(dy)


def _again(node: Node) -> Node:
    """The node in float32 if it is of float16 or bfloat16, with its result computed again.

    Each element of the gradient is as far off as the result that it is divided by, or whose exponential it is.
    """
    wide = node.wide()
    if wide.x is not node.x:
        wide.outputs = [node.same(*wide.inputs)]
    return wide


formula("ReduceSum", "dx = dy.", lambda n: _spread(n, n.dy), constant=(1,))
formula(
    "ReduceMean", "dx = dy / number of elements.", lambda n: _spread(n, _shared(n, n.dy, _reduced(n))), constant=(1,)
)


@gradient("ReduceMax", "ReduceMin", constant=(1,), integers=True)
def reduce_extremum(node: Node) -> Value:
    """dx = dy * (x == y) / number of elements that are equal to y."""
    return extreme_share(node, node.kept(node.dy), node.kept(node.y), _reduced(node))


@gradient("ReduceProd", constant=(1,))
def reduce_prod(node: Node) -> Value:
    """dx = dy * the product of the others: y / x where no element is 0, the rest's product for the only zero."""
    axes, x, y = _reduced(node), node.x, node.kept(node.y)
    zero = x.equals(0)
    zeros = zero.like(x).sum(axes)
    filled = node.where(zero, 1, x)
    rest = node.same(filled, *node.inputs[1:], keepdims=1)
    others = node.where(zero, node.where(zeros.equals(1), rest, 0), node.where(zeros.equals(0), y / filled, 0))
    return node.kept(node.dy) * others


formula("ReduceL1", "dx = kept(dy) * sign(x)", constant=(1,))


@gradient("ReduceL2", constant=(1,))
def reduce_l2(node: Node) -> Value:
    """dx = x * dy / y, 0 where y is 0."""
    node = _again(node)
    y = node.kept(node.y)
    zero = y.equals(0)
    return node.x * node.where(zero, 0, node.kept(node.dy) / node.where(zero, 1, y))


@gradient("ReduceLogSum", constant=(1,))
def reduce_log_sum(node: Node) -> Value:
    """dx = dy / exp(y)."""
    node = _again(node)
    return _spread(node, node.dy / node.y.apply("Exp"))


@gradient("ReduceLogSumExp", constant=(1,))
def reduce_log_sum_exp(node: Node) -> Value:
    """dx = dy * exp(x - y)."""
    node = _again(node)
    return node.kept(node.dy) * (node.x - node.kept(node.y)).apply("Exp")


formula("ReduceSumSquare", "dx = kept(dy) * 2 * x", constant=(1,))


@gradient("CumSum", constant=(1,))
def cumsum(node: Node) -> Value:
    """dx = the sum from the other end."""
    return node.same(widened(node.dy), node.required(1), reverse=1 - node.get("reverse", 0))


@gradient("GlobalAveragePool")
def global_average_pool(node: Node) -> Value:
    """dx = dy / number of elements of a channel."""
    return _shared(node, node.dy, list(range(2, node.rank()))).expand(node.x.shape())


@gradient("GlobalMaxPool")
def global_max_pool(node: Node) -> Value:
    """dx = dy * (x == y) / number of elements that are equal to y."""
    return extreme_share(node, node.dy, node.y, list(range(2, node.rank())))
