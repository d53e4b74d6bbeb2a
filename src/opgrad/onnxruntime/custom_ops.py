"""The operators as onnxruntime's C structures, and the functions that make their nodes."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from opgrad.cpu.runtime.plan import execute
from opgrad.cpu.runtime.system import system
from opgrad.cuda import driver
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import Api, address_of, callback, forever
from opgrad.onnxruntime.compute import close, compute, parallel_for
from opgrad.onnxruntime.node import RuntimeNode, prepare, read_attributes, refuse
from opgrad.onnxruntime.overloads import MEMBERS, Described, Overload, described, overloads, overloads_beside_cuda

# For each domain its name for onnxruntime and the origin of its operators; None: all operators.
DOMAINS: tuple[tuple[bytes, str | None], ...] = ((b"com.microsoft", None), (b"", ""))
# By whether a CUDA device computes.
PROVIDERS = tuple(ctypes.create_string_buffer(f"{name}ExecutionProvider".encode()) for name in ("CPU", "CUDA"))
SIZE = ctypes.c_size_t

overload_at: dict[int, Overload] = {}  # by the address of their structure
_names: dict[str, Any] = {}
_kept: list[Any] = forever([PROVIDERS, _names])  # objects whose addresses onnxruntime holds


def new_domains(api: Api, functions: Callable[[], dict[str, int]] | None = None, cuda: bool = False) -> list[int]:
    """The operator domains with every overload in them; they stay for the life of the process.

    com.microsoft has all of them; operators that the original has in ai.onnx are also there, beside onnxruntime's own.
    functions: returns the members that create and run nodes; None: those for sessions that run. cuda: whether
    sessions may have CUDA's provider.
    """
    domains = []
    for name, origin in DOMAINS:
        domain = api.word(abi.CREATE_CUSTOM_OP_DOMAIN, name)
        for structure in _structures(origin, functions or _functions, cuda):
            api.check(abi.CUSTOM_OP_DOMAIN_ADD, domain, ctypes.byref(structure))
        domains.append(domain)
    return domains


@functools.cache
def _structures(origin: str | None, functions: Callable[[], dict[str, int]], cuda: bool) -> list[Described]:
    """The operators of this origin, or all."""
    members = {member: each.address for member, each in MEMBERS.items()} | functions()
    structures = []
    for overload in (*overloads(), *(overloads_beside_cuda() if cuda else ())):
        if origin not in (None, overload.onnx.origin):
            continue
        name = _names.setdefault(overload.onnx.name, ctypes.create_string_buffer(overload.onnx.name.encode()))
        provider = ctypes.addressof(PROVIDERS[overload.on_device])
        structure, words = described(members, overload, ctypes.addressof(name), provider)
        overload_at[ctypes.addressof(structure)] = overload
        _kept.append(words)
        structures.append(structure)
    _kept.append(structures)
    return structures


def keep(function: Any) -> int:
    """The address of a function made by `callback`, which is kept alive."""
    _kept.append(function)
    return address_of(function)


@functools.cache
def _functions() -> dict[str, int]:
    """The members that create, run and destroy nodes."""
    return {
        "CreateKernelV2": keep(callback(_create_kernel, SIZE, 4)),
        "KernelComputeV2": compute.address,
        "KernelDestroy": close.address,
    }


@functools.cache
def _natives(on_device: bool) -> tuple[int, ...]:
    """The words of a node from PREPARE on."""
    return (
        keep(callback(prepare, SIZE, 4)),
        keep(callback(refuse, SIZE, 3)),
        execute.address,
        parallel_for.address,
        driver.address(driver.COPY) if on_device else system().heap("memcpy"),
        driver.address(driver.SET) if on_device else system().heap("memset"),
    )


def _create_kernel(op: int, api_address: int, info: int, kernel: int) -> int:
    """CreateKernelV2: make the node for `compute`; returns a status."""
    api = Api(api_address)
    try:
        overload = overload_at[op]
        attributes, inputs, outputs = read_attributes(api, info, overload)
        memory = 0, 0  # the allocator of the device on which the node runs, and what describes its memory
        if overload.on_device:
            allocator = api.word(abi.KERNEL_INFO_GET_ALLOCATOR, info, abi.DEFAULT_MEMORY)
            entries = ctypes.cast(allocator, ctypes.POINTER(ctypes.c_size_t))
            memory = allocator, abi.call(entries[abi.ALLOCATOR_INFO], allocator)
        node = RuntimeNode(api, overload, attributes, inputs, outputs, _natives(overload.on_device), memory)
        ctypes.c_size_t.from_address(kernel).value = node.address
        return 0
    except BaseException as exception:
        return api.error(exception)
