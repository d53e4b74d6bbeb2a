"""Helpers of losses: checks of arguments, conversion of scores and targets to one type, and the reduction."""

from collections.abc import Collection
from typing import Any

import numpy as np
from onnx import TensorProto

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.onnx.graph.messages import FLOATS, HALVES
from opgrad.training.make.blocks.accessor import current, type_name
from opgrad.training.make.blocks.operators import append
from opgrad.training.make.checks import near

REDUCTIONS = ("mean", "sum", "none")


def chosen(argument: str, value: str, values: Collection[str]) -> str:
    """An argument, checked to be one of these values. Raises ArgumentError."""
    if value not in values:
        raise ArgumentError(argument, f"is {value!r}, expected one of {', '.join(map(repr, values))}")
    return value


def positive(argument: str, value: float) -> float:
    """An argument, checked to be above 0. Raises ArgumentError."""
    if not value > 0:
        raise ArgumentError(argument, f"is {value!r}, expected a number above 0")
    return value


def weights(argument: str, values: Any) -> np.ndarray | None:
    """An argument as a finite array of numbers, or None. Raises ArgumentError, which is a TypeError for no numbers."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ArgumentTypeError(argument, f"has dtype {array.dtype}, expected numbers")
    if not np.isfinite(array.astype(np.float64)).all():
        raise ArgumentError(argument, "has values that are not finite, expected numbers")
    return array.astype(np.float64)


def scores_type(name: str) -> int:
    """The element type of a value. Raises LookupError if there is no such value, ValueError if it is no float type."""
    accessor = current()
    who = accessor.blocks[-1]
    if not accessor.has_value(name):
        values = [name for node in accessor.model.graph.node for name in node.output]
        raise LookupError(f"{who}: the graph has no value {name!r}{near(name, values)}")
    kind = accessor.element_type(name)
    if kind is None:
        raise ValueError(f"{who}: nothing tells the type of {name!r}, expected it in the graph's value_info")
    if kind not in FLOATS:
        raise ValueError(f"{who}: {name!r} has elements of type {type_name(kind)}, expected a float type")
    return kind


def target_like(scores: str, target: str) -> tuple[str, str]:
    """Scores and their target, which becomes an input like the scores, in float32 beside halves, unless it is there."""
    accessor, kind = current(), scores_type(scores)
    wide = TensorProto.FLOAT if kind in HALVES else kind
    if not accessor.has_value(target):
        return scores, accessor.input(target, wide, accessor.sizes(scores))
    found = accessor.element_type(target)
    if found not in (None, kind, wide):
        raise ValueError(
            f"{accessor.blocks[-1]}: {target!r} has elements of type {type_name(found)}, expected {type_name(kind)}, "
            f"that of {scores!r}"
        )
    return scores, target


def in_float32(*names: str) -> list[str]:
    """The names of these values, with float16 and bfloat16 cast to float32."""
    accessor = current()
    return [
        append("Cast", [name], to=TensorProto.FLOAT) if accessor.element_type(name) in HALVES else name
        for name in names
    ]


def reduced(loss: str, reduction: str) -> str:
    """The mean or the sum of all elements, one number without axes; or the elements, for "none"."""
    if reduction == "none":
        return loss
    return append({"mean": "ReduceMean", "sum": "ReduceSum"}[reduction], [loss], keepdims=0)
