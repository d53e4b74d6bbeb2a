"""Mixtures of experts: each token goes through the experts that have its largest shares."""

from opgrad.graph.formulas import Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.fused import gated_linear
from opgrad.rules.gated import silu
from opgrad.rules.node import Node
from opgrad.rules.registry import NoGradient, recomputed

ACTIVATIONS = {"relu": "Relu", "identity": "Identity"}


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


def _layer(node: Node, x: Value, place: int) -> Value:
    """x @ w.T + b of every expert, [experts, tokens, out]."""
    y, bias = node.body.node("MatMul", x, node.required(place).transpose(0, 2, 1)), node.input(place + 1)
    return y if bias is None else y + bias.unsqueeze(1)


def _activated(node: Node, rows: Value) -> Value:
    """The numbers between the two layers of every expert."""
    first, kind, fusion = _layer(node, rows, 2), node.get("activation_type", "relu"), node.get("swiglu_fusion", 0)
    if kind == "swiglu":
        if node.get("swiglu_limit_after_activation", 0):
            raise NoGradient("it limits gates after their activation")
        g, u = (first, _layer(node, rows, 6)) if not fusion else _halves(first, interleaved=fusion == 1)
        names = {"activation_alpha": 1.0, "activation_beta": 0.0, "swiglu_limit": 0.0}
        return gated_linear(g, u, *(node.get(*each) for each in names.items()))
    y = _activation(node, kind, first)
    return y if node.input(6) is None else y * _layer(node, rows, 6)


def _halves(x: Value, interleaved: bool) -> list[Value]:
    """The gates and the linear parts of a layer that computes both."""
    if not interleaved:
        return x.split(2, 2)
    pairs = x.reshape(x.body.concat(x.shape(0, 2), x.body.ints([-1, 2])))
    return [pairs.slice(place, place + 1, 3).squeeze(3) for place in (0, 1)]


def _activation(node: Node, kind: str, x: Value) -> Value:
    if kind == "gelu":
        return node.microsoft("FastGelu", x)
    if kind == "silu":
        return silu(x)
    if kind not in ACTIVATIONS:
        raise NoGradient(f"its activation is {kind!r}, expected gelu, silu, swiglu, {', '.join(ACTIVATIONS)}")
    return x.apply(ACTIVATIONS[kind])


def _shares(node: Node) -> Value:
    """The share of every expert in every token, 0 for those that were not chosen."""
    body, p = node.body, node.required(1).apply("Softmax", axis=1)
    top, chosen = body.nodes_of("TopK", 2, p, body.ints([node.get("k", 1)]), axis=1)
    if node.get("normalize_routing_weights", 0):
        top = top / top.sum([1])
    return body.node("ScatterElements", body.full(p.shape(), 0, p), chosen, top, axis=1)
