"""What `generate_artifacts` does: models of a request, and their files."""

import inspect
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.onnxruntime import batch_norm
from opgrad.onnxruntime.messages import copied, opset_of
from opgrad.onnxruntime.reading import check_model, read_model
from opgrad.training.building import forms
from opgrad.training.building.checks import listed
from opgrad.training.building.models import TrainingModels
from opgrad.training.building.ort_format import convert
from opgrad.training.building.saving import LARGEST_MODEL, write_model
from opgrad.training.building.selection import Selection, select
from opgrad.training.objective import note_outputs
from opgrad.training.onnxblock.accessor import ModelAccessor, building, empty_model
from opgrad.training.onnxblock.block import Block, ForwardBlock, names_of
from opgrad.training.onnxblock.checkpoints import save_checkpoint
from opgrad.training.onnxblock.training import TrainingBlock
from opgrad.writing import replace_file, staged

WHO = "generate_artifacts"
ORDER = ("training_model", "eval_model", "checkpoint", "nominal_checkpoint", "optimizer_model")
Names = str | Iterable[str] | None


@dataclass(frozen=True)
class Request:
    """What artifacts are to be: arguments of `generate_artifacts`, checked."""

    requires_grad: Names
    frozen_params: Names
    loss: Block
    loss_inputs: Sequence[str] | None
    outputs: Sequence[str]
    batch_norm: str
    checkpoint_segments: int | Sequence[str] | None = None


@dataclass(frozen=True)
class Made:
    """What became of a request."""

    models: TrainingModels
    optimizer: onnx.ModelProto | None
    selection: Selection


def names_in(what: str, given: Iterable[str]) -> list[str]:
    """An argument that is a list of names. Raises TypeError."""
    names = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{WHO}: {what} is {given!r}, expected a list of names")
    return names


class _Artifacts(TrainingBlock):
    """The loss of a request on a model, and its parameters."""

    def __init__(self, request: Request):
        super().__init__()
        self.request, self.checkpoint_segments = request, request.checkpoint_segments

    @property
    def _who(self) -> str:
        return WHO

    def build(self) -> list[str]:
        """Append the loss, and choose what is trained."""
        request, model = self.request, self.base
        self.outputs = [each.name for each in model.graph.output]
        names = request.loss_inputs
        self._set_batch_norm()
        current = [each.name for each in model.graph.output] if names is None else list(names)
        outputs = names_of(_called(request.loss, current), type(request.loss).__name__)
        self.selection = select(model, outputs[0], request.requires_grad, request.frozen_params, WHO)
        for name in self.selection.trainable:
            self.requires_grad(name)
        for name in self.selection.frozen:
            self.requires_grad(name, False)
        self._freeze_held()
        return [*outputs, *request.outputs]

    def _set_batch_norm(self) -> None:
        if self.request.batch_norm == "train":
            forms.train(self.base, WHO)
        elif self.request.batch_norm == "freeze":
            batch_norm.freeze(self.base, list(batch_norm.batch_norms(self.base)))

    def _freeze_held(self) -> None:
        """Let batch normalization take given statistics where these were asked to stay as they are."""
        if self.request.batch_norm != "model":
            return
        held, opset = set(self.selection.held), opset_of(self.base)
        nodes = [node for node in batch_norm.batch_norms(self.base) if batch_norm.trains(node, opset)]
        batch_norm.freeze(self.base, [node for node in nodes if held.issuperset(node.input[3:5])])

    def make(self, accessor: ModelAccessor) -> TrainingModels:
        """Both models; that of the accessor is used up."""
        self._train(accessor, (), {})
        return self._trained()


def _called(loss: Block, names: Sequence[str]) -> str | Sequence[str]:
    """What a loss makes of these values. Raises ValueError if it takes more of them, or less."""
    try:
        inspect.signature(loss.build).bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{WHO}: {type(loss).__name__} cannot take {listed(names)}: {error}; loss_input_names says what it takes"
        ) from None
    result: str | Sequence[str] = loss(*names)
    return result


def make(model: onnx.ModelProto | str | os.PathLike[str], request: Request, optimizer: Block | None) -> Made:
    """The models of a request."""
    accessor = ModelAccessor(_own(model), None if isinstance(model, onnx.ModelProto) else model)
    block = _Artifacts(request)
    with building(accessor):
        models = block.make(accessor)
    note_outputs(models.evaluation, block.outputs)
    if optimizer is None:
        return Made(models, None, block.selection)
    opset = opset_of(models.evaluation)
    with building(ModelAccessor(empty_model(opset), drawn=accessor.drawn)) as empty:
        optimizer(models.parameters)
    changing = optimizer.to_model_proto() if isinstance(optimizer, ForwardBlock) else empty.model
    return Made(models, changing, block.selection)


def _own(model: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    """A model that may be changed. Raises TypeError, ValueError, FileNotFoundError."""
    if isinstance(model, str | os.PathLike):
        return read_model(model, WHO)
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"{WHO}: model is of type {type(model).__name__}, expected onnx.ModelProto or a path")
    if model.ByteSize() > LARGEST_MODEL:
        raise ValueError(f"{WHO}: model has {model.ByteSize()} bytes, expected at most {LARGEST_MODEL}; give its path")
    outside = [each.name for each in model.graph.initializer if uses_external_data(each)]
    if outside:
        raise ValueError(f"{WHO}: model keeps {listed(outside)} in another file; give its path, or load these tensors")
    check_model(model, f"{WHO}: model")
    return copied(model)


@dataclass
class Files:
    """The files of an artifact set.

    folder: where they come. prefix: of their names. nominal: whether there is a nominal checkpoint. ort_format: whether
    models are in ORT format, too. library: with operators of the user's.
    """

    folder: Path
    prefix: str = ""
    nominal: bool = False
    ort_format: bool = False
    library: str | None = None

    def write(self, made: Made) -> list[str]:
        """Write all files, and return their names; an exception leaves the folder as it was."""
        models = made.models
        with staged(self.folder) as folder:
            write_model(models.training, models.values, folder / f"{self.prefix}training_model.onnx")
            write_model(models.evaluation, models.values, folder / f"{self.prefix}eval_model.onnx")
            save_checkpoint(models.parameters, folder / f"{self.prefix}checkpoint")
            if self.nominal:
                save_checkpoint(models.parameters, folder / f"{self.prefix}nominal_checkpoint", True)
            if made.optimizer is not None:
                content = made.optimizer.SerializeToString(deterministic=True)
                replace_file(folder / f"{self.prefix}optimizer_model.onnx", content)
            if self.ort_format:
                for file in sorted(folder.glob("*.onnx"), key=self._order):
                    convert(file, self.library, WHO)
            names = [file.name for file in sorted(folder.iterdir(), key=self._order)]
        for name in names:
            if f"{name}.data" not in names and not name.endswith(".data"):
                (self.folder / f"{name}.data").unlink(missing_ok=True)
        return names

    def _order(self, file: Path) -> tuple[int, str]:
        """The place of a file: behind those that are made before it."""
        name = file.name.removeprefix(self.prefix)
        return next(place for place, part in enumerate(ORDER) if name.startswith(part)), name
