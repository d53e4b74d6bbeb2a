"""The operators as onnxruntime's C structures, and the functions through which it asks about them."""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from opgrad.cpu.runtime.execute import execute
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import Api, CustomOp, address_of, callback, forever
from opgrad.onnxruntime.attributes import read_attributes
from opgrad.onnxruntime.compute import close, compute, parallel_for
from opgrad.onnxruntime.node import Node, prepare, refuse
from opgrad.onnxruntime.overloads import VALUE, Overload, Port, overloads

# The domains' names for onnxruntime, and whose operators each has; None: all.
DOMAINS: tuple[tuple[bytes, str | None], ...] = ((b"com.microsoft", None), (b"", ""))
PROVIDER = ctypes.create_string_buffer(b"CPUExecutionProvider")
LAST_VERSION = 2**31 - 1
SIZE, NUMBER = ctypes.c_size_t, ctypes.c_int

_overloads: dict[int, Overload] = {}  # by the address of their structure
_names: dict[str, Any] = {}
_kept: list[Any] = forever([PROVIDER, _names])  # what onnxruntime points at


def new_domains(api: Api, functions: Callable[[], dict[str, int]] | None = None) -> list[int]:
    """The operator domains with every overload in them; they stay for the life of the process.

    com.microsoft has them all; what the original has in ai.onnx stands there too, beside onnxruntime's own.
    functions: makes the members that create and run nodes; None: those that do.
    """
    return [_new_domain(api, name, _structures(origin, functions or _functions)) for name, origin in DOMAINS]


def _new_domain(api: Api, name: bytes, structures: list[CustomOp]) -> int:
    domain = ctypes.c_size_t()
    api.check(abi.CREATE_CUSTOM_OP_DOMAIN, name, ctypes.byref(domain))
    for structure in structures:
        api.check(abi.CUSTOM_OP_DOMAIN_ADD, domain.value, ctypes.byref(structure))
    return domain.value


@functools.cache
def _structures(origin: str | None, functions: Callable[[], dict[str, int]]) -> list[CustomOp]:
    """The operators of this origin, or all."""
    members = _descriptions() | functions()
    structures = []
    for overload in overloads():
        if origin not in (None, overload.onnx.origin):
            continue
        structure = CustomOp(version=abi.VERSION, **members)
        _overloads[ctypes.addressof(structure)] = overload
        _names.setdefault(overload.onnx.name, ctypes.create_string_buffer(overload.onnx.name.encode()))
        structures.append(structure)
    _kept.append(structures)
    return structures


def keep(function: Any) -> int:
    """The address of a function made by `callback`, which stays."""
    _kept.append(function)
    return address_of(function)


def overload_at(op: int) -> Overload:
    """The overload whose structure is at this address."""
    return _overloads[op]


@functools.cache
def _descriptions() -> dict[str, int]:
    """The members that tell what an operator is, the same in all structures: they answer by the structure's address."""

    def answer(result: Any, of: Callable[[Overload], int]) -> int:
        return keep(callback(lambda op: of(_overloads[op]), result, 1))

    def input_answer(of: Callable[[Port], int]) -> int:
        return keep(callback(lambda op, i: of(_overloads[op].inputs[i]), NUMBER, 2))

    def output_answer(of: Callable[[Port], int]) -> int:
        return keep(callback(lambda op, i: of(_overloads[op].outputs[i]), NUMBER, 2))

    return {
        "GetName": answer(SIZE, lambda overload: ctypes.addressof(_names[overload.onnx.name])),
        "GetExecutionProviderType": answer(SIZE, lambda _: ctypes.addressof(PROVIDER)),
        "GetInputTypeCount": answer(SIZE, lambda overload: len(overload.inputs)),
        "GetOutputTypeCount": answer(SIZE, lambda overload: len(overload.outputs)),
        "GetInputType": input_answer(lambda port: abi.ELEMENT_TYPES[port.dtype]),
        "GetOutputType": output_answer(lambda port: abi.ELEMENT_TYPES[port.dtype]),
        "GetInputCharacteristic": input_answer(_characteristic),
        "GetOutputCharacteristic": output_answer(_characteristic),
        "GetInputMemoryType": input_answer(_memory_type),
        "GetVariadicInputMinArity": answer(NUMBER, lambda _: 1),
        "GetVariadicInputHomogeneity": answer(NUMBER, lambda _: 1),
        "GetVariadicOutputMinArity": answer(NUMBER, lambda _: 1),
        "GetVariadicOutputHomogeneity": answer(NUMBER, lambda _: 1),
        "GetStartVersion": answer(NUMBER, lambda _: 1),
        "GetEndVersion": answer(NUMBER, lambda _: LAST_VERSION),
    }


@functools.cache
def _functions() -> dict[str, int]:
    """The members that create, run and destroy nodes."""
    return {
        "CreateKernelV2": keep(callback(_create_kernel, SIZE, 4)),
        "KernelComputeV2": compute.address,
        "KernelDestroy": close.address,
    }


def _characteristic(port: Port) -> int:
    if port.several:
        return abi.VARIADIC
    # onnxruntime refuses required outputs of undefined type, except with one input of undefined type.
    return abi.OPTIONAL if port.optional or port.dtype == abi.ANY else abi.REQUIRED


def _memory_type(port: Port) -> int:
    return abi.CPU_MEMORY if port.operand == VALUE else abi.DEFAULT_MEMORY


@functools.cache
def _natives() -> tuple[int, ...]:
    """The words of a node from PREPARE on."""
    system = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)
    return (
        keep(callback(prepare, SIZE, 3)),
        keep(callback(refuse, SIZE, 3)),
        execute.address,
        parallel_for.address,
        *map(address_of, (system.malloc, system.free, system.memcpy)),
    )


def _create_kernel(op: int, api_address: int, info: int, kernel: int) -> int:
    """CreateKernelV2: makes the node that `compute` will get; a status."""
    api = Api(api_address)
    try:
        overload = _overloads[op]
        attributes, inputs, outputs = read_attributes(api, info, overload)
        node = Node(api, overload, attributes, inputs, outputs, _natives())
        ctypes.c_size_t.from_address(kernel).value = node.address
        return 0
    except BaseException as exception:
        return api.error(exception)
