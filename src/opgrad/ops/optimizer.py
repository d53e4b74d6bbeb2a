"""Optimizer steps over lists of arrays: the operators of optimizer models."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, Tensor, one_number, operator, several
from opgrad.contract.attributes import FLOATS, Array, Attributes, Shape, Shapes


def _of(name: str) -> Any:
    """The shape of the array of the same number in a list."""

    def shape(shapes: Shapes, attributes: Attributes, index: int) -> Shape:
        return shapes[f"{name}[{index}]"]

    return shape


def _list(model: str, dtypes: tuple[str, ...] = FLOATS) -> Tensor:
    """Arrays of the shapes of another list."""
    return Tensor(dtypes, _of(model), f"the shape in {model}", several=True)


def _new(model: str) -> Tensor:
    """Results of the shapes and dtypes of a list."""
    return Tensor(FLOATS, _of(model), f"the shape in {model}", dtype_of=f"{model}[]", several=True)


Rate = Annotated[Array, one_number("lr", ("float32",))]
Step = Annotated[Array, one_number("step", ("int64",))]
Weights = Annotated[Sequence[Array], Tensor(FLOATS, several=True)]
LikeWeights = Annotated[Sequence[Array], _list("weights")]


@operator(
    support=IN_GRAPHS,
    results={"new_weights": _new("weights")},
    in_place={"new_weights": ("weights",)},
    general=several(lambda op, given, count: count),
)
def sgd_optimizer(lr: Rate, weights: Weights, gradients: LikeWeights, *, out: Any = None) -> list[Array]:
    """One step of gradient descent.

    lr: the learning rate, float32 of shape () or (1,).
    weights: a list of arrays of any shapes; float32, float64, float16 or bfloat16.
    gradients: a list of arrays of the same shapes; any of the four dtypes.
    out: where to write, a list of arrays; may be weights.

    Returns the new weights as a list.

    Formula: w = weights - lr * gradients. Source: com.microsoft SGDOptimizerV2.

    Example:
    >>> weights, gradients = np.array([1.0, 2.0], np.float32), np.array([0.5, -1.0], np.float32)
    >>> opgrad.sgd_optimizer(np.float32(0.1), [weights], [gradients])
    [array([0.95, 2.1 ], dtype=float32)]
    """
    return [w - lr.reshape(()) * g for w, g in zip(weights, gradients, strict=True)]


@operator(
    "m = alpha * m + (1 - alpha) * g; v = beta * v + (1 - beta) * g * g; w -= rate * m / (sqrt(v) + epsilon), decayed",
    support=IN_GRAPHS,
    results={
        "new_weights": _new("weights"),
        "new_momentums_1": _new("momentums_1"),
        "new_momentums_2": _new("momentums_2"),
    },
    in_place={"new_weights": ("weights",), "new_momentums_1": ("momentums_1",), "new_momentums_2": ("momentums_2",)},
    general=several(lambda op, given, count: count),
)
def adamw_optimizer(
    lr: Rate, step: Step, weights: Weights, gradients: LikeWeights, momentums_1: LikeWeights,
    momentums_2: LikeWeights, alpha: float = 0.9, beta: float = 0.999, epsilon: float = 1e-8,
    weight_decay: float = 0.01, adam_mode: int = 0, correct_bias: bool = True, *, out: Any = None,
) -> tuple[list[Array], list[Array], list[Array]]:  # fmt: skip
    """One step of AdamW.

    lr: the learning rate, float32 of shape () or (1,).
    step: the number of this step, from 1; int64 of shape () or (1,).
    weights: a list of arrays of any shapes; float32, float64, float16 or bfloat16.
    gradients, momentums_1, momentums_2: lists of arrays of the same shapes, the momentums 0 before the first step;
        any of the four dtypes.
    alpha, beta: the decay rates of the two momentums. epsilon: what keeps the denominator from 0.
    weight_decay: the decay of the weights, times lr.
    adam_mode: 0 for PyTorch's order of operations, 1 for that of Hugging Face.
    correct_bias: whether the momentums' start at 0 is made up for; adam_mode 0 always does.
    out: where to write, a tuple of three lists; may be (weights, momentums_1, momentums_2).

    Returns the new weights, momentums_1 and momentums_2, three lists.

    Formula: m = alpha * m + (1 - alpha) * g; v = beta * v + (1 - beta) * g * g; c1 = 1 - alpha**step,
    c2 = 1 - beta**step; mode 0: w = w * (1 - lr * weight_decay) - lr / c1 * m / (sqrt(v / c2) + epsilon); mode 1:
    w = (w - lr * sqrt(c2) / c1 * m / (sqrt(v) + epsilon)) * (1 - lr * weight_decay).
    Source: com.microsoft AdamWOptimizer; Decoupled Weight Decay Regularization, arXiv 1711.05101.

    Example:
    >>> weights, gradients = np.array([1.0, 2.0], np.float32), np.array([2.0, -1.0], np.float32)
    >>> zeros = np.zeros(2, np.float32)
    >>> opgrad.adamw_optimizer(np.float32(0.1), np.int64(1), [weights], [gradients], [zeros], [zeros])
    ([array([0.899, 2.098], dtype=float32)],
     [array([ 0.2, -0.1], dtype=float32)],
     [array([0.004, 0.001], dtype=float32)])
    """
    rate, count = float(lr.reshape(())), int(step.reshape(()))
    c1, c2 = (1 - alpha**count, 1 - beta**count) if correct_bias else (1.0, 1.0)
    decay = 1 - rate * weight_decay
    new: tuple[list[Array], list[Array], list[Array]] = [], [], []
    for w, g, m, v in zip(weights, gradients, momentums_1, momentums_2, strict=True):
        m, v = alpha * m + (1 - alpha) * g, beta * v + (1 - beta) * g * g
        if adam_mode == 0:
            w = w * decay - rate / c1 * m / (np.sqrt(v / c2) + epsilon)
        else:
            w = (w - rate * np.sqrt(c2) / c1 * m / (np.sqrt(v) + epsilon)) * decay
        for collected, array in zip(new, (w, m, v), strict=True):
            collected.append(array)
    return new


@operator(
    support=IN_GRAPHS,
    results={"clipped": _new("gradients")},
    in_place={"clipped": ("gradients",)},
    general=several(lambda op, given, count: count),
)
def clip_grad_norm(gradients: Weights, max_norm: float = 1.0, *, out: Any = None) -> list[Array]:
    """Gradients scaled down so that their norm, taken over all of them together, is at most max_norm.

    gradients: a list of arrays of any shapes; float32, float64, float16 or bfloat16.
    max_norm: the largest norm that they may have.
    out: where to write, a list of arrays; may be gradients.

    Returns a list of arrays; NaN throughout if a gradient holds one. The squares are summed in float64.

    Formula: g * min(1, max_norm / (norm + 1e-6)). Source: com.microsoft InplaceClipGradNorm.

    Example:
    >>> opgrad.clip_grad_norm([np.array([3.0], np.float32), np.array([0.0, 4.0], np.float32)], max_norm=1.0)
    [array([0.6], dtype=float32), array([0. , 0.8], dtype=float32)]
    """
    norm = np.sqrt(np.sum([np.sum(np.square(g)) for g in gradients]))
    factor = np.minimum(1.0, max_norm / (norm + 1e-6))
    return [g * factor for g in gradients]
