"""PyTorch on the operators of training graphs: for each that it has, or that a few of its calls make up, the call."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import opgrad
from opgrad.bench.graph_case import GraphCase

Call = Callable[[], object]
ML_DTYPE = "bfloat16"  # which NumPy and torch know from each other by its bits alone


class Tensors:
    """The case's arrays as tensors in the same memory, by name; other arguments as they are."""

    def __init__(self, case: GraphCase):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten = self.torch.ops.aten
        self.case = case
        self.values = {name: self._converted(value) for name, value in case.values.items()}
        self.results = {name: self._converted(value) for name, value in case.results.items()}

    def _converted(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._converted(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.name == ML_DTYPE:
            return self.torch.from_numpy(value.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(value)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def calls(case: GraphCase, peers: Sequence[str]) -> dict[str, Call]:
    """The call of torch, if it is among the peers and has the operator."""
    if "torch" not in peers or case.op.name not in TORCH:
        return {}
    return {"torch": TORCH[case.op.name](Tensors(case))}


def _all_finite(t: Tensors) -> Call:
    isfinite, arrays = t.torch.isfinite, t["arrays"]
    return lambda: all(bool(isfinite(each).all()) for each in arrays)


def _adamw(t: Tensors) -> Call:
    """The fused step of torch.optim.AdamW, in place."""
    step = [t.torch.tensor(float(t["step"])) for _ in t["weights"]]
    lists: tuple[Any, ...] = (t["weights"], t["gradients"], t["momentums_1"], t["momentums_2"], [], step)
    rates = {"lr": float(t["lr"]), "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    return partial(t.torch._fused_adamw_, *lists, **rates, amsgrad=False, maximize=False)


def _sgd(t: Tensors) -> Call:
    return partial(t.torch._foreach_add, t["weights"], t["gradients"], alpha=-float(t["lr"]))


def _clip(t: Tensors) -> Call:
    def clip() -> object:
        norm = t.torch.stack(t.torch._foreach_norm(t["gradients"])).norm()
        return t.torch._foreach_mul(t["gradients"], (1.0 / (norm + 1e-6)).clamp(max=1.0))

    return clip


TORCH: Mapping[str, Callable[[Tensors], Call]] = {
    "concat_training": lambda t: partial(t.torch.cat, t["arrays"], t["axis"], out=t.results["y"]),
    "split_training": lambda t: (
        lambda: [piece.contiguous() for piece in t.torch.split(t["x"], list(t["split"]), t["axis"])]
    ),
    "pass_through": lambda t: lambda: [each.clone() for each in t["arrays"]],
    "is_all_finite": _all_finite,
    "mixed_precision_scale": lambda t: partial(t.torch._foreach_mul, t["arrays"], t["scale"]),
    "adamw_optimizer": _adamw,
    "sgd_optimizer": _sgd,
    "clip_grad_norm": _clip,
    "reduce_all_l2": lambda t: lambda: t.torch.stack(t.torch._foreach_norm(t["arrays"])).norm(),
}
