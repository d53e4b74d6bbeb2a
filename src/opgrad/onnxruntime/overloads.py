"""From the declarations to what onnxruntime must know: one overload per ONNX name and choice of dtypes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from opgrad.contract import FLOATS, OnnxName, Operator, operators
from opgrad.onnxruntime.abi import ANY
from opgrad.onnxruntime.compute import COPY, FLAG

# Inputs that are read as attributes, and the dtype that the ONNX operators give them.
VALUE_DTYPES = {"shape": "int64", "ignore_index": "int64", "overwrite": "bool"}
# The ONNX operators give all their float inputs one type, but for these.
OWN_DTYPE = ("bias", "value", "factor")
# Results that are written over an input, whose memory the caller keeps.
OVERWRITTEN = {"sum": "buffer"}
VALUE = -1  # the place of an input that is read as an attribute


@dataclass(frozen=True)
class Port:
    """An input or output of an ONNX operator.

    `operand` is its place among the operands of a plan, or VALUE. `dtype` is ANY for an output whose type is
    an attribute of the node.
    """

    parameter: str
    optional: bool
    dtype: str
    operand: int


@dataclass(frozen=True)
class Overload:
    """An ONNX operator for one choice of input dtypes."""

    operator: Operator
    onnx: OnnxName
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def overloads() -> Iterator[Overload]:
    """Every overload of every declared operator that has an ONNX name."""
    for operator in operators().values():
        for onnx in operator.onnx:
            for dtypes in _choices(operator, onnx):
                inputs = tuple(_input(operator, name, dtypes) for name in onnx.inputs)
                outputs = tuple(_output(operator, onnx, name, dtypes) for name in onnx.outputs)
                yield Overload(operator, onnx, inputs, outputs)


def _choices(operator: Operator, onnx: OnnxName) -> Iterator[dict[str, str]]:
    """Every choice of dtypes for the arrays among the inputs."""
    names = [name.rstrip("?") for name in onnx.inputs if name.rstrip("?") in operator.inputs]
    shared = [name for name in names if operator.inputs[name].dtypes == FLOATS and name not in OWN_DTYPE]
    own = [name for name in names if name not in shared]
    for common, *others in itertools.product(FLOATS, *(operator.inputs[name].dtypes for name in own)):
        yield dict.fromkeys(shared, common) | dict(zip(own, others, strict=True))


def _input(operator: Operator, name: str, dtypes: dict[str, str]) -> Port:
    parameter, optional = name.rstrip("?"), name.endswith("?")
    if parameter in operator.attributes:
        return Port(parameter, optional, VALUE_DTYPES[parameter], VALUE)
    return Port(parameter, optional, dtypes[parameter], operator.arrays.index(parameter))


def _output(operator: Operator, onnx: OnnxName, name: str, dtypes: dict[str, str]) -> Port:
    parameter, optional = name.rstrip("?"), name.endswith("?")
    if parameter not in operator.results:
        return Port(parameter, optional, "bool", FLAG)
    dtype = ANY if "output_type" in onnx.attributes else dtypes[model_of(operator, parameter)]
    if parameter in OVERWRITTEN:
        return Port(parameter, optional, dtype, COPY)
    return Port(parameter, optional, dtype, len(operator.arrays) + list(operator.results).index(parameter))


def model_of(operator: Operator, result: str) -> str:
    """The input whose dtype a result has when nothing else is asked for."""
    return operator.results[result].dtype_of or operator.arrays[0]
