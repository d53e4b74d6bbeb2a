"""Reads a node of the graph: its attributes, the number of its inputs and outputs, and their types."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from opgrad.contract import FLOATS, NEEDS
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import Api
from opgrad.onnxruntime.overloads import OUTPUT_TYPES, Overload, model_of
from opgrad.onnxruntime.private import is_missing

LONGEST_STRING = 256
LONGEST_LIST = 256
SPATIAL = 2  # the axes behind image and channel begin here
UNKNOWN = -1  # a size that the graph does not fix
IGNORED_BY_DEFAULT = -1  # the label that the original kernels ignore when a node does not say


def read_attributes(api: Api, info: int, overload: Overload) -> tuple[dict[str, Any], int, int]:
    """The operator's attributes, and the numbers of inputs and outputs. Raises ValueError for an invalid attribute.

    `info` is the OrtKernelInfo of the node.
    """
    _refuse_unread(api, info, overload)
    found = {name: _attribute(api, info, overload, name) for name in overload.onnx.attributes}
    if "ignore_index" in overload.operator.attributes:
        found.setdefault("ignore_index", IGNORED_BY_DEFAULT)
    inputs, outputs = ctypes.c_size_t(), ctypes.c_size_t()
    api.check(abi.KERNEL_INFO_GET_INPUT_COUNT, info, ctypes.byref(inputs))
    api.check(abi.KERNEL_INFO_GET_OUTPUT_COUNT, info, ctypes.byref(outputs))
    needed = sum(not port.optional for port in overload.outputs)
    if outputs.value < needed:
        raise ValueError(f"{overload.onnx.name}: the node has {outputs.value} outputs, expected {needed}")
    for name in set(OUTPUT_TYPES).intersection(found):
        found["out_dtype"] = _out_dtype(overload, name, found.pop(name))
        for i in range(outputs.value):
            _check_output(api, info, overload, i, found["out_dtype"])
    general = overload.operator.general
    if general is not None and NEEDS in general.keywords:
        names = zip(overload.outputs, range(outputs.value), strict=False)
        found[NEEDS] = tuple(
            port.parameter for port, i in names if is_given(api, info, i, abi.KERNEL_INFO_GET_OUTPUT_NAME)
        )
    if overload.onnx.shape_of and not _has_input(api, info, overload, "shape", inputs.value):
        found["shape"] = _declared_shape(api, info, overload)
    return found, inputs.value, outputs.value


def _refuse_unread(api: Api, info: int, overload: Overload) -> None:
    """NotImplementedError if the node has an attribute that cannot be read: onnxruntime gives out no lists of text."""
    for name in overload.onnx.unread:
        text, size = ctypes.create_string_buffer(LONGEST_STRING), ctypes.c_size_t(LONGEST_STRING)
        try:
            given = _read(api, abi.KERNEL_INFO_GET_STRING, info, name, text, ctypes.byref(size))
        except RuntimeError:  # it has the attribute, of another type
            given = True
        if given:
            raise NotImplementedError(f"{overload.onnx.name}: the node has the attribute {name}, expected none")


def _read(api: Api, entry: int, info: int, name: str, *arguments: Any) -> bool:
    """Read an attribute into the arguments; False if the node has none of this name. Raises RuntimeError."""
    try:
        api.check(entry, info, name.encode(), *arguments)
    except RuntimeError as error:
        if is_missing(error, name, lambda other: api.check(entry, info, other.encode(), *arguments)):
            return False
        raise
    return True


def _attribute(api: Api, info: int, overload: Overload, name: str) -> Any:
    """The value of an attribute, by the type of its default (None: by that of the operator's), or the default."""
    default = overload.onnx.attributes[name]
    if isinstance(default, tuple):
        return _integers(api, info, overload, name)
    is_float = isinstance(default, float) or (default is None and overload.operator.types.get(name) == float | None)
    value: Any = ctypes.c_float() if is_float else ctypes.c_int64()
    entry = abi.KERNEL_INFO_GET_FLOAT if is_float else abi.KERNEL_INFO_GET_INT64
    arguments = [ctypes.byref(value)]
    if isinstance(default, str):
        value, entry = ctypes.create_string_buffer(LONGEST_STRING), abi.KERNEL_INFO_GET_STRING
        arguments = [value, ctypes.byref(ctypes.c_size_t(LONGEST_STRING))]
    try:
        if not _read(api, entry, info, name, *arguments):
            return default
    except RuntimeError as error:
        raise ValueError(f"{overload.onnx.name}: attribute {name}: {error}") from None
    return value.value.decode() if isinstance(default, str) else value.value


def _integers(api: Api, info: int, overload: Overload, name: str) -> tuple[int, ...]:
    """The value of an attribute that is a list of integers, or the default."""
    count, value = ctypes.c_size_t(0), (ctypes.c_int64 * LONGEST_LIST)()
    try:
        # Called without memory for the result, onnxruntime returns the number of elements.
        if not _read(api, abi.KERNEL_INFO_GET_INT64_ARRAY, info, name, 0, ctypes.byref(count)):
            return tuple(overload.onnx.attributes[name])
        if count.value > LONGEST_LIST:
            raise ValueError(
                f"{overload.onnx.name}: attribute {name} has {count.value} entries, expected at most {LONGEST_LIST}"
            )
        api.check(abi.KERNEL_INFO_GET_INT64_ARRAY, info, name.encode(), value, ctypes.byref(count))
    except RuntimeError as error:
        raise ValueError(f"{overload.onnx.name}: attribute {name}: {error}") from None
    return tuple(value[: count.value])


def _out_dtype(overload: Overload, name: str, number: int | None) -> str:
    """The dtype that an attribute names; without the attribute that of the input which determines the result's."""
    if number is None:
        model = model_of(overload.operator, next(iter(overload.operator.results)))
        return next(port.dtype for port in overload.inputs if port.parameter == model)
    dtype = abi.DTYPES.get(number)
    if dtype not in FLOATS:
        numbers = ", ".join(f"{abi.ELEMENT_TYPES[name]} ({name})" for name in FLOATS)
        raise ValueError(f"{overload.onnx.name}: {name} is {number}, expected one of {numbers}")
    return dtype


def _check_output(api: Api, info: int, overload: Overload, i: int, expected: str) -> None:
    """Raise ValueError unless the graph declares output i with the expected type."""
    number = ctypes.c_int()
    with declaration(api, info, i) as tensor:
        api.check(abi.GET_TENSOR_ELEMENT_TYPE, tensor, ctypes.byref(number))
    declared = abi.DTYPES.get(number.value, f"ONNX type {number.value}")
    if declared != expected:
        what = f"{overload.onnx.name}: {overload.outputs[min(i, len(overload.outputs) - 1)].parameter}"
        raise ValueError(f"{what} is declared as {declared}, expected {expected}, as output_type or the input says")


def _has_input(api: Api, info: int, overload: Overload, parameter: str, count: int) -> bool:
    """Whether the node, which has so many inputs, has this one."""
    index = next(i for i, port in enumerate(overload.inputs) if port.parameter == parameter)
    return index < count and is_given(api, info, index)


def is_given(api: Api, info: int, i: int, entry: int = abi.KERNEL_INFO_GET_INPUT_NAME) -> bool:
    """Whether the node has input i, or output i with its `entry`; what it leaves out has an empty name."""
    length = ctypes.c_size_t(0)
    # Asked with no memory, onnxruntime says how long the name is, its end included.
    api.check(entry, info, i, 0, ctypes.byref(length))
    return length.value > 1


def shape_of(api: Api, tensor: int) -> tuple[int, ...]:
    """The shape in an OrtTensorTypeAndShapeInfo."""
    count = ctypes.c_size_t()
    api.check(abi.GET_DIMENSIONS_COUNT, tensor, ctypes.byref(count))
    sizes = (ctypes.c_int64 * count.value)()
    api.check(abi.GET_DIMENSIONS, tensor, sizes, count.value)
    return tuple(sizes)


def _declared_shape(api: Api, info: int, overload: Overload) -> tuple[int, ...]:
    """The shape that the graph declares for the output whose shape is an attribute; UNKNOWN for images and channels.

    Those are dy's. ValueError unless the graph gives all other sizes as numbers.
    """
    name = overload.onnx.shape_of
    index = next(i for i, port in enumerate(overload.outputs) if port.parameter == name)
    with declaration(api, info, index) as tensor:
        sizes = shape_of(api, tensor)
    what = f"{overload.onnx.name}: {name}"
    if not sizes:
        raise ValueError(
            f"{what} has no declared shape, expected one: add a value_info entry for it, or the input shape"
        )
    if any(size < 0 for size in sizes[SPATIAL:]):
        shape = ", ".join("?" if size < 0 else str(size) for size in sizes)
        raise ValueError(
            f"{what} is declared with shape ({shape}), expected numbers from axis {SPATIAL} on, or the input shape"
        )
    return (UNKNOWN,) * min(SPATIAL, len(sizes)) + sizes[SPATIAL:]


@contextlib.contextmanager
def declaration(api: Api, info: int, i: int, entry: int = abi.KERNEL_INFO_GET_OUTPUT_TYPE_INFO) -> Iterator[int]:
    """The declaration of output i, or of input i with its `entry`, as the address of an OrtTensorTypeAndShapeInfo."""
    kind, tensor = ctypes.c_size_t(), ctypes.c_size_t()
    api.check(entry, info, i, ctypes.byref(kind))
    try:
        api.check(abi.CAST_TYPE_INFO_TO_TENSOR_INFO, kind.value, ctypes.byref(tensor))
        yield tensor.value
    finally:
        api.status(abi.RELEASE_TYPE_INFO, kind.value)
