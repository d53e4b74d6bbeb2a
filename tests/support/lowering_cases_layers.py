"""More nodes to lower, each with a float64 formula of its own: losses, normalization, sums."""

import numpy as np
from lowering_cases import SINGLE, Case, normal, softmax

from opgrad.contract.declaration import reference

# --- cross-entropy ---------------------------------------------------------------------------------------------------


def loss_and_grad(scores, labels, weight=None, ignore=-1, reduction="mean", dy=None):
    """The loss, log_prob and the gradient of the scores, sample by sample; the classes lie along axis 1."""
    log_prob = np.log(softmax(scores, 1))
    loss, each, grad = np.zeros(labels.shape), np.zeros(labels.shape), np.zeros(scores.shape)
    for place in np.ndindex(labels.shape):
        label = labels[place]
        if label != ignore:
            each[place] = 1 if weight is None else weight[label]
            column = (place[0], slice(None), *place[1:])
            loss[place] = -each[place] * log_prob[column][label]
            grad[column] = each[place] * (np.exp(log_prob[column]) - np.eye(scores.shape[1])[label])
    total = each.sum() or 1
    if reduction == "none":
        return loss, log_prob, grad * np.expand_dims(np.ones(labels.shape) if dy is None else dy, 1)
    divisor = total if reduction == "mean" else 1
    return loss.sum() / divisor, log_prob, grad * (1 if dy is None else dy.flat[0]) / divisor


def internal(scores, labels, weight=None, ignore=-1, reduction="mean"):
    return loss_and_grad(scores, labels, weight, ignore, reduction)[:2]


def grad_case(shape, labels, reduction="mean", weight=None, ignore=None, note="", dy=None, kind=np.int64):
    labels = np.array(labels, kind)
    attributes = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})

    def inputs(rng):
        scores = rng.standard_normal(shape)
        outer = rng.standard_normal(labels.shape if reduction == "none" else () if dy is None else dy)
        given = [outer, np.log(softmax(scores, 1)), labels]
        return given if weight is None else [*given, np.array(weight)]

    def formula(dy, log_prob, labels, weight=None):
        return loss_and_grad(log_prob, labels, weight, -1 if ignore is None else ignore, reduction, dy)[2]

    return Case("SoftmaxCrossEntropyLossGrad", inputs, formula, attributes, note)


def together_case(shape, labels, reduction="mean", weight=None, ignore=-1, note=""):
    given = [np.array(labels), *([] if weight is None else [np.array(weight)])]

    def formula(scores, labels, weight=None):
        return loss_and_grad(scores, labels, weight, ignore, reduction)[::2]

    attributes = {"reduction": reduction, "ignore_index": ignore}
    return Case(
        "SoftmaxCrossEntropyLossAndGrad", lambda rng: [rng.standard_normal(shape), *given], formula, attributes, note
    )


def internal_case(shape, labels, reduction="mean", weight=None, ignore=None, note=""):
    given = [
        np.array(labels),
        None if weight is None else np.array(weight),
        None if ignore is None else np.array(ignore),
    ]

    def formula(scores, labels, weight=None, ignore=-1):
        return internal(scores, labels, weight, -1 if ignore is None else ignore, reduction)

    attributes = {"reduction": reduction}
    return Case(
        "SoftmaxCrossEntropyLossInternal", lambda rng: [rng.standard_normal(shape), *given], formula, attributes, note
    )


def internal_grad(dy, log_prob, labels, weight=None, ignore=-1, bias=None):
    ignore = -1 if ignore is None else ignore
    return loss_and_grad(log_prob, labels, weight, ignore, "mean", dy)[2] + (0 if bias is None else bias)


def internal_grad_inputs(rng):
    log_prob = np.log(softmax(rng.standard_normal((3, 4)), 1))
    return [np.array(0.5), log_prob, np.array([1, 2, 0]), None, np.array([2]), rng.standard_normal((3, 4))]


def dense(scores, labels):
    log_prob = np.log(softmax(scores, -1))
    return -(labels * log_prob).sum() / (scores.size // scores.shape[-1]), log_prob


def sparse(scores, labels, weight=None):
    log_prob = np.log(softmax(scores, -1))
    weight = np.ones(labels.shape) if weight is None else weight
    picked = np.take_along_axis(log_prob, labels[..., None], -1)[..., 0]
    return -(picked * weight).sum() / weight.sum(), log_prob


def sparse_grad(dy, log_prob, labels, weight=None):
    weight = np.ones(labels.shape) if weight is None else weight
    return dy * (weight / weight.sum())[..., None] * (np.exp(log_prob) - np.eye(log_prob.shape[-1])[labels])


LABELS = [[0, 2, -1], [1, 1, 2]]
LOSSES = [
    grad_case((3, 4), [1, 0, 3]),
    grad_case((3, 4), [1, -1, 3], note="ignored by default"),
    grad_case((3, 4), [1, 0, 3], ignore=3, reduction="sum", note="other label ignored"),
    grad_case((3, 4), [3, 3, 3], ignore=3, note="all ignored"),
    grad_case((3, 4), [1, 0, 3], ignore=2**32, note="a label that int32 does not hold", kind=np.int32),
    grad_case((3, 4), [1, 0, 3], "none", [0.5, 2, 1, 0]),
    grad_case((2, 4, 3), LABELS, weight=[0.5, 2, 1, 3], note="spatial"),
    grad_case((2, 4, 3), LABELS, "none", note="spatial"),
    grad_case((2, 4, 3, 1), np.zeros((2, 3, 1)), "sum", dy=(1,), note="two axes", kind=np.int32),
    together_case((3, 4), [1, 0, 3]),
    together_case((3, 4), [1, -1, 3], "none"),
    together_case((2, 4, 3), LABELS, "sum", weight=[0.5, 2, 1, 3], note="spatial"),
    together_case((3, 4), [9, 9, 9], ignore=9, note="all ignored"),
    internal_case((3, 4), [1, 0, 3]),
    internal_case((3, 4), [1, -1, 3], "none"),
    internal_case((2, 4, 3), LABELS, "sum", weight=[0.5, 2, 1, 3]),
    internal_case((3, 4), [1, 0, 3], weight=[1.0, 2, 3, 4], ignore=0),
    internal_case((3, 4), [9, 9, 9], ignore=9, note="all ignored"),
    internal_case((3, 4), np.int32([1, 0, 3]), ignore=2**32, note="a label that int32 does not hold"),
    Case("SoftmaxCrossEntropyLossInternalGrad", internal_grad_inputs, internal_grad),
    Case("SoftmaxCrossEntropy", normal((2, 3, 4), (2, 3, 4)), dense),
    Case(
        "SoftmaxCrossEntropyGrad",
        normal((1,), (3, 4), (3, 4)),
        lambda dy, log_prob, labels: dy * (np.exp(log_prob) - labels) / 3,
    ),
    Case(
        "SparseSoftmaxCrossEntropy",
        lambda rng: [rng.standard_normal((2, 3, 4)), np.array([[0, 1, 3], [2, 2, 0]]), rng.random((2, 3))],
        sparse,
        domain="",
    ),
    Case(
        "SparseSoftmaxCrossEntropyGrad",
        lambda rng: [np.array(2.0), np.log(softmax(rng.standard_normal((3, 4)), -1)), np.array([0, 3, 1])],
        sparse_grad,
        domain="",
    ),
]


# --- normalization ---------------------------------------------------------------------------------------------------


EPSILON = 2.0**-10  # attributes are float32


def layer_inputs(shape, axis, simple=False):
    def inputs(rng):
        dy, x = rng.standard_normal((2, *shape))
        axes = tuple(range(axis % len(shape), len(shape)))
        mean, scale = x.mean(axes, keepdims=True), rng.standard_normal(shape[axis % len(shape) :])
        inv_std = 1 / np.sqrt(((x - (0 if simple else mean)) ** 2).mean(axes, keepdims=True) + 1e-3)
        return [dy, x, scale, inv_std] if simple else [dy, x, scale, mean, inv_std]

    return inputs


def layer_grad(axis, simple=False):
    def formula(dy, x, scale, mean, inv_std=None):
        mean, inv_std = (0, mean) if simple else (mean, inv_std)
        axes, outer = tuple(range(axis % x.ndim, x.ndim)), tuple(range(axis % x.ndim))
        normalized, g = (x - mean) * inv_std, dy * scale
        projection = (g * normalized).mean(axes, keepdims=True)
        dx = inv_std * (g - (0 if simple else g.mean(axes, keepdims=True)) - normalized * projection)
        results = dx, (dy * normalized).sum(outer), dy.sum(outer)
        return results[:2] if simple else results

    return formula


def invertible_inputs(rng):
    dy, normalized = rng.standard_normal((2, 4, 6))
    scale, bias = rng.random(6) + 0.5, rng.standard_normal(6)
    return [dy, normalized * scale + bias, scale, bias, rng.random((4, 1))]


def invertible_grad(dy, y, scale, bias, inv_std):
    x = (y - bias) / scale / inv_std
    return layer_grad(-1)(dy, x, scale, 0, inv_std)


def batch_norm(x, scale, bias, mean, variance):
    axes, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    new_mean, new_variance = x.mean(axes), x.var(axes)
    inv_std = 1 / np.sqrt(new_variance + EPSILON)
    y = (x - new_mean.reshape(column)) * (inv_std * scale).reshape(column) + bias.reshape(column)
    return y, 0.75 * mean + 0.25 * new_mean, 0.75 * variance + 0.25 * new_variance, new_mean, inv_std


def batch_norm_grad(dy, x, scale, mean, inv_std):
    axes, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    normalized = (x - mean.reshape(column)) * inv_std.reshape(column)
    centred = dy - dy.mean(axes, keepdims=True) - normalized * (dy * normalized).mean(axes, keepdims=True)
    return (scale * inv_std).reshape(column) * centred, (dy * normalized).sum(axes), dy.sum(axes)


def batch_norm_grad_inputs(shape):
    def inputs(rng):
        dy, x = rng.standard_normal((2, *shape))
        axes = (0, *range(2, x.ndim))
        return [dy, x, rng.standard_normal(shape[1]), x.mean(axes), 1 / np.sqrt(x.var(axes) + 1e-3)]

    return inputs


NORMALIZATION = [
    *(
        Case(
            f"{name}LayerNormalizationGrad", layer_inputs(shape, axis, simple), layer_grad(axis, simple), {"axis": axis}
        )
        for name, simple in (("", False), ("Simplified", True))
        for shape, axis in [((4, 6), -1), ((2, 3, 5), 1), ((2, 3, 5), -1), ((5,), 0)]
    ),
    Case("InvertibleLayerNormalizationGrad", invertible_inputs, invertible_grad),
    *(
        Case(
            name,
            lambda rng, shape=shape: [rng.standard_normal(shape), *rng.random((4, shape[1]))],
            batch_norm,
            {"epsilon": EPSILON, "momentum": 0.75},
        )
        for name in ("BatchNormInternal", "BatchNormTraining")
        for shape in [(4, 3), (4, 3, 5), (2, 3, 4, 2)]
    ),
    *(
        Case("BatchNormalizationGrad", batch_norm_grad_inputs(shape), batch_norm_grad)
        for shape in [(6, 3), (2, 3, 4, 2)]
    ),
]


# --- sums of gradients -----------------------------------------------------------------------------------------------


def infinite(*numbers):
    return lambda rng: [np.array([1.0, 2.0]), np.array([[0.5, *numbers]])]


FLAG = np.array([True])
SUMS = [
    Case("InPlaceAccumulatorV2", normal((2, 3), (2, 3)), lambda b, v: (FLAG, b + v)),
    Case(
        "InPlaceAccumulatorV2",
        lambda rng: [np.full((2, 3), np.nan), rng.standard_normal((2, 3)), FLAG],
        lambda b, v, overwrite: (FLAG, v),
        note="overwrite",
    ),
    Case(
        "InPlaceAccumulatorV2",
        lambda rng: [np.array(2.0), np.array(3.0), ~FLAG],
        lambda b, v, overwrite: (FLAG, b + v),
        note="scalar",
    ),
    Case("InPlaceAccumulator", normal((2, 3), (2, 3)), lambda b, v: b + v),
    Case(
        "InPlaceAccumulator",
        lambda rng: [*rng.standard_normal((2, 3)), np.array([False])],
        lambda b, v, update: b,
        note="no update",
    ),
    Case("ZeroGradient", lambda rng: [rng.standard_normal((2, 3)), FLAG], lambda g, signal: np.zeros_like(g)),
    Case("PassThrough", normal((3,), (2, 2)), lambda *given: given),
    Case("Scale", lambda rng: [rng.standard_normal((2, 3)), np.array(3)], lambda x, f: x * 3, note="int64"),
    Case("Scale", normal((2, 3), (1,)), lambda x, f: x / f, {"scale_down": 1}),
    Case("IsAllFinite", infinite(7.0), lambda *given: np.array(True)),
    Case("IsAllFinite", infinite(np.inf), lambda *given: np.array(False)),
    Case("IsAllFinite", infinite(np.nan), lambda *given: np.array(False), note="NaN"),
    Case("IsAllFinite", infinite(np.nan), lambda *given: np.array(True), {"isinf_only": 1}),
    Case("IsAllFinite", infinite(np.inf), lambda *given: np.array(True), {"isnan_only": 1}),
    Case("ReduceAllL2", normal((2, 3), (), (4,)), lambda *given: np.sqrt(sum((x**2).sum() for x in given))),
    Case("MixedPrecisionScale", normal((), (2, 3), (4,)), lambda f, *given: [f * x for x in given], {"to": "dtype"}),
    Case(
        "MixedPrecisionScale",
        normal((1,), (2, 3), (4,)),
        lambda f, *given: f * np.concatenate([x.ravel() for x in given]),
        {"to": "dtype", "fuse_outputs": 1},
    ),
]


# --- what stock onnxruntime has beyond ai.onnx -----------------------------------------------------------------------


def rms(axis):
    def formula(x, scale):
        axes = tuple(range(axis % x.ndim, x.ndim))
        inv_std = 1 / np.sqrt((x * x).mean(axes, keepdims=True) + 1e-5)
        return x * inv_std * scale, inv_std.astype(np.float32)

    return formula


def rotated(sign, size, interleaved):
    """Rotary embedding of x [B, H, L, D] by complex numbers."""

    def formula(x, cos, sin):
        turned = (
            (x[..., 0:size:2] + 1j * x[..., 1:size:2])
            if interleaved
            else x[..., : size // 2] + 1j * x[..., size // 2 : size]
        )
        turned = turned * (cos + sign * 1j * sin)
        pair = [turned.real, turned.imag]
        joined = np.stack(pair, -1).reshape(*x.shape[:-1], size) if interleaved else np.concatenate(pair, -1)
        return np.concatenate([joined, x[..., size:]], -1)

    return formula


def rotated_by_position(x, cos, sin, positions):
    """Rotary embedding of x [B, L, 2 * D]."""
    x = x.reshape(*x.shape[:2], 2, -1).swapaxes(1, 2)
    y = rotated(1, x.shape[-1], False)(x, cos[positions][:, None], sin[positions][:, None])
    return y.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attending(**options):
    """The formula of AttentionTraining with these arguments of the operator."""

    def formula(q, k, v, *more):
        return reference("attention")(q, k, v, **dict(zip(MORE, more, strict=False)), **options, needs=("y", "lse"))

    return formula


def attention_gradients(needs=("dq", "dk", "dv"), **options):
    """The formula of AttentionGrad with these arguments of the operator."""

    def formula(dy, q, k, v, y, lse, *more):
        given = dict(zip((*MORE, "dlse"), more, strict=False))
        return reference("attention_grad")(dy, q, k, v, y, lse, **given, **options, needs=needs)

    return formula


MORE = ("mask", "key_lengths", "sink", "seed", "offset", "cu_seqlens_q", "cu_seqlens_k")


def attended(*shapes, mask=None, lengths=None, heads=0, starts=None, with_dlse=False, **options):
    """The inputs of AttentionGrad: dy, q, k, v, y, lse, and those from the mask on that are given."""

    def inputs(rng):
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        more = [None if mask is None else mask(rng), lengths, rng.standard_normal(heads) if heads else None]
        more += [None, None, *(starts or (None, None))]
        y, lse = attending(**options)(q, k, v, *more)
        more.append(rng.standard_normal(lse.shape) if with_dlse else None)
        while more and more[-1] is None:
            more.pop()
        return [rng.standard_normal(y.shape), q, k, v, y, lse, *more]

    return inputs


STARTS = np.array([1, 3, 3, 8]), np.array([0, 4, 6, 7])  # the first query and the last have no sequence
ATTENTION = [
    Case("AttentionTraining", normal((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)), attending(scale=0.25), {"scale": 0.25}),
    Case(
        "AttentionTraining",
        lambda rng: [*normal(*[(2, 5, 2, 3)] * 3)(rng), None, np.array([5, 3]), rng.standard_normal(2)],
        attending(scale=1.0, causal="bottom_right", softcap=2.0, layout="BLHD", window=(2, -1)),
        {"causal": "bottom_right", "softcap": 2.0, "layout": "BLHD", "window": [2, -1], "scale": 1.0},
    ),
    Case(
        "AttentionTraining",
        lambda rng: [*normal(*[(2, 2, 5, 3)] * 3)(rng), rng.random((2, 1, 5, 5)) > 0.3],
        attending(scale=1.0, causal="top_left"),
        {"causal": "top_left", "scale": 1.0},
        "bool mask, rows without keys",
    ),
    Case("AttentionTraining", normal((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)), attending(), {}, "no scale"),
    Case(
        "AttentionTraining",
        lambda rng: [*normal((9, 4, 3), (8, 2, 3), (8, 2, 4))(rng), *[None] * 5, *STARTS],
        attending(causal="bottom_right", window=(2, 0)),
        {"causal": "bottom_right", "window": [2, 0]},
        "sequences behind each other",
    ),
    Case(
        "AttentionTraining",
        lambda rng: [*normal(*[(9, 2, 3)] * 3)(rng), *[None] * 5, STARTS[0].astype(np.int32)],
        attending(causal="top_left"),
        {"causal": "top_left"},
        "sequences behind each other, of int32",
    ),
    Case(
        "AttentionGrad",
        attended((9, 4, 3), (8, 2, 3), (8, 2, 4), starts=STARTS, with_dlse=True, causal="top_left"),
        attention_gradients(causal="top_left"),
        {"causal": "top_left"},
        "sequences behind each other",
    ),
    Case(
        "AttentionGrad",
        attended((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4), mask=lambda rng: rng.standard_normal((4, 1, 6)), scale=0.25),
        attention_gradients(("dq", "dk", "dv", "dmask"), scale=0.25),
        {"scale": 0.25},
    ),
    Case(
        "AttentionGrad",
        attended(*[(2, 5, 2, 3)] * 3, lengths=np.array([5, 3]), heads=2, scale=1.0, softcap=2.0, layout="BLHD"),
        lambda *given: (
            *attention_gradients(scale=1.0, softcap=2.0, layout="BLHD")(*given),
            None,
            attention_gradients(("dsink",), scale=1.0, softcap=2.0, layout="BLHD")(*given),
        ),
        {"softcap": 2.0, "layout": "BLHD", "scale": 1.0},
    ),
]
CONTRIB = [
    Case(
        "RotaryEmbeddingTraining",
        normal((2, 3, 4, 6), (5, 3), (5, 3)),
        lambda x, c, s: rotated(1, 6, False)(x, c[:4], s[:4]),
    ),
    Case(
        "RotaryEmbeddingTraining",
        lambda rng: [*normal((2, 4, 12), (5, 3), (5, 3))(rng), rng.integers(0, 5, (2, 4))],
        rotated_by_position,
        {"num_heads": 2},
    ),
    Case("RotaryEmbeddingGrad", normal((2, 3, 4, 6), (4, 3), (4, 3)), rotated(-1, 6, False)),
    Case(
        "RotaryEmbeddingGrad",
        normal((2, 3, 4, 7), (2, 4, 2), (2, 4, 2)),
        lambda dy, c, s: rotated(-1, 4, True)(dy, c[:, None], s[:, None]),
        {"interleaved": 1, "rotary_embedding_dim": 4},
    ),
    Case(
        "RotaryEmbeddingGrad",
        normal((2, 4, 3, 6), (5, 3), (5, 3)),
        lambda dy, c, s: rotated(-1, 6, False)(dy.swapaxes(1, 2), c[:4], s[:4]).swapaxes(1, 2),
        {"layout": "BLHD"},
    ),
    Case("FusedMatMul", normal((2, 3, 4), (2, 4, 5)), lambda a, b: 0.5 * (a @ b), {"alpha": 0.5}),
    Case("FusedMatMul", normal((4, 3), (5, 4)), lambda a, b: a.T @ b.T, {"transA": 1, "transB": 1}),
    Case(
        "FusedMatMul",
        normal((3, 2, 4), (2, 5, 4)),
        lambda a, b: a.transpose(1, 0, 2) @ b.swapaxes(1, 2),
        {"transBatchA": 1, "transB": 1},
    ),
    *(
        Case(
            "SimplifiedLayerNormalization",
            normal((2, 3, 4), shape),
            rms(axis),
            {"axis": axis},
            domain="",
            dtypes=SINGLE,
        )
        for axis, shape in ((-1, (4,)), (1, (3, 4)))
    ),
]
