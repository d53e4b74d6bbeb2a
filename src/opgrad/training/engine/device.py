"""A CUDA device that trains: its stream, arrays in its memory, and the engine's own kernels between runs of a session.

Everything is in the order of one stream, which sessions take from here. It is one for which CUDA's default stream
waits, so that copies to the host, onnxruntime's too, come after what was begun before.
"""

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from opgrad.base.locks import settling
from opgrad.cuda import PARTS, driver
from opgrad.cuda.without_triton import importing
from opgrad.onnxruntime.sessions import CUDA, lacking_cuda
from opgrad.training.files.artifact_set import AdamWRule, Rule

if TYPE_CHECKING:
    from opgrad.onnxruntime.device_plans import Pass

TYPE = "cuda"  # of memory, as onnxruntime calls it
ASSIGNED = "session.record_ep_graph_assignment_info"  # an option of sessions: which provider has a node


def opened(name: str) -> "Device | None":
    """The device of a name: None for "cpu".

    Raises NotImplementedError for another name, RuntimeError where onnxruntime or this machine have no such device.
    """
    kind, colon, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise NotImplementedError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:0'")
    if kind == "cpu":
        return None
    if CUDA not in onnxruntime.get_available_providers():
        problem = f"onnxruntime {onnxruntime.__version__} {lacking_cuda()}"
    elif not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        problem = f"onnxruntime {onnxruntime.__version__} does not tell where nodes run, expected 1.31 or newer"
    else:
        try:
            with settling:
                return _device(int(number or 0))
        except driver.DriverError as error:
            problem = f"{error}; expected an NVIDIA GPU of this number and its driver"
    raise RuntimeError(f"device is {name!r}, but {problem}; or device 'cpu'")


@functools.cache
def _device(number: int) -> "Device":
    return Device(number)


class Device:
    """A CUDA device by its number, with a context and a stream that stay for the life of the process."""

    def __init__(self, number: int):
        ordinal, self._context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(number))
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self.number = number
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(0))
        self.stream = stream.value or 0

    @property
    def providers(self) -> list[Any]:
        """What sessions are opened with: float32 is computed as such, on the stream."""
        options = {"device_id": str(self.number), "user_compute_stream": str(self.stream), "use_tf32": "0"}
        return [(CUDA, options)]

    def activate(self) -> None:
        """Make its context this thread's."""
        driver.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver with this device's context."""
        self.activate()
        driver.call(name, *arguments)

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32, value: Any = 0) -> "DeviceArray":
        """New memory that holds zeros, or a copy of an array."""
        size = max(math.prod(shape) * np.dtype(dtype).itemsize, 1)
        memory = onnxruntime.OrtValue.ortvalue_from_shape_and_type([size], np.uint8, TYPE, self.number)
        made = DeviceArray(self, shape, np.dtype(dtype), memory.data_ptr(), memory)
        made[...] = value
        return made

    def run(self, name: str, arrays: "Sequence[DeviceArray]", *options: Any) -> "Pass":
        """The pass of a function of opgrad.cuda.optimizer over these arrays; it keeps all but the first."""
        with importing():
            from opgrad.cuda import optimizer
            from opgrad.onnxruntime.device_plans import Pass
        self.activate()
        launches = getattr(optimizer, name)(arrays[0].size, *options)
        found = Pass(name, launches, [each.address for each in arrays], self.stream)
        found.kept = arrays[1:]
        return found

    def step(self, kernel: str, arrays: "Sequence[DeviceArray]", factors: np.ndarray, rule: Rule) -> Callable[[], None]:
        """An optimizer's step over arrays, which clips the gradients if the rule says so.

        factors: read in each step; see `opgrad.cpu.kernels.optimizer`.
        """
        more = self.array((1,)), self.array((PARTS,), np.float64)
        launches = self.run(kernel, (*arrays, *more), rule.max_norm is not None)
        numbers = {"most": rule.max_norm or 0.0}
        if isinstance(rule, AdamWRule):
            rates = {"alpha": rule.alpha, "beta": rule.beta}
            numbers |= rates | {f"rest_of_{name}": 1 - rate for name, rate in rates.items()}

        def step() -> None:
            rate, epsilon, before, after = map(float, factors[:4])
            self.activate()
            launches(**numbers, rate=rate, epsilon=epsilon, before=before, after=after)

        return step


class DeviceArray:
    """An array in a device's memory, with what the engine does to NumPy's arrays: `x[...] = y`, `x *= 2`, `x += y`.

    Arithmetic is for float32 in one dimension. `np.asarray` copies to the host, after all that was begun before.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: "np.dtype[Any]", address: int, owner: Any):
        self.device, self.shape, self.dtype, self.address, self.owner = device, shape, dtype, address, owner
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self._passes: dict[tuple[str, ...], Pass] = {}

    def part(self, start: int, shape: tuple[int, ...]) -> "DeviceArray":
        """The elements from a number on, in a shape, in the same memory."""
        return DeviceArray(self.device, shape, self.dtype, self.address + start * self.dtype.itemsize, self.owner)

    def read(self) -> np.ndarray:
        """A copy in the host's memory, which cannot be written."""
        found = np.asarray(self)
        found.flags.writeable = False
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        if host.size:
            self.device.call("cuMemcpyDtoH_v2", _pointer(host), ctypes.c_uint64(self.address), _size(self))
        return host if dtype is None else host.astype(dtype)

    def __setitem__(self, every: Any, value: "DeviceArray | np.ndarray | int") -> None:
        """Copy an array of the same shape and dtype, or set all elements to 0."""
        stream, address = ctypes.c_void_p(self.device.stream), ctypes.c_uint64(self.address)
        if not self.size:
            return
        if isinstance(value, DeviceArray):
            self.device.call(driver.COPY, address, ctypes.c_uint64(value.address), _size(self), stream)
        elif isinstance(value, np.ndarray):
            host = np.ascontiguousarray(value, self.dtype)
            self.device.call("cuMemcpyHtoD_v2", address, _pointer(host), _size(self))
        else:
            self.device.call(driver.SET, address, ctypes.c_ubyte(0), _size(self), stream)

    def __imul__(self, factor: float) -> "DeviceArray":
        self._launch("scale", factor=float(factor))
        return self

    def __iadd__(self, other: "DeviceArray") -> "DeviceArray":
        self._launch("add", other)
        return self

    def _launch(self, name: str, *others: "DeviceArray", **numbers: float) -> None:
        key = name, *(str(each.address) for each in others)
        if key not in self._passes:
            self._passes[key] = self.device.run(name, (self, *others))
        self.device.activate()
        self._passes[key](**numbers)


class Staging:
    """The memory of an input of a session, and two pieces of the host's, from which it is filled in turn.

    So a batch can be written while the one before it is copied.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: "np.dtype[Any]"):
        self.array, self._device, self._is_filled = device.array(shape, dtype), device, False
        self._places = [_pinned(self.array), _pinned(self.array)]

    def to_fill(self) -> np.ndarray:
        """The memory to write a batch into, when its last batch has been copied."""
        host, copied = self._places[0]
        self._device.call("cuEventSynchronize", copied)
        self._is_filled = True
        return host

    def send(self) -> None:
        """Begin to copy what was written, if something was."""
        if self._is_filled:
            host, copied = self._places[0]
            stream, to = ctypes.c_void_p(self._device.stream), ctypes.c_uint64(self.array.address)
            if host.size:
                self._device.call("cuMemcpyHtoDAsync_v2", to, _pointer(host), _size(self.array), stream)
            self._device.call("cuEventRecord", copied, stream)
            self._places.reverse()
            self._is_filled = False


def _pinned(like: DeviceArray) -> tuple[np.ndarray, ctypes.c_void_p]:
    """Memory of the host that a device reads while the host goes on, and an event, of its having been read."""
    call, size, memory, event = like.device.call, max(like.nbytes, 1), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuMemAllocHost_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))  # without times
    block = (ctypes.c_ubyte * size).from_address(memory.value or 0)
    for name, given in (("cuMemFreeHost", memory), ("cuEventDestroy_v2", event)):
        weakref.finalize(block, call, name, given).atexit = False
    return np.frombuffer(memoryview(block), np.uint8, like.nbytes).view(like.dtype).reshape(like.shape), event


def _pointer(host: np.ndarray) -> Any:
    return ctypes.c_void_p(host.ctypes.data)


def _size(array: DeviceArray) -> Any:
    return ctypes.c_size_t(array.nbytes)
