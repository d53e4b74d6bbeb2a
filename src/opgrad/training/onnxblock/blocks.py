"""Blocks of single operators, by the names of onnxruntime.training.onnxblock; see `opgrad.training.make.blocks`."""

from typing import NoReturn

from opgrad.training.make.blocks import (
    Abs,
    Add,
    Cast,
    Constant,
    Div,
    InputLike,
    Log,
    Mul,
    Neg,
    Pow,
    ReduceMean,
    ReduceSum,
    Sigmoid,
    Sub,
)

__all__ = [
    "Abs",
    "Add",
    "Cast",
    "Constant",
    "Div",
    "InputLike",
    "Log",
    "Mul",
    "Neg",
    "Pow",
    "ReduceMean",
    "ReduceSum",
    "Sigmoid",
    "Sub",
]

LEFT_OUT = ("Clip", "LabelEncoder", "Linear", "PassThrough", "ReduceAllL2", "SequenceConstruct")


def __getattr__(name: str) -> NoReturn:
    """Say of a block that only onnxruntime-training has what takes its place."""
    instead = "; expected a Block of your own, whose build appends the node" if name in LEFT_OUT else ""
    raise AttributeError(f"module {__name__!r} has no block {name!r}{instead}")
