"""PyTorch on the layers of training graphs: activations, dropout, attention, losses, normalization, windows."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from opgrad.bench.torch_tensors import Setups, Torch
from opgrad.bench.ways import NEW, Call

ALL = [True, True, True]  # gradients that are wanted
CORNERS = "align_corners"

# --- activations, dropout, attention ---------------------------------------------------------------------------------


def _gelu_grad(approximate: str) -> Callable[[Torch], Call]:
    def setup(t: Torch) -> Call:
        dx, dy, x, bias = t["dx"], t["dy"], t["x"], t["bias"]
        backward = t.into(t.aten.gelu_backward.grad_input, dy, approximate=approximate, grad_input=dx)
        if bias is None:
            return partial(backward, x)
        add = t.into(t.torch.add, x, bias, out=t.torch.empty_like(x))
        return lambda: backward(add())

    return setup


def _gelu(approximate: str) -> Callable[[Torch], Call]:
    return lambda t: t.into(t.aten.gelu.out, t["x"], approximate=approximate, out=t["y"])


def _scale(ratio: float) -> float:
    return 1.0 / (1.0 - ratio) if ratio < 1 else 0.0


def _dropout(t: Torch) -> Call | None:
    """With random numbers of torch's own."""
    if not t["training_mode"]:
        return None
    t.only(NEW)
    return partial(t.torch.native_dropout, t["x"], float(t["ratio"]), True)


def _dropout_grad(t: Torch) -> Call | None:
    """torch's looks at the mask even where nothing is dropped."""
    if not t["training_mode"] or t["ratio"] == 0:
        return None
    t.only(NEW)
    return partial(t.aten.native_dropout_backward, t["dy"], t["mask"], _scale(t["ratio"]))


def _bias_softmax(t: Torch) -> Call:
    x, y = t.rows("x", t["axis"]), t.rows("y", t["axis"])
    bias = t["bias"].view(-1, x.shape[1])
    repeats, inner = len(x) // len(bias), t["is_inner_broadcast"]
    shape = (len(bias), repeats, x.shape[1]) if inner else (repeats, *bias.shape)
    x, y, bias = x.view(shape), y.view(shape), bias.unsqueeze(1) if inner else bias
    add, softmax = t.into(t.torch.add, x, bias, out=t.torch.empty_like(x)), t.into(t.torch.softmax, dim=-1, out=y)
    whole = t["y"].shape
    return lambda: softmax(add()).view(whole)


def _softmax_dropout_grad(t: Torch) -> Call:
    dy, mask, y, dx = (t.rows(name, t["axis"]) for name in ("dy", "mask", "y", "dx"))
    dropout, scale, whole = t.aten.native_dropout_backward, _scale(t["ratio"]), t["dx"].shape
    softmax = t.into(t.aten._softmax_backward_data.out, grad_input=dx)
    return lambda: softmax(dropout(dy, mask, scale), y, 1, y.dtype).view(whole)


# --- losses ----------------------------------------------------------------------------------------------------------


def _dense_loss(t: Torch) -> Call:
    logits, labels, log_prob = (t.rows(name, -1) for name in ("logits", "labels", "log_prob"))
    log_softmax = t.into(t.torch.log_softmax, logits, 1, out=log_prob)
    mul, whole = t.into(t.torch.mul, labels, out=t.torch.empty_like(labels)), t["log_prob"].shape
    losses, divisor = t["loss"].shape, -len(labels) if t["reduction"] == "mean" else -1

    def loss() -> object:
        kept = log_softmax()
        products = mul(kept)
        total = products.sum(1).neg().view(losses) if t["reduction"] == "none" else products.sum() / divisor
        return total, kept.view(whole)

    return loss


def _sparse_loss(t: Torch) -> Call:
    log_softmax = t.into(t.torch.log_softmax, t.rows("logits", -1), 1, out=t.rows("log_prob", -1))
    labels, weight, reduction = t["labels"].long().view(-1), _sample_weights(t), t["reduction"]
    nll_loss, shape, whole = t.torch.nn.functional.nll_loss, t["labels"].shape, t["log_prob"].shape

    def loss() -> object:
        kept = log_softmax()
        losses = nll_loss(kept, labels, reduction="none").mul_(weight)
        if reduction == "none":
            return losses.view(shape), kept.view(whole)
        return (losses.sum() / weight.sum() if reduction == "mean" else losses.sum()), kept.view(whole)

    return loss


def _sample_weights(t: Torch) -> Any:
    if t["weight"] is not None:
        return t["weight"].view(-1)
    rows = t.rows("log_prob", -1)
    return rows.new_ones(len(rows))


def _upstream(t: Torch) -> Callable[[], Any]:
    """What computes the gradient of each sample's loss."""
    dy, weight = t["dy"].view(-1), _sample_weights(t)
    return lambda: weight * (dy / weight.sum() if t["reduction"] == "mean" else dy)


def _dense_loss_grad(t: Torch) -> Call:
    log_prob, labels, dlogits = (t.rows(name, -1) for name in ("log_prob", "labels", "dlogits"))
    backward = t.into(t.aten._log_softmax_backward_data.out, out=dlogits)
    mul, upstream = t.into(t.torch.mul, labels, out=t.torch.empty_like(log_prob)), _upstream(t)
    whole = t["dlogits"].shape
    return lambda: backward(mul(upstream().neg().unsqueeze(1)), log_prob, 1, log_prob.dtype).view(whole)


def _sparse_loss_grad(t: Torch) -> Call:
    log_prob, dlogits = t.rows("log_prob", -1), t.rows("dlogits", -1)
    nll = t.into(t.aten.nll_loss_backward.grad_input, grad_input=t.torch.empty_like(log_prob))
    log_softmax, upstream = t.into(t.aten._log_softmax_backward_data.out, out=dlogits), _upstream(t)
    given = (log_prob, t["labels"].long().view(-1), None, 0, -100, log_prob.new_zeros(()))
    whole = t["dlogits"].shape
    return lambda: log_softmax(nll(upstream(), *given), log_prob, 1, log_prob.dtype).view(whole)


# --- normalization ---------------------------------------------------------------------------------------------------


def _layer_norm(t: Torch) -> Call:
    t.only(NEW)
    return partial(t.torch.native_layer_norm, t["x"], t["scale"].shape, t["scale"], t["bias"], t["epsilon"])


def _layer_norm_grad(t: Torch) -> Call:
    """The bias only says that its gradient is wanted."""
    t.only(NEW)
    given = (t["dy"], t["x"], t["scale"].shape, t["mean"], t["inv_std"], t["scale"], t["scale"])
    return partial(t.aten.native_layer_norm_backward, *given, ALL)


def _rms_norm(t: Torch) -> Call:
    t.only(NEW)
    return partial(t.aten._fused_rms_norm, t["x"], t["scale"].shape, t["scale"], t["epsilon"])


def _rms_norm_grad(t: Torch) -> Call:
    """What autograd makes of rms_norm, which has no kernel of its own for it on the CPU."""
    t.only(NEW)
    inputs = t["x"].detach().requires_grad_(), t["scale"].detach().requires_grad_()
    y = t.torch.rms_norm(inputs[0], t["scale"].shape, inputs[1], 1e-5)
    return partial(t.torch.autograd.grad, y, inputs, t["dy"], retain_graph=True)


def _batch_norm(t: Torch) -> Call:
    """torch mixes the running variance with one that is divided by one element less."""
    running = (t["running_mean"].clone(), t["running_var"].clone())
    given = (t["x"], t["scale"], t["bias"], *running, t["training_mode"], 1.0 - t["momentum"], t["epsilon"])
    out = {"out": t["y"], "save_mean": t["saved_mean"], "save_invstd": t["saved_inv_std"]}
    return t.into(t.aten.native_batch_norm.out, *given, **out)


def _batch_norm_grad(t: Torch) -> Call:
    t.only(NEW)
    given = (t["dy"], t["x"], t["scale"], None, None, t["mean"], t["inv_std"])
    return partial(t.aten.native_batch_norm_backward, *given, True, 1e-5, ALL)


# --- recurrent layers ------------------------------------------------------------------------------------------------

ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}  # of torch's gates among those of ONNX


def _recurrent(t: Torch, kind: str) -> tuple[Any, Any]:
    """A layer of torch with the same weights, and its input."""
    layer = getattr(t.torch.nn, kind)(t["x"].shape[2], t["r"].shape[2])
    bias = t["r"].new_zeros(1, 2 * t["r"].shape[1]) if t["bias"] is None else t["bias"]
    given = {"weight_ih_l0": t["w"][0], "weight_hh_l0": t["r"][0]}
    given |= dict(zip(("bias_ih_l0", "bias_hh_l0"), bias[0].chunk(2), strict=True))
    with t.torch.no_grad():
        for name, value in given.items():
            parts = value.chunk(len(ORDERS[kind]))
            getattr(layer, name).copy_(t.torch.cat([parts[place] for place in ORDERS[kind]]))
    return layer.to(t["x"].dtype), t["x"].detach().requires_grad_()


def _is_torchs(t: Torch, kind: str) -> bool:
    """Whether torch has such a layer, and all gradients of its results are given, or none."""
    missing = all(t[name] is None for name in ("initial_h", "initial_c", "peepholes"))
    upstream = ("dy", "dy_h", "dy_c") if kind == "LSTM" else ("dy", "dy_h")
    given = "y" not in t.values or all(t[name] is not None for name in upstream)
    return t["direction"] == "forward" and missing and given and bool(kind == "LSTM" or t["linear_before_reset"])


def _padded(t: Torch, found: Sequence[Any]) -> list[Any]:
    """The first results, and None for those that torch does not have in this form."""
    return [*found, *[None] * (len(t.results) - len(found))]


def _layer(kind: str) -> Callable[[Torch], Call | None]:
    """The layer, with what autograd keeps for its gradient."""

    def setup(t: Torch) -> Call | None:
        if not _is_torchs(t, kind):
            return None
        t.only(NEW)
        layer, x = _recurrent(t, kind)

        def call() -> object:
            y, last = layer(x)
            found = y.unsqueeze(1), *(last if isinstance(last, tuple) else (last,))
            return _padded(t, [each.detach() for each in found])

        return call

    return setup


def _layer_grad(kind: str) -> Callable[[Torch], Call | None]:
    """What autograd makes of the layer: all gradients, of which dx alone has the order that ours has."""

    def setup(t: Torch) -> Call | None:
        if not _is_torchs(t, kind):
            return None
        t.only(NEW)
        layer, x = _recurrent(t, kind)
        y, last = layer(x)
        outputs = [y, *(last if isinstance(last, tuple) else (last,))]
        upstream = [t["dy"][:, 0], t["dy_h"], t["dy_c"]][: len(outputs)]
        inputs, grad = (x, *layer.parameters()), t.torch.autograd.grad
        return lambda: _padded(t, grad(outputs, inputs, upstream, retain_graph=True)[:1])

    return setup


# --- windows ---------------------------------------------------------------------------------------------------------


def _windows(t: Torch, axes: int) -> tuple[list[int], list[int], list[int]] | None:
    """Strides, pads and dilations; None for pads that differ at both ends, or that depend on the shape."""
    pads = list(t["pads"]) or [0] * (2 * axes)
    if t["auto_pad"] not in ("NOTSET", "VALID") or (t["auto_pad"] == "NOTSET" and pads[:axes] != pads[axes:]):
        return None
    begin = pads[:axes] if t["auto_pad"] == "NOTSET" else [0] * axes
    return list(t["strides"]) or [1] * axes, begin, list(t["dilations"]) or [1] * axes


def _conv_grad(transposed: bool) -> Callable[[Torch], Call | None]:
    """A convolution's gradients, or those of a transposed one."""

    def setup(t: Torch) -> Call | None:
        axes = t["x"].ndim - 2
        if t["needs"] is not None or t["output_shape"] or (windows := _windows(t, axes)) is None:
            return None
        t.only(NEW)
        bias, more = [t["dy"].shape[1]], list(t["output_padding"] or ()) or [0] * axes
        given = (t["dy"], t["x"], t["w"], bias, *windows, transposed, more, t["group"])
        return partial(t.aten.convolution_backward, *given, ALL)

    return setup


def _as_images(tensor: Any) -> Any:
    """Two axes behind the channels; a single one as an image of one row."""
    return tensor.unsqueeze(2) if tensor.ndim == 3 else tensor


def _max_pool_grad(t: Torch) -> Call | None:
    """torch takes the place of a maximum in its plane, and windows that would give as many of them."""
    if t["storage_order"] or len(t["shape"]) > 4:
        return None
    dx, dy, indices = (_as_images(each) for each in (t["dx"], t["dy"], t["indices"]))
    axes = list(zip(dx.shape[2:], dy.shape[2:], strict=True))
    if any(count > size or not count for size, count in axes):
        return None
    strides = [size // count for size, count in axes]
    window = [size - (count - 1) * (size // count) for size, count in axes]
    local = indices % math.prod(dx.shape[2:])
    given = (dy, t.torch.empty_like(dx), window, strides, [0, 0], [1, 1], False, local)
    backward, whole = t.aten.max_pool2d_with_indices_backward.grad_input, t["dx"].shape
    pool = t.into(backward, *given, grad_input=dx)
    return lambda: pool().view(whole)


def _average_pool_grad(t: Torch) -> Call | None:
    axes = len(t["shape"]) - 2
    windows = _windows(t, axes)
    if axes > 2 or windows is None or windows[2] != [1] * axes:
        return None
    dx, dy = _as_images(t["dx"]), _as_images(t["dy"])
    more = [1] * (2 - axes)
    window, strides, pads = more + list(t["kernel_shape"]), more + windows[0], [0] * (2 - axes) + windows[1]
    given = (dy, t.torch.empty_like(dx), window, strides, pads, t["ceil_mode"], t["count_include_pad"], None)
    pool, whole = t.into(t.aten.avg_pool2d_backward.grad_input, *given, grad_input=dx), t["dx"].shape
    return lambda: pool().view(whole)


def _resize_grad(t: Torch) -> Call | None:
    """torch has images, whose last two axes it resizes; no smoothing, and coordinates of two kinds."""
    name = {"linear": "upsample_bilinear2d_backward", "cubic": "upsample_bicubic2d_backward"}.get(t["mode"])
    dy, dx, kind = t["dy"], t["dx"], t["coordinate_transformation_mode"]
    own = t["axes"] or t["antialias"] or t["exclude_outside"] or t["cubic_coeff_a"] != -0.75
    if name is None or own or dx.ndim != 4 or dx.shape[:2] != dy.shape[:2] or kind not in ("half_pixel", CORNERS):
        return None
    scales = list(t["scales"])[2:] or [None, None]
    backward = getattr(t.aten, name).grad_input
    return t.into(backward, dy, list(dy.shape[2:]), list(dx.shape), kind == CORNERS, *scales, grad_input=dx)


LAYERS: Setups = {
    "gelu": _gelu("none"),
    "gelu_grad": _gelu_grad("none"),
    "fast_gelu": _gelu("tanh"),
    "fast_gelu_grad": _gelu_grad("tanh"),
    "bias_gelu_grad_dx": _gelu_grad("none"),
    "bias_fast_gelu_grad_dx": _gelu_grad("tanh"),
    "dropout": _dropout,
    "dropout_grad": _dropout_grad,
    "bias_softmax": _bias_softmax,
    "softmax_dropout_grad": _softmax_dropout_grad,
    "softmax_cross_entropy": _dense_loss,
    "softmax_cross_entropy_grad": _dense_loss_grad,
    "sparse_softmax_cross_entropy": _sparse_loss,
    "sparse_softmax_cross_entropy_grad": _sparse_loss_grad,
    "layer_normalization": _layer_norm,
    "layer_normalization_grad": _layer_norm_grad,
    "simplified_layer_normalization": _rms_norm,
    "simplified_layer_normalization_grad": _rms_norm_grad,
    "batch_norm_internal": _batch_norm,
    "batch_normalization_grad": _batch_norm_grad,
    "lstm_training": _layer("LSTM"),
    "lstm_grad": _layer_grad("LSTM"),
    "gru_training": _layer("GRU"),
    "gru_grad": _layer_grad("GRU"),
    "conv_grad": _conv_grad(False),
    "conv_transpose_grad": _conv_grad(True),
    "max_pool_grad": _max_pool_grad,
    "average_pool_grad": _average_pool_grad,
    "resize_grad": _resize_grad,
}
