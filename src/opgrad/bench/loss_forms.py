"""The losses that are measured, and what they are given, by a name for tables."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opgrad.contract import Operator, Shape, operators

LOGITS, LINEAR = NAMES = ("cross_entropy", "linear_cross_entropy")

# `weight`, `ignored` and `probabilities` stand for tensors that the case makes, `entropy` for its share of the loss.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": True},
    "half ignored": {"ignored": True},
    "z-loss": {"lse_square_scale": 1e-4},
    "softcap": {"softcap": 30.0},
    "temperature": {"temperature": 1.5},
    "shift": {"shift": 1},
    "num_items": {"num_items": 500},
    "probabilities": {"probabilities": True},
    "entropy": {"entropy": 0.01},
    "all": {
        "label_smoothing": 0.1, "weight": True, "ignored": True, "lse_square_scale": 1e-4, "softcap": 30.0,
        "temperature": 1.5, "shift": 1, "num_items": 500, "entropy": 0.01,
    },
    "of pixels": {},
    "of pixels, half ignored": {"ignored": True},
    "of pixels, weight": {"weight": True},
    "of patches": {},
}  # fmt: skip


# Classes along axis 1, with planes behind them: those forms have shapes of their own.
OF_PIXELS = (16, 21, 128, 128)
SHAPES: Mapping[str, Shape] = {
    "of pixels": OF_PIXELS,
    "of pixels, half ignored": OF_PIXELS,
    "of pixels, weight": OF_PIXELS,
    "of patches": (8, 1000, 14, 14),
}


def functions() -> dict[str, Operator]:
    """The losses as the benchmark's cells name them: what they declare beside the name is that of the plain loss."""
    return {name: replace(operators()["softmax_cross_entropy_loss_and_grad"], name=name) for name in NAMES}
