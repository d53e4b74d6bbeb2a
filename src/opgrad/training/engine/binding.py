"""A session whose inputs and outputs are bound to fixed memory, and the checks of a call's inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from onnx.helper import tensor_dtype_to_np_dtype

from opgrad.onnx.graph.messages import FEW_BITS
from opgrad.onnxruntime import private
from opgrad.training.files.artifact_set import tensor_spec
from opgrad.training.files.dataset import TensorSpec, fits, show

# A smaller input is copied into the bound memory, which takes 0.3 to 2 µs; binding other memory takes 4 µs.
LARGEST_COPIED = 1 << 18
MOST_BUFFERS = 16  # the most buffers of an input, one for each shape of its batches
ANY_RANK = ("of any rank",)
# Types whose integers lie two in a byte, and all of those that are no dtypes of NumPy.
SHARING_BYTES = {f"tensor({onnx.TensorProto.DataType.Name(kind).lower()})": kind for kind in FEW_BITS}
UNKNOWN_TO_NUMPY = ("tensor(bfloat16)", *SHARING_BYTES)

Value: TypeAlias = Any  # np.ndarray | onnxruntime.OrtValue, which mypy does not know
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # by the names of inputs
FirstRun: TypeAlias = Callable[[Callable[[], Shapes]], AbstractContextManager[Any]]


class _ChangingInput:
    """An input that changes from call to call."""

    def __init__(self, spec: TensorSpec, binding: onnxruntime.IOBinding):
        self.spec = spec
        self._binding = binding
        self._buffers: dict[tuple[int, ...], np.ndarray] = {}
        self._shape: tuple[int, ...] | None = None  # the shape of the buffer that is bound
        self._buffer = np.empty(0)
        self.bound_shape: tuple[int, ...] = ()

    def set(self, value: Value) -> None:
        """Take the input of a call: a large array is bound as it is, a small one copied into bound memory."""
        if not isinstance(value, np.ndarray):
            self._binding.bind_ortvalue_input(self.spec.name, value)
            self._shape, self.bound_shape = None, tuple(value.shape())
            return
        is_plain = value.flags.c_contiguous and value.flags.aligned
        if value.shape != self._shape and value.nbytes > LARGEST_COPIED and is_plain:
            self._bind(value)
            self._shape = None
        else:
            np.copyto(self.buffer(value.shape), value)

    def buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read the input."""
        if shape != self._shape:
            if shape not in self._buffers:
                if len(self._buffers) == MOST_BUFFERS:
                    self._buffers.clear()
                self._buffers[shape] = np.empty(shape, self.spec.dtype)
            self._buffer = self._buffers[shape]
            self._bind(self._buffer)
            self._shape = shape
        return self._buffer

    def _bind(self, array: np.ndarray) -> None:
        self.bound_shape = array.shape
        self._binding.bind_input(self.spec.name, "cpu", 0, _kind(array), array.shape, array.ctypes.data)


class BoundGraph:
    """A session that reads and writes fixed memory, except for the inputs and outputs of a call.

    fixed: the memory of inputs, by name; all other inputs are those of a call.
    written: the memory of outputs, by name.
    outputs: names of the outputs that a call returns.
    who: the caller, and the name of the model, for messages.
    first: a context manager around the first run. It is called with a function that returns the inputs' shapes, and
    its value is the options of that run.

    inputs: the specifications of a call's inputs, in the graph's order.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        fixed: Mapping[str, np.ndarray],
        written: Mapping[str, np.ndarray],
        who: str,
        first: FirstRun | None = None,
    ):
        self._first, self._who = first, who
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._session = session
        self._fixed, self._written = dict(fixed), dict(written)  # keeps the memory alive
        self._binding = session.io_binding()
        self._slots = [_ChangingInput(spec, self._binding) for spec in self.inputs]
        self._known = {item.name: item for item in session.get_inputs()}
        for name, array in self._fixed.items():
            self.replace(name, array)
        for name, array in self._written.items():
            self._bind_output(name, array)
        self._scalars = {spec.name: np.zeros((), spec.dtype) for spec in self.outputs if spec.shape == ()}
        for name, array in self._scalars.items():
            self._bind_output(name, array)
        self._others = [spec.name for spec in self.outputs if spec.name not in self._scalars]

    def replace(self, name: str, array: np.ndarray) -> None:
        """Bind other memory to a fixed input."""
        self._fixed[name] = array
        if name in self._known:
            _bind(self._binding, self._known[name], array)

    def _bind_output(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def buffer(self, place: int, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read an input; to be filled before `run`."""
        return self._slots[place].buffer(shape)

    def __call__(self, values: Sequence[Value] | None = None) -> "BoundGraph":
        """Run the graph on the inputs of a call, or for None on what is in their memory; returns the graph.

        Raises what `run_error` tells.
        """
        for slot, value in zip(self._slots, values, strict=True) if values is not None else ():
            slot.set(value)
        for name in self._others:  # bound anew, so that no run writes into results that a caller still holds
            self._binding.bind_output(name, "cpu")
        try:
            if self._first is None:
                self._session.run_with_iobinding(self._binding)
            else:
                fixed = {name: array.shape for name, array in self._fixed.items()}
                with self._first(lambda: fixed | {slot.spec.name: slot.bound_shape for slot in self._slots}) as options:
                    self._session.run_with_iobinding(self._binding, options)
                self._first = None
        except Exception as error:
            raise run_error(error, self._who) from None
        return self

    @property
    def loss(self) -> float:
        """The first result of the last run."""
        array = self._scalars.get(self.outputs[0].name)
        return float((self.results()[0] if array is None else array).item())

    def results(self) -> list[np.ndarray]:
        """The outputs of the last run, in memory that belongs to the caller."""
        if not self._others:
            return [array.copy() for array in self._scalars.values()]
        return [value.numpy() for value in self.ort_results()]

    def ort_results(self) -> list[onnxruntime.OrtValue]:
        """The same as OrtValues."""
        names = [*self._written, *self._scalars, *self._others]  # in the order in which they were bound
        found = dict(zip(names, self._binding.get_outputs(), strict=True)) if self._others else {}
        for name, array in self._scalars.items():
            found[name] = ort_value(array)
        return [found[spec.name] for spec in self.outputs]


def declared(value: onnx.ValueInfoProto) -> TensorSpec:
    """The name, dtype and shape that a graph declares for a tensor; the shape is `ANY_RANK` if it declares none."""
    spec = tensor_spec(value)
    return spec if value.type.tensor_type.HasField("shape") else replace(spec, shape=ANY_RANK)


def check_inputs(specs: Sequence[TensorSpec], values: Sequence[Value], who: str) -> None:
    """Raise TypeError or ValueError unless the values have the dtypes and shapes that the graph declares."""
    for spec, value in zip(specs, values, strict=True):
        if isinstance(value, np.ndarray):
            dtype, shape = value.dtype, value.shape
        else:
            dtype, shape = np.dtype(tensor_dtype_to_np_dtype(value.element_type())), tuple(value.shape())
        if dtype != spec.dtype:
            raise TypeError(f"{who}: {spec.name} is {dtype}, expected {spec.dtype}")
        if spec.shape != ANY_RANK and not fits(shape, spec.shape):
            raise ValueError(f"{who}: {spec.name} has shape {shape}, expected {show(spec.shape)}")


def _kind(array: np.ndarray) -> Any:
    """The dtype of an array as onnxruntime takes it, which knows bfloat16 by ONNX's number alone."""
    return onnx.TensorProto.BFLOAT16 if array.dtype.name == "bfloat16" else array.dtype


def _bind(binding: onnxruntime.IOBinding, declared: Any, array: np.ndarray) -> None:
    """Bind an array to an input, as a session declares it: bytes to integers of which two lie in one.

    Raises ValueError if there are not as many bytes as these take.
    """
    kind, shape = _kind(array), array.shape
    if array.dtype == np.uint8 and declared.type in SHARING_BYTES:
        kind, shape = SHARING_BYTES[declared.type], declared.shape
        if not all(isinstance(size, int) for size in shape) or array.nbytes != -(-math.prod(shape) // 2):
            raise ValueError(f"{declared.name} has {array.nbytes} bytes, expected those of {declared.type} {shape}")
    binding.bind_input(declared.name, "cpu", 0, kind, shape, array.ctypes.data)


def borrowed(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue of an array, which must outlive it; bfloat16, which is no dtype of NumPy's own, goes by its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def run_error(error: Exception, who: str) -> Exception:
    """The exception to raise for a run that failed: ValueError if a kernel refused values or shapes."""
    kind = ValueError if private.node_refused(error) or type(error).__name__ == "InvalidArgument" else RuntimeError
    return kind(f"{who}: {private.reason(error)}")


def run(
    session: onnxruntime.InferenceSession, wanted: Sequence[str] | None, feeds: Mapping[str, np.ndarray], who: str
) -> list[np.ndarray]:
    """Run a session as its own `run` does, which takes no array of bfloat16, and none of two integers in a byte.

    who: the caller, and the name of the model, for messages. Raises what `run_error` tells.
    """
    try:
        return _run(session, wanted, feeds)
    except Exception as error:
        raise run_error(error, who) from None


def _run(
    session: onnxruntime.InferenceSession, wanted: Sequence[str] | None, feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    declared = [each for each in session.get_inputs() if each.name in feeds]
    if all(each.type not in UNKNOWN_TO_NUMPY for each in declared):
        found: list[np.ndarray] = session.run(wanted, feeds)
        return found
    binding, held = session.io_binding(), {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    for each in declared:
        _bind(binding, each, held[each.name])
    for name in wanted or [each.name for each in session.get_outputs()]:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    return [each.numpy() for each in binding.get_outputs()]


def ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of the array.

    It owns its memory. If it borrowed the array's, the array that its `numpy()` returns would dangle after the
    OrtValue is freed.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(array)
    return value
