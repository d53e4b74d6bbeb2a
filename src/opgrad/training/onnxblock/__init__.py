"""Blocks that build a loss, an optimizer or a whole training graph onto an ONNX model.

The names are those of onnxruntime.training.onnxblock.
"""

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from opgrad.base.arguments import naming
from opgrad.training.files.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from opgrad.training.files.tensor_values import array_of, tensor_of
from opgrad.training.make import forms
from opgrad.training.make.blocks import Block, ForwardBlock, base, current, custom_op_library, empty_base, names_of
from opgrad.training.make.models import FLOAT32, TrainingModels, training_models
from opgrad.training.onnxblock import blocks, loss, optim


def save_checkpoint(
    parameters: tuple[Sequence[TensorProto], Sequence[TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write parameters into a checkpoint file.

    parameters: the trainable and the frozen ones, as `TrainingBlock.parameters` gives them.
    path_to_checkpoint: the file. nominal_checkpoint: whether it has names alone, without values.

    Raises TypeError unless there are two lists of onnx.TensorProto, and what `write_checkpoint` raises.
    """
    groups = tuple(parameters) if isinstance(parameters, tuple | list) else ()
    if len(groups) != 2 or not all(isinstance(each, TensorProto) for group in groups for each in group):
        raise TypeError("save_checkpoint: parameters is no pair of lists of onnx.TensorProto")
    trainable, frozen = ({each.name: array_of(each) for each in group} for group in groups)
    write_checkpoint(Checkpoint(trainable, frozen, nominal=bool(nominal_checkpoint)), path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Give the initializers of a model the values that a checkpoint has for them.

    path_to_checkpoint: the file. model: changed in place; inputs that the checkpoint has become initializers.

    Raises what `read_checkpoint` raises, TypeError for another model, ValueError if the checkpoint is a nominal one, or
    has a parameter that the model does not have, or has in another type or shape.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"load_checkpoint_to_model: model is of type {type(model).__name__}, expected onnx.ModelProto")
    checkpoint = read_checkpoint(path_to_checkpoint)
    if checkpoint.nominal:
        raise ValueError(f"load_checkpoint_to_model: {path_to_checkpoint} has the names of parameters alone, no values")
    graph = model.graph
    held = {each.name: each for each in graph.initializer}
    given = {each.name: each for each in graph.input}
    for name, array in checkpoint.parameters.items():
        if name in given and name not in held:
            kind = given[name].type.tensor_type
            sizes = [each.dim_value for each in kind.shape.dim]
            held[name] = graph.initializer.add(name=name, data_type=kind.elem_type, dims=sizes)
            graph.input.remove(given[name])
        if name not in held:
            raise ValueError(f"the checkpoint has {name!r}, which is no initializer and no input of the model")
        found, own = tensor_of(name, array), held[name]
        if own.data_type != found.data_type or own.dims != found.dims:
            raise ValueError(
                f"the checkpoint's {name!r} has type {found.data_type} and shape {tuple(found.dims)}, "
                f"expected {own.data_type} and {tuple(own.dims)}, as the model has it"
            )
        own.CopyFrom(found)


class TrainingBlock(Block):
    """A block whose first result is a loss: calling it makes a training model and an eval model.

    Training model: inputs are those of the model, what its losses compare with, parameters, buffers of gradients
    and `lazy_reset_grad`; outputs are what `build` returned, then one of every gradient's accumulation.

    checkpoint_segments: an attribute that may be set before, as for `opgrad.gradients.gradients`.
    precision: another one: "float32", in which the training model computes what the model computes in float16 or
    bfloat16, with float32 parameters, or "model", for the model's own types.
    """

    checkpoint_segments: int | Sequence[str] | None = None
    precision: str = FLOAT32
    _models: TrainingModels | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Say of an initializer that it is trained, or, with False, that it is a parameter that stays as it is.

        Inputs of the graph may be named, too: they get a gradient.
        """
        self._grad_names[argument_name] = bool(value)

    @property
    def _grad_names(self) -> dict[str, bool]:
        """By name, whether there is a gradient; subclasses need not call `super().__init__`."""
        found: dict[str, bool] = self.__dict__.setdefault("_grad_by_name", {})
        return found

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the name of the loss, or several names, of which the first is the loss."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and make both models of it; that of `base` becomes the training model.

        Raises what `build` raises; ValueError, LookupError and NotImplementedError, see `generate_artifacts`.
        """
        accessor = current()
        with naming(self._who):
            forms.normalize(accessor.model)
        accessor.forget()
        output = self._built(accessor, args, kwargs)
        trainable = [name for name, grad in self._grad_names.items() if grad]
        frozen = [name for name, grad in self._grad_names.items() if not grad]
        with naming(self._who):
            outputs, segments = names_of(output), self.checkpoint_segments
            self._models = training_models(accessor, outputs, trainable, frozen, segments, self.precision)
        accessor.model.CopyFrom(self._models.whole()[0])
        accessor.forget()
        return output

    def _trained(self) -> TrainingModels:
        if self._models is None:
            raise RuntimeError(f"{self._who}: nothing is built yet; call the block first")
        return self._models

    def parameters(self) -> tuple[list[TensorProto], list[TensorProto]]:
        """The trainable and the frozen parameters, in the order of the initializers. Raises RuntimeError before."""
        return self._trained().parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the eval model. Raises RuntimeError before they are built."""
        return self._trained().whole()


__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
