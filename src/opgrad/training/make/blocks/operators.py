"""Blocks of one operator each. Their arguments when called are names of values, and what they return is one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.messages import FLOATS, MICROSOFT
from opgrad.training.make.blocks.accessor import current, type_name
from opgrad.training.make.blocks.block import Block
from opgrad.training.make.checks import near

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


def append(
    op: str, inputs: Sequence[str], output: str = "", node: str = "", domain: str = "", **attributes: Any
) -> str:
    """Append a node of one output to the model that is being built, and return the output's name.

    output, node: what their names say, by default <op>_output and <op>.
    """
    accessor = current()
    name = accessor.fresh(output or f"{op.lower()}_output")
    return accessor.node(op, inputs, name, accessor.fresh(node or op), domain, **attributes)


def float_type(name: str, who: str) -> int:
    """The element type of a value. Raises ValueError if it is known and no float type."""
    kind = current().element_type(name)
    if kind is not None and kind not in FLOATS:
        raise ValueError(f"{who}: {name!r} has elements of type {type_name(kind)}, expected a float type")
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

    def __init__(self) -> None:
        super().__init__()

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
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Append the node. Raises ValueError unless the input has a float type."""
        exponent = number("pow_exponent", self._exponent, float_type(pow_input_name, "Pow"), [1])
        return append("Pow", [pow_input_name, exponent])


class _Unary(Block):
    """A function of one value."""

    def __init__(self, **attributes: Any):
        super().__init__()
        self._attributes = attributes

    def build(self, input_name: str) -> str:
        """Append the node."""
        return append(type(self).__name__, [input_name], **self._attributes)


class _Reduction(_Unary):
    """All elements become one. keepdims: whether the result has as many axes as before, or none."""

    def __init__(self, keepdims: bool = True):
        super().__init__(keepdims=int(keepdims))


class ReduceMean(_Reduction):
    """The mean of all elements. keepdims: whether the result has as many axes as before, or none."""


class ReduceSum(_Reduction):
    """The sum of all elements. keepdims: whether the result has as many axes as before, or none."""


class _Function(_Unary):
    """A function of each element."""

    def __init__(self) -> None:
        super().__init__()


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
        super().__init__()
        self._value, self._type = value_float, to

    def build(self) -> str:
        """Append the initializer."""
        return number("initializer", self._value, self._type)


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *sequence_input_names: str) -> str:
        """Append the node."""
        return append("SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """The Euclidean norm of all values together: ReduceAllL2 of com.microsoft, float32 [1]."""

    def build(self, *reduce_node_input_names: str) -> str:
        """Append the node."""
        name = append("ReduceAllL2", reduce_node_input_names, domain=MICROSOFT)
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
        current().model.graph.value_info.append(info)
        return name


class Clip(Block):
    """x, but not below and not above these numbers. clip_min, clip_max: numbers, or None."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None):
        super().__init__()
        self._bounds = {"clip_min": clip_min, "clip_max": clip_max}

    def build(self, clip_input_name: str) -> str:
        """Append the node. Raises ValueError unless the input has a float type."""
        kind = float_type(clip_input_name, "Clip")
        bounds = ["" if value is None else number(what, value, kind) for what, value in self._bounds.items()]
        while bounds and not bounds[-1]:
            bounds.pop()
        return append("Clip", [clip_input_name, *bounds])


class PassThrough(Block):
    """The values themselves: the loss is in the model already."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the names."""
        return input_names


class InputLike(Block):
    """A new input of the graph, of the type and shape of another value.

    like: the name of the other one, an input, an output or any value whose type is known.
    """

    def __init__(self, like: str):
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Append the input under this name, or a new one. Raises LookupError if there is no such value."""
        accessor = current()
        kind = accessor.element_type(self._like)
        if kind is None:
            values = [each.name for each in (*accessor.model.graph.input, *accessor.model.graph.output)]
            raise LookupError(f"InputLike: no value {self._like!r} of a known type{near(self._like, values)}")
        return accessor.input(input_name or accessor.fresh("input"), kind, accessor.sizes(self._like))


class LabelEncoder(Block):
    """Integers, texts or numbers become others, by a table: LabelEncoder of ai.onnx.ml.

    keys_…: what the input has. values_…: what stands for it. default_…: what stands for all others.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ):
        super().__init__()
        tables = {
            "keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings,
            "values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings,
        }  # fmt: skip
        defaults = {"default_float": default_float, "default_int64": default_int64, "default_string": default_string}
        self._attributes: dict[str, Any] = defaults | {
            name: list(table) for name, table in tables.items() if table is not None
        }

    def build(self, label_encoder_input_name: str) -> str:
        """Append the node."""
        model = current().model
        if all(each.domain != "ai.onnx.ml" for each in model.opset_import):
            model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
        name = [label_encoder_input_name]
        return append("LabelEncoder", name, "label_encoder.output", domain="ai.onnx.ml", **self._attributes)


class Cast(Block):
    """Values of another type. to: a number of TensorProto.DataType."""

    def __init__(self, to: int):
        super().__init__()
        self._to = int(to)

    def build(self, cast_input_name: str) -> str:
        """Append the node."""
        return append("Cast", [cast_input_name], "cast.output", to=self._to)


class Linear(Block):
    """alpha * x @ weight + beta * bias, with parameters of its own, random numbers that are the same in each run.

    in_features, out_features: the sizes of rows. bias: whether there is one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
        seed: int = 0,
    ):
        super().__init__()
        self._shape, self._bias, self._seed = (in_features, out_features), bias, seed
        self._attributes: dict[str, Any] = {"alpha": alpha, "beta": beta}

    def build(self, linear_input_name: str) -> str:
        """Append weight, bias and node."""
        random = np.random.default_rng((self._seed, current().drawn))
        parameters = [_normal(random, "linear.weight", self._shape)]
        if self._bias:
            parameters.append(_normal(random, "linear.bias", self._shape[1:]))
        return append("Gemm", [linear_input_name, *parameters], "linear.output", "linear", **self._attributes)


def _normal(random: np.random.Generator, what: str, shape: Sequence[int]) -> str:
    """An initializer of standard normal numbers, float32."""
    accessor = current()
    tensor = numpy_helper.from_array(random.standard_normal(shape, np.float32), accessor.fresh(what))
    accessor.model.graph.initializer.append(tensor)
    return tensor.name
