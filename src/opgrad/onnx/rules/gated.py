"""Gates and normalizations that onnxruntime has in one kernel for newer language models."""

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, NoGradient, in_float32, recomputed
from opgrad.onnx.rules.shaping import numbers_of, sizes_of


def rms_normalized(x: Value, axis: int, epsilon: float) -> Value:
    """x / sqrt(mean(x * x) + epsilon), the mean along one axis."""
    return x / ((x * x).mean(axis) + epsilon).apply("Sqrt")


def silu(x: Value) -> Value:
    """x * sigmoid(x)."""
    return x * x.apply("Sigmoid")


@recomputed("ScaledSiLU", domain=MICROSOFT)
@in_float32
def scaled_silu(node: Node) -> Value:
    """y = silu(scale * x)."""
    scale = node.input(1)
    return silu(node.x * (node.get("alpha", 1.0) if scale is None else scale))


@recomputed("GatedAdd", domain=MICROSOFT)
def gated_add(node: Node) -> Value:
    """output = x + y * gate, or, where the gate has weights, x + y * sigmoid(gate @ weights)."""
    gate, weights = node.required(2), node.input(3)
    if weights is not None:
        gate = node.body.node("MatMul", gate, weights).apply("Sigmoid")
    return node.x + node.required(1) * gate


@recomputed("GatedRMSNorm", domain=MICROSOFT)
@in_float32
def gated_rms_norm(node: Node) -> Value:
    """y = x / sqrt(mean(x * x) + epsilon) * scale * activation(gate), over as many elements as the scale has."""
    scale, gate = node.required(1), node.required(2)
    rank, shape = node.rank(), node.x.shape()
    heads = node.x.reshape(node.body.concat(node.x.shape(0, rank - 1), node.body.ints([-1]), scale.shape()))
    n = rms_normalized(heads, rank, node.get("epsilon", 1e-5)) * scale
    gates = gate.apply("Sigmoid") if node.get("activation", "silu") == "sigmoid" else silu(gate)
    return n.reshape(shape) * gates


@recomputed("BranchwiseRMSNorm", domain=MICROSOFT)
@in_float32
def branchwise_rms_norm(node: Node) -> Value:
    """y = x / sqrt(mean(x * x) + epsilon) * scale, the mean over each branch."""
    x, branches = _branches(node, node.x)
    n = rms_normalized(x, branches, node.get("epsilon", 1e-5))
    scale = node.input(1)
    if scale is not None:
        several = len(sizes_of(scale)) == 1 and not _is_width(node, scale)
        n = n * (scale.reshape(x.shape(branches - 1)) if several else scale)
    return n.reshape(node.x.shape())


def _branches(node: Node, x: Value) -> tuple[Value, int]:
    """[.., C * H] as [.., C, H], and the axis of H."""
    count, rank = node.get("num_branches", 0), len(sizes_of(x))
    if not count:
        return x, rank - 1
    split = x.reshape(node.body.concat(x.shape(0, rank - 1), node.body.ints([count, -1])))
    return split, rank


def _is_width(node: Node, scale: Value) -> bool:
    """Whether the scale has the size of one branch."""
    (size,), (width,), count = numbers_of(scale, 0), numbers_of(node.x, -1), node.get("num_branches", 0)
    return size == (width // count if count else width)


@recomputed("EngramGate", domain=MICROSOFT)
@in_float32
def engram_gate(node: Node) -> Gradients:
    """y = value * sigmoid(sign(d) * sqrt(max(abs(d), 1e-6))), d the product of normalized key and query."""
    epsilon, (width,) = node.get("epsilon", 1e-5), numbers_of(node.x, 3)
    key, query = (rms_normalized(node.required(at), 3, epsilon) * node.required(at + 3) for at in (0, 1))
    d = (key * query).sum([3]) * width**-0.5
    size = node.body.node("Max", d.apply("Abs"), node.body.number(1e-6, d))
    y = (d.apply("Sign") * size.apply("Sqrt")).apply("Sigmoid") * node.required(2).unsqueeze(2)
    scale = node.input(5)
    return [y, None if scale is None else rms_normalized(y, 3, epsilon) * scale]


@recomputed("HyperConnectionPreMix", domain=MICROSOFT)
@in_float32
def hyper_connection_pre_mix(node: Node) -> Value:
    """y[h] = reduction_scale * sum over c of x[c, h] * gate[c, h]."""
    x, axis = _branches(node, node.x)
    gates = _gates(node, node.required(1), axis)
    return (x * gates).sum([axis - 1], keepdims=False) * node.get("reduction_scale", 1.0)


def _gates(node: Node, gates: Value, axis: int) -> Value:
    """Gates of branches, [.., C], or of each feature, [.., C * H], as they go with [.., C, H]."""
    count, sizes = node.get("num_branches", 0), sizes_of(gates)
    if len(sizes) > axis:
        return gates
    if count and sizes[-1] not in (count, None) and not isinstance(sizes[-1], str):
        return gates.reshape(node.body.concat(gates.shape(0, axis - 1), node.body.ints([count, -1])))
    return gates.unsqueeze(axis)


@recomputed("HyperConnectionPostMix", domain=MICROSOFT)
@in_float32
def hyper_connection_post_mix(node: Node) -> Value:
    """y[k, h] = sum over c of mix[c, k] * x[c, h] + gate[k, h] * block[h]; without mix x is the first term."""
    x, axis = _branches(node, node.x)
    mix, block = node.input(3), node.required(1).unsqueeze(axis - 1)
    gates = _gates(node, node.required(2), axis)
    if mix is not None:
        rank = len(sizes_of(mix))
        x = node.body.node("MatMul", mix.transpose(*range(rank - 2), rank - 1, rank - 2), x)
    return (x + gates * block).reshape(node.x.shape())


@recomputed("LinearAttentionGate", domain=MICROSOFT)
@in_float32
def linear_attention_gate(node: Node) -> Gradients:
    """decay = scale * softplus(a + bias), beta = sigmoid(b)."""
    names = ("a", "dt_bias", "decay_scale", "b")
    a, bias, scale, b = (node.input(place) for place in range(len(names)))
    if a is None or bias is None or scale is None:
        raise NoGradient(f"it lacks one of its inputs {', '.join(names[:3])}")
    return [(a + bias).apply("Softplus") * scale, None if b is None else b.apply("Sigmoid")]


@recomputed("MoEGroupRouter", domain=MICROSOFT)
@in_float32
def moe_group_router(node: Node) -> Gradients:
    """log(sigmoid(x)) of the experts that the operator chose; or scores, sigmoid(x) + bias, and weights, sigmoid(x)."""
    x, projection = node.x, node.input(2)
    s = (x if projection is None else node.body.node("MatMul", x, projection.transpose(1, 0))).apply("Sigmoid")
    sentinel, chosen = node.get("router_sentinel", -100.0), node.outputs[0]
    if chosen is None:
        return [None, s + node.required(1), s]
    at_least = node.body.number(1e-20, s)
    return [node.where(chosen.equals(sentinel), sentinel, node.body.node("Max", s, at_least).apply("Log"))]


@recomputed("CausalConvWithState", domain=MICROSOFT)
@in_float32
def causal_conv_with_state(node: Node) -> Gradients:
    """y = activation(conv(past, then x)) of each channel for itself; the state is what the next call needs."""
    if node.get("ndim", 1) != 1 or node.get("state_window", 0) or node.get("state_update_capacity", 0):
        raise NoGradient("it has several axes of space, or keeps several states")
    body, last = node.body, node.get("channels_last", 0)
    channels, taps = numbers_of(node.required(1), 0, 2)
    x, past, dilation = _channels_first(node.x, last), node.input(3), node.get("dilation", 1)
    kept = (taps - 1) * dilation
    zeros = body.full(body.concat(x.shape(0, 2), body.ints([kept])), 0, x)
    before = zeros if past is None else _channels_first(past, last)
    whole = body.concat(before, x, axis=2)
    y = body.node("Conv", whole, node.required(1), node.input(2), group=channels, dilations=[dilation])
    y = silu(y) if node.get("activation", "none") in ("silu", "swish") else y
    state = whole.slice(-kept, LAST, 2) if kept else whole.slice(0, 0, 2)
    return [_channels_last(node, each) if last else each for each in (y, state)]


def _channels_first(value: Value, last: int) -> Value:
    """[N, L, C, ..] as [N, C, L]."""
    return value if not last else value.reshape([0, 0, -1]).transpose(0, 2, 1)


def _channels_last(node: Node, value: Value) -> Value:
    """[N, C, L] as [N, L, C, ..], with the axes of channels that the input has."""
    return value.transpose(0, 2, 1).reshape(node.body.concat(node.body.ints([0, 0]), node.x.shape(2)))
