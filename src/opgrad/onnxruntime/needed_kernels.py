"""Finds the kernels that a graph will need without running it.

A session is made of the graph with inputs of fixed shapes, and never run. onnxruntime infers the shapes of its own
operators' results and calls `_infer` for those of opgrad's. So the shapes of all inputs are known when it creates
opgrad's nodes.
"""

import ctypes
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnxruntime

from opgrad.base.locks import settling
from opgrad.contract import DTYPES, Operator, Spec
from opgrad.cpu.compiler.decorators import noting
from opgrad.cpu.compiler.processes import Request, Work
from opgrad.cpu.plans import Call, plan
from opgrad.onnx.graph.loading import check_sizes
from opgrad.onnx.graph.messages import copied
from opgrad.onnxruntime import abi, custom_ops, sessions
from opgrad.onnxruntime.abi import Api, callback
from opgrad.onnxruntime.compute import ABSENT, FLAG, close
from opgrad.onnxruntime.loading import open_session
from opgrad.onnxruntime.node import LONGEST_LIST, RuntimeNode, declaration, is_given, read_attributes, shape_of
from opgrad.onnxruntime.overloads import OUTPUT_TYPES, VALUE, Overload, Port, model_of, overloads

SIZE = ctypes.c_size_t
NO_NATIVES = (0,) * 6  # in place of the functions of a node that never runs
INT, INTS, FLOAT, STRING = 1, 2, 3, 5  # the kinds of attributes for ReadOpAttr

Signature = tuple[Operator, Sequence[Spec | None], dict[str, Any]]

_created: list[tuple[RuntimeNode, tuple[int, ...]]] = []  # nodes of the session being made, with keys of their calls


def requests(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], options: Any) -> list[Request]:
    """The kernels that the cache lacks for a graph with inputs of these shapes, as far as they can be found out.

    model: the graph. shapes: by the names of inputs; those of the others are declared as numbers. options: the
    onnxruntime.SessionOptions that it will run with, but for its own operators.
    """
    return list(
        dict(request for node, key in _nodes(model, shapes, options) for request in _of_node(node, key)).items()
    )


def calls(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Signature]:
    """The operators of a graph on CUDA with inputs of these shapes, each with its arrays and attributes."""
    for node, key in _nodes(model, shapes, onnxruntime.SessionOptions(), cuda=True):
        with suppress(TypeError, ValueError, NotImplementedError):
            yield node.operator, *node.signature(key)


def _nodes(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], options: Any, cuda: bool = False
) -> list[tuple[RuntimeNode, tuple[int, ...]]]:
    """The nodes of a graph, with the keys of their calls. cuda: those of sessions that may have CUDA's provider."""
    with settling:
        _created.clear()
        with suppress(Exception):  # if no session can be made, the real one raises the error
            fixed = _fixed(model, shapes)
            folds = check_sizes(fixed, "requests")
            open_session(fixed.SerializeToString(), _options(options, cuda), "requests", stock=True, folds=folds)
        found = _created.copy()
        _created.clear()
    return found


def _fixed(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    model = copied(model)
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dimension.dim_value = size
    for node in model.graph.node:
        if node.op_type in _names() and "" in node.input:
            # onnxruntime cannot call `_infer` for a node that lacks an input before others. The node loses these
            # others, too: they are numbers and weights, without which mostly the same kernels are needed.
            del node.input[list(node.input).index("") :]
    return model


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(each.onnx.name for each in overloads())


def _options(like: Any, cuda: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = like.graph_optimization_level
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    pointer, base = sessions.options_and_base(options)
    api = abi.table(base)
    for domain in _domains(api.address, cuda):
        api.check(abi.ADD_CUSTOM_OP_DOMAIN, pointer, domain)
    return options


@functools.cache
def _domains(address: int, cuda: bool) -> list[int]:
    api = Api(address)
    members = {
        "CreateKernelV2": custom_ops.keep(callback(_create, SIZE, 4)),
        "KernelDestroy": close.address,
        "InferOutputShapeFn": custom_ops.keep(callback(functools.partial(_infer, api), SIZE, 2)),
    }
    return custom_ops.new_domains(api, lambda: members, cuda)


def _of_node(node: RuntimeNode, key: tuple[int, ...]) -> Iterator[Request]:
    """The kernels that the cache lacks for a node."""
    try:
        specs, attributes = node.signature(key)
        with noting() as missing:
            plan(node.operator, specs, attributes)
    except (TypeError, ValueError, NotImplementedError):  # if the call is really wrong, running it raises the error
        return
    given = tuple(None if spec is None else (spec.shape, spec.dtype.name) for spec in specs)
    call = Call(node.overload.operator.name, node.needs, node.lists, given, attributes)
    yield from ((name, Work(call.compile, (name,))) for name in missing)


# --- what onnxruntime calls ------------------------------------------------------------------------------------------


def _create(op: int, api_address: int, info: int, kernel: int) -> int:
    """CreateKernelV2: record a node that never runs; returns a status."""
    api = Api(api_address)
    try:
        overload = custom_ops.overload_at[op]
        node = RuntimeNode(api, overload, *read_attributes(api, info, overload), NO_NATIVES)
        ctypes.c_size_t.from_address(kernel).value = node.address
        words = [_words(api, info, i, port) for i, port in enumerate(node.inputs)]
        if None not in words:
            _created.append((node, (0, *(word for each in words for word in each or ()))))
        return 0
    except BaseException as exception:
        return api.error(exception)


def _words(api: Api, info: int, i: int, port: Port) -> list[int] | None:
    """The words of input i in the key of a call; None if its shape or values are not known."""
    if not is_given(api, info, i):
        return [ABSENT]
    if port.operand == VALUE:
        return _constant(api, info, i, port)
    with declaration(api, info, i, abi.KERNEL_INFO_GET_INPUT_TYPE_INFO) as tensor:
        sizes = shape_of(api, tensor)
    return None if min(sizes, default=0) < 0 else [len(sizes), *sizes]


def _constant(api: Api, info: int, i: int, port: Port) -> list[int] | None:
    """Shape and values of an input that is read as an attribute, if the graph has them."""
    known, value = ctypes.c_int(), ctypes.c_size_t()
    api.check(abi.KERNEL_INFO_GET_CONSTANT_INPUT, info, i, ctypes.byref(known), ctypes.byref(value))
    if not known.value:
        return None
    tensor = api.word(abi.GET_TENSOR_TYPE_AND_SHAPE, value.value)
    sizes = shape_of(api, tensor)
    api.status(abi.RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, tensor)
    size = DTYPES[port.dtype].itemsize
    content = ctypes.string_at(api.word(abi.GET_TENSOR_MUTABLE_DATA, value.value), math.prod(sizes) * size)
    return [len(sizes), *sizes, *map(int, np.frombuffer(content, f"u{size}").astype(np.uint64).view(np.int64))]


def _infer(api: Api, op: int, context: int) -> int:
    """InferOutputShapeFn: set the shapes of a node's outputs as far as they are known; returns the status 0."""
    with suppress(Exception):  # a shape that cannot be computed stays open
        overload = custom_ops.overload_at[op]
        count, shapes = api.word(abi.SHAPE_CONTEXT_GET_INPUT_COUNT, context), dict[str, tuple[int, ...]]()
        for i, port in enumerate(overload.inputs[:count]):
            shapes[port.parameter] = shape_of(api, api.word(abi.SHAPE_CONTEXT_GET_INPUT, context, i))
            if port.several or min(shapes[port.parameter], default=0) < 0:
                return 0
        attributes = dict(overload.operator.attributes)
        for name, default in overload.onnx.attributes.items():
            with suppress(RuntimeError):  # the node has none of this name
                attribute = api.word(abi.SHAPE_CONTEXT_GET_ATTRIBUTE, context, name.encode())
                attributes[name] = _value(api, attribute, default)
        for i, port in enumerate(overload.outputs):
            shape = _shape(overload.operator, port, shapes, attributes)
            if shape is not None:
                with suppress(RuntimeError):  # the node has no such output
                    element_type = abi.ELEMENT_TYPES[_dtype(overload, port, attributes)]
                    tensor = api.word(abi.CREATE_TENSOR_TYPE_AND_SHAPE)
                    api.check(abi.SET_TENSOR_ELEMENT_TYPE, tensor, element_type)
                    api.check(abi.SET_DIMENSIONS, tensor, (ctypes.c_int64 * len(shape))(*shape), len(shape))
                    api.check(abi.SHAPE_CONTEXT_SET_OUTPUT, context, i, tensor)
                    api.status(abi.RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, tensor)
    return 0


def _value(api: Api, attribute: int, default: Any) -> Any:
    """The value of an attribute, by the type of its default as in `opgrad.onnxruntime.node`."""
    kinds: dict[type, tuple[int, Any]] = {
        float: (FLOAT, ctypes.c_float),
        str: (STRING, ctypes.c_char),
        tuple: (INTS, ctypes.c_int64),
    }
    number, kind = kinds.get(type(default), (INT, ctypes.c_int64))
    room, size = (kind * LONGEST_LIST)(), ctypes.c_size_t()
    api.check(abi.READ_OP_ATTRIBUTE, attribute, number, room, ctypes.sizeof(room), ctypes.byref(size))
    read = room[: size.value // ctypes.sizeof(kind)]
    if number == STRING:
        return read.rstrip(b"\0").decode()
    return tuple(read) if number == INTS else read[0]


def _shape(
    operator: Operator, port: Port, shapes: dict[str, tuple[int, ...]], attributes: dict[str, Any]
) -> tuple[int, ...] | None:
    """The shape of an output; None if it depends on values that are not known."""
    if port.operand == FLAG:
        return (1,)
    tensor = operator.results[port.parameter]
    if port.several:
        return None
    with suppress(Exception):
        return tuple(tensor.shape(shapes, attributes)) if tensor.shape else ()
    return None


def _dtype(overload: Overload, port: Port, attributes: dict[str, Any]) -> str:
    """The dtype of an output, which an attribute may give, or else the input that it is like."""
    if port.dtype != abi.ANY:
        return port.dtype
    numbers = [attributes[name] for name in OUTPUT_TYPES if attributes.get(name)]
    like = model_of(overload.operator, port.parameter)
    own = next(each.dtype for each in overload.inputs if each.parameter == like)
    return abi.DTYPES[numbers[0]] if numbers else own
