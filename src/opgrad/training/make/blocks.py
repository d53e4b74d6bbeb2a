"""Blocks build a model of their parts: operators, and optimizers. One model is built at a time in each thread.

A block of an operator is called with names of values, and returns one; an optimizer's block makes a model of its own.
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming, require
from opgrad.base.files import check_regular
from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, copied, opset_of
from opgrad.training.files.tensor_values import Held
from opgrad.training.make.checks import check_built, near
from opgrad.training.make.outputs import declare_types, set_outputs

LATEST_IR_VERSION = 10  # the latest version that the last packages of onnxruntime-training can read
Sizes = Sequence[int | str | None]

_current: ContextVar["ModelAccessor | None"] = ContextVar("opgrad.onnxblock.model", default=None)


class ModelAccessor:
    """A model that is being built.

    model: the model; blocks change it in place. apart: the values of its huge initializers, by name; in the model these
    are placeholders. drawn: how many numbers the names of blocks have used so far. known: a graph with types of values.
    """

    def __init__(
        self, model: onnx.ModelProto, drawn: int = 0, apart: dict[str, Held] | None = None, known: Graph | None = None
    ):
        self.model, self.apart, self.drawn = model, {} if apart is None else apart, drawn
        self.blocks: list[str] = []  # the names of those that are being built, the innermost last
        self._types = known

    def fresh(self, what: str) -> str:
        """A name that the model does not have: onnx::<what>::<the next number>."""
        while True:
            self.drawn += 1
            name = f"onnx::{what}::{self.drawn}"
            if not self.has_value(name) and all(name != node.name for node in self.model.graph.node):
                return name

    def has_value(self, name: str) -> bool:
        """Whether an input, an initializer or the result of a node has this name."""
        graph = self.model.graph
        return any(name == each.name for each in (*graph.input, *graph.initializer)) or any(
            name in node.output for node in graph.node
        )

    def element_type(self, name: str) -> int | None:
        """The TensorProto.DataType of a value, None if it is not known."""
        return self._known(name).element_type(name)

    def sizes(self, name: str) -> Sizes | None:
        """For each axis an int, a name or None; None in place of the list if not even the rank is known."""
        return self._known(name).sizes(name)

    def _known(self, name: str) -> Graph:
        if self._types is None or self._types.element_type(name) is None:
            self._types = self.graph()
        return self._types

    def graph(self) -> Graph:
        """The model as a graph, with the types that are known."""
        return Graph(self.model, known=self._types)

    def forget(self) -> None:
        """Forget types and sizes, as the graph has changed; they are inferred again when they are needed."""
        self._types = None

    def constant(self, name: str, element_type: int, shape: Sequence[int], values: Sequence[float]) -> str:
        """Append an initializer."""
        self.model.graph.initializer.append(helper.make_tensor(name, element_type, shape, values))
        return name

    def input(self, name: str, element_type: int, sizes: Sizes | None) -> str:
        """Append an input to the graph."""
        self.model.graph.input.append(helper.make_tensor_value_info(name, element_type, sizes))
        return name


def current() -> ModelAccessor:
    """The model that blocks build. Raises RuntimeError outside of `base` and `empty_base`."""
    found = _current.get()
    if found is None:
        raise RuntimeError("onnxblock: there is no model to build on; call blocks within base(model) or empty_base()")
    return found


@contextmanager
def building(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    """Within the `with` block, blocks build this model. Raises RuntimeError if they build another one already."""
    if _current.get() is not None:
        raise RuntimeError(
            "onnxblock: blocks build another model already, expected one of base and empty_base at a time"
        )
    token = _current.set(accessor)
    try:
        yield accessor
    finally:
        _current.reset(token)


def base(model: onnx.ModelProto) -> AbstractContextManager[ModelAccessor]:
    """Let blocks build on a copy of a model.

    Gives a `ModelAccessor` of the copy. Raises TypeError for another model, RuntimeError inside
    another `base` or `empty_base`.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"base: model is of type {type(model).__name__}, expected onnx.ModelProto")
    return building(ModelAccessor(copied(model)))


def empty_base(opset_version: int | None = None) -> AbstractContextManager[ModelAccessor]:
    """Let blocks build a new model.

    opset_version: of ai.onnx; None: the newest that onnx has.

    Gives a `ModelAccessor`. Raises RuntimeError inside another `base` or `empty_base`.
    """
    return building(ModelAccessor(empty_model(opset_version)))


def empty_model(opset_version: int | None = None) -> onnx.ModelProto:
    opsets = [helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid("", opset_version or defs.onnx_opset_version())]
    version = min(onnx.IR_VERSION, LATEST_IR_VERSION)
    graph = onnx.GraphProto(name="graph")
    return onnx.ModelProto(ir_version=version, producer_name="orttraining", graph=graph, opset_import=opsets)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the library with the operators of one's own that the model has; graphs are written without it.

    custom_op_library_path: the file. Gradients of operators come from `opgrad.gradients.register_gradient`.

    Raises FileNotFoundError.
    """
    yield library_file(custom_op_library_path)


def library_file(path: str | bytes | os.PathLike[str]) -> str:
    """The path of a library with operators of one's own. Raises FileNotFoundError, and OSError for a pipe or device."""
    found = os.fsdecode(path)
    if not Path(found).exists():
        raise FileNotFoundError(f"custom_op_library: there is no file {found}")
    check_regular(Path(found), f"custom_op_library: {found}")
    return found


def type_name(element_type: int | None) -> str:
    return TensorProto.DataType.Name(element_type) if element_type else "unknown"


class Block(ABC):
    """A part of a model: `build` writes it behind the values that it is given the names of.

    base: the model that is being built.
    """

    base: onnx.ModelProto

    def __init_subclass__(cls) -> None:
        """Let errors about arguments of a constructor name the class that was called."""
        if "__init__" not in vars(cls):
            return
        constructor = cls.__init__

        @functools.wraps(constructor)
        def construct(self: "Block", *args: Any, **kwargs: Any) -> None:
            with naming(type(self).__name__):
                constructor(self, *args, **kwargs)

        cls.__init__ = construct  # type: ignore[method-assign,assignment]

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the name of the result, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the model of `base` or `empty_base`, and return the name of the result, or several.

        Raises what `build` raises, RuntimeError without a model, ValueError if the model is wrong then.
        """
        return self._built(current(), args, kwargs)

    def _built(self, accessor: ModelAccessor, args: Any, kwargs: Any) -> Any:
        """Build, and check the model unless this block is built inside of another one, which is checked as a whole."""
        self.base = accessor.model
        accessor.blocks.append(self._who)
        try:
            with naming(self._who):
                output = self.build(*args, **kwargs)
        finally:
            accessor.blocks.pop()
        if not accessor.blocks:
            with naming(self._who):
                check_built(accessor.model)
        return output

    @property
    def _who(self) -> str:
        return type(self).__name__


class ForwardBlock(Block):
    """A block that makes a whole model; what it returns are the model's outputs."""

    _model: onnx.ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the names of the model's outputs: one, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and let the results be the only outputs of the model."""
        accessor = current()
        output = self._built(accessor, args, kwargs)
        self._model = copied(self.base)
        with naming(self._who):
            set_outputs(declare_types(self._model), names_of(output))
        accessor.model.CopyFrom(self._model)
        accessor.forget()
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model. Raises RuntimeError before it is built."""
        if self._model is None:
            raise RuntimeError(f"{self._who}: the model is not built yet; call the block first")
        return self._model


def names_of(output: Any) -> list[str]:
    """What a block returned, as a list of names. Raises TypeError for anything else."""
    names = [output] if isinstance(output, str) else list(output) if isinstance(output, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"build returned {output!r}, expected the name of a value, or several")
    return names


def append(op: str, inputs: Sequence[str], output: str = "", domain: str = "", **attributes: Any) -> str:
    """Append a node of one output to the model that is being built, and return the output's name.

    output: what its name says, by default <op>_output.
    """
    accessor = current()
    name = accessor.fresh(output or f"{op.lower()}_output")
    made = helper.make_node(op, inputs, [name], accessor.fresh(op), domain=domain or None, **attributes)
    accessor.model.graph.node.append(made)
    return name


class Formulas(Body):
    """Formulas of a block, whose nodes are appended to the model that is being built."""

    def __init__(self) -> None:
        super().__init__(opset_of(current().model))

    def value(self, name: str) -> Value:
        """A value of the model."""
        return Value(self, name, current().element_type(name), current().sizes(name))

    def nodes_of(self, op: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """Append a node, which has one output."""
        name = append(op, ["" if each is None else each.name for each in inputs], **attributes)
        return [Value(self, name, self._dtype(current().model.graph.node[-1], 0, inputs, attributes))]

    def _write(self, tensor: TensorProto) -> Value:
        named, accessor = copied(tensor), current()
        named.name = accessor.fresh("constant")
        accessor.model.graph.initializer.append(named)
        return Value(self, named.name, tensor.data_type, list(tensor.dims))


def number(what: str, value: float, dtype: int, shape: Sequence[int] = ()) -> str:
    """Append an initializer of one number. what: what its name says."""
    return current().constant(current().fresh(what), dtype, shape, [value])


class _Binary(Block):
    """Two values, element by element, broadcast against each other."""

    def build(self, input_name1: str, input_name2: str) -> str:
        """Append the node. Raises ValueError for values of different types."""
        names = input_name1, input_name2
        first, second = (current().element_type(name) for name in names)
        if first and second and first != second:
            raise ValueError(
                f"{input_name1!r} has elements of type {type_name(first)} and {input_name2!r} "
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
        dtype = current().element_type(pow_input_name) or TensorProto.FLOAT
        if dtype not in FLOATS:
            raise ValueError(f"{pow_input_name!r} has elements of type {type_name(dtype)}, expected a float type")
        exponent = number("pow_exponent", self._exponent, dtype, [1])
        return append("Pow", [pow_input_name, exponent])


class _Reduction(Block):
    """All elements become one; see `ReduceMean`."""

    def __init__(self, keepdims: bool = True):
        self._keepdims = int(keepdims)

    def build(self, input_name: str) -> str:
        return append(type(self).__name__, [input_name], keepdims=self._keepdims)


class ReduceMean(_Reduction):
    """The mean of all elements. keepdims: whether the result has as many axes as before, or none."""


class ReduceSum(_Reduction):
    """The sum of all elements. keepdims: whether the result has as many axes as before, or none."""


class _Function(Block):
    """A function of each element."""

    def build(self, input_name: str) -> str:
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
        dtype = accessor.element_type(self._like)
        if dtype is None:
            values = [each.name for each in (*accessor.model.graph.input, *accessor.model.graph.output)]
            raise LookupError(f"no value {self._like!r} of a known type{near(self._like, values)}")
        return accessor.input(input_name or accessor.fresh("input"), dtype, accessor.sizes(self._like))


class Cast(Block):
    """Values of another type. to: a number of TensorProto.DataType."""

    def __init__(self, to: int):
        self._to = int(to)

    def build(self, cast_input_name: str) -> str:
        return append("Cast", [cast_input_name], "cast.output", to=self._to)


REDUCTIONS = ("mean", "sum", "none")


def chosen(argument: str, value: str, values: Collection[str]) -> str:
    """An argument, checked to be one of these values. Raises ArgumentError."""
    require(value in values, argument, value, f"one of {', '.join(map(repr, values))}")
    return value


def positive(argument: str, value: float) -> float:
    """An argument, checked to be above 0. Raises ArgumentError."""
    require(value > 0, argument, value, "a number above 0")
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


Parameters = tuple[Sequence[TensorProto], Sequence[TensorProto]]


class ClipGradNorm(Block):
    """All gradients scaled down so that their norm is at most this. max_norm: above 0."""

    def __init__(self, max_norm: float):
        self._max_norm = positive("max_norm", max_norm)

    def build(self, gradients_name: str) -> str:
        """Append the node; the name is that of a sequence of gradients."""
        output, max_norm = "clip_grad_norm_output", float(self._max_norm)
        return append("InplaceClipGradNorm", [gradients_name], output, domain=MICROSOFT, max_norm=max_norm)


class _Optimizer(ForwardBlock):
    """An optimizer of all trainable parameters. clip_grad: a block for the gradients, such as ClipGradNorm."""

    _MOMENTS: Sequence[str] = ("first_order_moments",)

    def __init__(self, clip_grad: Callable[[str], str] | None = None):
        if clip_grad is not None and not callable(clip_grad):
            raise ArgumentTypeError("clip_grad", f"is {clip_grad!r}, expected a block such as ClipGradNorm")
        self._clip_grad = clip_grad

    def build(self, parameters: Parameters) -> str:
        """Append inputs and nodes.

        parameters: the trainable and the frozen ones, as `TrainingBlock.parameters` gives them.
        Raises ValueError if none is trainable, or if they are not all of one type.
        """
        kinds = {each.data_type for each in parameters[0]}
        if not kinds:
            raise ValueError("no parameter is trainable, expected one at least")
        if len(kinds) > 1:
            names = " and ".join(sorted(map(type_name, kinds)))
            raise ValueError(f"the trainable parameters have elements of types {names}, expected one type")
        kind, accessor = kinds.pop(), current()
        accessor.input("learning_rate", TensorProto.FLOAT, [1])
        accessor.input("step", TensorProto.INT64, [1])
        for name in ("params", "gradients", *self._MOMENTS):
            accessor.model.graph.input.append(helper.make_tensor_sequence_value_info(name, kind, None))
        flag = self._update("gradients" if self._clip_grad is None else self._clip_grad("gradients"))
        accessor.model.graph.output.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
        return flag

    def _update(self, gradients: str) -> str:
        """Append the optimizer's node, and return the name of its result."""
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW (Loshchilov, Hutter, 2019).

    bias_correction: whether the moments' start at 0 is made up for. betas: the decay rates of the moments, from 0 to
    below 1. eps: what keeps the denominator from 0. weight_decay: of the parameters, times the learning rate.
    adam_mode: 1 is the order of operations of Hugging Face, 0 that of PyTorch.
    clip_grad: a block for the gradients, such as ClipGradNorm(1.0).
    """

    _MOMENTS = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Any = None,
        adam_mode: int = 1,
    ):
        super().__init__(clip_grad)
        are_rates = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require(are_rates, "betas", betas, "two numbers from 0 to below 1")
        for name, value in (("eps", eps), ("weight_decay", weight_decay)):
            require(value >= 0, name, value, "0 or above")
        is_mode = adam_mode == 1 or (adam_mode == 0 and bias_correction)
        require(is_mode, "adam_mode", adam_mode, "1, or 0 with bias_correction")
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]), "beta": float(betas[1]), "epsilon": float(eps),
            "weight_decay": float(weight_decay), "correct_bias": int(bias_correction), "adam_mode": adam_mode,
        }  # fmt: skip

    def _update(self, gradients: str) -> str:
        inputs = ["learning_rate", "step", "params", gradients, *self._MOMENTS]
        return append("AdamWOptimizer", inputs, "adamw.updated_flag", domain=MICROSOFT, **self._attributes)


class SGD(_Optimizer):
    """Gradient descent. clip_grad: a block for the gradients, such as ClipGradNorm(1.0)."""

    def _update(self, gradients: str) -> str:
        inputs = ["learning_rate", "params", gradients]
        return append("SGDOptimizerV2", inputs, "update_completed", domain=MICROSOFT)
