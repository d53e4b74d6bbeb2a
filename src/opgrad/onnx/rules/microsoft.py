"""Operators of com.microsoft that onnxruntime's optimizers and the exporters for it write."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value, biased_softmax, fused_product
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, formula, gradient

# Activations of fused operators, and their attributes.
ACTIVATIONS = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish"), ()),
    **dict.fromkeys(("LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    **dict.fromkeys(("Clip", "HardSigmoid"), ("alpha", "beta")),
}


def _over_rows(node: Node, dx: Value) -> Value:
    """The gradient of a bias along the last axis."""
    return node.unbroadcast(dx, 1, node.x)


formula("Gelu", "dx = dy * gelu'(x).", lambda n: n.microsoft("GeluGrad", n.dy, n.x), domain=MICROSOFT)


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


@decomposition("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> Value:
    """y = alpha * a @ b, either of them transposed."""
    return fused_product(node)


@decomposition("GatherND", "Pad", "Trilu", domain=MICROSOFT)
def same_of_ai_onnx(node: Node) -> Value:
    """That of the operator of this name in ai.onnx."""
    return node.body.node(node.proto.op_type, *node.inputs, **node.attributes)


@decomposition("GridSample", domain=MICROSOFT)
def grid_sample(node: Node) -> Value:
    """That of GridSample in ai.onnx, whose modes have other names from opset 20 on."""
    modes = {} if node.opset < 20 else {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.get("mode", "bilinear")
    return node.body.node("GridSample", *node.inputs, **{**node.attributes, "mode": modes.get(mode, mode)})


@decomposition("ExpandDims", domain=MICROSOFT)
def expand_dims(node: Node) -> Value:
    """y = x with a new axis."""
    axis = node.constant(1)
    if axis is None:
        raise NoGradient("its axis is known at run time alone")
    index = int(axis.reshape(()))
    return node.x.unsqueeze(index % (node.rank() + 1))


@decomposition("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node) -> Value:
    """y = activation(gemm(a, b, c))."""
    attributes = node.given("alpha", "beta", "transA", "transB")
    return activated(node, node.body.node("Gemm", *node.inputs, **attributes))


@decomposition("FusedConv", domain=MICROSOFT)
def fused_conv(node: Node) -> Value:
    """y = activation(conv(x, w, b) + z)."""
    own = ("activation", "activation_params")
    attributes = {name: value for name, value in node.attributes.items() if name not in own}
    y, z = node.body.node("Conv", *node.inputs[:3], **attributes), node.input(3)
    return activated(node, y if z is None else y + z)


def activated(node: Node, y: Value) -> Value:
    """The activation that the node's attribute names, applied to y."""
    op = node.get("activation", "")
    if not op:
        return y
    if op not in ACTIVATIONS:
        raise NoGradient(f"its activation is {op!r}, expected none or one of {', '.join(ACTIVATIONS)}")
    given = dict(zip(ACTIVATIONS[op], node.get("activation_params") or [], strict=False))
    numbers = {name: node.get(f"activation_{name}", given.get(name)) for name in ACTIVATIONS[op]}
    if op == "Clip":
        return y.body.node("Clip", y, *(y.body.number(each, y) for each in numbers.values()))
    return y.apply(op, **{name: value for name, value in numbers.items() if value is not None})


@decomposition("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(node: Node) -> Gradients:
    """y = layer_normalization(word + position + segment), the rows of tables; the third result is the sum."""
    body, tokens, segments = node.body, node.x, node.input(1)
    places = node.input(8) or body.range(tokens.shape(1, 2).squeeze(0))
    total = body.node("Gather", node.required(2), tokens) + body.node("Gather", node.required(3), places)
    if segments is not None:
        total = total + body.node("Gather", node.required(4), segments)
    epsilon = node.get("epsilon", 1e-12)
    y = body.node("LayerNormalization", total, node.required(5), node.input(6), axis=-1, epsilon=epsilon)
    mask = node.input(7)
    lengths = tokens.slice(0, 1, 1).squeeze(1) * 0 if mask is None else mask.sum([1], keepdims=False)
    return [y, lengths.cast(TensorProto.INT32), total]


@decomposition("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(node: Node) -> Value:
    """y = softmax(x + bias), over the axes from `axis` on."""
    return biased_softmax(node)


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


def _skip_sum(node: Node, index: int) -> Value:
    bias = node.input(index)
    total = node.x + node.required(1)
    return total if bias is None else total + bias
