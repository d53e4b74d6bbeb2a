"""Gates and normalizations that onnxruntime has in one kernel for newer language models."""

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Node, numbers_of
from opgrad.onnx.rules.registry import Gradients, NoGradient, in_float32, recomputed


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


@recomputed("LinearAttentionGate", domain=MICROSOFT)
@in_float32
def linear_attention_gate(node: Node) -> Gradients:
    """decay = scale * softplus(a + bias), beta = sigmoid(b)."""
    names = ("a", "dt_bias", "decay_scale", "b")
    a, bias, scale, b = (node.input(index) for index in range(len(names)))
    if a is None or bias is None or scale is None:
        raise NoGradient(f"it lacks one of its inputs {', '.join(names[:3])}")
    return [(a + bias).apply("Softplus") * scale, None if b is None else b.apply("Sigmoid")]


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
