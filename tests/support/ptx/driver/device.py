"""The device behind the driver's functions: modules, launches, and the memory that kernels may access."""

import ctypes
import weakref
from collections import deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.driver.arguments import check, values_of
from ptx.machine import BACKWARD, FORWARD, Launch
from ptx.memory import GlobalMemory, byte_bounds
from ptx.program import Program
from ptx.sanitizer import Finding, Findings

HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
SUCCESS, INVALID_VALUE, NOT_SUPPORTED, LAUNCH_FAILED = 0, 1, 801, 719
MESSAGE = 900  # characters: Triton copies them into an array of 1024
STATIC_SHARED = 48 << 10  # bytes of shared memory of a launch, if more was not allowed before

# CUfunction_attribute, by their numbers in cuda.h
MAX_THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS, DYNAMIC_SHARED, NON_PORTABLE = 0, 1, 3, 4, 8, 14
ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
CREATED_STREAM = 0x5A00
DEVICES = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}  # multiprocessors, bytes of shared memory


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass
class Function:
    """A kernel that was loaded. source: what Triton says of it. allowed: bytes of shared memory of a launch."""

    program: Program
    source: Any = None
    allowed: int = STATIC_SHARED


Done = namedtuple("Done", "kernel grid stream checked")  # a launch that was run


def _answer(kind, value, place=0):
    """A function of the driver that only gives a number."""
    return lambda self, given: given.result(place, kind, value)


@dataclass
class Device:
    """A device of an architecture, whose memory is the host's."""

    architecture: int
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    launches: deque[Done] = field(default_factory=lambda: deque(maxlen=100_000))
    found: list[Finding] = field(default_factory=list)
    orders: tuple[int, ...] = (FORWARD, BACKWARD)  # of thread blocks

    def __post_init__(self):
        self.functions = []
        self.programs = {}
        self.error = ctypes.create_string_buffer(MESSAGE + 1)
        self.context = 0
        self.pinned = {}
        self.recorded = deque(maxlen=1000)  # the streams of events
        self.handler = HANDLER(self._call)

    # --- memory

    def lend(self, array, name, written=True):
        """Let kernels access an array while it lives. written: it holds something."""
        if written and self.memory.fill(*byte_bounds(array)):
            return
        allocation = self.memory.add(array, name, written)
        weakref.finalize(array, self.memory.remove, allocation)

    def take_back(self):
        """Let kernels access nothing."""
        self.memory.allocations.clear()

    # --- the driver's functions

    def _call(self, name, arguments):
        try:
            return getattr(self, name.decode())(_Arguments(arguments)) or SUCCESS
        except Findings as findings:
            self.found += findings.found
            return self._failed(str(findings))
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, message):
        self.error.value = message.encode("ascii", "replace")[:MESSAGE]
        return LAUNCH_FAILED

    def _nothing(self, given):
        pass

    cuInit = cuModuleUnload = cuFuncSetCacheConfig = cuEventSynchronize = cuEventDestroy_v2 = _nothing
    cuDriverGetVersion, cuDeviceGetCount = _answer(ctypes.c_int, 13000), _answer(ctypes.c_int, 1)
    cuDevicePrimaryCtxRetain = cuEventCreate = _answer(ctypes.c_void_p, 1)
    cuCtxGetDevice, cuStreamIsCapturing = _answer(ctypes.c_int, 0), _answer(ctypes.c_int, 0, place=1)
    cuStreamCreate = _answer(ctypes.c_void_p, CREATED_STREAM)

    def cuGetErrorString(self, given):
        given.result(1, ctypes.c_void_p, ctypes.addressof(self.error))

    def cuDeviceGet(self, given):
        given.result(0, ctypes.c_int, 0)
        return SUCCESS if given.number(1) == 0 else INVALID_VALUE

    def cuDeviceGetAttribute(self, given):
        """By the numbers of CUdevice_attribute in cuda.h."""
        multiprocessors, shared = DEVICES[self.architecture]
        warp, registers, clock, memory_clock, bus_width = 32, 65536, 1_700_000, 2_600_000, 5120
        major, minor = divmod(self.architecture, 10)
        known = {
            10: warp, 12: registers, 13: clock, 16: multiprocessors, 36: memory_clock, 37: bus_width, 75: major,
            76: minor, 81: shared + 1024, 97: shared,
        }  # fmt: skip
        if given.number(1) not in known:
            return INVALID_VALUE
        given.result(0, ctypes.c_int, known[given.number(1)])
        return SUCCESS

    def cuCtxGetCurrent(self, given):
        given.result(0, ctypes.c_void_p, self.context)

    def cuCtxSetCurrent(self, given):
        self.context = given.address(0)

    def cuPointerGetAttribute(self, given):
        """Of the attributes only those of a device's address are asked for: the address itself, and which device."""
        address = given.unsigned(2)
        known = any(each.address <= address <= each.end for each in self.memory.allocations)
        if given.number(1) == ORDINAL:
            given.result(0, ctypes.c_int, 0)
        else:
            given.result(0, ctypes.c_uint64, address)
        return SUCCESS if known else INVALID_VALUE

    def cuModuleLoadData(self, given):
        image = ctypes.string_at(given.address(1))
        if not image.lstrip().startswith(b"//"):
            raise ValueError("the image of a module is no PTX")
        if image not in self.programs:
            self.programs[image] = Program(image.decode())
        self.functions.append(Function(self.programs[image]))
        given.result(0, ctypes.c_void_p, len(self.functions))

    def cuModuleGetFunction(self, given):
        number = given.address(1)
        name = ctypes.string_at(given.address(2)).decode()
        given.result(0, ctypes.c_void_p, number)
        return SUCCESS if self.functions[number - 1].program.kernel.name == name else INVALID_VALUE

    def cuFuncGetAttribute(self, given):
        kernel = self.functions[given.address(2) - 1].program.kernel
        known = {MAX_THREADS: kernel.threads or 1024, SHARED_BYTES: sum(kernel.shared.values()),
                 LOCAL_BYTES: kernel.local, REGISTERS: 255}  # fmt: skip
        given.result(0, ctypes.c_int, known[given.number(1)])

    def cuFuncSetAttribute(self, given):
        """More shared memory than 48 KiB, and clusters of 16; no larger shared memory than the device has."""
        if given.number(1) == DYNAMIC_SHARED:
            self.functions[given.address(0) - 1].allowed = given.number(2)
            return SUCCESS
        return SUCCESS if given.number(1) == NON_PORTABLE else NOT_SUPPORTED

    def cuMemcpyDtoDAsync_v2(self, given):
        ctypes.memmove(given.unsigned(0), given.unsigned(1), given.unsigned(2))

    cuMemcpyDtoH_v2 = cuMemcpyHtoD_v2 = cuMemcpyHtoDAsync_v2 = cuMemcpyDtoDAsync_v2

    def cuMemAllocHost_v2(self, given):
        array = np.empty(given.unsigned(1), np.uint8)
        self.pinned[array.ctypes.data] = array
        given.result(0, ctypes.c_void_p, array.ctypes.data)

    def cuMemFreeHost(self, given):
        del self.pinned[given.address(0)]

    def cuEventRecord(self, given):
        self.recorded.append(given.address(1))

    def cuMemsetD8Async(self, given):
        ctypes.memset(given.unsigned(0), given.number(1) & 0xFF, given.unsigned(2))

    def cuLaunchKernelEx(self, given):
        config = ctypes.cast(given.address(0), ctypes.POINTER(_Config)).contents
        function = self.functions[given.address(1) - 1]
        if config.shared > function.allowed:
            raise ValueError(f"{config.shared} bytes of shared memory, {function.allowed} are allowed")
        clusters = [each.value[0] for each in config.attributes[: config.count] if each.id == CLUSTER]
        values = values_of(function.program.kernel, given.address(2))
        check(function.program.kernel, function.source, values, self.memory)
        launch = Launch(
            function.program, tuple(config.grid), config.block[0], values, self.memory, config.shared,
            clusters[0] if clusters else 1, orders=self.orders,
        )  # fmt: skip
        launch.run()
        kernel = function.program.kernel.name
        self.launches.append(Done(kernel, tuple(config.grid), config.stream or 0, launch.sanitizer.checked))

    # --- what Triton knows of a kernel

    def watch(self, triton):
        """Keep what Triton compiled a kernel for beside the kernel, once it has loaded it."""
        kernels = triton.compiler.CompiledKernel
        load = kernels._init_handles

        def loaded(kernel):
            load(kernel)
            if kernel.function is not None:
                self.functions[kernel.function - 1].source = kernel.src

        kernels._init_handles = loaded


class _Arguments:
    """The arguments of a call, each behind a pointer."""

    def __init__(self, pointers):
        self.pointers = pointers

    def _at(self, place, kind):
        return ctypes.cast(self.pointers[place], ctypes.POINTER(kind)).contents.value

    def number(self, place):
        return self._at(place, ctypes.c_int)

    def unsigned(self, place):
        return self._at(place, ctypes.c_uint64)

    def address(self, place):
        return self._at(place, ctypes.c_void_p) or 0

    def result(self, place, kind, value):
        """Write where a pointer argument says."""
        ctypes.cast(self.address(place), ctypes.POINTER(kind)).contents.value = value
