"""CheckpointState: the parameters, gradients, optimizer state and properties of a training."""

import numbers
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import onnxruntime

from opgrad.training.engine.memory import TrainingMemory
from opgrad.training.files import mapped_files
from opgrad.training.files.checkpoint import Checkpoint, in_float32, read_checkpoint, write_checkpoint

Property = int | float | str
T = TypeVar("T")


def _copy_into(target: np.ndarray, value: np.ndarray | onnxruntime.OrtValue, what: str) -> None:
    """Copy a value of the same dtype and shape to the target.

    what: the target's name, for messages.
    Raises TypeError for another type or dtype, ValueError for another shape.
    """
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{what} is {type(value).__name__}, expected a NumPy array of {target.dtype}")
    if value.dtype != target.dtype:
        raise TypeError(f"{what} is {value.dtype}, expected {target.dtype}")
    if value.shape != target.shape:
        raise ValueError(f"{what} has shape {value.shape}, expected {target.shape}")
    np.copyto(target, value)


class Parameter:
    """One parameter of a `CheckpointState`, which makes it."""

    def __init__(self, name: str, memory: TrainingMemory):
        self._name = name
        self._memory = memory

    @property
    def name(self) -> str:
        """The parameter's name in the graph."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """The values, as a view of the memory that the graph reads: writing into it changes the parameter."""
        found = self._memory.parameters.get(self._name)
        return self._memory.frozen[self._name] if found is None else found

    @data.setter
    def data(self, value: np.ndarray | onnxruntime.OrtValue) -> None:
        """Copy `value`, an array of the same dtype and shape. Raises TypeError, ValueError."""
        _copy_into(self.data, value, f"Parameter {self._name!r}: the value")

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient, a view of memory that runs write to; None for a frozen parameter, or without a `Module`."""
        return self._memory.gradients[self._name] if self._memory.bound and self.requires_grad else None

    @property
    def requires_grad(self) -> bool:
        """Whether the graph computes a gradient for it."""
        return self._name in self._memory.parameters

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class _Named(Generic[T]):
    """Values by name, which are listed in the order of the names; iterating gives pairs of name and value."""

    @property
    def _held(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> T:
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter(self.items())

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> list[str]:
        """The names."""
        return sorted(self._held)

    def values(self) -> list[T]:
        """The values, by name."""
        return [self[name] for name in self.keys()]

    def items(self) -> list[tuple[str, T]]:
        """Pairs of name and value, by name."""
        return [(name, self[name]) for name in self.keys()]


class Parameters(_Named[Parameter]):
    """The parameters of a `CheckpointState` by name."""

    def __init__(self, memory: TrainingMemory):
        self._memory = memory

    @property
    def _held(self) -> Mapping[str, Any]:
        return {**self._memory.parameters, **self._memory.frozen}

    def __getitem__(self, name: str) -> Parameter:
        """The parameter. Raises KeyError, and RuntimeError if the checkpoint is nominal and not filled yet."""
        if name not in self._memory.parameters and name not in self._memory.frozen:
            raise KeyError(f"Parameter {name} not found.")
        if self._memory.nominal:
            raise RuntimeError(
                f"CheckpointState: the parameter {name!r} has no value yet, the checkpoint is nominal; "
                "call Module.copy_buffer_to_parameters first"
            )
        return Parameter(name, self._memory)

    def __setitem__(self, name: str, value: np.ndarray | onnxruntime.OrtValue) -> None:
        """Copy `value`, an array of the parameter's dtype and shape; the next call of a module uses it.

        Raises KeyError, TypeError for another dtype, ValueError for another shape.
        """
        self[name].data = value

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self.keys())})"


class Properties(_Named[Property]):
    """Whole numbers, floats and strings by name, which are saved with the parameters."""

    def __init__(self, values: dict[str, Property]):
        self._values = {name: _property(name, value) for name, value in values.items()}

    @property
    def _held(self) -> Mapping[str, Any]:
        return self._values

    def __getitem__(self, name: str) -> Property:
        """The value. Raises KeyError."""
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        """Add or change a property: an int, float or str.

        A float is rounded to float32, as the file holds it; an int that int64 cannot hold becomes a float.
        Raises TypeError for other types, ValueError for a number that float32 cannot hold.
        """
        if not isinstance(name, str):
            raise TypeError(f"Properties: the name {name!r} is {type(name).__name__}, expected str")
        self._values[name] = _property(name, value)

    def __repr__(self) -> str:
        return f"Properties({dict(self.items())})"


def _property(name: str, value: Any) -> Property:
    """A property as the file will give it back."""
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral | np.bool_) and -(2**63) <= int(value) < 2**63:
        return int(value)
    return in_float32(f"Properties: {name!r}", value)


class CheckpointState:
    """The state of a training: parameters, their gradients, the optimizer's moments, properties.

    state: what a checkpoint file holds; `CheckpointState.load_checkpoint` reads one.
    Raises TypeError for anything else, NotImplementedError if a trainable parameter is not float32.
    """

    def __init__(self, state: Checkpoint):
        self._take(state, owned=False)

    def _take(self, state: Checkpoint, owned: bool) -> None:
        if not isinstance(state, Checkpoint):
            raise TypeError(f"CheckpointState: state is {type(state).__name__}, expected Checkpoint")
        take = mapped_files.own if owned else np.copy
        frozen = {name: take(array) for name, array in state.frozen.items()}
        self._memory = TrainingMemory("CheckpointState", replace(state, frozen=frozen), unchanged=owned)
        self._parameters = Parameters(self._memory)
        self._properties = Properties(state.properties)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> "CheckpointState":
        """Read a checkpoint file, complete or nominal, of onnxruntime-training or of `save_checkpoint`.

        checkpoint_uri: the file.
        Raises FileNotFoundError if there is none, ValueError if it is damaged or no checkpoint.
        """
        state = cls.__new__(cls)
        state._take(read_checkpoint(os.fspath(checkpoint_uri)), owned=True)
        return state

    @classmethod
    def save_checkpoint(
        cls, state: "CheckpointState", checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write a checkpoint file, which onnxruntime-training 1.19 opens too.

        state: what is written.
        checkpoint_uri: the file; what was there stays whole until the new file takes its place.
        include_optimizer_state: whether moments, step count and learning rate are written; without them a training
        cannot go on exactly where it stopped.
        Raises OSError if the file cannot be written.
        """
        if not isinstance(state, CheckpointState):
            raise TypeError(f"save_checkpoint: state is {type(state).__name__}, expected CheckpointState")
        checkpoint = state._memory.checkpoint(dict(state.properties.items()), include_optimizer_state)
        write_checkpoint(checkpoint, os.fspath(checkpoint_uri))

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The properties by name."""
        return self._properties
