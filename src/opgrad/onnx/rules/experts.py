"""Mixtures of experts: each token goes through the experts that have its largest shares."""

from opgrad.contract.quantized import BYTE
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.gated import silu
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.packed import unpacked
from opgrad.onnx.rules.registry import NoGradient, in_float32, recomputed

ACTIVATIONS = {"relu": "Relu", "identity": "Identity"}


@recomputed("MoE", domain=MICROSOFT)
def mixture_of_experts(node: Node) -> Value:
    """y = sum over the top k experts of share * (activation(x @ w1.T + b1) @ w2.T + b2).

    The backward part computes every expert for every token, and leaves out with shares of 0 what was not chosen.
    """
    return _mixed(node)


@recomputed("QMoE", domain=MICROSOFT, constant=(2, 5, 8, 11, 12, 13))
@in_float32
def mixture_of_quantized_experts(node: Node) -> Value:
    """That of MoE with the floats that the weights stand for; shares by softmax sum to 1 over the chosen experts."""
    if node.get("quant_type", "int") != "int" or node.get("weights_prepacked", 0) > 0:
        raise NoGradient("its weights are small floats, or in the order of a kernel; expected quant_type 'int'")
    layers = [_dequantized_layer(node, *indices) for indices in ((2, 3, 4, 11), (5, 6, 7, 12), (8, 9, 10, 13))]
    return _mixed(node.on(node.x, node.required(1), *(each for layer in layers for each in layer)), node.input(14))


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


def _mixed(node: Node, weights: Value | None = None) -> Value:
    """The mixture. weights: of the chosen experts, if they are others than the shares by which they are chosen."""
    if node.get("use_sparse_mixer", 0):
        raise NoGradient("it mixes experts by a sampling of its own (use_sparse_mixer)")
    body, shape = node.body, node.x.shape()
    rows = node.x.reshape(body.concat(body.ints([1, -1]), node.required(2).shape(2, 3)))
    y = _layer(node, _activated(node, rows), 4)
    shares = _shares(node, weights).transpose(1, 0).unsqueeze(2)  # [experts, tokens, 1]
    return (y * shares).sum([0], keepdims=False).reshape(shape)


def _layer(node: Node, x: Value, index: int) -> Value:
    """x @ w.T + b of every expert, [experts, tokens, out]."""
    y, bias = node.body.node("MatMul", x, node.required(index).transpose(0, 2, 1)), node.input(index + 1)
    return y if bias is None else y + bias.unsqueeze(1)


def _activated(node: Node, rows: Value) -> Value:
    """The numbers between the two layers of every expert."""
    first, kind, fusion = _layer(node, rows, 2), node.get("activation_type", "relu"), node.get("swiglu_fusion", 0)
    if kind == "swiglu":
        if node.get("swiglu_limit_after_activation", 0):
            raise NoGradient("it limits gates after their activation")
        g, u = (first, _layer(node, rows, 6)) if not fusion else _halves(first, interleaved=fusion == 1)
        names = {"activation_alpha": 1.0, "activation_beta": 0.0, "swiglu_limit": 0.0}
        return _gated_linear(g, u, *(node.get(*each) for each in names.items()))
    y = _activation(node, kind, first)
    return y if node.input(6) is None else y * _layer(node, rows, 6)


def _gated_linear(g: Value, u: Value, alpha: float, beta: float, limit: float) -> Value:
    """g * sigmoid(alpha * g) * (u + beta), g at most `limit` and u within both limits; 0 for no limit."""
    if limit:
        top, bottom = (g.body.number(each, g) for each in (limit, -limit))
        g, u = g.body.node("Min", g, top), g.body.node("Clip", u, bottom, top)
    return g * (g * alpha).apply("Sigmoid") * (u + beta)


def _halves(x: Value, interleaved: bool) -> list[Value]:
    """The gates and the linear parts of a layer that computes both."""
    if not interleaved:
        return x.split(2, 2)
    pairs = x.reshape(x.body.concat(x.shape(0, 2), x.body.ints([-1, 2])))
    return [pairs.slice(index, index + 1, 3).squeeze(3) for index in (0, 1)]


def _activation(node: Node, kind: str, x: Value) -> Value:
    if kind == "gelu":
        return node.microsoft("FastGelu", x)
    if kind == "silu":
        return silu(x)
    if kind not in ACTIVATIONS:
        raise NoGradient(f"its activation is {kind!r}, expected gelu, silu, swiglu, {', '.join(ACTIVATIONS)}")
    return x.apply(ACTIVATIONS[kind])


def _shares(node: Node, weights: Value | None) -> Value:
    """The share of every expert in every token, 0 for those that were not chosen."""
    body, p = node.body, node.required(1).apply("Softmax", axis=1)
    top, chosen = body.nodes_of("TopK", 2, p, body.ints([node.get("k", 1)]), axis=1)
    if weights is not None:
        top = body.node("GatherElements", weights, chosen, axis=1)
    quantized = node.proto.op_type == "QMoE"  # whose kernel takes the softmax of the chosen experts alone
    if node.get("normalize_routing_weights", 0) or (quantized and weights is None):
        top = top / top.sum([1])
    return body.node("ScatterElements", body.full(p.shape(), 0, p), chosen, top, axis=1)
