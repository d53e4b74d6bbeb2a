"""Reductions over axes, cumulative sums, and global pooling."""

from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.rules.arithmetic import extreme_share
from opgrad.onnx.rules.node import Node, broadcast_to, element_count, ratio
from opgrad.onnx.rules.registry import formula, gradient


def _spread(node: Node, value: Value) -> Value:
    """A value of the result's shape, for every element that was reduced."""
    return broadcast_to(node.kept(value), node.x)


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


formula("ReduceL1", "dx = dy * sign(x).", lambda n: n.kept(n.dy) * n.x.apply("Sign"), constant=(1,))


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


formula("ReduceSumSquare", "dx = dy * 2 * x.", lambda n: n.kept(n.dy) * 2 * n.x, constant=(1,))


@gradient("CumSum", constant=(1,))
def cumsum(node: Node) -> Value:
    """dx = the sum from the other end."""
    return node.same(widened(node.dy), node.required(1), reverse=1 - node.get("reverse", 0))


@gradient("GlobalAveragePool")
def global_average_pool(node: Node) -> Value:
    """dx = dy / number of elements of a channel."""
    return broadcast_to(_shared(node, node.dy, list(range(2, node.rank()))), node.x)


@gradient("GlobalMaxPool")
def global_max_pool(node: Node) -> Value:
    """dx = dy * (x == y) / number of elements that are equal to y."""
    return extreme_share(node, node.dy, node.y, list(range(2, node.rank())))


@gradient("GlobalLpPool")
def global_lp_pool(node: Node) -> Value:
    """dx = dy * sign(x) * (abs(x) / y)**(p - 1)."""
    p = node.get("p", 2)
    size = node.x.apply("Abs") / node.where(node.y.equals(0), 1, node.y)
    return node.dy * node.x.apply("Sign") * (size ** float(p - 1) if p > 1 else 1.0)
