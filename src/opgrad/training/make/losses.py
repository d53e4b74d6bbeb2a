"""Losses: blocks that compare what a model computes with what it should have computed.

Each is called with the names of both; the second one becomes a new input of the graph unless it is there already.
Scores in float16 and bfloat16 are compared in float32, which is the type of the loss then.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.messages import comparable, opset_of
from opgrad.training.make.blocks import (
    REDUCTIONS,
    Block,
    Sizes,
    append,
    array,
    chosen,
    current,
    float_type,
    in_float32,
    number,
    positive,
    reduced,
    scores_type,
    target_like,
    type_name,
    weights,
)
from opgrad.training.make.forms import least_divisor

LABELS = (TensorProto.INT64, TensorProto.INT32)
LAST_AXIS_UP_TO = 3  # up to this rank the classes lie along the last axis by default


class _Classes(Block):
    """A loss of scores of classes; its arguments are those of `CrossEntropyLoss`."""

    _OPERATOR = ""

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        class_axis: int | None = None,
    ):
        self._weight = weights("weight", weight)
        if self._weight is not None and self._weight.ndim != 1:
            raise ArgumentError("weight", f"has shape {self._weight.shape}, expected one number for each class")
        self._reduction = chosen("reduction", reduction, REDUCTIONS)
        self._ignore_index, self._class_axis = ignore_index, class_axis

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Append the loss. Raises ValueError unless the scores are floats and the labels integers that fit them."""
        accessor = current()
        scores_type(scores_input_name)
        weight = accessor.fresh("celoss.weight")
        sizes = accessor.sizes(scores_input_name)
        axis = self._axis(scores_input_name, sizes, labels_name)
        if not accessor.has_value(labels_name):
            accessor.input(labels_name, TensorProto.INT64, _without(sizes, axis))
        self._check(scores_input_name, labels_name, sizes, axis)
        (scores,) = in_float32(scores_input_name)
        labels, shape = labels_name, None
        if axis != 1 and sizes is not None:
            last = len(sizes) - 1  # a matrix with a row of classes for each label, and the labels as a vector
            if axis != last:
                order = [place for place in range(len(sizes)) if place != axis] + [axis]
                scores = append("Transpose", [scores], perm=order)
            flat, shape = array("celoss.flat", [-1], TensorProto.INT64), labels_name
            scores, labels = append("Flatten", [scores], axis=last), append("Reshape", [labels, flat])
        inputs = [scores, labels]
        if self._weight is not None:
            kind = accessor.element_type(scores) or TensorProto.FLOAT
            inputs.append(accessor.constant(weight, kind, self._weight.shape, self._weight.tolist()))
        loss = self._loss(inputs)
        return append("Reshape", [loss, append("Shape", [shape])]) if shape and self._reduction == "none" else loss

    def _loss(self, inputs: Sequence[str]) -> str:
        return _node(self._OPERATOR, inputs, [current().fresh("loss")], self._reduction, self._ignore_index)

    def _axis(self, scores: str, sizes: Sizes | None, labels: str) -> int:
        """The axis of the classes, counted from the first."""
        if sizes is None:
            return 1
        rank = len(sizes)
        if rank < 2:
            raise ValueError(f"{scores!r} has {rank} axes, expected rows of a score for each class")
        if self._class_axis is not None:
            if not -rank <= self._class_axis < rank or self._class_axis % rank == 0:
                raise ArgumentError("class_axis", f"is {self._class_axis}, expected 1 to {rank - 1}, or from the end")
            return self._class_axis % rank
        given = current().sizes(labels) if current().has_value(labels) else None
        fitting = [
            axis for axis in (rank - 1, 1) if given is not None and list(given) == list(_without(sizes, axis) or ())
        ]
        return fitting[0] if fitting else rank - 1 if rank <= LAST_AXIS_UP_TO else 1

    def _check(self, scores: str, labels: str, sizes: Sizes | None, axis: int) -> None:
        """Raise ValueError unless labels and weights fit the scores."""
        accessor = current()
        kind, given = accessor.element_type(labels), accessor.sizes(labels)
        if kind is not None and kind not in LABELS:
            raise ArgumentError(
                "loss_input_names",
                f"says which outputs the loss takes: the labels {labels!r} have elements of type {type_name(kind)}, "
                "expected INT64 or INT32",
            )
        if sizes is None:
            return
        if given is not None and len(given) != len(sizes) - 1:
            raise ValueError(
                f"the labels {labels!r} have {len(given)} axes, expected {len(sizes) - 1}: those of "
                f"{scores!r} without that of the classes"
            )
        classes = sizes[axis]
        if self._weight is not None and isinstance(classes, int) and classes != len(self._weight):
            raise ArgumentError("weight", f"has {len(self._weight)} numbers, expected {classes}, one for each class")


class CrossEntropyLoss(_Classes):
    """The mean of -log(softmax(scores)[label]), each label being the number of a class.

    weight: of each class, an array; None: 1.
    reduction: "mean", divided by the weights of the labels; "sum"; or "none" for a loss of each label.
    ignore_index: a label that does not count.
    label_smoothing: from 0 to 1, how much of each label is spread over all classes (Szegedy et al., 2016).
    class_axis: the axis of the scores along which the classes are; None: 1 where they have four axes or more, as images
        have, else the last one, as texts have. If the graph has the labels already, their shape tells.
    """

    _OPERATOR = "SoftmaxCrossEntropyLoss"

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        class_axis: int | None = None,
    ):
        super().__init__(weight, reduction, ignore_index, class_axis)
        if not 0 <= label_smoothing <= 1:
            raise ArgumentError("label_smoothing", f"is {label_smoothing!r}, expected 0 to 1")
        self._smoothing = label_smoothing

    def _loss(self, inputs: Sequence[str]) -> str:
        names = [current().fresh("loss"), current().fresh("log_prob")]
        loss = _node(self._OPERATOR, inputs, names, self._reduction, self._ignore_index)
        return self._smoothed(loss, names[1], inputs) if self._smoothing else loss

    def _smoothed(self, loss: str, log_prob: str, inputs: Sequence[str]) -> str:
        """(1 - s) * loss + s * the mean over all classes of what the loss would be with that label."""
        kind = current().element_type(inputs[0]) or TensorProto.FLOAT
        share = number("celoss.smoothing", self._smoothing, kind)
        # For each row the negative mean of its log-probabilities times the weights of the classes, along axis 1.
        if self._weight is not None:
            sizes = current().sizes(log_prob)
            shape = (-1, *(1 for _ in range(len(sizes) - 2 if sizes else 0)))
            weight = array("celoss.class_weight", self._weight.reshape(shape), kind)
            log_prob = append("Mul", [log_prob, weight])
        if opset_of(current().model) < 18:
            mean = append("ReduceMean", [log_prob], axes=[1], keepdims=0)
        else:
            axes = array("celoss.axis", [1], TensorProto.INT64)
            mean = append("ReduceMean", [log_prob, axes], keepdims=0)
        spread = append("Neg", [mean])
        # Reduced as the loss is; rows with ignored labels do not count.
        counts = self._counts(inputs, kind)
        if self._ignore_index is not None:
            spread = append("Mul", [spread, self._counted(inputs[1], kind)])
        if self._reduction != "mean" or counts is None:
            spread = reduced(spread, self._reduction)
        else:
            total, least = reduced(counts, "sum"), number("celoss.least", least_divisor(kind), kind)
            spread = reduced(spread, "sum")
            if self._weight is not None and not self._weight.all():  # rows of weight 0 have a spread
                some = append("Cast", [append("Greater", [total, number("celoss.none", 0.0, kind)])], to=kind)
                spread = append("Mul", [spread, some])
            spread = append("Div", [spread, append("Max", [total, least])])
        sharp = append("Mul", [loss, number("celoss.sharpness", 1 - self._smoothing, kind)])
        return append("Add", [sharp, append("Mul", [spread, share])])

    def _counts(self, inputs: Sequence[str], kind: int) -> str | None:
        """The weight of each row in a mean; None if all weights are 1."""
        counted = None if self._ignore_index is None else self._counted(inputs[1], kind)
        if len(inputs) < 3:
            return counted
        if counted is None:
            return append("Gather", [inputs[2], inputs[1]])
        integer = current().element_type(inputs[1]) or TensorProto.INT64
        known = append("Mul", [inputs[1], append("Cast", [counted], to=integer)])
        return append("Mul", [append("Gather", [inputs[2], known]), counted])

    def _counted(self, labels: str, kind: int) -> str:
        """1 for each label that counts, and 0 for each ignored label."""
        given, label = current().element_type(labels) or TensorProto.INT64, int(self._ignore_index or 0)
        integer = comparable(given, label)
        labels = labels if integer == given else append("Cast", [labels], to=integer)
        ignored = array("celoss.ignored", label, integer)
        return append("Cast", [append("Not", [append("Equal", [labels, ignored])])], to=kind)


class NLLLoss(_Classes):
    """The mean of -log_prob[label], each label being the number of a class, of a model that gives log-probabilities.

    weight, reduction, ignore_index, class_axis: as for CrossEntropyLoss.
    """

    _OPERATOR = "NegativeLogLikelihoodLoss"


def _node(op: str, inputs: Sequence[str], outputs: Sequence[str], reduction: str, ignore_index: int | None) -> str:
    """Append a loss of ai.onnx, and return its first output."""
    accessor = current()
    node = helper.make_node(op, inputs, outputs, accessor.fresh(op), reduction=reduction, ignore_index=ignore_index)
    accessor.model.graph.node.append(node)
    return outputs[0]


def _without(sizes: Sizes | None, axis: int) -> Sizes | None:
    return None if sizes is None else [size for place, size in enumerate(sizes) if place != axis]


class _Regression(Block):
    """A loss of the difference between each number and its target; reduction: as for `MSELoss`."""

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
        total, index = reduced(loss, "sum"), array("kldiv.first", 0, TensorProto.INT64)
        rows = append("Gather", [append("Shape", [scores]), index])
        return append("Div", [total, append("Cast", [rows], to=float_type(scores))])
