"""The operators as onnxruntime's C structures, and the functions that make their nodes."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from opgrad.cpu.runtime.plan import execute
from opgrad.cpu.runtime.threads.system import system
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import Api, address_of, callback, forever
from opgrad.onnxruntime.attributes import read_attributes
from opgrad.onnxruntime.compute import close, compute, parallel_for
from opgrad.onnxruntime.node import RuntimeNode, prepare, refuse
from opgrad.onnxruntime.overloads import Overload, overloads
from opgrad.onnxruntime.structures import MEMBERS, Described, described

# For each domain its name for onnxruntime and the origin of its operators; None: all operators.
DOMAINS: tuple[tuple[bytes, str | None], ...] = ((b"com.microsoft", None), (b"", ""))
PROVIDER = ctypes.create_string_buffer(b"CPUExecutionProvider")
SIZE = ctypes.c_size_t

_overloads: dict[int, Overload] = {}  # by the address of their structure
_names: dict[str, Any] = {}
_kept: list[Any] = forever([PROVIDER, _names])  # objects whose addresses onnxruntime holds


def new_domains(api: Api, functions: Callable[[], dict[str, int]] | None = None) -> list[int]:
    """The operator domains with every overload in them; they stay for the life of the process.

    com.microsoft has all of them; operators that the original has in ai.onnx are also there, beside onnxruntime's own.
    functions: returns the members that create and run nodes; None: those for sessions that run.
    """
    return [_new_domain(api, name, _structures(origin, functions or _functions)) for name, origin in DOMAINS]


def _new_domain(api: Api, name: bytes, structures: list[Described]) -> int:
    domain = ctypes.c_size_t()
    api.check(abi.CREATE_CUSTOM_OP_DOMAIN, name, ctypes.byref(domain))
    for structure in structures:
        api.check(abi.CUSTOM_OP_DOMAIN_ADD, domain.value, ctypes.byref(structure))
    return domain.value


@functools.cache
def _structures(origin: str | None, functions: Callable[[], dict[str, int]]) -> list[Described]:
    """The operators of this origin, or all."""
    members = {member: each.address for member, each in MEMBERS.items()} | functions()
    structures = []
    for overload in overloads():
        if origin not in (None, overload.onnx.origin):
            continue
        name = _names.setdefault(overload.onnx.name, ctypes.create_string_buffer(overload.onnx.name.encode()))
        structure, words = described(members, overload, ctypes.addressof(name), ctypes.addressof(PROVIDER))
        _overloads[ctypes.addressof(structure)] = overload
        _kept.append(words)
        structures.append(structure)
    _kept.append(structures)
    return structures


def keep(function: Any) -> int:
    """The address of a function made by `callback`, which is kept alive."""
    _kept.append(function)
    return address_of(function)


def overload_at(op: int) -> Overload:
    """The overload whose structure is at this address."""
    return _overloads[op]


@functools.cache
def _functions() -> dict[str, int]:
    """The members that create, run and destroy nodes."""
    return {
        "CreateKernelV2": keep(callback(_create_kernel, SIZE, 4)),
        "KernelComputeV2": compute.address,
        "KernelDestroy": close.address,
    }


@functools.cache
def _natives() -> tuple[int, ...]:
    """The words of a node from PREPARE on."""
    return (
        keep(callback(prepare, SIZE, 3)),
        keep(callback(refuse, SIZE, 3)),
        execute.address,
        parallel_for.address,
        system().heap("memcpy"),
    )


def _create_kernel(op: int, api_address: int, info: int, kernel: int) -> int:
    """CreateKernelV2: make the node for `compute`; returns a status."""
    api = Api(api_address)
    try:
        overload = _overloads[op]
        attributes, inputs, outputs = read_attributes(api, info, overload)
        node = RuntimeNode(api, overload, attributes, inputs, outputs, _natives())
        ctypes.c_size_t.from_address(kernel).value = node.address
        return 0
    except BaseException as exception:
        return api.error(exception)
