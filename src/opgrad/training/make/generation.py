"""The work of `generate_artifacts`: it builds the models of a request and writes their files."""

import inspect
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.base.writing import check_destinations, new_file, staged
from opgrad.onnx.graph import batch_norm
from opgrad.onnx.graph.loading import check_and_repair
from opgrad.onnx.graph.messages import opset_of
from opgrad.training.files import checkpoint_files
from opgrad.training.files.checkpoint import Checkpoint, write_checkpoint
from opgrad.training.files.model_files import LARGEST_MODEL, ValuesFile, write_model
from opgrad.training.files.names import VALUES
from opgrad.training.files.objective import note_outputs
from opgrad.training.files.tensor_values import Held, is_placeholder, nbytes_of, read_apart, without_huge
from opgrad.training.make import forms
from opgrad.training.make.blocks.accessor import ModelAccessor, building, current, empty_model
from opgrad.training.make.blocks.block import Block, ForwardBlock, names_of
from opgrad.training.make.blocks.training import TrainingBlock
from opgrad.training.make.checks import listed, refused_inputs
from opgrad.training.make.models import FLOAT32, TrainingModels
from opgrad.training.make.ort_format import convert
from opgrad.training.make.outputs import cut_maps
from opgrad.training.make.selection import Candidates, Selection, select
from opgrad.training.make.shared_tensors import part_statistics, untie

WHO = "generate_artifacts"
ORDER = ("training_model", "eval_model", "weights", "checkpoint", "nominal_checkpoint", "optimizer_model")
# If the large tensors that are no parameters have so many bytes in all, they are written once, into their own file.
OUTSIDE_FROM = 1 << 20
Names = str | Iterable[str] | None


@dataclass(frozen=True)
class ArtifactRequest:
    """The checked arguments of `generate_artifacts`."""

    requires_grad: Names
    frozen_params: Names
    loss: Block
    loss_inputs: Sequence[str] | None
    outputs: Sequence[str]
    batch_norm: str
    checkpoint_segments: int | Sequence[str] | None = None
    precision: str = FLOAT32
    untie: bool = False


@dataclass(frozen=True)
class Made:
    """The models that were made of a request. cut: see `cut_maps`."""

    models: TrainingModels
    optimizer: onnx.ModelProto | None
    selection: Selection
    cut: dict[str, str]


def names_in(what: str, given: Iterable[str]) -> list[str]:
    """An argument that is a list of names. Raises TypeError."""
    names = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{WHO}: {what} is {given!r}, expected a list of names")
    return names


class _Artifacts(TrainingBlock):
    """The training block of a request: it appends the loss to the model and selects the parameters.

    cut: see `cut_maps`; without names of its inputs, the loss takes the tensors in the places of maps alone.
    """

    def __init__(self, request: ArtifactRequest, apart: dict[str, Held], cut: dict[str, str]):
        super().__init__()
        self.request, self._apart, self._cut = request, apart, cut
        self.checkpoint_segments, self.precision = request.checkpoint_segments, request.precision

    @property
    def _who(self) -> str:
        return WHO

    def build(self) -> list[str]:
        """Append the loss, and select the parameters."""
        request, model = self.request, self.base
        self.outputs = [each.name for each in model.graph.output]
        names = request.loss_inputs
        self._set_batch_norm()
        given = list(dict.fromkeys(self._cut.values()) or self.outputs) if names is None else list(names)
        (untie if request.untie else part_statistics)(model, self._apart)
        candidates = Candidates(model, self._apart)
        outputs = names_of(_called(request.loss, given), type(request.loss).__name__)
        forward = current().graph()
        self.selection = select(forward, outputs[0], request.requires_grad, request.frozen_params, WHO, candidates)
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
        """Set batch normalizations to evaluation mode whose statistics are in frozen_params."""
        if self.request.batch_norm != "model":
            return
        held, opset = set(self.selection.held), opset_of(self.base)
        nodes = [node for node in batch_norm.batch_norms(self.base) if batch_norm.trains(node, opset)]
        batch_norm.freeze(self.base, [node for node in nodes if held.issuperset(node.input[3:5])])

    def make(self, accessor: ModelAccessor) -> TrainingModels:
        """The training and the eval model; the model of the accessor is changed and must not be used afterwards."""
        self._train(accessor, (), {})
        return self._trained()


def _called(loss: Block, names: Sequence[str]) -> str | Sequence[str]:
    """The result of a loss block for these values. Raises ValueError if it takes another number of values."""
    try:
        inspect.signature(loss.build).bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{WHO}: {type(loss).__name__} cannot take {listed(names)}: {error}; loss_input_names says what it takes"
        ) from None
    result: str | Sequence[str] = loss(*names)
    return result


def make(model: onnx.ModelProto | str | os.PathLike[str], request: ArtifactRequest, optimizer: Block | None) -> Made:
    """The models of a request."""
    own, apart = _own(model)
    if refusal := refused_inputs(own.graph):
        raise ValueError(f"{WHO}: {refusal}")
    cut = cut_maps(own)
    accessor = ModelAccessor(own, None if isinstance(model, onnx.ModelProto) else model, apart=apart)
    block = _Artifacts(request, apart, cut)
    with building(accessor):
        models = block.make(accessor)
    note_outputs(models.evaluation, block.outputs)
    if optimizer is None:
        return Made(models, None, block.selection, cut)
    if not models.trainable:
        raise ValueError(
            f"{WHO}: requires_grad has {listed(block.selection.trainable)}, inputs of the model: parameters are "
            "initializers, expected one at least for the optimizer; give the model values for these inputs"
        )
    opset = opset_of(models.evaluation)
    with building(ModelAccessor(empty_model(opset), drawn=accessor.drawn)) as empty:
        optimizer((models.trainable, models.frozen) if apart else models.parameters)
    changing = optimizer.to_model_proto() if isinstance(optimizer, ForwardBlock) else empty.model
    return Made(models, changing, block.selection, cut)


def _own(model: onnx.ModelProto | str | os.PathLike[str]) -> tuple[onnx.ModelProto, dict[str, Held]]:
    """A copy of a model that may be changed, with placeholders for its huge tensors, and their values by name.

    Raises TypeError, ValueError, FileNotFoundError.
    """
    if isinstance(model, str | os.PathLike):
        return read_apart(Path(model), WHO)
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"{WHO}: model is of type {type(model).__name__}, expected onnx.ModelProto or a path")
    if model.ByteSize() > LARGEST_MODEL:
        raise ValueError(f"{WHO}: model has {model.ByteSize()} bytes, expected at most {LARGEST_MODEL}; give its path")
    outside = [each.name for each in model.graph.initializer if uses_external_data(each)]
    if outside:
        raise ValueError(f"{WHO}: model keeps {listed(outside)} in another file; give its path, or load these tensors")
    own, apart = without_huge(model)
    check_and_repair(own, f"{WHO}: model")
    return own, apart


@dataclass
class Files:
    """The files of an artifact set.

    folder: the folder for them. prefix: what their names begin with. nominal: whether there is a nominal checkpoint.
    ort_format: whether models are written in ORT format, too. library: a library with the user's own operators.
    """

    folder: Path
    prefix: str = ""
    nominal: bool = False
    ort_format: bool = False
    library: str | None = None

    def write(self, made: Made) -> list[str]:
        """Write all files, and return their names; an exception leaves the folder as it was."""
        with staged(self.folder, self._beside) as folder:
            self._write_models(made.models, folder)
            trainable, frozen = made.models.arrays
            write_checkpoint(Checkpoint(trainable, frozen), folder / f"{self.prefix}checkpoint")
            if self.nominal:
                nominal = Checkpoint(trainable, frozen, nominal=True)
                write_checkpoint(nominal, folder / f"{self.prefix}nominal_checkpoint")
            if made.optimizer is not None:
                content = made.optimizer.SerializeToString(deterministic=True)
                new_file(folder / f"{self.prefix}optimizer_model.onnx", content)
            if self.ort_format:
                for file in sorted(folder.glob("*.onnx"), key=self._order):
                    convert(file, self.library, WHO)
            return [file.name for file in sorted(folder.iterdir(), key=self._order)]

    def _write_models(self, models: TrainingModels, folder: Path) -> None:
        """Write the training and the eval model; if they have many large constants, these go into a file for both."""
        written = {
            f"{self.prefix}{name}_model.onnx": model
            for name, model in (("training", models.training), ("eval", models.evaluation))
        }
        held = {each.name for model in written.values() for each in model.graph.initializer if is_placeholder(each)}
        with ExitStack() as stack:
            outside = None
            if sum(nbytes_of(models.values[name]) for name in held) > OUTSIDE_FROM:
                outside = stack.enter_context(ValuesFile(folder / f"{self.prefix}{VALUES}"))
            for name, model in written.items():
                write_model(model, models.values, folder / name, outside)

    def check(self) -> None:
        """Raise `NoFile` or IsADirectoryError where a file cannot be written."""
        names = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint", VALUES)
        check_destinations(self.folder, [f"{self.prefix}{name}" for name in (*names, "nominal_checkpoint")])

    def _beside(self, names: Collection[str]) -> list[str]:
        """The further files of an older set with these names, which are removed because only that set needs them."""
        values = checkpoint_files.beside(self.folder, f"{self.prefix}checkpoint")
        return [f"{self.prefix}{VALUES}", *(f"{name}.data" for name in names), *values]

    def _order(self, file: Path) -> tuple[int, str]:
        """The sort key of a file: files come in the order in which they are made."""
        name = file.name.removeprefix(self.prefix)
        return next(place for place, part in enumerate(ORDER) if name.startswith(part)), name
