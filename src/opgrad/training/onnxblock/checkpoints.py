"""Checkpoints of parameters as ONNX has them."""

import os
from collections.abc import Sequence

import onnx
from onnx import TensorProto

from opgrad.training.files.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from opgrad.training.files.tensor_values import arrays_of, tensor_of


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
    trainable, frozen = map(arrays_of, groups)
    write_checkpoint(Checkpoint(trainable, frozen, nominal=bool(nominal_checkpoint)), path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Give the initializers of a model the values that a checkpoint has for them.

    path_to_checkpoint: the file. model: changed in place; parameters of the checkpoint that are inputs of it become
        initializers.

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
        found = tensor_of(name, array)
        _check(found, held.get(name), given.get(name))
        if name in held:
            held[name].CopyFrom(found)
        else:
            graph.initializer.append(found)
            graph.input.remove(given[name])


def _check(found: TensorProto, own: TensorProto | None, given: onnx.ValueInfoProto | None) -> None:
    """Raise ValueError unless the model has an initializer or an input of this type and shape."""
    who = "load_checkpoint_to_model"
    if own is not None:
        kind, dims = own.data_type, list(own.dims)
    elif given is not None:
        kind, dims = given.type.tensor_type.elem_type, [each.dim_value for each in given.type.tensor_type.shape.dim]
    else:
        raise ValueError(f"{who}: the checkpoint has {found.name!r}, which is no initializer and no input of the model")
    if kind != found.data_type or dims != list(found.dims):
        raise ValueError(
            f"{who}: the checkpoint's {found.name!r} has type {found.data_type} and shape {tuple(found.dims)}, "
            f"expected {kind} and {tuple(dims)}, as the model has it"
        )
