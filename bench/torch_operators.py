"""PyTorch's calls for every operator, on tensors that share a case's memory, in either way of working.

Of the operators of training graphs the setups take the forms that the large examples have, which alone are measured.
"""

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
from opgrad.cli.examples import listed

TRIED = 3
RESULTS = frozenset({"out", "grad_input", "save_mean", "save_invstd"})  # keywords for memory that is given
MEAN, IGNORE_INDEX = 1, -100  # how aten's losses reduce, and the label that they leave out
ALL = [True, True, True]  # gradients that are wanted


class Torch:
    """A case's arrays as PyTorch's tensors in the same memory, to be used with opgrad's number of threads in a way.

    is_given: whether results go into memory that is given.
    A setup gets one of these and returns the call to be timed, or None for arguments that torch cannot take. Each call
    returns the operator's results, in its order, as far as torch has them, in new memory or in the case's arrays. It
    raises NoSuchWay where torch has no kernel that works this way, but for an `out` that copies. Indices are converted
    before the call, so that no conversion is timed.
    """

    def __init__(self, case: Case, way: str = GIVEN):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten, self.case, self.way, self.is_given = self.torch.ops.aten, case, way, way == GIVEN
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

    def like(self, name: str) -> Any:
        """New memory for what comes between two calls, of the shape and dtype of an argument or a result."""
        return self.torch.empty_like(self[name])

    def zeros(self, given: Any) -> Callable[[], Any]:
        """What makes zeros, in new memory or in the memory given."""
        return (lambda: given.zero_()) if self.is_given else (lambda: self.torch.zeros_like(given))

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
        only(NEW, self.way)
        packet = getattr(found, "overloadpacket", None)
        return partial(found if packet is None or not memory else packet.default, *arguments, **others)


Setup = Callable[[Torch], Call | None]
Setups = Mapping[str, Setup]


def direct(function: str, *given: Any, **keywords: Any) -> Setup:
    """The setup of what one call of torch computes, see `Torch.into`."""
    return lambda t: t.into(function, *given, **keywords)


def chained(first: Call, then: Callable[[Any], Any]) -> Call:
    """A call whose result goes into another."""
    return lambda: then(first())


class Traced(Torch):
    """The same case with other tensors as its arguments, which torch.compile traces through a setup."""

    def __init__(self, like: Torch, values: Mapping[str, Any]):
        vars(self).update(vars(like) | {"values": {**like.values, **values}})


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile makes of a call, for tensors of one shape; it compiles when it is first called."""
    torch: Any = importlib.import_module("torch")
    torch.compiler.reset()  # after 8 calls PyTorch would compile no more
    return torch.compile(lambda *arrays: call(*arrays), dynamic=False, fullgraph=True)


def fastest(*calls: Call) -> Call:
    """That of several calls for the same thing which takes the least time, tried in turn."""
    return min(calls, key=lambda call: min(timeit.repeat(call, number=1, repeat=TRIED)))


# --- losses ----------------------------------------------------------------------------------------------------------


def _loss(t: Torch, of_rows: Callable[[Any], Any] | None = None) -> Call:
    """The loss and the logarithms of probabilities. of_rows: the loss of these; None: their mean by labels."""
    log_softmax = t.into("log_softmax", "logits", 1, out="log_prob")
    nll_loss, labels = t.torch.nn.functional.nll_loss, t["labels"]

    def loss() -> object:
        log_prob = log_softmax()
        return of_rows(log_prob) if of_rows else nll_loss(log_prob, labels), log_prob

    return loss


def _soft_loss(t: Torch) -> Call:
    """Of labels that are probabilities."""
    mul = t.into("mul", "labels", out=t.like("labels"))
    return _loss(t, lambda log_prob: mul(log_prob).sum(1).mean().neg())


def _weighted_loss(t: Torch) -> Call:
    """Of rows with a weight each."""
    nll_loss, labels, weight = t.torch.nn.functional.nll_loss, t["labels"], t["weight"]
    return _loss(t, lambda log_prob: nll_loss(log_prob, labels, reduction="none").mul_(weight).sum() / weight.sum())


def _soft_loss_grad(t: Torch) -> Call:
    dy, log_prob, mul = t["dy"], t["log_prob"], t.into("mul", "labels", out=t.like("log_prob"))
    log_softmax = t.into("aten._log_softmax_backward_data.out", out="dlogits")
    return lambda: log_softmax(mul(dy / -len(log_prob)), log_prob, 1, log_prob.dtype)


def _weighted_loss_grad(t: Torch) -> Call:
    dy, weight, log_prob = t["dy"], t["weight"], t["log_prob"]
    nll = t.into("aten.nll_loss_backward.grad_input", grad_input=t.like("log_prob"))
    log_softmax = t.into("aten._log_softmax_backward_data.out", out="dlogits")
    given = (log_prob, t["labels"], None, 0, IGNORE_INDEX, log_prob.new_zeros(()))
    return lambda: log_softmax(nll(weight * (dy / weight.sum()), *given), log_prob, 1, log_prob.dtype)


def _backward(t: Torch, dy: Any, like: Any) -> Callable[[Any], Any]:
    """What computes the gradient of the mean loss from log_prob. like: has the shape and dtype of logits."""
    labels, total = t["labels"], like.new_full((), float(t["labels"].numel()))
    name = "aten.nll_loss_backward" if like.ndim == 2 else "aten.nll_loss2d_backward"
    nll = t.into(f"{name}.grad_input", grad_input=t.like("dlogits"))
    log_softmax = t.into("aten._log_softmax_backward_data.out", out="dlogits")

    def backward(log_prob: Any) -> Any:
        gradient = nll(dy, log_prob, labels, None, MEAN, IGNORE_INDEX, total)
        return log_softmax(gradient, log_prob, 1, log_prob.dtype)

    return backward


def _loss_and_grad(t: Torch) -> Call:
    """By autograd, which makes new memory; into memory that is given, by the steps that autograd takes."""
    functional, logits, labels = t.torch.nn.functional, t["logits"], t["labels"]
    if not t.is_given:
        return with_grad(functional.cross_entropy, t)
    kept, backward = t.like("logits"), _backward(t, logits.new_ones(()), logits)

    def loss_and_grad() -> object:
        log_prob = t.torch.log_softmax(logits, 1, out=kept)
        return functional.nll_loss(log_prob, labels), backward(log_prob)

    return loss_and_grad


def with_grad(loss: Callable[[Any, Any], Any], t: Torch) -> Call:
    """A loss and its gradient by autograd."""
    logits, labels, grad = t["logits"].requires_grad_(), t["labels"], t.torch.autograd.grad

    def loss_and_grad() -> object:
        value = loss(logits, labels)
        return value, grad(value, logits)[0]

    return loss_and_grad


# --- slices ----------------------------------------------------------------------------------------------------------


def _rows_grad(t: Torch) -> Call:
    """The backward of embedding, or additions into zeros, whichever is faster; only these can be told where."""
    dy, indices, dx, zeros = t["dy"], t["indices"], t["dx"], t.zeros(t["dx"])
    added = lambda: zeros().index_add_(0, indices, dy)  # noqa: E731
    if t.is_given:
        return added
    embedding = t.into("aten.embedding_dense_backward", dy, indices, len(dx), -1, False)
    return embedding if dy.is_cuda or isinstance(t, Traced) else fastest(embedding, added)


def _from_start(t: Torch, x: Any) -> Any:
    """The indices along the axis of x, none of them negative."""
    return t["indices"].long().remainder(x.shape[t["axis"]])


def _gather_grad(t: Torch) -> Call:
    dy, axis, indices, zeros = t["dy"], t["axis"], _from_start(t, t["dx"]), t.zeros(t["dx"])
    return lambda: zeros().scatter_add_(axis, indices, dy)


def _paired(t: Torch, x: Any) -> tuple[Any, int, Any]:
    """x as slices in one row, its axis, and the places there of those that pairs of indices name."""
    first, second = (place.long().remainder(x.shape[axis]) for axis, place in enumerate(t["indices"].unbind(-1)))
    return x.flatten(0, 1), 0, first * x.shape[1] + second


def _gather_nd_grad(t: Torch) -> Call:
    (slices, axis, places), dy, dx = _paired(t, t["dx"]), t["dy"], t["dx"]
    zeros = t.zeros(slices)
    return lambda: zeros().index_add_(axis, places, dy).view(dx.shape)


def _slice_grad(t: Torch) -> Call:
    inside, dy, zeros = tuple(map(slice, t["starts"], t["ends"])), t["dy"], t.zeros(t["dx"])

    def backward() -> object:
        made = zeros()
        made[inside].copy_(dy)
        return made

    return backward


def _div_grad(t: Torch) -> Call:
    a, b, div, mul = t["a"], t["b"], t.into("div", "dy", "b", out="da"), t.into("mul", out=t.like("dy"))

    def backward() -> object:
        quotient = div()
        return quotient, mul(quotient, a).sum_to_size(b.shape).div(b).neg()

    return backward


# --- lists of arrays -------------------------------------------------------------------------------------------------


def _all_finite(t: Torch) -> Call:
    isfinite, arrays = t.torch.isfinite, t["arrays"]
    return lambda: all(bool(isfinite(each).all()) for each in arrays)


def _norm(t: Torch, arrays: Any) -> Any:
    """The norm of the norms, which half precision would round."""
    wide = t.torch.float64 if arrays[0].dtype == t.torch.float64 else t.torch.float32
    return t.torch.stack(t.torch._foreach_norm(arrays, dtype=wide)).norm()


def _copies(arrays: Any) -> list[Any]:
    return [each.clone() for each in arrays]


def _adamw(t: Torch) -> Call:
    """The fused step of torch.optim.AdamW, in place, on weights and momentums of its own."""
    only(GIVEN, t.way)
    weights, *momentums = (_copies(t[name]) for name in ("weights", "momentums_1", "momentums_2"))
    step = [t.torch.tensor(float(t["step"])) for _ in weights]
    lists: tuple[Any, ...] = (weights, t["gradients"], *momentums, [], step)
    rates = {"lr": float(t["lr"]), "beta1": t["alpha"], "beta2": t["beta"], "eps": t["epsilon"]}
    optimize = partial(t.torch._fused_adamw_, *lists, **rates, weight_decay=t["weight_decay"])

    def update() -> object:
        optimize(amsgrad=False, maximize=False)
        return weights, *momentums

    return update


def _sgd(t: Torch) -> Call:
    weights = _copies(t["weights"]) if t.is_given else t["weights"]
    add = t.torch._foreach_add_ if t.is_given else t.torch._foreach_add
    return partial(add, weights, t["gradients"], alpha=-float(t["lr"]))


def _clip(t: Torch) -> Call:
    gradients = _copies(t["gradients"]) if t.is_given else t["gradients"]
    mul, most = t.torch._foreach_mul_ if t.is_given else t.torch._foreach_mul, t["max_norm"]
    return lambda: mul(gradients, (most / (_norm(t, gradients) + 1e-6)).clamp(max=1.0)) or gradients


def _pass_through(t: Torch) -> Call:
    if t.is_given:
        return partial(t.torch._foreach_copy_, list(t.results.values()), t["arrays"])
    return partial(_copies, t["arrays"])


# --- layers ----------------------------------------------------------------------------------------------------------


def _with_bias(t: Torch) -> Call:
    return t.into("add", "x", "bias", out=t.like("x"))


def _bias_gelu_grad(approximate: str, t: Torch) -> Call:
    gelu = t.into("aten.gelu_backward.grad_input", "dy", approximate=approximate, grad_input="dx")
    return chained(_with_bias(t), gelu)


def _softmax_dropout_grad(t: Torch) -> Call:
    dropout = partial(t.aten.native_dropout_backward, t["dy"], t["mask"], 1 / (1 - t["ratio"]))
    softmax = t.into("aten._softmax_backward_data.out", grad_input="dx")
    return chained(dropout, lambda gradient: softmax(gradient, t["y"], -1, gradient.dtype))


def _activated(t: Torch) -> Call:
    return t.into("aten.silu.out", "gate", out=t.like("gate"))


def _gated_grad(t: Torch) -> Call:
    """The activation's gradient by dy * up, and dy * the activation, which is computed again."""
    by_up, activate = t.into("mul", "dy", "up", out=t.like("dy")), _activated(t)
    backward, mul = t.into("aten.silu_backward.grad_input", grad_input="dgate"), t.into("mul", "dy", out="dup")
    return lambda: (backward(by_up(), t["gate"]), mul(activate()))


def _rms_norm_grad(t: Torch) -> Call:
    """What autograd makes of rms_norm, which has no kernel of its own for it on the CPU."""
    only(NEW, t.way)
    inputs = t["x"].detach().requires_grad_(), t["scale"].detach().requires_grad_()
    y = t.torch.rms_norm(inputs[0], t["scale"].shape, inputs[1], 1e-5)
    return partial(t.torch.autograd.grad, y, inputs, t["dy"], retain_graph=True)


def _batch_norm(t: Torch) -> Call:
    """torch mixes the running variance with one that is divided by one element less."""
    running = (t["running_mean"].clone(), t["running_var"].clone())
    given = ("x", "scale", "bias", *running, True, 1.0 - t["momentum"], "epsilon")
    out = {"out": "y", "save_mean": "saved_mean", "save_invstd": "saved_inv_std"}
    return t.into("aten.native_batch_norm.out", *given, **out)


ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}  # of torch's gates among those of ONNX


def _recurrent(kind: str, t: Torch) -> Call:
    """A layer of torch with the same weights, with what autograd keeps for its gradient; or what autograd makes of it.

    Of the gradients dx alone has the order that ours has.
    """
    only(NEW, t.way)
    layer = getattr(t.torch.nn, kind)(t["x"].shape[2], t["r"].shape[2])
    bias = t["r"].new_zeros(1, 2 * t["r"].shape[1]) if t["bias"] is None else t["bias"]
    given = {"weight_ih_l0": t["w"][0], "weight_hh_l0": t["r"][0]}
    given |= dict(zip(("bias_ih_l0", "bias_hh_l0"), bias[0].chunk(2), strict=True))
    with t.torch.no_grad():
        for name, value in given.items():
            parts = value.chunk(len(ORDERS[kind]))
            getattr(layer, name).copy_(t.torch.cat([parts[place] for place in ORDERS[kind]]))
    layer, x = layer.to(t["x"].dtype), t["x"].detach().requires_grad_()

    def forward() -> list[Any]:
        y, last = layer(x)
        return [y.unsqueeze(1), *listed(last)]

    if "dy" not in t.values:
        return lambda: [each.detach() for each in forward()]
    inputs, upstream = (x, *layer.parameters()), [t[name] for name in ("dy", "dy_h", "dy_c") if name in t.values]
    backward = partial(t.torch.autograd.grad, forward(), inputs, upstream, retain_graph=True)
    return lambda: backward()[:1]


def _conv_grad(transposed: bool, t: Torch) -> Call:
    """A convolution's gradients, or those of a transposed one."""
    windows = t["strides"] or [1, 1], t["pads"][:2] or [0, 0], t["dilations"] or [1, 1]
    bias = [t["dy"].shape[1]]
    return t.into("aten.convolution_backward", "dy", "x", "w", bias, *windows, transposed, [0, 0], "group", ALL)


def _max_pool_grad(t: Torch) -> Call:
    """Windows of two by two, side by side. torch takes the place of a maximum in its plane."""
    local, given = t["indices"] % math.prod(t["dx"].shape[2:]), ([2, 2], [2, 2], [0, 0], [1, 1], False)
    pool = "aten.max_pool2d_with_indices_backward.grad_input"
    return t.into(pool, "dy", t.like("dx"), *given, local, grad_input="dx")


def _average_pool_grad(t: Torch) -> Call:
    given = ("kernel_shape", "strides", t["pads"][:2], "ceil_mode", "count_include_pad", None)
    return t.into("aten.avg_pool2d_backward.grad_input", "dy", t.like("dx"), *given, grad_input="dx")


def _resize_grad(t: Torch) -> Call:
    """Linear, of images."""
    given = (t["dy"].shape[2:], "dx.shape", False, *t["scales"][2:])
    return t.into("aten.upsample_bilinear2d_backward.grad_input", "dy", *given, grad_input="dx")


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
TORCH: Setups = {
    "softmax": direct("softmax", "x", "axis", out="y"),
    "log_softmax": direct("log_softmax", "x", "axis", out="y"),
    "softmax_grad": direct("aten._softmax_backward_data.out", "dy", "y", "axis", "y.dtype", grad_input="dx"),
    "log_softmax_grad": direct("aten._log_softmax_backward_data.out", "dy", "y", "axis", "y.dtype", out="dx"),
    "softmax_cross_entropy_loss": _loss,
    # One number, for which no memory need be given, of tensors that need no gradient; no_grad would cost 4 µs a call.
    "softmax_cross_entropy_loss_only": lambda t: partial(t.torch.nn.functional.cross_entropy, t["logits"], t["labels"]),
    "softmax_cross_entropy_loss_grad": lambda t: partial(_backward(t, t["dy"], t["log_prob"]), t["log_prob"]),
    "softmax_cross_entropy_loss_and_grad": _loss_and_grad,
    "relu": lambda t: t.into("clamp_min", "x", 0, out="y") if t.is_given else t.into("relu", "x"),
    "sigmoid": direct("sigmoid", "x", out="y"),
    "tanh": direct("tanh", "x", out="y"),
    "quick_gelu": direct("aten.silu.out", "x", out="y"),
    "leaky_relu": direct("aten.leaky_relu.out", "x", 0.01, out="y"),
    "relu_grad": direct("aten.threshold_backward.grad_input", "dy", "x", 0, grad_input="dx"),
    "sigmoid_grad": direct("aten.sigmoid_backward.grad_input", "dy", "y", grad_input="dx"),
    "tanh_grad": direct("aten.tanh_backward.grad_input", "dy", "y", grad_input="dx"),
    "quick_gelu_grad": direct("aten.silu_backward.grad_input", "dy", "x", grad_input="dx"),
    "leaky_relu_grad": direct("aten.leaky_relu_backward.grad_input", "dy", "y", 0.01, True, grad_input="dx"),
    "gather": direct("index_select", "x", "axis", "indices", out="y"),
    "gather_grad": _rows_grad,
    "in_place_accumulator": direct("add", "buffer", "value", out="sum"),
    "scale": direct("mul", "x", "factor", out="y"),
    # Operators of training graphs.
    "reduce_sum_training": direct("sum", "x", "axes", keepdim=True, out="y"),
    "div_grad": _div_grad,
    "zero_gradient": lambda t: t.zeros(t["y"]),
    "accumulate": direct("add", "buffer", "value", out="sum"),
    "gather_elements": lambda t: t.into("gather", "x", "axis", _from_start(t, t["x"]), out="y"),
    "gather_elements_grad": _gather_grad,
    "gather_nd": lambda t: t.into("index_select", *_paired(t, t["x"]), out="y"),
    "gather_nd_grad": _gather_nd_grad,
    "slice_grad": _slice_grad,
    "concat_training": direct("cat", "arrays", "axis", out="y"),
    "split_training": lambda t: t.into(
        "aten.split_with_sizes_copy.out", "x", "split", "axis", out=list(t.results.values())
    ),
    "pass_through": _pass_through,
    "is_all_finite": _all_finite,
    "mixed_precision_scale": direct("_foreach_mul", "arrays", "scale"),
    "adamw_optimizer": _adamw,
    "sgd_optimizer": _sgd,
    "clip_grad_norm": _clip,
    "reduce_all_l2": lambda t: partial(_norm, t, t["arrays"]),
    "gelu": direct("aten.gelu.out", "x", approximate="none", out="y"),
    "gelu_grad": direct("aten.gelu_backward.grad_input", "dy", "x", approximate="none", grad_input="dx"),
    "fast_gelu": direct("aten.gelu.out", "x", approximate="tanh", out="y"),
    "fast_gelu_grad": direct("aten.gelu_backward.grad_input", "dy", "x", approximate="tanh", grad_input="dx"),
    "bias_gelu_grad_dx": partial(_bias_gelu_grad, "none"),
    "bias_fast_gelu_grad_dx": partial(_bias_gelu_grad, "tanh"),
    "gated_linear_unit": lambda t: chained(_activated(t), t.into("mul", "up", out="y")),
    "gated_linear_unit_grad": _gated_grad,
    "dropout": direct("native_dropout", "x", "ratio", True),  # by random numbers of torch's own
    "dropout_grad": lambda t: t.into("aten.native_dropout_backward", "dy", "mask", 1 / (1 - t["ratio"])),
    "fake_quant_grad": lambda t: t.into("where", "mask", "dy", t.torch.zeros((), dtype=t["dy"].dtype), out="dx"),
    "bias_softmax": lambda t: chained(_with_bias(t), t.into("softmax", dim=-1, out="y")),
    "attention": direct(FLASH, "q", "k", "v", 0.0, "causal"),
    "attention_grad": direct(f"{FLASH}_backward", "dy", "q", "k", "v", "y", "lse", 0.0, "causal"),
    "softmax_dropout_grad": _softmax_dropout_grad,
    "softmax_cross_entropy": _soft_loss,
    "softmax_cross_entropy_grad": _soft_loss_grad,
    "sparse_softmax_cross_entropy": _weighted_loss,
    "sparse_softmax_cross_entropy_grad": _weighted_loss_grad,
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
    **{f"{kind.lower()}_{of}": partial(_recurrent, kind) for kind in ORDERS for of in ("training", "grad")},
    "conv_grad": partial(_conv_grad, False),
    "conv_transpose_grad": partial(_conv_grad, True),
    "max_pool_grad": _max_pool_grad,
    "average_pool_grad": _average_pool_grad,
    "resize_grad": _resize_grad,
}
