"""Activations, gated normalization, softmax and the losses that are made of it."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, ONE_AXIS_FROM, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, formula, gradient, in_float32, numbers_of, recomputed

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


formula("Relu", "dx = dy where y > 0.", lambda n: n.microsoft("ReluGrad", n.dy, n.y))
formula("Sigmoid", "dx = dy * y * (1 - y).", lambda n: n.microsoft("SigmoidGrad", n.dy, n.y))
formula("PRelu", "db = sum_to(where(a < 0, dy * a, 0), b); da = where(a < 0, dy * b, dy)")
formula("ThresholdedRelu", "dx = where(x > alpha, dy, 0)", alpha=1.0)
formula("Shrink", "dx = where(abs(x) > lambd, dy, 0)", lambd=0.5)
formula("HardSigmoid", "dx = where((y > 0) & (y < 1), dy * alpha, 0)", alpha=0.2)
formula("HardSwish", "slope = where(x > -3, x * (1 / 3) + 0.5, 0); dx = dy * where(x < 3, slope, 1)")
formula("Elu", "dx = where(x > 0, dy, dy * (y + alpha))", alpha=1.0)
formula("Celu", "dx = where(x > 0, dy, dy * (y * (1 / alpha) + 1))", alpha=1.0)
formula("Selu", "dx = where(x > 0, dy * gamma, dy * (y + gamma * alpha))", alpha=SELU_ALPHA, gamma=SELU_GAMMA)
formula("Softplus", "dx = dy * sigmoid(x)")
formula("Softsign", "bottom = 1 + abs(x); dx = dy / (bottom * bottom)")
formula("Mish", "t = tanh(softplus(x)); dx = dy * (t + x * (1 - t * t) * sigmoid(x))")


@gradient("LeakyRelu")
def leaky_relu(node: Node) -> Value:
    """dx = dy where x > 0, else alpha * dy; y has the sign of x unless alpha is negative."""
    alpha = node.get("alpha", 0.01)
    return node.microsoft("LeakyReluGrad", node.dy, node.y if alpha >= 0 else node.x, alpha=alpha)


@gradient("Swish")
def swish(node: Node) -> Value:
    """dx = dy * s * (1 + v * (1 - s)), v = alpha * x, s = sigmoid(v)."""
    return node.microsoft("QuickGeluGrad", node.dy, node.x, alpha=node.get("alpha", 1.0))


@gradient("Gelu")
def gelu(node: Node) -> Value:
    """dx = dy * gelu'(x), of the exact form or the one with tanh."""
    op = "FastGeluGrad" if node.get("approximate", "none") == "tanh" else "GeluGrad"
    return node.microsoft(op, node.dy, node.x)


@gradient("Softmax", "LogSoftmax")
def softmax(node: Node) -> Value:
    """dx = y * (dy - sum(y * dy)), of the logarithm dx = dy - exp(y) * sum(dy)."""
    op, y = f"{node.proto.op_type}Grad", node.y
    # A row in which every element is masked is NaN, and exporters write IsNaN and Where behind softmax to replace it by
    # 0. Its gradient must be 0 then, but NaN times 0 would be NaN.
    masked_rows_are_replaced = node.leads_to("Where", "IsNaN")
    if masked_rows_are_replaced:
        y = node.where(y.apply("IsNaN"), 0, y)
    if node.opset < ONE_AXIS_FROM:
        return node.microsoft(op, node.dy, y, axis=node.get("axis", 1))
    return node.microsoft(f"{op}_13", node.dy, y, axis=node.get("axis", -1))


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
    n = heads / ((heads * heads).mean(rank) + node.get("epsilon", 1e-5)).apply("Sqrt") * scale
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
    if not last:
        return [y, state]
    shape = body.concat(body.ints([0, 0]), node.x.shape(2))  # with the axes of channels that the input has
    return [each.transpose(0, 2, 1).reshape(shape) for each in (y, state)]


def _channels_first(value: Value, last: int) -> Value:
    """[N, L, C, ..] as [N, C, L]."""
    return value if not last else value.reshape([0, 0, -1]).transpose(0, 2, 1)


@gradient("SoftmaxCrossEntropyLoss", constant=(1, 2))
def softmax_cross_entropy_loss(node: Node) -> Gradients:
    """dscores = weight * dy * (exp(log_prob) - onehot(label)) / sum of weights, and what log_prob's gradient gives."""
    log_prob, dx = node.output(1, "_log_prob"), None
    if node.dys[0] is not None:
        op, given = "SoftmaxCrossEntropyLossGrad", node.given("reduction", "ignore_index")
        dx = node.microsoft(op, node.dy, log_prob, node.required(1), node.input(2), **given)
    return _with_log_prob(node, dx, log_prob)


@gradient("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT, constant=(1, 2, 3))
def softmax_cross_entropy_loss_internal(node: Node) -> Gradients:
    """dscores as of SoftmaxCrossEntropyLoss; the class to ignore is an input, the results may have another type."""
    log_prob, dx = node.output(1, "_log_prob"), None
    dtype = {"output_type": node.x.element_type or TensorProto.FLOAT} if "output_type" in node.attributes else {}
    if node.dys[0] is not None:
        op, reduction = "SoftmaxCrossEntropyLossInternalGrad", node.get("reduction", "mean")
        dx = node.microsoft(op, node.dy, log_prob, *node.inputs[1:], reduction=reduction, **dtype)
    return _with_log_prob(node, dx, log_prob)


@gradient("LinearCrossEntropyLoss", domain=MICROSOFT, constant=(2, 3, 4, 5))
def linear_cross_entropy_loss(node: Node) -> Gradients:
    """dx = dy times the gradient that the forward node leaves, so that no logits are computed a second time."""
    if node.needed != {0}:
        raise NoGradient("its weights are trained; write it as a product and SoftmaxCrossEntropyLoss")
    node.become("LinearCrossEntropyLossAndGrad", MICROSOFT, **node.attributes)
    dx = node.output(1, "_dx", node.x.element_type)
    node.forward.declare(dx.name, node.x.element_type or TensorProto.FLOAT, node.x.sizes)
    dy = node.dy.like(dx)
    return [dx * (dy.unsqueeze(-1) if node.get("reduction", "mean") == "none" else dy)]


@gradient("SoftmaxCrossEntropy", domain=MICROSOFT, constant=(1,))
def softmax_cross_entropy(node: Node) -> Value:
    """dlogits = dy * (exp(log_prob) - labels) / number of samples, for labels that are probabilities."""
    return _of_rows(node, node.required(1))


@gradient("SparseSoftmaxCrossEntropy", constant=(1, 2))
def sparse_softmax_cross_entropy(node: Node) -> Value:
    """dlogits = weight * dy * (exp(log_prob) - onehot(label)) / sum of weights."""
    return _of_rows(node, node.required(1), node.input(2))


def _of_rows(node: Node, *given: Value | None) -> Value:
    """The gradient of a loss over the last axis; given: labels and weights."""
    if node.dys[1:] != [None] * len(node.dys[1:]):
        raise NoGradient("what is differentiated depends on its second output")
    op, reduction = f"{node.proto.op_type}Grad", node.get("reduction", "mean")
    log_prob = node.output(1, "_log_prob")
    return node.body.node(op, node.dy, log_prob, *given, reduction=reduction, domain=node.proto.domain)


def _with_log_prob(node: Node, dx: Value | None, log_prob: Value) -> Value | None:
    """dx plus the gradient that comes through the second result, the log-probabilities along axis 1."""
    d_log_prob = node.dys[1] if len(node.dys) > 1 else None
    if d_log_prob is None:
        return dx
    through = node.microsoft("LogSoftmaxGrad_13", d_log_prob, log_prob, axis=1)
    return through if dx is None else dx + through
