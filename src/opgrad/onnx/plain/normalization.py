"""Gradients of layer and batch normalization, batch normalization in training, and RMS normalization."""

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, in_float32, lowers


def _layer_grad(slope: Value, normalized: Value, inv_std: Value, centred: bool) -> Value:
    """The gradient of rows: slope is dy * scale, normalized what the rows became."""
    grad = slope - normalized * (slope * normalized).mean(1)
    return (grad - slope.mean(1) if centred else grad) * inv_std


@lowers("LayerNormalizationGrad")
def layer_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, mean: Value, inv_std: Value) -> Results:
    """dx, dscale and dbias of (x - mean) * inv_std * scale + bias, in the type of mean."""
    axis = call.get("axis", -1)
    rows, x_rows, mean, inv_std = (each.flatten(axis) for each in (dy.like(mean), x.like(mean), mean, inv_std))
    normalized = (x_rows - mean) * inv_std
    dx = _layer_grad(rows * scale.like(mean).reshape([1, -1]), normalized, inv_std, centred=True)
    return (
        dx.reshape(x.shape()).like(x),
        (rows * normalized).sum([0]).reshape(scale.shape()).like(scale),
        rows.sum([0]).reshape(scale.shape()).like(scale),
    )


@lowers("SimplifiedLayerNormalizationGrad")
def simplified_layer_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, inv_std: Value) -> Results:
    """dx and dscale of x * inv_std * scale, in the type of inv_std."""
    axis = call.get("axis", -1)
    rows, x_rows, inv_std = (each.flatten(axis) for each in (dy.like(inv_std), x.like(inv_std), inv_std))
    normalized = x_rows * inv_std
    dx = _layer_grad(rows * scale.like(inv_std).reshape([1, -1]), normalized, inv_std, centred=False)
    return dx.reshape(x.shape()).like(x), (rows * normalized).sum([0]).reshape(scale.shape()).like(scale)


@lowers("InvertibleLayerNormalizationGrad")
def invertible_layer_normalization_grad(
    call: Call, dy: Value, y: Value, scale: Value, bias: Value, inv_std: Value
) -> Results:
    """dx, dscale and dbias of layer normalization, from its output y = normalized * scale + bias."""
    axis = call.get("axis", -1)
    rows, y_rows, inv_std = (each.flatten(axis) for each in (dy.like(inv_std), y.like(inv_std), inv_std))
    factor, offset = (each.like(inv_std).reshape([1, -1]) for each in (scale, bias))
    normalized = (y_rows - offset) / factor
    sums = ((each.sum([0]).reshape(scale.shape()).like(scale)) for each in (rows * normalized, rows))
    return _layer_grad(rows * factor, normalized, inv_std, centred=True).reshape(y.shape()).like(y), *sums


def _channels(x: Value) -> Value:
    """[N, C, everything else]."""
    return x.reshape([0, 0, -1])


def _channel_mean(x: Value) -> Value:
    """The mean of each channel of [N, C, L], of shape [C, 1]."""
    return x.mean(2).mean(0).reshape([-1, 1])


@lowers("BatchNormalizationGrad")
@in_float32(1, 2, 2)
def batch_normalization_grad(call: Call, dy: Value, x: Value, scale: Value, mean: Value, inv_std: Value) -> Results:
    """dx, dscale and dbias of (x - mean) * inv_std * scale + bias, mean and inv_std being those of the batch."""
    dy_rows, column = _channels(dy), scale.like(x).reshape([-1, 1])
    mean, inv_std = (each.like(x).reshape([-1, 1]) for each in (mean, inv_std))
    normalized = (_channels(x) - mean) * inv_std
    product = dy_rows * normalized
    dx = (dy_rows - _channel_mean(dy_rows) - normalized * _channel_mean(product)) * (column * inv_std)
    sums = (each.sum([0, 2], keepdims=False).like(scale) for each in (product, dy_rows))
    return dx.reshape(x.shape()), *sums


@lowers("BatchNormInternal")
@lowers("BatchNormTraining")
@in_float32(0, 3, 3, 3, 3)
def batch_norm_internal(
    call: Call, x: Value, scale: Value, bias: Value, running_mean: Value, running_variance: Value
) -> Results:
    """Batch normalization by the batch's mean and variance, with the running statistics after it.

    Results: y, running mean and variance (momentum * old + (1 - momentum) * of the batch, whose variance is divided
    by the number of elements), and the batch's mean and 1 / sqrt(variance + epsilon).
    """
    epsilon, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    if not call.get("training_mode", 1):
        return call.body.node(
            "BatchNormalization", x, scale, bias, running_mean, running_variance, epsilon=epsilon, momentum=momentum
        )
    mean = _channel_mean(_channels(x))
    centred = _channels(x) - mean
    variance = _channel_mean(centred * centred)
    inv_std = 1 / (variance + epsilon).apply("Sqrt")
    y = centred * (inv_std * scale.like(x).reshape([-1, 1])) + bias.like(x).reshape([-1, 1])
    mean, variance, saved = (each.reshape([-1]).like(running_mean) for each in (mean, variance, inv_std))
    return (
        y.reshape(x.shape()),
        running_mean * momentum + mean * (1 - momentum),
        running_variance * momentum + variance * (1 - momentum),
        mean,
        saved,
    )


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
