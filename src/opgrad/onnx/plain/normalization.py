"""Gradients of layer and batch normalization, batch normalization in training, and RMS normalization."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers


def _layer_grad(slope: Value, normalized: Value, inv_std: Value, centred: bool) -> Value:
    """The gradient of rows: slope is dy * scale, normalized what the rows became."""
    grad = slope - normalized * (slope * normalized).mean(1)
    return (grad - slope.mean(1) if centred else grad) * inv_std


def _rows(call: Call, *values: Value) -> list[Value]:
    """Values as rows, in the type of the last one, a statistic, or in float64 where x has it."""
    wide = call.required(1) if call.input_types[1] == TensorProto.DOUBLE else values[-1]
    return [each.like(wide).flatten(call.get("axis", -1)) for each in values]


@lowers("LayerNormalizationGrad")
def layer_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, mean: Value, inv_std: Value) -> Results:
    """dx, dscale and dbias of (x - mean) * inv_std * scale + bias."""
    rows, x_rows, mean, inv_std = _rows(call, dy, x, mean, inv_std)
    normalized = (x_rows - mean) * inv_std
    dx = _layer_grad(rows * scale.like(mean).flatten(0), normalized, inv_std, centred=True)
    return (
        dx.in_shape(x.shape()).like(x),
        (rows * normalized).sum([0]).in_shape(scale.shape()).like(scale),
        rows.sum([0]).in_shape(scale.shape()).like(scale),
    )


@lowers("SimplifiedLayerNormalizationGrad")
def simplified_layer_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, inv_std: Value) -> Results:
    """dx and dscale of x * inv_std * scale."""
    rows, x_rows, inv_std = _rows(call, dy, x, inv_std)
    normalized = x_rows * inv_std
    dx = _layer_grad(rows * scale.like(inv_std).flatten(0), normalized, inv_std, centred=False)
    return dx.in_shape(x.shape()).like(x), (rows * normalized).sum([0]).in_shape(scale.shape()).like(scale)


@lowers("InvertibleLayerNormalizationGrad")
def invertible_layer_normalization_grad(
    call: Call, dy: Value, y: Value, scale: Value, bias: Value, inv_std: Value
) -> Results:
    """dx, dscale and dbias of layer normalization, from its output y = normalized * scale + bias."""
    rows, y_rows, inv_std = _rows(call, dy, y, inv_std)
    factor, offset = (each.like(inv_std).flatten(0) for each in (scale, bias))
    normalized = (y_rows - offset) / factor
    sums = ((each.sum([0]).in_shape(scale.shape()).like(scale)) for each in (rows * normalized, rows))
    return _layer_grad(rows * factor, normalized, inv_std, centred=True).in_shape(y.shape()).like(y), *sums


def _channels(x: Value) -> Value:
    """[N, C, everything else]."""
    return x.in_shape(x.body.concat(x.shape(0, 2), x.shape(2).product()))


def _channel_mean(x: Value) -> Value:
    """The mean of each channel of [N, C, L], of shape [C, 1]."""
    return x.mean(2).mean(0).squeeze(0)


@lowers("BatchNormalizationGrad")
@in_float32(1, 2, 2)
def batch_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, mean: Value, inv_std: Value) -> Results:
    """dx, dscale and dbias of (x - mean) * inv_std * scale + bias, mean and inv_std being those of the batch."""
    dy_rows, column = _channels(dy), scale.like(x).unsqueeze(1)
    mean, inv_std = (each.like(x).unsqueeze(1) for each in (mean, inv_std))
    normalized = (_channels(x) - mean) * inv_std
    product = dy_rows * normalized
    dx = (dy_rows - _channel_mean(dy_rows) - normalized * _channel_mean(product)) * (column * inv_std)
    sums = (each.sum([0, 2], keepdims=False).like(scale) for each in (product, dy_rows))
    return dx.in_shape(x.shape()), *sums


@lowers("BatchNormInternal")
@lowers("BatchNormTraining")
@in_float32(0, 3, 3, 3, 3)
def batch_norm_internal(
    call: Call, x: Value, scale: Value, bias: Value, running_mean: Value, running_variance: Value
) -> Results:
    """Batch normalization by the batch's mean and variance, or by the running ones, with the statistics after it.

    Results: y; running mean and variance, in training momentum * old + (1 - momentum) * of the batch, whose variance
    is divided by the number of elements; and the mean and 1 / sqrt(variance + epsilon) of y. An empty batch leaves
    the running ones as they are.
    """
    epsilon, momentum, running = call.get("epsilon", 1e-5), call.get("momentum", 0.9), [running_mean, running_variance]
    rows, trains = _channels(x), call.get("training_mode", 1)
    mean = _channel_mean(rows) if trains else running_mean.like(x).unsqueeze(1)
    centred = rows - mean
    variance = _channel_mean(centred * centred) if trains else running_variance.like(x).unsqueeze(1)
    inv_std = 1 / (variance + epsilon).apply("Sqrt")
    y = centred * (inv_std * scale.like(x).unsqueeze(1)) + bias.like(x).unsqueeze(1)
    mean, variance, saved = (each.squeeze(1).like(running_mean) for each in (mean, variance, inv_std))
    new = running
    if trains:
        pairs, is_empty = zip(running, (mean, variance), strict=True), x.size().equals(0)
        new = [call.body.where(is_empty, a, a * momentum + b * (1 - momentum)) for a, b in pairs]
    return y.in_shape(x.shape()), *new, mean, saved


@lowers("SimplifiedLayerNormalization", domain="")
def simplified_layer_normalization(call: Call, x: Value, scale: Value) -> Results:
    """y = x * inv_std * scale, and inv_std = 1 / sqrt(mean(x²) + epsilon) over the axes from `axis` on, in float32."""
    axis, sizes = call.get("axis", -1), call.input_shapes[0]
    if axis >= 0 and sizes is None:
        raise NoForm("the graph does not tell the rank of its input")
    axes = range(axis if sizes is None or axis < 0 else axis - len(sizes), 0)
    wide = x.cast(call.get("stash_type", 1))
    inv_std = 1 / ((wide * wide).mean(*axes) + call.get("epsilon", 1e-5)).apply("Sqrt")
    return (wide * inv_std).like(scale) * scale, inv_std
