"""The losses as modules, in the places of torch.nn.CrossEntropyLoss and torch.nn.LinearCrossEntropyLoss."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.losses.linear import linear_cross_entropy
from opgrad.torch.losses.logits import cross_entropy
from opgrad.torch.losses.options import read_options


class _Options:
    """Options of a loss as attributes of a module, which may be changed as those of PyTorch's modules may."""

    names: tuple[str, ...]

    def _take(self, function: Callable[..., Any], options: Mapping[str, Any], taken: tuple[str, ...] = ()) -> None:
        """Set the keywords of the function, but for what is `taken`. Raises TypeError for others, ValueError."""
        parameters = inspect.signature(function).parameters.values()
        known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in taken}
        kind = type(self).__name__
        for name in options:
            if name not in known:
                raise TypeError(f"{kind}: {name} is no option, expected one of {', '.join(known)}")
        self.names = tuple(known)
        for name, default in known.items():
            setattr(self, name, options.get(name, default))
        this: Any = self
        bent = (this.label_smoothing, this.lse_square_scale, this.softcap, this.temperature, this.num_items)
        read_options(kind, this.reduction, this.ignore_index, *bent)

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}


class CrossEntropyLoss(_Options, torch.nn.CrossEntropyLoss):
    """`opgrad.torch.cross_entropy` as a module: arguments of torch.nn.CrossEntropyLoss, then the function's keywords.

    All of them are attributes. Raises TypeError for other names, ValueError for values out of range.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self._take(cross_entropy, options)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss, or CrossEntropyOutput where other results are asked for."""
        return cross_entropy(input, target, self.weight, **self._given())

    def _given(self) -> dict[str, Any]:
        first = ("ignore_index", "reduction", "label_smoothing")
        return {name: getattr(self, name) for name in first} | super()._given()

    def extra_repr(self) -> str:
        return _written(self._given())


class LinearCrossEntropyLoss(_Options, torch.nn.Module):
    """A linear layer and its loss: `opgrad.torch.linear_cross_entropy` with its options, the keywords of the function.

    in_features, num_classes, out_features, bias, device, dtype: of the layer, as torch.nn.LinearCrossEntropyLoss has
    them; its parameters are `linear.weight` and `linear.bias`. linear: a layer to share instead, such as the output
    layer of a model. The options are attributes. Raises TypeError for options of other names, ValueError for values
    out of range.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int | None = None,
        num_classes: int | None = None,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        linear: torch.nn.Linear | None = None,
        **options: Any,
    ):
        super().__init__()
        self._take(linear_cross_entropy, options, ("linear_bias", "weight"))
        self.out_features = tuple(out_features)
        each = math.prod(self.out_features)
        if linear is None:
            if in_features is None or num_classes is None:
                raise TypeError("LinearCrossEntropyLoss: expected in_features and num_classes, or linear")
            linear = torch.nn.Linear(in_features, num_classes * each, bias, device=device, dtype=dtype)
        self.num_classes = linear.out_features // each
        if weight is not None and weight.shape != (self.num_classes,):
            shape, expected = tuple(weight.shape), (self.num_classes,)
            raise ValueError(f"LinearCrossEntropyLoss: weight has shape {shape}, expected {expected}, the classes")
        self.register_buffer("weight", weight)
        self.linear = linear

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss, or CrossEntropyOutput where other results are asked for."""
        w: Tensor = self.linear.weight
        b: Tensor | None = self.linear.bias
        if self.out_features:
            w = w.view(-1, *self.out_features, w.shape[-1])
            b = None if b is None else b.view(-1, *self.out_features)
        return linear_cross_entropy(input, w, target, linear_bias=b, weight=self.weight, **self._given())

    def extra_repr(self) -> str:
        named = {"num_classes": self.num_classes, "out_features": self.out_features}
        return _written({**named, **self._given()})


def _written(options: Mapping[str, Any]) -> str:
    """Options as they are written in a call, without those that are off."""
    off = (None, False, 0, ())  # the label 0 is none of them
    shown = {name: value for name, value in options.items() if name == "ignore_index" or value not in off}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())
