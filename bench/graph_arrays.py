"""PyTorch on the arithmetic of training graphs, on elements and slices, and on lists of arrays."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.measure import GIVEN, Call
from bench.torch_tensors import Setups, Torch, direct

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
