"""A training graph with its parameters, gradients and batch bound to fixed memory."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnxruntime

from opgrad.onnxruntime import InferenceSession
from opgrad.training.artifacts import BUFFER_SUFFIX, RESET, ArtifactSet, TensorSpec


class FlatTensors(Mapping[str, np.ndarray]):
    """Named float32 arrays that lie one behind the other in one array.

    flat: float32 [n], the memory of all of them; each named array is a view of it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()]
        ends = np.cumsum(sizes, dtype=np.int64)
        self.flat = np.zeros(sum(sizes), np.float32)
        parts = np.split(self.flat, ends[:-1]) if sizes else []
        self._views = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class GradientGraph:
    """Computes loss and gradients of a batch.

    parameters, gradients: the trainable ones, by name; the graph reads and writes this very memory.
    frozen: the other parameters.
    """

    def __init__(self, artifacts: ArtifactSet, options: onnxruntime.SessionOptions):
        for name, array in artifacts.trainable.items():
            if array.dtype != np.float32:
                raise NotImplementedError(f"Trainer: {name} has dtype {array.dtype}, expected float32")
        shapes = {name: array.shape for name, array in artifacts.trainable.items()}
        self.parameters, self.gradients = FlatTensors(shapes), FlatTensors(shapes)
        for name, array in artifacts.trainable.items():
            self.parameters[name][...] = array
        self.frozen = {name: np.array(array, order="C") for name, array in artifacts.frozen.items()}
        self._batch: dict[str, np.ndarray] = {}
        self._loss = np.zeros((), np.float32)
        self._reset = np.ones(1, np.bool_)
        self._session = InferenceSession(artifacts.training_model, options)
        self._binding = self._session.io_binding()
        self._bind(artifacts.loss)

    def _bind(self, loss: str) -> None:
        for name, array in (*self.parameters.items(), *self.frozen.items()):
            self._bind_input(name, array)
        for name, array in self.gradients.items():
            self._bind_input(name + BUFFER_SUFFIX, array)
        self._bind_input(RESET, self._reset)
        for output in self._session.get_outputs():
            if output.name == loss:
                self._binding.bind_output(loss, "cpu", 0, np.float32, (), self._loss.ctypes.data)
            else:
                self._binding.bind_output(output.name, "cpu")

    def _bind_input(self, name: str, array: np.ndarray) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def batch(self, spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read an input; to be filled before `run`."""
        array = self._batch.get(spec.name)
        if array is None or array.shape != shape:
            array = self._batch[spec.name] = np.empty(shape, spec.dtype)
            self._bind_input(spec.name, array)
        return array

    def run(self) -> float:
        """Compute the loss and overwrite the gradients."""
        self._session.run_with_iobinding(self._binding)
        return float(self._loss)
