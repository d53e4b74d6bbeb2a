"""The losses as modules, in the places of torch.nn.CrossEntropyLoss and torch.nn.LinearCrossEntropyLoss."""

import math
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.linear_loss import linear_cross_entropy
from opgrad.torch.loss import cross_entropy


class _Loss(torch.nn.Module):
    """Options that are given once; the classes' weights are a buffer, as in PyTorch."""

    weight: Tensor | None

    def __init__(self, weight: Tensor | None, options: dict[str, Any]):
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Loss):
    """`opgrad.torch.cross_entropy` with its options, which are the keywords of the function."""

    def __init__(self, weight: Tensor | None = None, **options: Any):
        super().__init__(weight, options)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        return cross_entropy(input, target, self.weight, **self.options)


class LinearCrossEntropyLoss(_Loss):
    """A linear layer and its loss: `opgrad.torch.linear_cross_entropy` with its options, the keywords of the function.

    in_features, num_classes, out_features, bias, device, dtype: of the layer, as torch.nn.LinearCrossEntropyLoss has
    them; its parameters are `linear.weight` and `linear.bias`. linear: a layer to share instead, such as the output
    layer of a model.
    """

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
        super().__init__(weight, options)
        if linear is None:
            if in_features is None or num_classes is None:
                raise TypeError("LinearCrossEntropyLoss: expected in_features and num_classes, or linear")
            outputs = math.prod(out_features, start=num_classes)
            linear = torch.nn.Linear(in_features, outputs, bias, device=device, dtype=dtype)
        self.linear, self.out_features = linear, tuple(out_features)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        w: Tensor = self.linear.weight
        b: Tensor | None = self.linear.bias
        if self.out_features:
            w = w.view(-1, *self.out_features, w.shape[-1])
            b = None if b is None else b.view(-1, *self.out_features)
        return linear_cross_entropy(input, w, target, linear_bias=b, weight=self.weight, **self.options)
