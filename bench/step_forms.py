"""The functions of opgrad.torch whose steps are measured, and what they are given, by a name for tables."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opgrad.contract import Operator, Shape
from opgrad.ops import graph_operators, operators
from opgrad.ops.reference.attending import LARGEST_HEAD

LOGITS, LINEAR, DIVERGENCE, LOG_PROBABILITY = LOSSES = (
    "cross_entropy", "linear_cross_entropy", "linear_jsd", "linear_log_prob",
)  # fmt: skip
ATTENTION = "scaled_dot_product_attention"

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


# Whether gradients are computed; in causal forms a query sees the keys up to its own place alone.
ATTENTION_FORMS = {"forward": False, "forward, causal": False, "with backward": True, "with backward, causal": True}
ATTENTION_SHAPES: tuple[Shape, ...] = ((4, 12, 512, 64), (1, 32, 2048, 64), (1, 8, 2, 4096, 128))


def takes(name: str, shape: Shape) -> bool:
    """Whether such a function is defined for a shape that no workload has; of losses, a linear layer's alone are."""
    if name in LOSSES:
        return name != LOGITS and len(shape) == 3
    if name != ATTENTION or len(shape) not in (4, 5):
        return False
    heads, of_keys = shape[1], shape[-3]
    return heads % of_keys == 0 and shape[-1] <= LARGEST_HEAD


def functions() -> dict[str, Operator]:
    """The functions as cells name them: what they declare beside the name is that of the operators they call."""
    losses = {name: replace(operators()["softmax_cross_entropy_loss_and_grad"], name=name) for name in LOSSES}
    return {**losses, ATTENTION: replace(graph_operators()["attention"], name=ATTENTION)}
