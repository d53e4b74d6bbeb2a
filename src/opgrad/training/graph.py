"""Graphs with parameters, gradients and results bound to fixed memory."""

import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx.helper import tensor_dtype_to_np_dtype

from opgrad.onnxruntime import InferenceSession
from opgrad.training import rewriting
from opgrad.training.artifacts import BUFFER_SUFFIX, RESET, TensorSpec, tensor_spec
from opgrad.training.data import fits, show
from opgrad.training.tensors import FlatTensors

# A smaller input is copied to where the graph reads it: 0.3 to 2 µs, against 4 for telling it another place.
LARGEST_COPIED = 1 << 18
MOST_BUFFERS = 16  # an input has, for batches of different shapes
UNKNOWN_OPERATOR = re.compile(r"(\S+)\(-?\d+\) is not a registered function/op|find an implementation for (\S+)\(")

Source: TypeAlias = str | bytes | PathLike[str]
Value: TypeAlias = Any  # np.ndarray | onnxruntime.OrtValue, which mypy does not know


def read_model(source: Source, who: str) -> onnx.ModelProto:
    """An ONNX model from a file or from its bytes.

    who: the caller, for messages.
    Raises FileNotFoundError if there is no such file, ValueError if it is no ONNX model.
    """
    name = "the model" if isinstance(source, bytes) else str(fspath(source))
    try:
        if isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        elif Path(source).exists():
            model = onnx.load(fspath(source))
        else:
            raise FileNotFoundError(f"{who}: there is no file {name}")
    except DecodeError:
        raise ValueError(f"{who}: {name} is no ONNX model, or damaged") from None
    if not model.graph.node and not model.graph.output:
        raise ValueError(f"{who}: {name} is no ONNX model, or empty")
    return model


def open_session(model: onnx.ModelProto, options: onnxruntime.SessionOptions, who: str) -> onnxruntime.InferenceSession:
    """A session with opgrad's operators.

    Raises NotImplementedError, which names the operator, if neither onnxruntime nor opgrad has it, and ValueError if
    onnxruntime finds the model wrong.
    """
    try:
        return InferenceSession(model.SerializeToString(), options)
    except Exception as error:
        if found := UNKNOWN_OPERATOR.search(str(error)):
            operator = found[1] or found[2]
            lack = f"{who}: the graph has the operator {operator}, which neither onnxruntime nor opgrad has"
            raise NotImplementedError(lack) from None
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise ValueError(f"{who}: onnxruntime cannot load the graph: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What an exception of onnxruntime says, without where in its source."""
    return str(error).rpartition("Status Message: ")[2].rpartition("[ONNXRuntimeError] : ")[2].strip()


class _Input:
    """An input that changes from call to call."""

    def __init__(self, spec: TensorSpec, binding: onnxruntime.IOBinding):
        self.spec = spec
        self._binding = binding
        self._buffers: dict[tuple[int, ...], np.ndarray] = {}
        self._shape: tuple[int, ...] | None = None  # of the buffer that is bound
        self._buffer = np.empty(0)

    def set(self, array: np.ndarray) -> None:
        if array.shape != self._shape:
            if array.nbytes > LARGEST_COPIED and array.flags.c_contiguous and array.flags.aligned:
                self._bind(array)
                self._shape = None
                return
            self._use_buffer(array.shape)
        np.copyto(self._buffer, array)

    def buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read the input."""
        if shape != self._shape:
            self._use_buffer(shape)
        return self._buffer

    def set_value(self, value: onnxruntime.OrtValue) -> None:
        self._binding.bind_ortvalue_input(self.spec.name, value)
        self._shape = None

    def _use_buffer(self, shape: tuple[int, ...]) -> None:
        buffer = self._buffers.get(shape)
        if buffer is None:
            if len(self._buffers) == MOST_BUFFERS:
                self._buffers.clear()
            buffer = self._buffers[shape] = np.empty(shape, self.spec.dtype)
        self._bind(buffer)
        self._buffer, self._shape = buffer, shape

    def _bind(self, array: np.ndarray) -> None:
        self._binding.bind_input(self.spec.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class BoundGraph:
    """A session that reads and writes fixed memory, but for the inputs and outputs of a call.

    fixed: the memory of inputs, by name; the others are those of a call.
    written: the memory of outputs, by name.
    outputs: names of the outputs that a call returns.

    inputs: what the inputs of a call are, in the graph's order.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        fixed: Mapping[str, np.ndarray],
        written: Mapping[str, np.ndarray],
    ):
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._session = session
        self._fixed, self._written = dict(fixed), dict(written)  # keeps the memory alive
        self._binding = session.io_binding()
        self._slots = [_Input(spec, self._binding) for spec in self.inputs]
        known = {item.name for item in session.get_inputs()}
        for name, array in self._fixed.items():
            if name in known:
                self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in self._written.items():
            self._bind_output(name, array)
        self._scalars = {spec.name: np.zeros((), spec.dtype) for spec in self.outputs if spec.shape == ()}
        for name, array in self._scalars.items():
            self._bind_output(name, array)
        self._others = [spec.name for spec in self.outputs if spec.name not in self._scalars]

    def _bind_output(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def buffer(self, place: int, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read an input; to be filled before `run`."""
        return self._slots[place].buffer(shape)

    def __call__(self, values: Sequence[Value]) -> None:
        """Run the graph on the inputs of a call."""
        for slot, value in zip(self._slots, values, strict=True):
            if isinstance(value, np.ndarray):
                slot.set(value)
            else:
                slot.set_value(value)
        self.run()

    def run(self) -> None:
        """Run the graph on what is in the inputs' memory."""
        for name in self._others:  # anew, so that the next run does not write into what a caller has kept
            self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)

    @property
    def loss(self) -> float:
        """The first result of the last run."""
        return float(self._scalars[self.outputs[0].name])

    def results(self) -> list[np.ndarray]:
        """The outputs of the last run, memory of the caller's own."""
        if not self._others:
            return [array.copy() for array in self._scalars.values()]
        return [value.numpy() for value in self.ort_results()]

    def ort_results(self) -> list[onnxruntime.OrtValue]:
        """The same as OrtValues."""
        found = dict(zip(self._binding_names(), self._binding.get_outputs(), strict=True)) if self._others else {}
        for name, array in self._scalars.items():
            found[name] = ort_value(array)
        return [found[spec.name] for spec in self.outputs]

    def _binding_names(self) -> list[str]:
        return [*self._written, *self._scalars, *self._others]


def check_inputs(specs: Sequence[TensorSpec], values: Sequence[Value], who: str) -> None:
    """Raise TypeError or ValueError unless the values have the dtypes and shapes that the graph declares."""
    for spec, value in zip(specs, values, strict=True):
        if isinstance(value, np.ndarray):
            dtype, shape = value.dtype, value.shape
        else:
            dtype, shape = np.dtype(tensor_dtype_to_np_dtype(value.element_type())), tuple(value.shape())
        if dtype != spec.dtype:
            raise TypeError(f"{who}: {spec.name} is {dtype}, expected {spec.dtype}")
        if not fits(shape, spec.shape):
            raise ValueError(f"{who}: {spec.name} has shape {shape}, expected {show(spec.shape)}")


def ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of the array.

    It owns its memory. One that borrows an array's would leave what its `numpy()` returns without memory when it goes.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(array)
    return value


def run_error(error: Exception, who: str) -> Exception:
    """The exception for a run that onnxruntime ended: ValueError where a kernel refused values or shapes."""
    refused = "while running" in str(error) and "alloc" not in str(error)
    kind = ValueError if refused or type(error).__name__ == "InvalidArgument" else RuntimeError
    return kind(f"{who}: {_reason(error)}")


class TrainingGraph:
    """Computes loss and gradients of a batch.

    model: the training graph.
    parameters, gradients: the trainable ones by name; the graph reads and writes this very memory.
    frozen: the other parameters.
    options: onnxruntime's session options.

    inputs, outputs: of a call, in the graph's order.
    reset: whether the next run overwrites the gradients; otherwise it adds to them.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        parameters: Mapping[str, np.ndarray],
        frozen: Mapping[str, np.ndarray],
        gradients: FlatTensors,
        options: onnxruntime.SessionOptions,
        who: str,
    ):
        buffers = {name + BUFFER_SUFFIX: array for name, array in gradients.items()}
        fixed = {**parameters, **frozen, **buffers, RESET: np.zeros(1, np.bool_)}
        flags = {node.output[0] for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2"}
        self.inputs = tuple(tensor_spec(value) for value in model.graph.input if value.name not in fixed)
        self.outputs = tuple(tensor_spec(value) for value in model.graph.output if value.name not in flags)
        self.reset = True
        self._flag, self._fixed, self._gradients = fixed[RESET], fixed, gradients
        self._options, self._who = options, who
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        rewriting.fuse_losses(self._model)
        self._adding: BoundGraph | None = None
        self._overwriting = self._open_overwriting() or self._open_adding()

    def _open_overwriting(self) -> BoundGraph | None:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        names = rewriting.overwriting(model)
        if names is None:
            return None
        written = {output: self._gradients[name] for name, output in names.items()}
        session = open_session(model, self._options, self._who)
        return BoundGraph(session, self.inputs, self.outputs, self._fixed, written)

    def _open_adding(self) -> BoundGraph:
        session = open_session(self._model, self._options, self._who)
        self._adding = BoundGraph(session, self.inputs, self.outputs, self._fixed, {})
        return self._adding

    @property
    def bound(self) -> BoundGraph:
        """The graph of the next run."""
        return self._overwriting if self.reset else self._adding or self._open_adding()

    def run(self, values: Sequence[Value] | None = None) -> BoundGraph:
        """Compute outputs and gradients; `results` of what is returned are the outputs.

        values: the inputs of a call; None: those that were written to `bound.buffer`.
        """
        bound = self.bound
        self._flag[0] = self.reset
        if values is None:
            bound.run()
        else:
            bound(values)
        self.reset = False
        return bound


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Options for so many threads, with which onnxruntime logs nothing that its exceptions say anyway."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return options
