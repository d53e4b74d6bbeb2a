"""Operators of com.microsoft that onnxruntime's optimizers and the exporters for it write."""

from onnx import TensorProto

from opgrad.gradients.node import Node
from opgrad.gradients.registry import Gradients, NoGradient, decomposition, gradient
from opgrad.gradients.shaping import sizes_of
from opgrad.onnxruntime.bodies.build import Value
from opgrad.onnxruntime.bodies.forms import MICROSOFT


def _over_rows(node: Node, dx: Value) -> Value:
    """The gradient of a bias along the last axis."""
    return node.unbroadcast(dx, 1, node.x)


@gradient("Gelu", domain=MICROSOFT)
def gelu(node: Node) -> Value:
    """dx = dy * gelu'(x)."""
    return node.microsoft("GeluGrad", node.dy, node.x)


@gradient("BiasGelu", domain=MICROSOFT)
def bias_gelu(node: Node) -> Gradients:
    """dx = dy * gelu'(x + bias), dbias = its sum."""
    dx = node.microsoft("BiasGeluGrad_dX", node.dy, node.x, node.required(1))
    return [dx, _over_rows(node, dx)]


@gradient("FastGelu", domain=MICROSOFT)
def fast_gelu(node: Node) -> Gradients:
    """dx = dy * fast_gelu'(x + bias), dbias = its sum."""
    if node.input(1) is None:
        return node.microsoft("FastGeluGrad", node.dy, node.x)
    dx = node.microsoft("BiasFastGeluGrad_dX", node.dy, node.x, node.required(1))
    return [dx, _over_rows(node, dx)]


@gradient("QuickGelu", domain=MICROSOFT)
def quick_gelu(node: Node) -> Value:
    """dx = dy * s * (1 + v * (1 - s)), v = alpha * x, s = sigmoid(v)."""
    return node.microsoft("QuickGeluGrad", node.dy, node.x, alpha=node.get("alpha", 1.702))


@gradient("ConcatTraining", domain=MICROSOFT)
def concat_training(node: Node) -> Gradients:
    """dx = the part of dy that x is."""
    lengths = node.output(1, "_lengths", TensorProto.INT64)
    return node.results("SplitTraining", len(node.inputs), node.dy, lengths, axis=node.get("axis", 0))


@decomposition("FusedMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> Value:
    """y = alpha * a @ b, either of them transposed."""
    a, b = (_operand(node, index, side) for index, side in enumerate("AB"))
    alpha, y = node.get("alpha", 1.0), node.body.node("MatMul", a, b)
    return y if alpha == 1 else y * alpha


def _operand(node: Node, index: int, side: str) -> Value:
    value = node.required(index)
    if node.get(f"transBatch{side}", 0):
        raise NoGradient(f"its attribute transBatch{side} is set")
    if not node.get(f"trans{side}", 0):
        return value
    rank = len(sizes_of(value))
    return value.transpose(*range(rank - 2), rank - 1, rank - 2)


@decomposition("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(node: Node) -> Value:
    """y = softmax(x + bias), over the axes from `axis` on."""
    axis, rank = node.get("axis", 1) % node.rank(), node.rank()
    total = node.x + node.required(1)
    if node.opset < 13:
        return total.apply("Softmax", axis=axis)
    if axis == rank - 1:
        return total.apply("Softmax", axis=-1)
    return total.flatten(axis).apply("Softmax", axis=1).reshape(node.x.shape())


@decomposition("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(node: Node) -> Gradients:
    """y = layer_normalization(x + skip + bias); the fourth result is the sum."""
    scale, offset = node.required(2), node.input(3)
    total = _skip_sum(node, 4)
    y, mean, inv_std = node.body.nodes_of(
        "LayerNormalization", 3, total, scale, offset, axis=-1, epsilon=node.get("epsilon", 1e-12)
    )
    return [y, mean, inv_std, total]


@decomposition("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(node: Node) -> Gradients:
    """y = simplified_layer_normalization(x + skip + bias); the fourth result is the sum."""
    total = _skip_sum(node, 3)
    y, inv_std = node.body.nodes_of(
        "SimplifiedLayerNormalization", 2, total, node.required(2), axis=-1, epsilon=node.get("epsilon", 1e-12)
    )
    return [y, None, inv_std, total]


def _skip_sum(node: Node, place: int) -> Value:
    bias = node.input(place)
    total = node.x + node.required(1)
    return total if bias is None else total + bias


@decomposition("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> Value:
    """y = softmax(scale * q @ k.T + bias) @ v, of each head; q, k and v are [N, L, heads * H]."""
    for place, what in ((4, "key_padding_mask"), (6, "past_key"), (7, "past_value")):
        if node.input(place) is not None:
            raise NoGradient(f"it has a {what}")
    if node.get("unidirectional", 0) or len([each for each in node.proto.output if each]) > 1:
        raise NoGradient("it is unidirectional or has more outputs than one")
    q, k, v = node.x, node.input(1), node.input(2)
    if k is None or v is None or {len(sizes_of(each)) for each in (q, k, v)} != {3}:
        raise NoGradient("its query, key and value are packed, expected three inputs of three axes")
    bias = node.input(3)
    if bias is not None:
        width = sizes_of(bias)[0]
        if not isinstance(width, int) or width % 3:
            raise NoGradient("the graph does not tell the size of its bias")
        parts = [bias.slice(index * width // 3, (index + 1) * width // 3) for index in range(3)]
        q, k, v = (each + part for each, part in zip((q, k, v), parts, strict=True))
    return _attention(node, q, k, v, node.input(5))


@decomposition("Attention", domain=MICROSOFT)
def attention(node: Node) -> Value:
    """y = softmax(scale * q @ k.T + bias) @ v, q, k and v being parts of x @ weights + bias."""
    for place, what in ((3, "mask_index"), (4, "past")):
        if node.input(place) is not None:
            raise NoGradient(f"it has a {what}")
    if node.get("unidirectional", 0) or node.get("qkv_hidden_sizes") or node.get("do_rotary", 0):
        raise NoGradient("it is unidirectional, rotary or has hidden sizes of its own")
    weights, bias = node.required(1), node.input(2)
    width = sizes_of(weights)[1]
    if not isinstance(width, int):
        raise NoGradient("the graph does not tell the size of its weights")
    packed = node.body.node("MatMul", node.x, weights)
    packed = packed if bias is None else packed + bias
    q, k, v = (packed.slice(index * width // 3, (index + 1) * width // 3, 2) for index in range(3))
    return _attention(node, q, k, v, node.input(5))


def _attention(node: Node, q: Value, k: Value, v: Value, bias: Value | None) -> Value:
    heads, body = node.get("num_heads"), node.body
    q, k, v = (each.reshape([0, 0, heads, -1]).transpose(0, 2, 1, 3) for each in (q, k, v))
    kind = node.x.element_type or TensorProto.FLOAT
    scale: Value | float = node.get("scale", 0.0)
    if not scale:
        scale = 1 / q.shape(3, 4).cast(kind).reshape([]).apply("Sqrt")
    scores = body.node("MatMul", q, k.transpose(0, 1, 3, 2)) * scale
    scores = scores if bias is None else scores + bias
    y = body.node("MatMul", scores.apply("Softmax", axis=-1 if node.opset >= 13 else 3), v)
    return y.transpose(0, 2, 1, 3).reshape([0, 0, -1])
