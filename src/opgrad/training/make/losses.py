"""Losses: blocks that compare what a model computes with what it should have computed.

Each is called with the names of both; the second one becomes a new input of the graph unless it is there already.
Scores in float16 and bfloat16 are compared in float32, which is the type of the loss then.
"""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, require
from opgrad.onnx.graph.formulas import Value, widened
from opgrad.onnx.graph.messages import FLOATS, HALVES
from opgrad.training.make.blocks import (
    REDUCTIONS,
    Block,
    Formulas,
    Sizes,
    chosen,
    current,
    positive,
    type_name,
    weights,
)
from opgrad.training.make.checks import near
from opgrad.training.make.forms import least_divisor, weights_of

LABELS = (TensorProto.INT64, TensorProto.INT32)
LAST_AXIS_UP_TO = 3  # up to this rank the classes lie along the last axis by default


def scores_type(name: str) -> int:
    """The element type of a value. Raises LookupError if there is no such value, ValueError if it is no float type."""
    accessor = current()
    if not accessor.has_value(name):
        values = [name for node in accessor.model.graph.node for name in node.output]
        raise LookupError(f"the graph has no value {name!r}{near(name, values)}")
    dtype = accessor.element_type(name)
    if dtype is None:
        raise ValueError(f"nothing tells the type of {name!r}, expected it in the graph's value_info")
    if dtype not in FLOATS:
        raise ValueError(f"{name!r} has elements of type {type_name(dtype)}, expected a float type")
    return dtype


def compared(scores: str, target: str) -> tuple[Value, Value]:
    """Scores and their target, in float32 where they are halves; a target that is not there becomes an input."""
    accessor, kind = current(), scores_type(scores)
    wide = TensorProto.FLOAT if kind in HALVES else kind
    if not accessor.has_value(target):
        accessor.input(target, wide, accessor.sizes(scores))
    elif (found := accessor.element_type(target)) not in (None, kind, wide):
        raise ValueError(
            f"{target!r} has elements of type {type_name(found)}, expected {type_name(kind)}, that of {scores!r}"
        )
    body = Formulas()
    return widened(body.value(scores)), widened(body.value(target))


def reduced(loss: Value, reduction: str) -> Value:
    """The mean or the sum of all elements, one number without axes; or the elements, for "none"."""
    if reduction == "none":
        return loss
    return loss.apply({"mean": "ReduceMean", "sum": "ReduceSum"}[reduction], keepdims=0)


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
        body = Formulas()
        scores, given = widened(body.value(scores_input_name)), body.value(labels_name)
        labels, weights = given, None
        if axis != 1 and sizes is not None:
            last = len(sizes) - 1  # a matrix with a row of classes for each label, and the labels as a vector
            if axis != last:
                scores = scores.transpose(*(index for index in range(len(sizes)) if index != axis), axis)
            scores, labels = scores.flatten(last), labels.reshape([-1])
        if self._weight is not None:
            dtype = scores.element_type or TensorProto.FLOAT
            weights = Value(body, accessor.constant(weight, dtype, self._weight.shape, self._weight.tolist()), dtype)
        loss = self._loss(scores, labels, weights)
        is_flat = labels is not given and self._reduction == "none"
        return (loss.reshape(given.apply("Shape")) if is_flat else loss).name

    def _loss(self, scores: Value, labels: Value, weights: Value | None) -> Value:
        return self._node(1, scores, labels, weights)[0]

    def _node(self, outputs: int, scores: Value, labels: Value, weights: Value | None) -> list[Value]:
        """Append the loss of ai.onnx, with its log-probabilities for two outputs."""
        accessor, inputs = current(), [each.name for each in (scores, labels, weights) if each is not None]
        names, given = [accessor.fresh(each) for each in ("loss", "log_prob")[:outputs]], accessor.fresh(self._OPERATOR)
        options: dict[str, Any] = {"reduction": self._reduction, "ignore_index": self._ignore_index}
        accessor.model.graph.node.append(helper.make_node(self._OPERATOR, inputs, names, given, **options))
        return [Value(scores.body, name, scores.element_type) for name in names]

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
        dtype, given = accessor.element_type(labels), accessor.sizes(labels)
        if dtype is not None and dtype not in LABELS:
            raise ArgumentError(
                "loss_input_names",
                f"says which outputs the loss takes: the labels {labels!r} have elements of type {type_name(dtype)}, "
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
        require(0 <= label_smoothing <= 1, "label_smoothing", label_smoothing, "0 to 1")
        self._smoothing = label_smoothing

    def _loss(self, scores: Value, labels: Value, weights: Value | None) -> Value:
        """(1 - s) * loss + s * the mean over all classes of what the loss would be with that label."""
        loss, log_prob = self._node(2, scores, labels, weights)
        if not self._smoothing:
            return loss
        dtype, body = scores.element_type or TensorProto.FLOAT, scores.body
        if weights is not None:
            sizes = current().sizes(log_prob.name)
            log_prob = log_prob * weights.reshape([-1, *(1 for _ in range(len(sizes) - 2 if sizes else 0))])
        # For each row the negative mean of its log-probabilities times the weights of the classes, along axis 1.
        spread = -log_prob.along("ReduceMean", [1], keepdims=0)
        # Reduced as the loss is; rows with ignored labels do not count.
        counts = weights_of(labels, weights, self._ignore_index, dtype)
        if (counted := weights_of(labels, None, self._ignore_index, dtype)) is not None:
            spread = spread * counted
        if self._reduction != "mean" or counts is None:
            spread = reduced(spread, self._reduction)
        else:
            total, spread = reduced(counts, "sum"), reduced(spread, "sum")
            if self._weight is not None and not self._weight.all():  # rows of weight 0 have a spread
                spread = spread * (total > 0).cast(dtype)
            spread = spread / body.node("Max", total, body.number(least_divisor(dtype), total))
        return loss * (1 - self._smoothing) + spread * self._smoothing


class NLLLoss(_Classes):
    """The mean of -log_prob[label], each label being the number of a class, of a model that gives log-probabilities.

    weight, reduction, ignore_index, class_axis: as for CrossEntropyLoss.
    """

    _OPERATOR = "NegativeLogLikelihoodLoss"


def _without(sizes: Sizes | None, axis: int) -> Sizes | None:
    return None if sizes is None else [size for index, size in enumerate(sizes) if index != axis]


class _Regression(Block):
    """A loss of the difference between each number and its target; reduction: as for `MSELoss`."""

    def __init__(self, reduction: str = "mean"):
        self._reduction = chosen("reduction", reduction, REDUCTIONS)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Append the loss. Raises ValueError unless both have float elements."""
        scores, target = compared(loss_input_name, target_name)
        return reduced(self._each(scores - target), self._reduction).name

    def _each(self, difference: Value) -> Value:
        raise NotImplementedError


class MSELoss(_Regression):
    """The mean of the squares of the differences.

    reduction: "mean", "sum", or "none" for a loss of each element, which a block of one's own makes one number.
    """

    def _each(self, difference: Value) -> Value:
        return difference**2.0


class L1Loss(_Regression):
    """The mean of the absolute differences.

    reduction: "mean", "sum", or "none" for a loss of each element, which a block of one's own makes one number.
    """

    def _each(self, difference: Value) -> Value:
        return difference.apply("Abs")


class HuberLoss(_Regression):
    """The mean of d * d / 2 where abs(d) <= delta, else delta * (abs(d) - delta / 2), d being the difference.

    reduction: as for MSELoss. delta: above 0.
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        super().__init__(reduction)
        self._delta = positive("delta", delta)

    def _each(self, difference: Value) -> Value:
        size = difference.apply("Abs")
        inner = size.body.node("Min", size, size.body.number(self._delta, size))
        return inner * inner * 0.5 + (size - inner) * self._delta


class SmoothL1Loss(HuberLoss):
    """The Huber loss divided by its delta, which is called beta here; of beta = 0 the L1 loss.

    reduction: as for MSELoss. beta: 0 or above.
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        super().__init__(reduction, beta or 1.0)
        self._beta = beta

    def _each(self, difference: Value) -> Value:
        return super()._each(difference) / self._beta if self._beta else difference.apply("Abs")


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
        scores, target = compared(loss_input_name, target_name)
        loss, curve = (1 - target) * scores, _softplus(-scores)
        if self._pos_weight is not None:
            curve = curve * (target * _constant(self._pos_weight - 1, scores) + 1)
        loss = loss + curve
        return reduced(loss if self._weight is None else loss * _constant(self._weight, scores), self._reduction).name


def _constant(values: np.ndarray, like: Value) -> Value:
    return like.body.constant(values.astype(helper.tensor_dtype_to_np_dtype(like.element_type or TensorProto.FLOAT)))


LINEAR_FROM = 36.0  # where log(1 + exp(x)) is x in float64


def _softplus(x: Value) -> Value:
    """log(1 + exp(x)); onnxruntime has no Softplus of float64, and its Sigmoid is 0 from -37 on."""
    if x.element_type != TensorProto.DOUBLE:
        return x.apply("Softplus")
    low = x.body.node("Min", x, x.body.number(LINEAR_FROM, x))
    return (low.apply("Exp") + 1).apply("Log") + (x - LINEAR_FROM).apply("Relu")


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
        scores, target = compared(loss_input_name, target_name)
        if self._log_target:
            logarithm, target = target, target.apply("Exp")
        else:
            smallest = scores.body.number(float(np.finfo(np.float32).tiny), scores)
            logarithm = scores.body.node("Max", target, smallest).apply("Log")  # 0 * log(0) is 0
        loss = target * (logarithm - scores)
        if self._reduction != "batchmean":
            return reduced(loss, self._reduction).name
        return (reduced(loss, "sum") / scores.shape(0, 1).scalar().like(scores)).name
