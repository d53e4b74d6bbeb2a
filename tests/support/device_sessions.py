"""Stock onnxruntime whose nodes of opgrad are those of CUDA's provider, on the stand-in for a device (support/ptx).

The provider that computes is the CPU's, so that onnxruntime's memory is the device's: kernels may access the tensors
that a node has asked for in this run, and the working memory that it was given; the engine's own kernels what it has
allocated. A plugin of pytest: `-p device_sessions` with OPGRAD_PTX=90.
"""

import ctypes
import math
import os
import tempfile
import weakref
from types import SimpleNamespace

import numpy as np
import onnxruntime
from ptx import driver as stand_in

DEVICE = stand_in.start(int(os.environ["OPGRAD_PTX"]))
DEVICE.context = 1  # which CUDA's provider makes current

from opgrad.contract import DTYPES  # noqa: E402
from opgrad.onnxruntime import abi, custom_ops, device_plans, overloads  # noqa: E402
from opgrad.training.engine import device as engine  # noqa: E402

ENTRIES = 300
STREAM = 0x5700
given, given_back = {}, []  # working memory by address; what nodes have given back
allocators = []  # an entry for each that a node has and has not released
said = {}  # by onnxruntime's own functions, which those here stand in for
_apis = {}


class Api(abi.Api):
    """The table of functions with those of a device's context."""

    def __init__(self, address):
        if address not in _apis:
            _apis[address] = _Table(abi.Api(address))
        super().__init__(_apis[address].address)


class _Table:
    def __init__(self, api):
        self.api = api
        entries = (ctypes.c_size_t * ENTRIES).from_address(api.address)
        self.entries = (ctypes.c_size_t * ENTRIES)(*entries)
        self.address = ctypes.addressof(self.entries)
        self.allocator = (ctypes.c_size_t * 4)()
        self.kept = []
        self.replace(self.entries, abi.KERNEL_CONTEXT_GET_INPUT_COUNT, self.input_count, 2)
        self.replace(self.entries, abi.GET_TENSOR_MUTABLE_DATA, self.data, 2)
        self.replace(self.entries, abi.KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM, self.stream, 2)
        self.replace(self.entries, abi.KERNEL_CONTEXT_GET_SCRATCH_BUFFER, self.scratch, 4)
        self.replace(self.entries, abi.KERNEL_INFO_GET_ALLOCATOR, self.get_allocator, 3)
        self.replace(self.entries, abi.RELEASE_ALLOCATOR, self.release, 1)
        self.replace(self.allocator, abi.ALLOCATOR_FREE, self.free, 2)
        self.replace(self.allocator, abi.ALLOCATOR_INFO, lambda allocator: 7, 1)

    def replace(self, table, place, function, count):
        made = abi.callback(function, ctypes.c_size_t, count)
        self.kept.append(made)
        table[place] = abi.address_of(made)

    def input_count(self, context, found):
        """What a node calls first: the tensors of the node before may be gone."""
        DEVICE.take_back()
        return self.api.status(abi.KERNEL_CONTEXT_GET_INPUT_COUNT, context, found)

    def data(self, value, found):
        status = self.api.status(abi.GET_TENSOR_MUTABLE_DATA, value, found)
        if not status:
            address = ctypes.c_size_t.from_address(found).value
            DEVICE.memory.add_range("a tensor", address, self.size(value))
        return status

    def size(self, value):
        info, kind, rank = ctypes.c_size_t(), ctypes.c_int(), ctypes.c_size_t()
        self.api.check(abi.GET_TENSOR_TYPE_AND_SHAPE, value, ctypes.byref(info))
        self.api.check(abi.GET_TENSOR_ELEMENT_TYPE, info.value, ctypes.byref(kind))
        self.api.check(abi.GET_DIMENSIONS_COUNT, info.value, ctypes.byref(rank))
        sizes = (ctypes.c_int64 * rank.value)()
        self.api.check(abi.GET_DIMENSIONS, info.value, sizes, rank.value)
        self.api.status(abi.RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, info.value)
        return math.prod(sizes) * DTYPES[abi.DTYPES[kind.value]].itemsize

    def stream(self, context, found):
        """onnxruntime itself says that the CPU's provider has none."""
        status = self.api.status(abi.KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM, context, found)
        said["stream"] = status, ctypes.c_size_t.from_address(found).value
        ctypes.c_size_t.from_address(found).value = STREAM
        return 0

    def scratch(self, context, memory, size, found):
        assert memory == 7
        array = np.empty(size + 16, np.uint8)
        array = array[-array.ctypes.data % 16 :][:size]
        given[array.ctypes.data] = array
        DEVICE.lend(array, "scratch", written=False)
        ctypes.c_size_t.from_address(found).value = array.ctypes.data
        return 0

    def get_allocator(self, info, kind, found):
        """onnxruntime's own gives memory of the CPU, and takes it back."""
        status = self.api.status(abi.KERNEL_INFO_GET_ALLOCATOR, info, kind, found)
        own = ctypes.c_size_t.from_address(found).value
        entries = ctypes.cast(own, ctypes.POINTER(ctypes.c_size_t))
        memory = abi.call(entries[abi.ALLOCATOR_FREE - 1], own, 4096)
        ctypes.memset(memory, 1, 4096)
        abi.call(entries[abi.ALLOCATOR_FREE], own, memory)
        said["allocator"] = status, abi.call(entries[abi.ALLOCATOR_INFO], own) != 0
        self.api.status(abi.RELEASE_ALLOCATOR, own)
        allocators.append(1)
        ctypes.c_size_t.from_address(found).value = ctypes.addressof(self.allocator)
        return 0

    def release(self, allocator):
        allocators.pop()
        return 0

    def free(self, allocator, address):
        given_back.append(given.pop(address).size)
        return 0


_kernels = tempfile.TemporaryDirectory(prefix="opgrad-device-")
device_plans.directory = lambda: _kernels.name  # which are PTX here, and none for a real device
custom_ops.Api = Api
custom_ops.PROVIDERS = custom_ops.PROVIDERS[:1] * 2
custom_ops.overloads = lambda: (each for each in overloads.overloads_beside_cuda() if each.on_device)

# --- the engine ------------------------------------------------------------------------------------------------------

arrays = {}  # by address, the bytes of those that the engine has allocated and not given back
_array, _run = engine.Device.array, device_plans.Pass.__call__


def array(self, *given):
    made = _array(self, *given)
    arrays[made.address] = made.nbytes
    weakref.finalize(made.owner, arrays.pop, made.address, None)
    return made


def run(self, **numbers):
    DEVICE.take_back()
    for address, size in arrays.items():
        DEVICE.memory.add_range("the engine's array", address, size)
    _run(self, **numbers)


engine.TYPE = "cpu"
engine.onnxruntime = SimpleNamespace(**{**vars(onnxruntime), "get_available_providers": lambda: [engine.CUDA]})
engine.Device.array, device_plans.Pass.__call__ = array, run
engine.Device.providers = ("CPUExecutionProvider",)
