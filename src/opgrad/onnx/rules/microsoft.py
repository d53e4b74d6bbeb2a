"""Operators of com.microsoft that onnxruntime's optimizers and the exporters for it write."""

from onnx import TensorProto

from opgrad.contract.quantized import BYTE
from opgrad.onnx.graph.formulas import Value, biased_softmax, fused_product
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.activation import silu
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, decomposition, formula, gradient, in_float32, recomputed
from opgrad.onnx.rules.quantization import unpacked

# Activations of fused operators, and their attributes.
ACTIVATIONS = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish"), ()),
    **dict.fromkeys(("LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    **dict.fromkeys(("Clip", "HardSigmoid"), ("alpha", "beta")),
}


formula("Gelu", "dx = dy * gelu'(x).", lambda n: n.microsoft("GeluGrad", n.dy, n.x), domain=MICROSOFT)


@gradient("BiasGelu", "FastGelu", domain=MICROSOFT)
def bias_gelu(node: Node) -> Gradients:
    """dx = dy * gelu'(x + bias), of the exact form or the one with tanh, dbias = its sum along the last axis."""
    op = node.proto.op_type.removeprefix("Bias")
    if node.input(1) is None:
        return node.microsoft(f"{op}Grad", node.dy, node.x)
    dx = node.microsoft(f"Bias{op}Grad_dX", node.dy, node.x, node.required(1))
    return [dx, node.unbroadcast(dx, 1, node.x)]


@gradient("QuickGelu", domain=MICROSOFT)
def quick_gelu(node: Node) -> Value:
    """dx = dy * s * (1 + v * (1 - s)), v = alpha * x, s = sigmoid(v)."""
    return node.microsoft("QuickGeluGrad", node.dy, node.x, alpha=node.get("alpha", 1.702))


@gradient("ConcatTraining", domain=MICROSOFT)
def concat_training(node: Node) -> Gradients:
    """dx = the part of dy that x is."""
    lengths = node.output(1, "_lengths", TensorProto.INT64)
    return node.results("SplitTraining", len(node.inputs), node.dy, lengths, axis=node.get("axis", 0))


decomposition("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)(fused_product)
decomposition("BiasSoftmax", domain=MICROSOFT)(biased_softmax)


@decomposition("GatherND", "Pad", "Trilu", domain=MICROSOFT)
def same_of_ai_onnx(node: Node) -> Value:
    """That of the operator of this name in ai.onnx."""
    return node.body.node(node.proto.op_type, *node.inputs, **node.attributes)


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


@decomposition("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(node: Node) -> Gradients:
    """y = layer_normalization(x + skip + bias), simplified or not; the fourth result is the sum."""
    op = node.proto.op_type.removeprefix("Skip")
    offset, bias = (None, node.input(3)) if op.startswith("Simplified") else (node.input(3), node.input(4))
    total = node.x + node.required(1)
    total = total if bias is None else total + bias
    given, several = (total, node.required(2), offset), 2 if op.startswith("Simplified") else 3
    y, *means, inv_std = node.body.nodes_of(op, several, *given, axis=-1, epsilon=node.get("epsilon", 1e-12))
    return [y, means[0] if means else None, inv_std, total]


WEIGHTS = 8  # the index of those of the chosen experts, if they are others than the shares by which these are chosen
EXPERT_ACTIVATIONS = {"relu": "Relu", "identity": "Identity"}


@recomputed("QMoE", domain=MICROSOFT, constant=(2, 5, 8, 11, 12, 13))
@in_float32
def mixture_of_quantized_experts(node: Node) -> Gradients:
    """That of MoE with the floats that the weights stand for; shares by softmax sum to 1 over the chosen experts."""
    if node.get("quant_type", "int") != "int" or node.get("weights_prepacked", 0) > 0:
        raise NoGradient("its weights are small floats, or in the order of a kernel; expected quant_type 'int'")
    layers = [_dequantized_layer(node, *indices) for indices in ((2, 3, 4, 11), (5, 6, 7, 12), (8, 9, 10, 13))]
    floats = (each for layer in layers for each in layer)
    return mixture_of_experts(node.on(node.x, node.required(1), *floats, node.input(14)))


def _dequantized_layer(node: Node, index: int, scale: int, bias: int, zero: int) -> list[Value | None]:
    """The weights [experts, out, in] as floats, and their bias."""
    bytes_, scales = node.input(index), node.input(scale)
    if bytes_ is None or scales is None:
        return [None, None]
    names = {2: "fc1_expert_weight_bits", 5: "fc2_expert_weight_bits", 8: "fc3_expert_weight_bits"}
    bits, body = node.get(names[index], 0) or node.get("expert_weight_bits", 4), node.body
    whole = unpacked(node, bytes_, bits).like(scales)
    block = node.get("block_size", 0) or -1
    blocks = whole.reshape(body.concat(whole.shape(0, 2), body.ints([-1, block] if block > 0 else [1, -1])))
    shape = body.concat(blocks.shape(0, 3), body.ints([1]))
    offset: Value | float = 2.0 ** (bits - 1)
    zeros = node.input(zero)
    if zeros is not None:
        if block < 0 and bits < BYTE:  # several rows of one scale share a byte
            zeros = unpacked(node, zeros, bits).slice(0, blocks.shape(1, 2), 1)
        elif bits < BYTE:
            zeros = unpacked(node, zeros, bits).slice(0, blocks.shape(2, 3), 2)
        offset = zeros.like(scales).reshape(shape)
    return [((blocks - offset) * scales.reshape(shape)).reshape(whole.shape()), node.input(bias)]


@recomputed("MoE", domain=MICROSOFT)
def mixture_of_experts(node: Node) -> Value:
    """y = sum over the top k experts of share * (activation(x @ w1.T + b1) @ w2.T + b2).

    The backward part computes every expert for every token, and leaves out with shares of 0 what was not chosen.
    """
    if node.get("use_sparse_mixer", 0):
        raise NoGradient("it mixes experts by a sampling of its own (use_sparse_mixer)")
    body, shape = node.body, node.x.shape()
    rows = node.x.reshape(body.concat(body.ints([1, -1]), node.required(2).shape(2, 3)))
    y = _layer(node, _activated(node, rows), 4)
    shares = _shares(node).transpose(1, 0).unsqueeze(2)  # [experts, tokens, 1]
    return (y * shares).sum([0], keepdims=False).reshape(shape)


def _layer(node: Node, x: Value, index: int) -> Value:
    """x @ w.T + b of every expert, [experts, tokens, out]."""
    y, bias = node.body.node("MatMul", x, node.required(index).transpose(0, 2, 1)), node.input(index + 1)
    return y if bias is None else y + bias.unsqueeze(1)


def _activated(node: Node, rows: Value) -> Value:
    """The numbers between the two layers of every expert."""
    first, kind, fusion = _layer(node, rows, 2), node.get("activation_type", "relu"), node.get("swiglu_fusion", 0)
    if kind == "swiglu":  # g * sigmoid(alpha * g) * (u + beta), g at most `limit` and u within both; 0 for no limit
        if node.get("swiglu_limit_after_activation", 0):
            raise NoGradient("it limits gates after their activation")
        if fusion == 1:  # the layer computes both, gates and linear parts in turn
            pairs = first.reshape(first.body.concat(first.shape(0, 2), first.body.ints([-1, 2])))
            g, u = (pairs.slice(index, index + 1, 3).squeeze(3) for index in (0, 1))
        else:
            g, u = first.split(2, 2) if fusion else (first, _layer(node, rows, 6))
        alpha, beta = node.get("activation_alpha", 1.0), node.get("activation_beta", 0.0)
        if limit := node.get("swiglu_limit", 0.0):
            top, bottom = (g.body.number(each, g) for each in (limit, -limit))
            g, u = g.body.node("Min", g, top), g.body.node("Clip", u, bottom, top)
        return g * (g * alpha).apply("Sigmoid") * (u + beta)
    if kind == "gelu":
        y = node.microsoft("FastGelu", first)
    elif kind == "silu":
        y = silu(first)
    elif kind in EXPERT_ACTIVATIONS:
        y = first.apply(EXPERT_ACTIVATIONS[kind])
    else:
        raise NoGradient(f"its activation is {kind!r}, expected gelu, silu, swiglu, {', '.join(EXPERT_ACTIVATIONS)}")
    return y if node.input(6) is None else y * _layer(node, rows, 6)


def _shares(node: Node) -> Value:
    """The share of every expert in every token, 0 for those that were not chosen."""
    body, p = node.body, node.required(1).apply("Softmax", axis=1)
    top, chosen = body.nodes_of("TopK", 2, p, body.ints([node.get("k", 1)]), axis=1)
    if (weights := node.input(WEIGHTS)) is not None:
        top = body.node("GatherElements", weights, chosen, axis=1)
    quantized = node.proto.op_type == "QMoE"  # whose kernel takes the softmax of the chosen experts alone
    if node.get("normalize_routing_weights", 0) or (quantized and weights is None):
        top = top / top.sum([1])
    return body.node("ScatterElements", p.filled(0), chosen, top, axis=1)
