"""What a node of the graph says about itself: its attributes, how many outputs it has, and their types."""

import ctypes
from typing import Any

from opgrad.contract import FLOATS
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import Api
from opgrad.onnxruntime.overloads import Overload, model_of

LONGEST_STRING = 256
IGNORED_BY_DEFAULT = -1  # the label that the original kernels ignore when a node does not say


def read_attributes(api: Api, info: int, overload: Overload) -> tuple[dict[str, Any], int]:
    """The operator's attributes, and the number of outputs; ValueError for an attribute that cannot be.

    `info` is the OrtKernelInfo of the node.
    """
    found = {name: _attribute(api, info, overload, name) for name in overload.onnx.attributes}
    if "ignore_index" in overload.operator.attributes:
        found.setdefault("ignore_index", IGNORED_BY_DEFAULT)
    outputs = ctypes.c_size_t()
    api.check(abi.KERNEL_INFO_GET_OUTPUT_COUNT, info, ctypes.byref(outputs))
    needed = sum(not port.optional for port in overload.outputs)
    if outputs.value < needed:
        raise ValueError(f"{overload.onnx.name}: the node has {outputs.value} outputs, expected {needed}")
    if "output_type" in found:
        found["out_dtype"] = _out_dtype(overload, found.pop("output_type"))
        for i in range(outputs.value):
            _check_output(api, info, overload, i, found["out_dtype"])
    return found, outputs.value


def _attribute(api: Api, info: int, overload: Overload, name: str) -> Any:
    """The value of an attribute, by the type of its default (None: an int), or the default."""
    default = overload.onnx.attributes[name]
    value: Any = ctypes.c_float() if isinstance(default, float) else ctypes.c_int64()
    entry = abi.KERNEL_INFO_GET_FLOAT if isinstance(default, float) else abi.KERNEL_INFO_GET_INT64
    arguments = [ctypes.byref(value)]
    if isinstance(default, str):
        value, entry = ctypes.create_string_buffer(LONGEST_STRING), abi.KERNEL_INFO_GET_STRING
        arguments = [value, ctypes.byref(ctypes.c_size_t(LONGEST_STRING))]
    try:
        api.check(entry, info, name.encode(), *arguments)
    except RuntimeError as error:
        if "No attribute" in str(error):
            return default
        raise ValueError(f"{overload.onnx.name}: attribute {name}: {error}") from None
    return value.value.decode() if isinstance(default, str) else value.value


def _out_dtype(overload: Overload, number: int | None) -> str:
    """The dtype that the attribute output_type names; without it, that of the input the results are like."""
    if number is None:
        model = model_of(overload.operator, next(iter(overload.operator.results)))
        return next(port.dtype for port in overload.inputs if port.parameter == model)
    dtype = abi.DTYPES.get(number)
    if dtype not in FLOATS:
        numbers = ", ".join(f"{abi.ELEMENT_TYPES[name]} ({name})" for name in FLOATS)
        raise ValueError(f"{overload.onnx.name}: output_type is {number}, expected one of {numbers}")
    return dtype


def _check_output(api: Api, info: int, overload: Overload, i: int, expected: str) -> None:
    """ValueError unless the graph declares output i with the expected type."""
    kind, tensor, number = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
    api.check(abi.KERNEL_INFO_GET_OUTPUT_TYPE_INFO, info, i, ctypes.byref(kind))
    api.check(abi.CAST_TYPE_INFO_TO_TENSOR_INFO, kind.value, ctypes.byref(tensor))
    api.check(abi.GET_TENSOR_ELEMENT_TYPE, tensor.value, ctypes.byref(number))
    api.status(abi.RELEASE_TYPE_INFO, kind.value)
    declared = abi.DTYPES.get(number.value, f"ONNX type {number.value}")
    if declared != expected:
        what = f"{overload.onnx.name}: {overload.outputs[i].parameter}"
        raise ValueError(f"{what} is declared as {declared}, expected {expected}, as output_type or the input says")
