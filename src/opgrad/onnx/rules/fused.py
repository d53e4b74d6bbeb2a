"""Fused operators of other execution providers, of which the CPU has none: their parts run in their place."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.node_view import fused_product
from opgrad.onnx.rules.gated import silu
from opgrad.onnx.rules.microsoft import activated
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.quantized_products import WINDOW, to_channels_first, to_channels_last
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, in_float32
from opgrad.onnx.rules.shaping import sizes_of


@decomposition("BiasAdd", domain=MICROSOFT)
def bias_add(node: Node) -> Value:
    """y = x + bias + skip."""
    return node.x + node.required(1) + node.required(2)


@decomposition("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(node: Node) -> Value:
    """y = a * gelu(b), the halves of x + bias."""
    a, b = (node.x + node.required(1)).split(2, 2)
    return a * node.microsoft("Gelu", b)


@decomposition("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(node: Node) -> Value:
    """y = fast_gelu(x @ w + bias)."""
    return node.microsoft("FastGelu", node.body.node("MatMul", node.x, node.required(1)), node.input(2))


@decomposition("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(node: Node) -> Value:
    """y = activation(alpha * a @ b), either of them transposed."""
    if node.get("activation", "") == "Softmax":
        return fused_product(node).apply("Softmax", axis=node.get("activation_axis", -1))
    return activated(node, fused_product(node))


@decomposition("SwiGLU", domain=MICROSOFT)
def swiglu(node: Node) -> Value:
    """y = g * sigmoid(alpha * g) * (u + beta), g and u within limits; they may be the halves of the first input."""
    g, u = node.x, node.input(1)
    if u is None:
        g, u = g.split(2, node.rank() - 1)
    names = {"activation_alpha": 1.0, "activation_beta": 0.0, "limit": 0.0}
    return gated_linear(g, u, *(node.get(*each) for each in names.items()))


def gated_linear(g: Value, u: Value, alpha: float, beta: float, limit: float) -> Value:
    """g * sigmoid(alpha * g) * (u + beta), g at most `limit` and u within both limits; 0 for no limit."""
    if limit:
        top, bottom = (g.body.number(each, g) for each in (limit, -limit))
        g, u = g.body.node("Min", g, top), g.body.node("Clip", u, bottom, top)
    return g * (g * alpha).apply("Sigmoid") * (u + beta)


# --- images with their channels at the end ---


@decomposition("NhwcConv", domain=MICROSOFT)
def nhwc_conv(node: Node) -> Value:
    """y = conv(x, w, b), the channels last."""
    rank = node.rank()
    y = node.body.node("Conv", to_channels_first(node.x, rank), *node.inputs[1:], **node.attributes)
    return to_channels_last(y, rank)


@decomposition("NhwcFusedConv", domain=MICROSOFT)
def nhwc_fused_conv(node: Node) -> Value:
    """y = activation(conv(x, w, b) + z), the channels last."""
    rank, z = node.rank(), node.input(3)
    given = {name: value for name, value in node.attributes.items() if name in WINDOW}
    y = node.body.node("Conv", to_channels_first(node.x, rank), node.required(1), node.input(2), **given)
    y = to_channels_last(y, rank)
    return activated(node, y if z is None else y + z)


@decomposition("GroupNorm", domain=MICROSOFT)
@in_float32
def group_norm(node: Node) -> Value:
    """y = activation(gamma * (x - mean) * inv_std + beta), the statistics over each group of channels."""
    return _group_norm(node, node.x)


@decomposition("SkipGroupNorm", domain=MICROSOFT)
@in_float32
def skip_group_norm(node: Node) -> Gradients:
    """y = activation(group_norm(x + skip + bias)); the second result is the sum."""
    skip, bias, rank, last = node.required(3), node.input(4), node.rank(), node.get("channels_last", 1)
    columns = list(range(1, rank - 1)) if last else list(range(2, rank))
    if len(sizes_of(skip)) < rank:  # [N, C]
        skip = skip.unsqueeze(*columns)
    total = node.x + skip
    if bias is not None:
        total = total + (bias if last else bias.unsqueeze(*(each - 1 for each in columns)))
    return [_group_norm(node, total), total]


def _group_norm(node: Node, x: Value) -> Value:
    rank, last, groups = node.rank(), node.get("channels_last", 1), node.get("groups")
    if groups is None:
        raise NoGradient("it has no attribute groups")
    x = to_channels_first(x, rank) if last else x
    rows = x.reshape([0, groups, -1])
    centred = rows - rows.mean(2)
    n = centred / ((centred * centred).mean(2) + node.get("epsilon", 1e-5)).apply("Sqrt")
    gamma, beta = (node.required(place).reshape([1, -1, *(1 for _ in range(rank - 2))]) for place in (1, 2))
    y = n.reshape(x.shape()) * gamma + beta
    y = silu(y) if node.get("activation", 0) else y
    return to_channels_last(y, rank) if last else y
