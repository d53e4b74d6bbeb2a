"""Losses: blocks that compare what a model computes with what it should have computed.

Each is called with the names of both; the second one becomes a new input of the graph unless it is there already.
Scores in float16 and bfloat16 are compared in float32, which is the type of the loss then.
"""

from typing import Any

import numpy as np
from onnx import TensorProto

from opgrad.training.make.blocks.block import Block
from opgrad.training.make.blocks.cross_entropy import CrossEntropyLoss, NLLLoss
from opgrad.training.make.blocks.operators import append, array, float_type, number
from opgrad.training.make.blocks.targets import REDUCTIONS, chosen, in_float32, positive, reduced, target_like, weights

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class _Regression(Block):
    """A loss of the difference between each number and its target.

    reduction: "mean", "sum", or "none" for a loss of each element, which a block of one's own makes one number.
    """

    def __init__(self, reduction: str = "mean"):
        self._reduction = chosen("reduction", reduction, REDUCTIONS)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Append the loss. Raises ValueError unless both have float elements."""
        scores, target = in_float32(*target_like(loss_input_name, target_name))
        return reduced(self._each(append("Sub", [scores, target])), self._reduction)

    def _each(self, difference: str) -> str:
        raise NotImplementedError


class MSELoss(_Regression):
    """The mean of the squares of the differences.

    reduction: "mean", "sum", or "none" for a loss of each element, which a block of one's own makes one number.
    """

    def _each(self, difference: str) -> str:
        exponent = number("pow_exponent", 2.0, float_type(difference), [1])
        return append("Pow", [difference, exponent])


class L1Loss(_Regression):
    """The mean of the absolute differences.

    reduction: "mean", "sum", or "none" for a loss of each element, which a block of one's own makes one number.
    """

    def _each(self, difference: str) -> str:
        return append("Abs", [difference])


class HuberLoss(_Regression):
    """The mean of d * d / 2 where abs(d) <= delta, else delta * (abs(d) - delta / 2), d being the difference.

    reduction: as for MSELoss. delta: above 0.
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        super().__init__(reduction)
        self._delta = positive("delta", delta)

    def _each(self, difference: str) -> str:
        kind, size = float_type(difference), append("Abs", [difference])
        delta = number("huber.delta", self._delta, kind)
        inner = append("Min", [size, delta])
        square = append("Mul", [append("Mul", [inner, inner]), number("huber.half", 0.5, kind)])
        return append("Add", [square, append("Mul", [append("Sub", [size, inner]), delta])])


class SmoothL1Loss(HuberLoss):
    """The Huber loss divided by its delta, which is called beta here; of beta = 0 the L1 loss.

    reduction: as for MSELoss. beta: 0 or above.
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        super().__init__(reduction, beta or 1.0)
        self._beta = beta

    def _each(self, difference: str) -> str:
        if not self._beta:
            return append("Abs", [difference])
        return append("Div", [super()._each(difference), number("smooth_l1.beta", self._beta, float_type(difference))])


class BCEWithLogitsLoss(Block):
    """The mean of -(pos_weight * t * log(s) + (1 - t) * log(1 - s)) * weight, s being sigmoid(x) of the scores x.

    It is computed as (1 - t) * x + (1 + (pos_weight - 1) * t) * log(1 + exp(-x)), which no score makes infinite.

    weight: of each element, an array that is broadcast to the scores.
    reduction: "mean", "sum", or "none".
    pos_weight: of the elements whose target is 1, an array that is broadcast to the scores.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None):
        self._weight = weights("weight", weight)
        self._pos_weight = weights("pos_weight", pos_weight)
        self._reduction = chosen("reduction", reduction, REDUCTIONS)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Append the loss. Raises ValueError unless both have float elements."""
        scores, target = in_float32(*target_like(loss_input_name, target_name))
        kind = float_type(scores)
        one = number("bceloss.one", 1.0, kind)
        linear = append("Mul", [append("Sub", [one, target]), scores])
        curve = _softplus(append("Neg", [scores]), kind)
        if self._pos_weight is not None:
            more = array("bceloss.pos_weight", self._pos_weight - 1, kind)
            factor = append("Add", [append("Mul", [target, more]), one])
            curve = append("Mul", [curve, factor])
        loss = append("Add", [linear, curve])
        if self._weight is not None:
            loss = append("Mul", [loss, array("bceloss.weight", self._weight, kind)])
        return reduced(loss, self._reduction)


LINEAR_FROM = 36.0  # where log(1 + exp(x)) is x in float64


def _softplus(x: str, kind: int) -> str:
    """log(1 + exp(x)); onnxruntime has no Softplus of float64, and its Sigmoid is 0 from -37 on."""
    if kind != TensorProto.DOUBLE:
        return append("Softplus", [x])
    bound, one = number("softplus.bound", LINEAR_FROM, kind), number("softplus.one", 1.0, kind)
    exponential = append("Exp", [append("Min", [x, bound])])
    beyond = append("Relu", [append("Sub", [x, bound])])
    return append("Add", [append("Log", [append("Add", [exponential, one])]), beyond])


class KLDivLoss(Block):
    """The Kullback-Leibler divergence, t * (log(t) - x) summed or averaged, of log-probabilities x from targets t.

    reduction: "mean" over all elements, "batchmean": the sum divided by the number of rows, "sum", or "none".
    log_target: whether the targets are logarithms, too.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        self._reduction = chosen("reduction", reduction, (*REDUCTIONS, "batchmean"))
        self._log_target = log_target

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Append the loss. Raises ValueError unless both have float elements."""
        scores, target = in_float32(*target_like(loss_input_name, target_name))
        if self._log_target:
            logarithm, target = target, append("Exp", [target])
        else:
            smallest = number("kldiv.smallest", float(np.finfo(np.float32).tiny), float_type(target))
            logarithm = append("Log", [append("Max", [target, smallest])])  # 0 * log(0) is 0
        loss = append("Mul", [target, append("Sub", [logarithm, scores])])
        if self._reduction != "batchmean":
            return reduced(loss, self._reduction)
        return append("Div", [reduced(loss, "sum"), _rows(scores)])


def _rows(name: str) -> str:
    """The size of a value's first axis, as a float."""
    index = array("kldiv.first", 0, TensorProto.INT64)
    return append("Cast", [append("Gather", [append("Shape", [name]), index])], to=float_type(name))
