"""The interface of onnxruntime.training.api: Module, Optimizer, LinearLRScheduler and CheckpointState."""

import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import onnx
import onnxruntime

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming
from opgrad.cpu.runtime.threads import get_num_threads
from opgrad.onnx.graph.conversion import compute_in_float32, evaluating, in_float32, is_half, written_inputs
from opgrad.onnx.graph.loading import Source, name_of, read_model
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.training.engine.device import opened
from opgrad.training.engine.distributed import OneProcess, Processes
from opgrad.training.engine.export import declared_outputs, export_model
from opgrad.training.engine.memory import Flat, FlatOptimizer, GradientNorm, TrainingMemory, clip_factor, zeros_like
from opgrad.training.engine.training_graph import BoundGraph, Value, check_inputs, declared, open_training, ort_value
from opgrad.training.engine.training_graph import session_options as options_for
from opgrad.training.files import artifact_set, mapped_files
from opgrad.training.files.checkpoint import Checkpoint, as_float32, read_checkpoint, write_checkpoint
from opgrad.training.files.dataset import TensorSpec, fits
from opgrad.training.files.tensor_values import read_shared

Property = int | float | str
T = TypeVar("T")


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
        """The values, as a view of the memory that the graph reads: writing into it changes the parameter.

        From a device they are copied, and cannot be written into.
        """
        found = self._memory.parameters.get(self._name)
        return self._memory.frozen[self._name] if found is None else found

    @data.setter
    def data(self, value: np.ndarray | onnxruntime.OrtValue) -> None:
        """Copy `value`, an array of the same dtype and shape. Raises TypeError, ValueError."""
        target, what = self.data, f"Parameter {self._name!r}: the value"
        if isinstance(value, onnxruntime.OrtValue):
            value = value.numpy()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{what} is {type(value).__name__}, expected a NumPy array of {target.dtype}")
        if value.dtype != target.dtype:
            raise TypeError(f"{what} is {value.dtype}, expected {target.dtype}")
        if value.shape != target.shape:
            raise ValueError(f"{what} has shape {value.shape}, expected {target.shape}")
        self._memory.write(self._name, value)

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
    return as_float32(f"Properties: {name!r}", value)


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
        self._memory = TrainingMemory(replace(state, frozen=frozen), unchanged=owned)
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


class Module:
    """Trains and evaluates the model of training artifacts.

    train_model_uri: the file of the training graph, or its bytes.
    state: the parameters; the module reads and changes them in place. Those that it changes are float32: a graph in
    float16 or bfloat16 computes in float32, and the exported model stores them in its own types.
    eval_model_uri: the file of the eval graph, or its bytes; needed for evaluation and export.
    device: "cpu", or "cuda" (also "cuda:1") for an NVIDIA GPU with onnxruntime-gpu, where the state's parameters and
    gradients stay: what reads one gets a copy that cannot be written, giving one a value copies it there. Calls with
    OrtValues return OrtValues of the device, without waiting for them.
    session_options: onnxruntime's; by default as many threads as `opgrad.get_num_threads()` says.
    process_group: a group of torch.distributed with a backend for the CPU such as gloo. Its processes train the same
    model, each on its own batches. All begin with the parameters of the first process, and before a step, or before
    gradients are clipped, every gradient is averaged over the processes. None: this process trains alone.
    fuse: whether nodes such as the loss and its gradient are fused into one; see `opgrad inspect`.

    training: whether a call trains (True at first) or evaluates.

    Raises FileNotFoundError if there is no such file; ValueError if it is no model, no training graph, or the
    checkpoint belongs to another model; NotImplementedError for another device, for what does not train on a device (a
    process group, batch normalization that updates statistics, frozen weights of 8 bits or fewer), and for an operator
    that neither onnxruntime nor opgrad has, which it names; RuntimeError where there is no such device.
    """

    training: bool

    @naming("Module")
    def __init__(
        self,
        train_model_uri: Source,
        state: CheckpointState,
        eval_model_uri: Source | None = None,
        device: str = "cpu",
        session_options: onnxruntime.SessionOptions | None = None,
        process_group: Any = None,
        *,
        fuse: bool = True,
    ) -> None:
        on = opened(device)
        if on is not None and process_group is not None:
            raise NotImplementedError(f"device is {device!r}, expected 'cpu' with a process_group")
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is {type(state).__name__}, expected CheckpointState")
        model, constants = read_shared(train_model_uri)
        self._eval_model: onnx.ModelProto | None = None
        self._constants = constants
        options = options_for(get_num_threads()) if session_options is None else session_options
        self.training = True
        self._state, self._memory = state, state._memory
        memory, title = self._memory, name_of(train_model_uri)
        _fit(model.graph, memory)
        if on is not None and memory.device is None:
            memory.move(on, written_inputs(model.graph))
        if memory.device is not on:
            raise ValueError(f"device is {device!r}, expected that of the module which the state has already")
        gradients = artifact_set.without_accumulators(model, title)
        compute_in_float32(model, {*memory.parameters, *written_inputs(model.graph)})
        self._graph = open_training(model, gradients, memory, constants, options, title, fuse)
        self._eval_graph = None
        if eval_model_uri is not None:
            self._eval_model, of_eval = read_shared(eval_model_uri)
            evaluating(self._eval_model)
            self._constants = {**constants, **of_eval}
            evaluated, fixed = copied(self._eval_model), {**memory.operands, **of_eval}
            compute_in_float32(evaluated, {name for name, each in fixed.items() if each.dtype == np.float32})
            use_internal_losses(evaluated)
            inputs = [declared(value) for value in evaluated.graph.input if value.name not in fixed]
            outputs = [declared(value) for value in evaluated.graph.output]
            title = name_of(eval_model_uri)
            self._eval_graph = BoundGraph(evaluated, options, title, inputs, outputs, fixed, {}, on)
        held = memory.parameters.keys() | memory.frozen.keys()
        self._order = [value.name for value in model.graph.input if value.name in held]
        self._norm: GradientNorm | None = None
        self._processes = OneProcess() if process_group is None else self._joined(process_group)
        self._overwrites = True  # whether the next gradients replace the present ones; else they are added to them
        self._before: Flat = np.empty(0, np.float32)  # gradients of the batches before, while others are added to them
        self._reduced = True  # whether the gradients are averaged over all processes, or there are none yet
        memory.bound = True

    def _joined(self, group: Any) -> Processes:
        """The processes of a group; all of them get the parameters of the first one."""
        processes = Processes(group)
        if not self._memory.nominal:
            processes.from_first(self._memory.parameters.flat)
            for name in sorted(self._memory.frozen):
                processes.from_first(self._memory.frozen[name])
        return processes

    # --- calls ---

    @naming("Module")
    def __call__(self, *user_inputs: Any) -> Any:
        """Run one batch through the training or the eval graph.

        user_inputs: a NumPy array or an OrtValue for every name in `input_names()`, of the graph's dtype. Lists beside
            arrays are converted.
        Returns the values of `output_names()`, one alone or several as a tuple: OrtValues if all inputs are, else
        NumPy arrays. In training mode it adds to the gradients, or overwrites them in the first call and the first
        after `lazy_reset_grad`.
        Raises ValueError for the wrong number of inputs, shapes, or values that an operator refuses; TypeError for
        dtypes; RuntimeError without an eval graph in evaluation mode, and for a nominal checkpoint without values.
        """
        training, bound = self.training, self._present_graph()
        values, as_ort = self._take(user_inputs, bound.inputs)
        if training and not self._overwrites:
            self._add(values)
        else:
            bound(values)
        self._overwrites &= not training
        self._memory.computed |= training
        self._reduced &= not training
        results = bound.ort_results() if as_ort else bound.results()
        return results[0] if len(results) == 1 else tuple(results)

    def _add(self, values: Sequence[Value]) -> None:
        """Run the training graph, and add its gradients to the present ones, which stay as they are after an error."""
        flat = self._memory.gradients.flat
        if self._before.shape != flat.shape:
            self._before = zeros_like(flat)
        self._before[...] = flat
        try:
            self._graph(values)
        except BaseException:
            flat[...] = self._before
            raise
        flat += self._before

    def _take(self, user_inputs: Sequence[Any], specs: Sequence[TensorSpec]) -> tuple[Sequence[Value], bool]:
        """The inputs as the graph takes them, and whether all of them are OrtValues."""
        if all(map(_is_as_declared, user_inputs, specs)) and len(user_inputs) == len(specs):  # the usual case, in 1 us
            return user_inputs, False
        if len(user_inputs) != len(specs):
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(f"{len(user_inputs)} inputs, expected {len(specs)}: {names}")
        values = [_value(value, spec) for value, spec in zip(user_inputs, specs, strict=True)]
        check_inputs(specs, values)
        return values, {type(value) for value in user_inputs} == {onnxruntime.OrtValue}

    def _present_graph(self) -> BoundGraph:
        """The graph of the present mode. Raises RuntimeError if no call is possible."""
        if self._memory.nominal:
            raise RuntimeError(
                "the parameters have no values yet, the checkpoint is nominal; "
                "call copy_buffer_to_parameters(buffer, trainable_only=False) first"
            )
        if self.training:
            return self._graph
        if self._eval_graph is None:
            raise RuntimeError("there is no eval graph, expected eval_model_uri when the module is made")
        return self._eval_graph

    def train(self, mode: bool = True) -> "Module":
        """Make calls train (True) or evaluate (False). Returns the module."""
        self.training = mode
        return self

    def eval(self) -> "Module":
        """Make calls evaluate. Returns the module."""
        return self.train(False)

    def input_names(self) -> list[str]:
        """The names of a call's inputs in the present mode, in order; none without an eval graph."""
        graph = self._graph if self.training else self._eval_graph
        return [] if graph is None else [spec.name for spec in graph.inputs]

    def output_names(self) -> list[str]:
        """The names of a call's results in the present mode, in order; none without an eval graph."""
        graph = self._graph if self.training else self._eval_graph
        return [] if graph is None else [spec.name for spec in graph.outputs]

    # --- gradients ---

    def lazy_reset_grad(self) -> None:
        """Make the next call in training mode overwrite the gradients; until then they stay as they are."""
        self._overwrites = True

    @property
    def gradients(self) -> Mapping[str, np.ndarray]:
        """The gradients by the names of the parameters, views of live memory."""
        return self._memory.gradients

    def reduce_gradients(self) -> None:
        """Average every gradient over the processes; do nothing without a process group, or if that was done already.

        `Optimizer.step` and `clip_grad_norm` do it. All processes of the group have to call.
        """
        if self._processes.is_group and not self._reduced:
            flat = self._memory.gradients.flat
            flat *= np.float32(1 / self._processes.size)
            self._processes.add(flat)
            self._reduced = True

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their Euclidean norm, taken together, is at most `max_norm`.

        Returns the norm before. An optimizer model with InplaceClipGradNorm does the same in every step.
        """
        self.reduce_gradients()
        if self._norm is None:
            self._norm = GradientNorm(self._memory.gradients.flat)
        norm = self._norm.measure()
        factor = clip_factor(norm, max_norm)
        if factor != 1:
            self._memory.gradients.flat *= np.float32(factor)
        return norm

    # --- parameters ---

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """The number of elements of the trainable parameters, or of all."""
        return sum(array.size for array in self._parameters(trainable_only).values())

    @naming("Module.get_contiguous_parameters")
    def get_contiguous_parameters(self, trainable_only: bool = False) -> onnxruntime.OrtValue:
        """A copy of the parameters, one behind the other in the order of the training graph's inputs.

        trainable_only: whether the frozen ones are left out.
        Returns float32 [get_parameters_size(trainable_only)]. Raises TypeError if a parameter is not float32.
        """
        arrays = self._float_parameters(trainable_only)
        buffer = np.concatenate([np.empty(0, np.float32), *(np.asarray(each).reshape(-1) for each in arrays.values())])
        return ort_value(buffer)

    @naming("Module.copy_buffer_to_parameters")
    def copy_buffer_to_parameters(self, buffer: onnxruntime.OrtValue | np.ndarray, trainable_only: bool = True) -> None:
        """Set the parameters to the values of such a buffer; this makes a nominal checkpoint complete.

        buffer: float32 [get_parameters_size(trainable_only)], an OrtValue or an array.
        trainable_only: whether the frozen parameters are left out; False for a nominal checkpoint that has some.
        Raises TypeError or ValueError if it does not fit; nothing has changed then.
        """
        arrays = self._float_parameters(trainable_only)
        values = buffer.numpy() if hasattr(buffer, "numpy") else buffer
        size = sum(array.size for array in arrays.values())
        if not isinstance(values, np.ndarray) or values.dtype != np.float32:
            found = getattr(values, "dtype", type(values).__name__)
            raise ArgumentTypeError("buffer", f"is {found}, expected float32")
        if values.shape != (size,):
            raise ArgumentError("buffer", f"has shape {values.shape}, expected ({size},)")
        if self._memory.nominal and trainable_only and self._memory.frozen:
            raise ArgumentError("trainable_only", "is True, expected False: the checkpoint is nominal")
        start = 0
        for name, array in arrays.items():
            self._memory.write(name, values[start : start + array.size].reshape(array.shape))
            start += array.size
        self._memory.nominal = False

    def _parameters(self, trainable_only: bool) -> dict[str, Any]:
        """The parameters where they lie."""
        every = self._memory.parameters.operands if trainable_only else self._memory.operands
        return {name: every[name] for name in self._order if name in every}

    def _float_parameters(self, trainable_only: bool) -> dict[str, Any]:
        arrays = self._parameters(trainable_only)
        for array in arrays.values():
            if array.dtype != np.float32:
                raise TypeError(f"a frozen parameter is {array.dtype}, expected float32")
        return arrays

    # --- export ---

    @naming("Module.export_model_for_inferencing")
    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Iterable[str]
    ) -> None:
        """Write the eval graph up to some of its tensors as an ordinary ONNX model, with the parameters in it.

        inference_model_uri: the file; what was there stays whole until the new one takes its place.
        graph_output_names: the tensors that become the model's outputs.
        Raises ValueError if the eval graph has no such tensor, RuntimeError if the module has no eval graph or a
        nominal checkpoint no values.
        """
        source = self._eval_model
        if source is None:
            raise RuntimeError("there is no eval graph, expected eval_model_uri when the module is made")
        if self._memory.nominal:
            raise RuntimeError("the parameters have no values yet, the checkpoint is nominal")
        held = {**self._memory.parameters, **self._memory.frozen}
        parameters = {**self._constants, **{name: held[name] for name in sorted(held)}}
        outputs = declared_outputs(source, list(dict.fromkeys(graph_output_names)))
        export_model(source, source.graph.name or "inference", parameters, outputs, inference_model_uri)


def _fit(graph: onnx.GraphProto, memory: TrainingMemory) -> None:
    """Raise ValueError unless the state belongs to this training graph; give a nominal one the graph's shapes."""
    specs = {value.name: artifact_set.tensor_spec(value) for value in graph.input}
    if memory.nominal and not memory.bound and memory.parameters.keys() | memory.frozen.keys() <= specs.keys():
        memory.shape({name: _fixed(specs[name].shape) for name in memory.parameters})
        memory.frozen = {name: np.zeros(_fixed(specs[name].shape), specs[name].dtype) for name in memory.frozen}
    for name in written_inputs(graph) & memory.frozen.keys():
        memory.frozen[name] = in_float32(memory.frozen[name])
    artifact_set.check_parameters(specs, memory.parameters, memory.frozen)
    for name in memory.parameters:
        kind = specs[name + artifact_set.BUFFER_SUFFIX].dtype
        if kind != np.float32 and not is_half(kind):
            raise NotImplementedError(f"the gradient of {name!r} is not float32")


def _fixed(shape: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else 0 for size in shape)


def _is_as_declared(value: Any, spec: TensorSpec) -> bool:
    return type(value) is np.ndarray and value.dtype == spec.dtype and fits(value.shape, spec.shape)


def _value(value: Any, spec: TensorSpec) -> Value:
    """An input of a call as an array or OrtValue; lists and numbers get the dtype that the graph declares."""
    if isinstance(value, np.ndarray | onnxruntime.OrtValue):
        return value
    try:
        return np.asarray(value) if hasattr(value, "dtype") else np.asarray(value, spec.dtype)
    except (TypeError, ValueError, OverflowError):
        kind = type(value).__name__
        raise TypeError(f"{spec.name} is {kind}, expected a NumPy array or an OrtValue") from None


LEARNING_RATE = 1e-3  # before one is set, if the checkpoint has no state of an optimizer


class Optimizer:
    """Updates the parameters as an optimizer model says.

    optimizer_uri: the file of the optimizer model, or its bytes: one AdamWOptimizer or SGDOptimizerV2, and before it
        InplaceClipGradNorm if gradients shall be clipped.
    module: what computes the gradients. If its checkpoint holds the state of an optimizer, this one goes on from there;
        optimizers of one state share step count, learning rate and moments.

    Raises FileNotFoundError if there is no such file; ValueError if it is no model, or if the checkpoint's optimizer
    state belongs to another model or optimizer; NotImplementedError for another optimizer.
    """

    __slots__ = ("__weakref__", "_memory", "_module", "_update")  # a misspelt attribute is an AttributeError

    @naming("Optimizer")
    def __init__(self, optimizer_uri: str | os.PathLike[str] | bytes, module: Module):
        if not isinstance(module, Module):
            raise TypeError(f"module is {type(module).__name__}, expected Module")
        rule = artifact_set.read_rule(read_model(optimizer_uri))
        self._module, self._memory = module, module._state._memory
        memory = self._memory
        if memory.optimizer is not None and memory.optimizer.rule == rule:
            self._update: FlatOptimizer = memory.optimizer
        else:
            group = memory.group()
            rate = LEARNING_RATE if group is None else group.learning_rate
            self._update = memory.start(rule, float(np.float32(rate)), group)

    def step(self) -> None:
        """Change the parameters by one step along their gradients, which stay as they are unless they are clipped.

        Of a module with a process group they are first made the mean of all processes'.

        Raises RuntimeError before the first call of a module in training mode, if no gradient was set otherwise.
        """
        if not self._memory.computed and not np.asarray(self._memory.gradients.flat).any():
            raise RuntimeError("Optimizer.step: there are no gradients yet, call the module in training mode first")
        self._memory.computed = True
        self._module.reduce_gradients()
        self._update.step()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps; it is rounded to float32, as checkpoints hold it."""
        if isinstance(learning_rate, str):
            raise TypeError("Optimizer.set_learning_rate: learning_rate is str, expected float")
        self._update.learning_rate = float(np.float32(float(learning_rate)))

    def get_learning_rate(self) -> float:
        """The present learning rate."""
        return self._update.learning_rate


class LinearLRScheduler:
    """Sets an optimizer's learning rate as a function of its step count t.

    optimizer: whose learning rate it sets, at once and in every `step`.
    warmup_step_count: steps in which the learning rate rises from 0 to `initial_lr`.
    total_step_count: steps after which it has fallen back to 0.
    initial_lr: the highest learning rate.

        initial_lr * t / warmup_step_count                                             for t < warmup_step_count
        initial_lr * max(0, (total_step_count - t) / (total_step_count - warmup_step_count))           otherwise
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float):
        self._optimizer = optimizer
        self._warmup, self._total = warmup_step_count, total_step_count
        self._initial = initial_lr
        self.step()

    def step(self) -> None:
        """Set the learning rate for the optimizer's next step; to be called after each of its steps."""
        step, factor = self._optimizer._update.steps, 0.0
        if step < self._warmup:
            factor = step / self._warmup
        elif step < self._total:
            factor = (self._total - step) / (self._total - self._warmup)
        self._optimizer.set_learning_rate(self._initial * factor)


__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"]
