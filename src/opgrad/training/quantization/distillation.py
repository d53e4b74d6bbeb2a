"""Distillation: the quantized model also learns from the scores of the float model that it was made of."""

from typing import Any

import onnx
from onnx import TensorProto, compose

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.loading import Model, load
from opgrad.onnx.graph.messages import copied, opset_of
from opgrad.onnx.graph.nodes import rename_inputs
from opgrad.training.make.blocks import Block, append, array, current, in_float32, number, positive
from opgrad.training.make.losses import KLDivLoss

TEACHER = "teacher/"  # in front of the names of the float model's values


def with_teacher(student: onnx.ModelProto, teacher: Model) -> onnx.ModelProto:
    """A model that computes what a float model does, too, from the same inputs, under names behind "teacher/".

    student: a model that `prepare` made of the teacher; it is not changed. teacher: the float model.
    Its weights are to be frozen: `frozen_params=["teacher/*"]`.
    """
    given = load(teacher, "quantization.with_teacher")
    inputs = {each.name for each in given.graph.input} - {each.name for each in given.graph.initializer}
    raise_opset(given, opset_of(student), "quantization.with_teacher")
    floats, model = compose.add_prefix(given, TEACHER), copied(student)
    for node in floats.graph.node:
        rename_inputs(node, {f"{TEACHER}{name}": name for name in inputs})
    versions = {each.domain: each for each in model.opset_import}
    model.opset_import.extend(each for each in floats.opset_import if each.domain not in versions)
    for field in ("node", "initializer", "value_info"):
        getattr(model.graph, field).extend(getattr(floats.graph, field))
    return model


class Distillation(Block):
    """(1 - weight) * loss + weight * temperature**2 * the mean of KL(teacher's classes, own classes).

    The classes' probabilities are softmax(scores / temperature) along the last axis, of the model that is trained and
    of that whose values `with_teacher` has put beside it. Source: Hinton, Vinyals and Dean 2015.

    loss: a block of `onnxblock.loss`, whose first argument are the scores. weight: from 0 to 1. temperature: above 0.
    """

    def __init__(self, loss: Block, weight: float = 0.5, temperature: float = 2.0):
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= 1:
            raise ArgumentError("weight", f"is {weight!r}, expected a number from 0 to 1")
        self._loss, self._weight = loss, float(weight)
        self._temperature = positive("temperature", temperature)

    def build(self, scores_input_name: str, *others: str) -> Any:
        """Append the loss. others: what else the loss takes."""
        taught = f"{TEACHER}{scores_input_name}"
        if not current().has_value(taught):
            raise ValueError(
                f"Distillation: the model has no {taught!r}, expected a model of `with_teacher` and scores that are an "
                "output of both"
            )
        own = self._loss(scores_input_name, *others)
        kind = TensorProto.FLOAT
        hot = number("distillation.temperature", self._temperature, kind)
        student, teacher = (
            append("LogSoftmax", [append("Div", [each, hot])], axis=-1)
            for each in in_float32(scores_input_name, taught)
        )
        divergence = KLDivLoss("none", log_target=True)(student, teacher)
        rows = append("ReduceSum", [divergence, array("distillation.axis", [-1], TensorProto.INT64)], keepdims=0)
        mean = append("ReduceMean", [rows], keepdims=0)
        factor = number("distillation.weight", self._weight * self._temperature**2, kind)
        rest = number("distillation.rest", 1 - self._weight, kind)
        return append("Add", [append("Mul", [own, rest]), append("Mul", [mean, factor])])
