"""Softmax cross-entropy with labels or with class probabilities, and the gradients.

The class axis is 1 for the operators with `Loss` in their name and the last one for the others. Samples lie in
[N, …], scores in [N, C, …]. A mean whose weights sum to 0 is 0, and so is its gradient.
"""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import HALVES
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers, widened
from opgrad.onnx.plain.quantized import DEFAULTS, weights_of

IGNORE_INDEX = -1  # where the node has no other
IGNORED_TOKEN = -100  # the same for the loss of a linear layer
REDUCTIONS = ("mean", "sum", "none")


def _reduction(call: Call) -> str:
    reduction = call.get("reduction", "mean")
    if reduction not in REDUCTIONS:
        raise NoForm(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    return str(reduction)


def _over(value: Value, total: Value) -> Value:
    """value / total, and 0 where the total is."""
    none = total.equals(0)
    return total.body.where(none, 0, value / total.body.where(none, 1, total))


def _one_hot(labels: Value, scores: Value) -> Value:
    """1 at the label's class, with the class axis at 1: [N, 1, …] against [C, 1, …]."""
    body = labels.body
    classes = body.range(scores.shape(1, 2).squeeze(0)).like(labels)
    ones = body.where(scores.shape(2) > -1, 1, scores.shape(2))
    column = classes.reshape(body.concat(body.ints([-1]), ones))
    return labels.unsqueeze(1).equals(column).like(scores)


def _samples(labels: Value, weight: Value | None, ignore: int | Value, like: Value) -> tuple[Value, Value, Value]:
    """Per sample: whether it is ignored, the class to read (0 where ignored) and the weight (0 where ignored)."""
    body = labels.body
    ignored = labels.is_label(ignore.scalar() if isinstance(ignore, Value) else ignore)
    picked = body.where(ignored, 0, labels)
    each = body.node("Gather", weight, picked) if weight is not None else body.full(labels.shape(), 1, like)
    return ignored, picked, body.where(ignored, 0, each)


def _reduced(loss: Value, weights: Value, reduction: str) -> Value:
    if reduction == "none":
        return loss
    total = loss.sum(keepdims=False)
    return _over(total, weights.sum(keepdims=False)) if reduction == "mean" else total


def _own_type(call: Call, index: int) -> int:
    """The type that the node gives its results; 0 where it is the one that they are computed in."""
    own = call.input_types[index]
    return call.get("output_type", 0) or (own if own in HALVES else 0) or 0


@lowers("SoftmaxCrossEntropyLossInternal")
def softmax_cross_entropy_loss_internal(call: Call, scores: Value, labels: Value) -> Results:
    """loss = -log_prob[label] * weight[label], reduced; and log_prob = log_softmax(scores). Halves become float32."""
    weight, ignore, target = call.input(2), call.input(3), _own_type(call, 0)
    if target in (TensorProto.FLOAT, TensorProto.DOUBLE) or call.input_types[0] in HALVES:
        dtype = target if target == TensorProto.DOUBLE else TensorProto.FLOAT
        scores = scores.cast(dtype)
        weight = None if weight is None else weight.cast(dtype)
    log_prob = scores.apply("LogSoftmax", axis=1)
    samples = _samples(labels, weight, IGNORE_INDEX if ignore is None else ignore, scores)
    loss, _ = _loss_and_slope(log_prob, labels, samples, _reduction(call))
    results = [loss, log_prob]
    return [each.cast(target) for each in results] if target else results


@lowers("SoftmaxCrossEntropyLossAndGrad")
@in_float32(0, 0)
def softmax_cross_entropy_loss_and_grad(call: Call, scores: Value, labels: Value) -> Results:
    """The loss, and its gradient weight[label] * (softmax(scores) - onehot(label)) / W."""
    samples = _samples(labels, call.input(2), call.get("ignore_index", IGNORE_INDEX), scores)
    return _loss_and_slope(scores.apply("LogSoftmax", axis=1), labels, samples, _reduction(call))


def _loss_and_slope(
    log_prob: Value, labels: Value, samples: tuple[Value, Value, Value], reduction: str
) -> tuple[Value, Value]:
    """The loss, and its gradient weight[label] * (softmax(scores) - onehot(label)) / W. samples: as of `_samples`."""
    body, (ignored, picked, weights) = log_prob.body, samples
    gathered = body.node("GatherElements", log_prob, picked.unsqueeze(1), axis=1).squeeze(1)
    # An ignored sample's loss is 0 whatever its scores are, so it is chosen: 0 * inf is NaN.
    loss = _reduced(body.where(ignored, 0, -gathered * weights), weights, reduction)
    factor = _over(weights, weights.sum(keepdims=False)) if reduction == "mean" else weights
    slope = factor.unsqueeze(1) * (log_prob.apply("Exp") - _one_hot(labels, log_prob))
    return loss, body.where(ignored.unsqueeze(1), 0, slope)


def _loss_grad(call: Call, ignore: int | Value) -> Value:
    """weight[label] * dy * (exp(log_prob) - onehot(label)) / W."""
    dy, log_prob, labels = call.operands(3)
    ignored, _, weights = _samples(labels, call.input(3), ignore, log_prob)
    grad = _factor(call, dy, weights).unsqueeze(1) * (log_prob.apply("Exp") - _one_hot(labels, log_prob))
    return call.body.where(ignored.unsqueeze(1), 0, grad)


def _factor(call: Call, dy: Value, weights: Value) -> Value:
    """weight * dy / W of each sample."""
    if (reduction := _reduction(call)) == "none":
        return weights * dy
    first = dy.reshape([-1]).slice(0, 1).scalar()  # the originals take the first element of any shape
    return weights * (_over(first, weights.sum(keepdims=False)) if reduction == "mean" else first)


@lowers("SoftmaxCrossEntropyLossGrad")
@in_float32(1)
def softmax_cross_entropy_loss_grad(call: Call) -> Value:
    """dscores, with the label to ignore as an attribute."""
    return _loss_grad(call, call.get("ignore_index", IGNORE_INDEX))


@lowers("SoftmaxCrossEntropyLossInternalGrad")
def softmax_cross_entropy_loss_internal_grad(call: Call) -> Value:
    """dscores, with the label to ignore as input 4 and a bias that is added as input 5."""
    wide = widened(call)
    ignore, bias, target = wide.input(4), wide.input(5), _own_type(call, 1)
    grad = _loss_grad(wide, IGNORE_INDEX if ignore is None else ignore)
    if bias is not None:
        grad = grad + bias.reshape(grad.shape()).like(grad)
    return grad.cast(target) if target else grad


@lowers("LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad")
def linear_cross_entropy_loss(call: Call) -> Results:
    """The loss of the logits z = x @ w.T, and dx = weight * (softmax(z) - onehot(label)) @ w / W."""
    wide, given = widened(call), {name: call.get(name, default) for name, default in (DEFAULTS | {"bits": 0}).items()}
    x, w, labels, weight = wide.required(0), wide.required(1), wide.required(2).reshape([-1]), wide.input(5)
    if given["bits"]:
        w = weights_of(wide, (1, 3, 4, len(wide.inputs)), given).floats()
    by_class = w.transpose(1, 0) if given["transB"] else w
    log_prob = call.body.node("MatMul", x.reshape([-1, given["K"]]), by_class).apply("LogSoftmax", axis=1)
    ignored, picked, weights = _samples(labels, None, call.get("ignore_index", IGNORED_TOKEN), log_prob)
    if weight is not None:
        weights = weights * weight.reshape([-1])
    loss, slope = _loss_and_slope(log_prob, labels, (ignored, picked, weights), _reduction(call))
    dx = call.body.node("MatMul", slope, by_class.transpose(1, 0)).reshape(x.shape())
    loss = loss.reshape(x.shape(0, -1)) if _reduction(call) == "none" else loss
    return loss, dx.like(call.required(0))


@lowers("SoftmaxCrossEntropy")
@in_float32(0, 0)
def softmax_cross_entropy(call: Call, scores: Value, labels: Value) -> Results:
    """loss = -sum(label * log_softmax(scores)) per sample, label being probabilities; a mean is that over samples."""
    log_prob = scores.apply("LogSoftmax", axis=-1)
    loss = -(labels * log_prob).sum([-1]).squeeze(-1)
    return _reduced(loss, call.body.full(loss.shape(), 1, scores), _reduction(call)), log_prob


@lowers("SoftmaxCrossEntropyGrad")
@in_float32(1)
def softmax_cross_entropy_grad(call: Call, dy: Value, log_prob: Value, labels: Value) -> Value:
    """dy * (exp(log_prob) - label), divided by the number of samples for a mean."""
    ones = call.body.full(log_prob.shape(0, -1), 1, log_prob)
    return _factor(call, dy, ones).unsqueeze(-1) * (log_prob.apply("Exp") - labels)


@lowers("SparseSoftmaxCrossEntropy", domain="")
@in_float32(0, 0)
def sparse_softmax_cross_entropy(call: Call, scores: Value, labels: Value) -> Results:
    """loss = -log_softmax(scores)[label] * weight, the weight being one for each sample."""
    log_prob = scores.apply("LogSoftmax", axis=-1)
    gathered = call.body.node("GatherElements", log_prob, labels.unsqueeze(-1), axis=-1).squeeze(-1)
    weights = _sample_weights(call.body, call.input(2), labels, scores)
    return _reduced(-gathered * weights, weights, _reduction(call)), log_prob


@lowers("SparseSoftmaxCrossEntropyGrad", domain="")
@in_float32(1)
def sparse_softmax_cross_entropy_grad(call: Call, dy: Value, log_prob: Value, labels: Value) -> Value:
    """weight * dy * (exp(log_prob) - onehot(label)) / W."""
    weights = _sample_weights(call.body, call.input(3), labels, log_prob)
    classes = call.body.range(log_prob.shape(-1).squeeze(0)).like(labels)
    one_hot = labels.unsqueeze(-1).equals(classes).like(log_prob)
    return _factor(call, dy, weights).unsqueeze(-1) * (log_prob.apply("Exp") - one_hot)


def _sample_weights(body: Body, weight: Value | None, labels: Value, like: Value) -> Value:
    return body.full(labels.shape(), 1, like) if weight is None else weight.reshape(labels.shape())
