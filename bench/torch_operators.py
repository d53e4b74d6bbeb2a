"""A case in PyTorch: arrays as tensors, calls in either way, and how operators of training graphs are set up."""

import importlib
import math
import timeit
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np

import opgrad
from bench.case import Case
from bench.measure import GIVEN, NEW, Call, only

TRIED = 3
RESULTS = frozenset({"out", "grad_input", "save_mean", "save_invstd"})  # keywords for memory that is given


class Torch:
    """A case's arrays as PyTorch's tensors in the same memory, to be used with opgrad's number of threads in a way.

    A setup gets one of these and returns the call to be timed, or None for arguments that torch cannot take. Each call
    returns the operator's results, in its order, as far as torch has them, in new memory or in the case's arrays. It
    raises NoSuchWay where torch has no kernel that works this way, but for an `out` that copies. Indices are converted
    before the call, so that no conversion is timed.
    """

    def __init__(self, case: Case, way: str = GIVEN):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten, self.case, self.way = self.torch.ops.aten, case, way
        self.values = {name: self._converted(value) for name, value in case.values.items()}
        self.results = {name: self._converted(value) for name, value in case.results.items()}

    def _converted(self, value: Any) -> Any:
        """A list, an array or a tensor as tensors, any other argument as it is."""
        if isinstance(value, list):
            return [self._converted(each) for each in value]
        if isinstance(value, self.torch.Tensor):
            return value.detach()  # a tensor of its own, of which a peer may ask for a gradient
        if not isinstance(value, np.ndarray):
            return value
        from opgrad.call.libraries.torch_tensors import shared

        return shared(value)

    def __getitem__(self, name: str) -> Any:
        """The argument or result of this name, or an attribute's default; None for an input that is not given."""
        found = self.results if name in self.results else self.values
        return found[name] if name in found else self.case.op.attributes.get(name)

    def named(self, given: Any) -> Any:
        """What a word names: "x" an argument or a result, "x.dtype" its dtype. Anything else stays as it is."""
        if not isinstance(given, str):
            return given
        name, _, attribute = given.partition(".")
        return getattr(self[name], attribute) if attribute else self[name]

    def has(self, name: str) -> bool:
        """Whether an input is given, or an attribute is neither None nor zero."""
        return isinstance(self[name], self.torch.Tensor) or bool(self[name])

    def rows(self, name: str, axis: int = -1) -> Any:
        """An argument or a result as rows, each of all axes from `axis` on."""
        shape = self[name].shape
        start = axis % len(shape)
        return self[name].view(math.prod(shape[:start]), math.prod(shape[start:]))

    def like(self, name: str) -> Any:
        """New memory for what comes between two calls, of the shape and dtype of an argument or a result."""
        return self.torch.empty_like(self[name])

    @property
    def is_given(self) -> bool:
        """Whether results go into memory that is given."""
        return self.way == GIVEN

    def only(self, way: str) -> None:
        """Raise NoSuchWay unless that is the way which is asked for."""
        only(way, self.way)

    def into(self, function: str, *given: Any, **keywords: Any) -> Callable[..., Any]:
        """The call with these arguments, which writes into the results named by keyword, or makes new ones.

        function: of torch, such as "softmax" or "aten.silu.out"; an overload of aten's that writes is replaced by the
        plain one where new memory is asked for. given, keywords: arguments; words name the case's, see `named`.
        Raises NoSuchWay where no result is named, and they have to go into memory that is given.
        """
        found: Any = self.torch.ops if function.startswith("aten.") else self.torch
        found = reduce(getattr, function.split("."), found)
        arguments = [self.named(each) for each in given]
        memory = {name: self.named(value) for name, value in keywords.items() if name in RESULTS}
        others = {name: value for name, value in keywords.items() if name not in RESULTS}
        if self.is_given and memory:
            return partial(found, *arguments, **others, **memory)
        self.only(NEW)
        packet = getattr(found, "overloadpacket", None)
        return partial(found if packet is None or not memory else packet.default, *arguments, **others)

    def fastest(self, *calls: Call) -> Call:
        """That of several calls for the same thing which takes the least time."""
        return fastest(*calls)


Setup = Callable[[Torch], Call | None]
Setups = Mapping[str, Setup]


def direct(function: str, *given: Any, **keywords: Any) -> Setup:
    """The setup of what one call of torch computes, see `Torch.into`."""
    return lambda t: t.into(function, *given, **keywords)


class Traced(Torch):
    """The same case with other tensors as its arguments, which torch.compile traces through a setup."""

    def __init__(self, like: Torch, values: Mapping[str, Any]):
        self.torch, self.aten, self.case, self.way = like.torch, like.aten, like.case, like.way
        self.values, self.results = {**like.values, **values}, like.results

    def fastest(self, *calls: Call) -> Call:
        """The first: while a call is traced, it takes no time."""
        return calls[0]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile makes of a call, for tensors of one shape; it compiles when it is first called."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 calls PyTorch would compile no more

    def run(*arrays: Any) -> object:
        return call(*arrays)

    made: Callable[..., Any] = torch.compile(run, dynamic=False, fullgraph=True)
    return made


def fastest(*calls: Call) -> Call:
    """That of several calls for the same thing which takes the least time, tried in turn."""
    return min(calls, key=lambda call: min(timeit.repeat(call, number=1, repeat=TRIED)))


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _sum(t: Torch) -> Call:
    """All axes are summed over where none is named."""
    axes = sorted({axis % t["x"].ndim for axis in t["axes"]}) or ([] if t["noop_with_empty_axes"] else None)
    return _copy(t, "x", "y") if axes == [] else t.into("sum", "x", axes, keepdim=t["keepdims"], out="y")


def _copy(t: Torch, name: str, result: str) -> Call:
    return partial(t[result].copy_, t[name]) if t.is_given else t[name].clone


def _div_grad(t: Torch) -> Call:
    a, b = t["a"], t["b"]
    div = t.into("div", "dy", b, out="da" if a.shape == t["dy"].shape else t.like("dy"))
    mul = t.into("mul", out=t.like("dy"))

    def backward() -> object:
        quotient = div()
        products = mul(quotient, a).sum_to_size(b.shape)
        return quotient.sum_to_size(a.shape), products.div(b).neg()

    return backward


def _accumulate(t: Torch) -> Call:
    return t.into("add", "buffer", "value", out="sum") if t["update"] else _copy(t, "buffer", "sum")


# --- elements and slices ---------------------------------------------------------------------------------------------


def _zeros(t: Torch, given: Any) -> Callable[[], Any]:
    """What makes zeros, in new memory or in the memory given."""
    return given.zero_ if t.is_given else partial(t.torch.zeros_like, given)


def _from_start(indices: Any, size: int) -> Any:
    return indices.long().remainder(size)


def _gather(t: Torch) -> Call:
    return t.into("gather", "x", "axis", _from_start(t["indices"], t["x"].shape[t["axis"]]), out="y")


def _gather_grad(t: Torch) -> Call:
    dx, dy, axis, zeros = t["dx"], t["dy"], t["axis"], _zeros(t, t["dx"])
    indices = _from_start(t["indices"], dx.shape[axis])
    return lambda: zeros().scatter_add_(axis, indices, dy)


def _named(t: Torch, x: Any) -> tuple[Any, Any]:
    """x as slices in one row, and the places there of those that tuples of indices name."""
    indices, batch = t["indices"], t["batch_dims"]
    named = batch + indices.shape[-1]
    places = t.torch.zeros(indices.shape[:-1], dtype=t.torch.int64)
    for axis, size in enumerate(x.shape[:named]):
        beside = (-1, *(1,) * (places.ndim - 1 - axis))
        own = t.torch.arange(size).view(beside) if axis < batch else _from_start(indices[..., axis - batch], size)
        places = places * size + own
    return x.view(math.prod(x.shape[:named]), math.prod(x.shape[named:])), places.view(-1)


def _gather_nd(t: Torch) -> Call:
    slices, places = _named(t, t["x"])
    return t.into("index_select", slices, 0, places, out=t["y"].view(len(places), slices.shape[1]))


def _gather_nd_grad(t: Torch) -> Call:
    slices, places = _named(t, t["dx"])
    dy = t["dy"].view(len(places), slices.shape[1])
    zeros, shape = _zeros(t, slices), t["dx"].shape
    return lambda: zeros().index_add_(0, places, dy).view(shape)


def _slice_grad(t: Torch) -> Call | None:
    """A slice that goes backwards is none of torch's."""
    steps = t["steps"] or (1,) * len(t["starts"])
    if min(steps, default=1) < 1:
        return None
    dx, dy = t["dx"], t["dy"]
    taken = [slice(None)] * dx.ndim
    for axis, *ends in zip(t["axes"] or range(len(steps)), t["starts"], t["ends"], steps, strict=True):
        taken[axis] = slice(*ends)
    inside, zeros = tuple(taken), _zeros(t, dx)

    def backward() -> object:
        made = zeros()
        made[inside].copy_(dy)
        return made

    return backward


# --- lists of arrays -------------------------------------------------------------------------------------------------


def _all_finite(t: Torch) -> Call | None:
    isfinite, arrays = t.torch.isfinite, t["arrays"]
    if t["isinf_only"] or t["isnan_only"]:
        return None
    return lambda: all(bool(isfinite(each).all()) for each in arrays)


def _scaled(t: Torch) -> Call | None:
    return None if t["fuse_outputs"] or t["out_dtype"] is not None else t.into("_foreach_mul", "arrays", "scale")


def _norm(t: Torch, arrays: Any) -> Any:
    """The norm of the norms, which half precision would round."""
    wide = t.torch.float64 if arrays[0].dtype == t.torch.float64 else t.torch.float32
    return t.torch.stack(t.torch._foreach_norm(arrays, dtype=wide)).norm()


def _split(t: Torch) -> Call:
    return t.into("aten.split_with_sizes_copy.out", "x", "split", "axis", out=list(t.results.values()))


def _adamw(t: Torch) -> Call | None:
    """The fused step of torch.optim.AdamW, in place, on weights and momentums of its own."""
    if t["adam_mode"]:
        return None
    t.only(GIVEN)
    weights, *momentums = ([each.clone() for each in t[name]] for name in ("weights", "momentums_1", "momentums_2"))
    step = [t.torch.tensor(float(t["step"])) for _ in weights]
    lists: tuple[Any, ...] = (weights, t["gradients"], *momentums, [], step)
    rates = {"lr": float(t["lr"]), "beta1": t["alpha"], "beta2": t["beta"], "eps": t["epsilon"]}
    optimize = partial(t.torch._fused_adamw_, *lists, **rates, weight_decay=t["weight_decay"])

    def update() -> object:
        optimize(amsgrad=False, maximize=False)
        return weights, *momentums

    return update


def _sgd(t: Torch) -> Call:
    weights = [each.clone() for each in t["weights"]] if t.is_given else t["weights"]
    add = t.torch._foreach_add_ if t.is_given else t.torch._foreach_add
    return partial(add, weights, t["gradients"], alpha=-float(t["lr"]))


def _clip(t: Torch) -> Call:
    gradients, most = t["gradients"], t["max_norm"]
    if t.is_given:
        own = [each.clone() for each in gradients]
        return lambda: (t.torch._foreach_mul_(own, (most / (_norm(t, own) + 1e-6)).clamp(max=1.0)), own)[1]
    return lambda: t.torch._foreach_mul(gradients, (most / (_norm(t, gradients) + 1e-6)).clamp(max=1.0))


def _pass_through(t: Torch) -> Call:
    arrays = t["arrays"]
    if t.is_given:
        return partial(t.torch._foreach_copy_, list(t.results.values()), arrays)
    return lambda: [each.clone() for each in arrays]


ARRAYS: Setups = {
    "reduce_sum_training": _sum,
    "div_grad": _div_grad,
    "zero_gradient": lambda t: _zeros(t, t["y"]),
    "accumulate": _accumulate,
    "gather_elements": _gather,
    "gather_elements_grad": _gather_grad,
    "gather_nd": _gather_nd,
    "gather_nd_grad": _gather_nd_grad,
    "slice_grad": _slice_grad,
    "concat_training": direct("cat", "arrays", "axis", out="y"),
    "split_training": _split,
    "pass_through": _pass_through,
    "is_all_finite": _all_finite,
    "mixed_precision_scale": _scaled,
    "adamw_optimizer": _adamw,
    "sgd_optimizer": _sgd,
    "clip_grad_norm": _clip,
    "reduce_all_l2": lambda t: partial(_norm, t, t["arrays"]),
}


ALL = [True, True, True]  # gradients that are wanted
CORNERS = "align_corners"

# --- activations, dropout, attention ---------------------------------------------------------------------------------


def _gelu_grad(approximate: str, t: Torch) -> Call:
    """The bias, where there is one, is added to x before."""
    backward = t.into("aten.gelu_backward.grad_input", "dy", approximate=approximate, grad_input="dx")
    if t["bias"] is None:
        return partial(backward, t["x"])
    add = t.into("add", "x", "bias", out=t.like("x"))
    return lambda: backward(add())


def _scale(ratio: float) -> float:
    return 1.0 / (1.0 - ratio) if ratio < 1 else 0.0


def _dropout(t: Torch) -> Call | None:
    """With random numbers of torch's own."""
    return t.into("native_dropout", "x", float(t["ratio"]), True) if t["training_mode"] else None


def _dropout_grad(t: Torch) -> Call | None:
    """torch's looks at the mask even where nothing is dropped."""
    if not t["training_mode"] or t["ratio"] == 0:
        return None
    return t.into("aten.native_dropout_backward", "dy", "mask", _scale(t["ratio"]))


def _bias_softmax(t: Torch) -> Call:
    x, y = t.rows("x", t["axis"]), t.rows("y", t["axis"])
    bias = t["bias"].view(-1, x.shape[1])
    repeats, inner = len(x) // len(bias), t["is_inner_broadcast"]
    shape = (len(bias), repeats, x.shape[1]) if inner else (repeats, *bias.shape)
    x, y, bias = x.view(shape), y.view(shape), bias.unsqueeze(1) if inner else bias
    add, softmax = t.into("add", x, bias, out=t.torch.empty_like(x)), t.into("softmax", dim=-1, out=y)
    whole = t["y"].shape
    return lambda: softmax(add()).view(whole)


def _softmax_dropout_grad(t: Torch) -> Call:
    dy, mask, y, dx = (t.rows(name, t["axis"]) for name in ("dy", "mask", "y", "dx"))
    dropout, scale, whole = t.aten.native_dropout_backward, _scale(t["ratio"]), t["dx"].shape
    softmax = t.into("aten._softmax_backward_data.out", grad_input=dx)
    return lambda: softmax(dropout(dy, mask, scale), y, 1, y.dtype).view(whole)


# What torch's attention on the CPU lacks, or has in another form.
OTHER_ATTENTION = ("mask", "sink", "key_lengths", "cu_seqlens_q", "window", "softcap", "dropout", "dlse")


def _attention(backward: bool, t: Torch) -> Call | None:
    """torch's flash attention, or its gradient, of as many heads of keys as of queries."""
    shapes_differ = t["q"].shape[:2] != t["k"].shape[:2] or (t["causal"] and t["q"].shape[2] != t["k"].shape[2])
    if shapes_differ or t["layout"] != "BHLD" or any(map(t.has, OTHER_ATTENTION)):
        return None
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    if backward:
        return t.into(f"{flash}_backward", "dy", "q", "k", "v", "y", "lse", 0.0, "causal", scale=t["scale"])
    return t.into(flash, "q", "k", "v", 0.0, "causal", scale=t["scale"])


def _gated(t: Torch) -> Call:
    """The activation, times up."""
    kind = t["activation"]
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    gelu = t.into("aten.gelu.out", "gate", approximate=approximate, out=t.like("gate"))
    activate = t.into("aten.silu.out", "gate", out=t.like("gate")) if kind == "silu" else gelu
    mul = t.into("mul", "up", out="y")
    return lambda: mul(activate())


def _gated_grad(t: Torch) -> Call:
    """The activation's gradient by dy * up, and dy * the activation, which is computed again."""
    kind = t["activation"]
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    by_up, value = t.into("mul", "dy", "up", out=t.like("dy")), t.like("dy")
    if kind == "silu":
        activate = t.into("aten.silu.out", "gate", out=value)
        backward = t.into("aten.silu_backward.grad_input", grad_input="dgate")
    else:
        activate = t.into("aten.gelu.out", "gate", approximate=approximate, out=value)
        backward = t.into("aten.gelu_backward.grad_input", approximate=approximate, grad_input="dgate")
    mul = t.into("mul", "dy", out="dup")
    return lambda: (backward(by_up(), t["gate"]), mul(activate()))


# --- losses ----------------------------------------------------------------------------------------------------------


def _loss(t: Torch) -> Call:
    """The log-softmax of rows, the loss of each by its label or its probabilities, and their mean, sum or neither."""
    log_softmax = t.into("log_softmax", t.rows("logits"), 1, out=t.rows("log_prob"))
    weight, reduction, shape, whole = _weights(t), t["reduction"], t["loss"].shape, t["log_prob"].shape
    labels, nll_loss = _labels(t), t.torch.nn.functional.nll_loss
    mul = t.into("mul", labels, out=t.torch.empty_like(labels))

    def each(log_prob: Any) -> Any:
        if labels.ndim == 2:
            return mul(log_prob).sum(1).neg()
        return nll_loss(log_prob, labels, reduction="none").mul_(weight)

    def loss() -> object:
        kept = log_softmax()
        losses = each(kept)
        if reduction == "none":
            return losses.view(shape), kept.view(whole)
        return (losses.sum() / weight.sum() if reduction == "mean" else losses.sum()), kept.view(whole)

    return loss


def _loss_grad(t: Torch) -> Call:
    """By the gradient of each row's loss, which goes to its probabilities or to its label, and of log-softmax."""
    log_prob, labels, weight, dy = t.rows("log_prob"), _labels(t), _weights(t), t["dy"].view(-1)
    middle, whole = t.torch.empty_like(log_prob), t["dlogits"].shape
    log_softmax = t.into("aten._log_softmax_backward_data.out", out=t.rows("dlogits"))
    mul = t.into("mul", labels, out=middle)
    nll = t.into("aten.nll_loss_backward.grad_input", grad_input=middle)
    given = (log_prob, labels, None, 0, -100, log_prob.new_zeros(()))

    def backward() -> object:
        upstream = weight * (dy / weight.sum() if t["reduction"] == "mean" else dy)
        gradient = mul(upstream.neg().unsqueeze(1)) if labels.ndim == 2 else nll(upstream, *given)
        return log_softmax(gradient, log_prob, 1, log_prob.dtype).view(whole)

    return backward


def _labels(t: Torch) -> Any:
    """The probabilities of the classes in rows, or a class for each row."""
    return t.rows("labels") if t["labels"].is_floating_point() else t["labels"].long().view(-1)


def _weights(t: Torch) -> Any:
    """Of the samples."""
    log_prob = t.rows("log_prob")
    return log_prob.new_ones(len(log_prob)) if t["weight"] is None else t["weight"].view(-1)


# --- normalization ---------------------------------------------------------------------------------------------------


def _rms_norm_grad(t: Torch) -> Call:
    """What autograd makes of rms_norm, which has no kernel of its own for it on the CPU."""
    t.only(NEW)
    inputs = t["x"].detach().requires_grad_(), t["scale"].detach().requires_grad_()
    y = t.torch.rms_norm(inputs[0], t["scale"].shape, inputs[1], 1e-5)
    return partial(t.torch.autograd.grad, y, inputs, t["dy"], retain_graph=True)


def _batch_norm(t: Torch) -> Call:
    """torch mixes the running variance with one that is divided by one element less."""
    running = (t["running_mean"].clone(), t["running_var"].clone())
    given = ("x", "scale", "bias", *running, "training_mode", 1.0 - t["momentum"], "epsilon")
    out = {"out": "y", "save_mean": "saved_mean", "save_invstd": "saved_inv_std"}
    return t.into("aten.native_batch_norm.out", *given, **out)


# --- recurrent layers ------------------------------------------------------------------------------------------------

ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}  # of torch's gates among those of ONNX
UPSTREAM = {"LSTM": ("dy", "dy_h", "dy_c"), "GRU": ("dy", "dy_h")}


def _layer(t: Torch, kind: str) -> tuple[Any, Any]:
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
    given = "y" not in t.values or all(t[name] is not None for name in UPSTREAM[kind])
    return t["direction"] == "forward" and missing and given and bool(kind == "LSTM" or t["linear_before_reset"])


def _recurrent(kind: str, of_gradient: bool, t: Torch) -> Call | None:
    """The layer, with what autograd keeps for its gradient; or what autograd makes of that.

    Of the gradients dx alone has the order that ours has. None stands for results that torch does not have.
    """
    if not _is_torchs(t, kind):
        return None
    t.only(NEW)
    layer, x = _layer(t, kind)

    def forward() -> list[Any]:
        y, last = layer(x)
        return [y.unsqueeze(1), *(last if isinstance(last, tuple) else (last,))]

    if not of_gradient:
        return lambda: _padded(t, [each.detach() for each in forward()])
    outputs, inputs, upstream = forward(), (x, *layer.parameters()), [t[name] for name in UPSTREAM[kind]]
    grad = t.torch.autograd.grad
    return lambda: _padded(t, grad(outputs, inputs, upstream, retain_graph=True)[:1])


def _padded(t: Torch, found: Any) -> list[Any]:
    return [*found, *[None] * (len(t.results) - len(found))]


# --- windows ---------------------------------------------------------------------------------------------------------


def _windows(t: Torch, axes: int) -> tuple[list[int], list[int], list[int]] | None:
    """Strides, pads and dilations; None for pads that differ at both ends, or that depend on the shape."""
    pads = list(t["pads"]) or [0] * (2 * axes)
    if t["auto_pad"] not in ("NOTSET", "VALID") or (t["auto_pad"] == "NOTSET" and pads[:axes] != pads[axes:]):
        return None
    begin = pads[:axes] if t["auto_pad"] == "NOTSET" else [0] * axes
    return list(t["strides"]) or [1] * axes, begin, list(t["dilations"]) or [1] * axes


def _conv_grad(transposed: bool, t: Torch) -> Call | None:
    """A convolution's gradients, or those of a transposed one."""
    axes = t["x"].ndim - 2
    if t["needs"] is not None or t["output_shape"] or (windows := _windows(t, axes)) is None:
        return None
    bias, more = [t["dy"].shape[1]], list(t["output_padding"] or ()) or [0] * axes
    return t.into("aten.convolution_backward", "dy", "x", "w", bias, *windows, transposed, more, "group", ALL)


def _max_pool_grad(t: Torch) -> Call | None:
    """torch takes the place of a maximum in its plane, and windows that would give as many of them."""
    sizes = list(zip(t["dx"].shape[2:], t["dy"].shape[2:], strict=True))
    if t["storage_order"] or len(sizes) > 2 or any(count > size or not count for size, count in sizes):
        return None
    strides = [size // count for size, count in sizes]
    window = [size - (count - 1) * stride for (size, count), stride in zip(sizes, strides, strict=True)]
    local = t["indices"] % math.prod(t["dx"].shape[2:])
    more = [1] * (2 - len(sizes))
    given = (more + window, more + strides, [0, 0], [1, 1], False, _image(local))
    return _pooled(t, "aten.max_pool2d_with_indices_backward.grad_input", *given)


def _average_pool_grad(t: Torch) -> Call | None:
    axes = len(t["shape"]) - 2
    windows = _windows(t, axes)
    if axes > 2 or windows is None or windows[2] != [1] * axes:
        return None
    more = [1] * (2 - axes)
    given = (more + list(t["kernel_shape"]), more + windows[0], [0] * (2 - axes) + windows[1])
    more_given = (t["ceil_mode"], t["count_include_pad"], None)
    return _pooled(t, "aten.avg_pool2d_backward.grad_input", *given, *more_given)


def _pooled(t: Torch, backward: str, *given: Any) -> Call:
    """A pool's gradient on images."""
    dx, dy = _image(t["dx"]), _image(t["dy"])
    pool, whole = t.into(backward, dy, t.torch.empty_like(dx), *given, grad_input=dx), t["dx"].shape
    return lambda: pool().view(whole)


def _image(tensor: Any) -> Any:
    """Two axes behind the channels; a single one as an image of one row."""
    return tensor.unsqueeze(2) if tensor.ndim == 3 else tensor


def _resize_grad(t: Torch) -> Call | None:
    """torch has images, whose last two axes it resizes; no smoothing, and coordinates of two kinds."""
    name = {"linear": "bilinear2d", "cubic": "bicubic2d"}.get(t["mode"])
    dy, dx, kind = t["dy"], t["dx"], t["coordinate_transformation_mode"]
    own = t["axes"] or t["antialias"] or t["exclude_outside"] or t["cubic_coeff_a"] != -0.75
    if name is None or own or dx.ndim != 4 or dx.shape[:2] != dy.shape[:2] or kind not in ("half_pixel", CORNERS):
        return None
    given = (list(dy.shape[2:]), list(dx.shape), kind == CORNERS, *(list(t["scales"])[2:] or [None, None]))
    return t.into(f"aten.upsample_{name}_backward.grad_input", dy, *given, grad_input=dx)


LAYERS: Setups = {
    "gelu": direct("aten.gelu.out", "x", approximate="none", out="y"),
    "gelu_grad": partial(_gelu_grad, "none"),
    "fast_gelu": direct("aten.gelu.out", "x", approximate="tanh", out="y"),
    "fast_gelu_grad": partial(_gelu_grad, "tanh"),
    "bias_gelu_grad_dx": partial(_gelu_grad, "none"),
    "bias_fast_gelu_grad_dx": partial(_gelu_grad, "tanh"),
    "gated_linear_unit": _gated,
    "gated_linear_unit_grad": _gated_grad,
    "dropout": _dropout,
    "dropout_grad": _dropout_grad,
    "bias_softmax": _bias_softmax,
    "attention": partial(_attention, False),
    "attention_grad": partial(_attention, True),
    "softmax_dropout_grad": _softmax_dropout_grad,
    "softmax_cross_entropy": _loss,
    "softmax_cross_entropy_grad": _loss_grad,
    "sparse_softmax_cross_entropy": _loss,
    "sparse_softmax_cross_entropy_grad": _loss_grad,
    "layer_normalization": direct("native_layer_norm", "x", "scale.shape", "scale", "bias", "epsilon"),
    # The second scale, in a bias's place, only says that the bias's gradient is wanted.
    "layer_normalization_grad": direct(
        "aten.native_layer_norm_backward", "dy", "x", "scale.shape", "mean", "inv_std", "scale", "scale", ALL
    ),
    "simplified_layer_normalization": direct("aten._fused_rms_norm", "x", "scale.shape", "scale", "epsilon"),
    "simplified_layer_normalization_grad": _rms_norm_grad,
    "batch_norm_internal": _batch_norm,
    "batch_normalization_grad": direct(
        "aten.native_batch_norm_backward", "dy", "x", "scale", None, None, "mean", "inv_std", True, 1e-5, ALL
    ),
    "lstm_training": partial(_recurrent, "LSTM", False),
    "lstm_grad": partial(_recurrent, "LSTM", True),
    "gru_training": partial(_recurrent, "GRU", False),
    "gru_grad": partial(_recurrent, "GRU", True),
    "conv_grad": partial(_conv_grad, False),
    "conv_transpose_grad": partial(_conv_grad, True),
    "max_pool_grad": _max_pool_grad,
    "average_pool_grad": _average_pool_grad,
    "resize_grad": _resize_grad,
}
