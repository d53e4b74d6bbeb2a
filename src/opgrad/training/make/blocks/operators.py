"""Blocks of one operator each. Their arguments when called are names of values, and what they return is one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from opgrad.onnx.graph.messages import FLOATS
from opgrad.training.make.blocks.accessor import current, type_name
from opgrad.training.make.blocks.block import Block
from opgrad.training.make.checks import near

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


def append(op: str, inputs: Sequence[str], output: str = "", domain: str = "", **attributes: Any) -> str:
    """Append a node of one output to the model that is being built, and return the output's name.

    output: what its name says, by default <op>_output.
    """
    accessor = current()
    name = accessor.fresh(output or f"{op.lower()}_output")
    made = helper.make_node(op, inputs, [name], accessor.fresh(op), domain=domain or None, **attributes)
    accessor.model.graph.node.append(made)
    return name


def float_type(name: str) -> int:
    """The element type of a value. Raises ValueError if it is known and no float type."""
    kind = current().element_type(name)
    if kind is not None and kind not in FLOATS:
        raise ValueError(
            f"{current().blocks[-1]}: {name!r} has elements of type {type_name(kind)}, expected a float type"
        )
    return kind or TensorProto.FLOAT


def number(what: str, value: float, kind: int, shape: Sequence[int] = ()) -> str:
    """An initializer with one number."""
    return array(what, np.full(shape, value, np.float64), kind)


def array(what: str, values: Any, kind: int) -> str:
    """An initializer with these numbers."""
    accessor, values = current(), np.asarray(values)
    return accessor.constant(accessor.fresh(what), kind, values.shape, values.ravel().tolist())


class _Binary(Block):
    """Two values, element by element, broadcast against each other."""

    def build(self, input_name1: str, input_name2: str) -> str:
        """Append the node. Raises ValueError for values of different types."""
        names = input_name1, input_name2
        first, second = (current().element_type(name) for name in names)
        if first and second and first != second:
            raise ValueError(
                f"{type(self).__name__}: {input_name1!r} has elements of type {type_name(first)} and {input_name2!r} "
                f"of type {type_name(second)}, expected one type; blocks.Cast converts them"
            )
        return append(type(self).__name__, names)


class Add(_Binary):
    """a + b."""


class Sub(_Binary):
    """a - b."""


class Mul(_Binary):
    """a * b."""


class Div(_Binary):
    """a / b."""


class Pow(Block):
    """x ** exponent. exponent: a number."""

    def __init__(self, exponent: float):
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Append the node. Raises ValueError unless the input has a float type."""
        exponent = number("pow_exponent", self._exponent, float_type(pow_input_name), [1])
        return append("Pow", [pow_input_name, exponent])


class _Reduction(Block):
    """All elements become one. keepdims: whether the result has as many axes as before, or none."""

    def __init__(self, keepdims: bool = True):
        self._keepdims = int(keepdims)

    def build(self, input_name: str) -> str:
        """Append the node."""
        return append(type(self).__name__, [input_name], keepdims=self._keepdims)


class ReduceMean(_Reduction):
    """The mean of all elements. keepdims: whether the result has as many axes as before, or none."""


class ReduceSum(_Reduction):
    """The sum of all elements. keepdims: whether the result has as many axes as before, or none."""


class _Function(Block):
    """A function of each element."""

    def build(self, input_name: str) -> str:
        """Append the node."""
        return append(type(self).__name__, [input_name])


class Sigmoid(_Function):
    """1 / (1 + exp(-x))."""


class Log(_Function):
    """The natural logarithm."""


class Neg(_Function):
    """-x."""


class Abs(_Function):
    """The absolute value."""


class Constant(Block):
    """A number: a scalar, so that what is multiplied by it keeps its shape.

    value_float: the number. to: its element type, a number of TensorProto.DataType.
    """

    def __init__(self, value_float: float, to: int = TensorProto.FLOAT):
        self._value, self._type = value_float, to

    def build(self) -> str:
        """Append the initializer."""
        return number("initializer", self._value, self._type)


class InputLike(Block):
    """A new input of the graph, of the type and shape of another value.

    like: the name of the other one, an input, an output or any value whose type is known.
    """

    def __init__(self, like: str):
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Append the input under this name, or a new one. Raises LookupError if there is no such value."""
        accessor = current()
        kind = accessor.element_type(self._like)
        if kind is None:
            values = [each.name for each in (*accessor.model.graph.input, *accessor.model.graph.output)]
            raise LookupError(f"InputLike: no value {self._like!r} of a known type{near(self._like, values)}")
        return accessor.input(input_name or accessor.fresh("input"), kind, accessor.sizes(self._like))


class Cast(Block):
    """Values of another type. to: a number of TensorProto.DataType."""

    def __init__(self, to: int):
        self._to = int(to)

    def build(self, cast_input_name: str) -> str:
        """Append the node."""
        return append("Cast", [cast_input_name], "cast.output", to=self._to)
