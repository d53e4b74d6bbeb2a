"""Formulas for torch.utils.flop_counter: the matrix products of the operators of linear layers.

Importing that module takes 0.3 seconds. So the formulas are registered only if it is imported already, also with
counters that are active.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from opgrad.call.libraries import torch_private

# The products of each operator; the gradients compute the logits again.
PRODUCTS = {
    "layer_statistics": 1,
    "layer_statistics_grad": 3,
}


def count_flops() -> None:
    """Register the formulas if torch.utils.flop_counter is imported."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    registries = [
        getattr(getattr(mode, "counter", None), "flop_registry", None) for mode in torch_private.active_modes()
    ]
    for registry in (getattr(counting, "flop_registry", None), *registries):
        if registry is not None:
            for name, products in PRODUCTS.items():
                registry.setdefault(getattr(torch.ops.opgrad, name), _Formula(products))


class _Formula:
    """The floating-point operations of so many products of x [N, H] with w [C, H]."""

    def __init__(self, products: int):
        self.products = products

    def __call__(self, x: Any, w: Any, *others: Any, **named: Any) -> int:
        (rows, features), classes = _shape(x), _shape(w)[0]
        return int(2 * self.products * rows * features * classes)


def _shape(value: Any) -> Sequence[int]:
    return value.shape if isinstance(value, torch.Tensor) else value
