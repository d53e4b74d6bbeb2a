"""The work of `generate_artifacts`: it builds the models of a request and writes their files."""

import contextlib
import inspect
import io
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.base.writing import check_destinations, new_file, staged
from opgrad.onnx.graph import conversion
from opgrad.onnx.graph.loading import check_and_repair
from opgrad.onnx.graph.messages import opset_of
from opgrad.training.files import checkpoint
from opgrad.training.files.artifact_set import ArtifactSet, note_outputs, read_rule
from opgrad.training.files.checkpoint import Checkpoint, write_checkpoint
from opgrad.training.files.tensor_values import (
    LARGEST_MODEL,
    VALUES,
    Held,
    ValuesFile,
    is_placeholder,
    nbytes_of,
    read_apart,
    without_huge,
    write_model,
)
from opgrad.training.make import forms
from opgrad.training.make.blocks.accessor import ModelAccessor, building, empty_model
from opgrad.training.make.blocks.block import Block, ForwardBlock, names_of
from opgrad.training.make.checks import listed, refused_inputs
from opgrad.training.make.models import FLOAT32, TrainingModels, training_models
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
    loss: Block | None
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

    def artifact_set(self, directory: Path) -> ArtifactSet:
        """The artifact set in memory. directory: for messages, its name is that of the set."""
        assert self.optimizer is not None
        return self.models.artifact_set(directory, read_rule(self.optimizer))


def names_in(what: str, given: Iterable[str]) -> list[str]:
    """An argument that is a list of names. Raises TypeError."""
    names = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(what, f"is {given!r}, expected a list of names")
    return names


def _chosen(request: ArtifactRequest, accessor: ModelAccessor, cut: Mapping[str, str]) -> tuple[list[str], Selection]:
    """Bring a model into the form for training, append the loss, and choose the parameters.

    cut: see `cut_maps`; without names of its inputs, the loss takes the tensors in the places of maps alone.
    Returns the outputs of the training model, the loss first, and the choice.
    """
    model, names = accessor.model, request.loss_inputs
    if request.batch_norm == "train":
        forms.train(model, WHO)
    elif request.batch_norm == "freeze":
        conversion.freeze(model, list(conversion.batch_norms(model)))
    if names is None:
        names = list(dict.fromkeys(cut.values())) or [each.name for each in model.graph.output]
    (untie if request.untie else part_statistics)(model, accessor.apart)
    candidates = Candidates(model, accessor.apart)
    outputs = list(names) if request.loss is None else _called(request.loss, names)
    selection = select(accessor.graph(), outputs[0], request.requires_grad, request.frozen_params, WHO, candidates)
    if request.batch_norm == "model":  # statistics in frozen_params stay as they are
        held, opset = set(selection.held), opset_of(model)
        nodes = [node for node in conversion.batch_norms(model) if conversion.trains(node, opset)]
        conversion.freeze(model, [node for node in nodes if held.issuperset(node.input[3:5])])
    return [*outputs, *request.outputs], selection


def _called(loss: Block, names: Sequence[str]) -> list[str]:
    """The results of a loss block for these values. Raises ArgumentError if it takes another number of values."""
    kind = type(loss).__name__
    try:
        inspect.signature(loss.build).bind(*names)
    except TypeError as error:
        text = f"says what the loss takes: {kind} cannot take {listed(names)}: {error}"
        raise ArgumentError("loss_input_names", text) from None
    return names_of(loss(*names), kind)


def make(model: onnx.ModelProto | str | os.PathLike[str], request: ArtifactRequest, optimizer: Block | None) -> Made:
    """The models of a request."""
    own, apart = _own(model)
    if refusal := refused_inputs(own.graph):
        raise ValueError(f"{WHO}: {refusal}")
    cut = cut_maps(own)
    forms.normalize(own, WHO)
    had, accessor = [each.name for each in own.graph.output], ModelAccessor(own, apart=apart)
    with building(accessor):
        outputs, selection = _chosen(request, accessor, cut)
    models = training_models(
        own,
        outputs,
        selection.trainable,
        selection.frozen,
        WHO,
        request.checkpoint_segments,
        apart,
        request.precision,
        accessor.graph(),
    )
    note_outputs(models.evaluation, had)
    if optimizer is None:
        return Made(models, None, selection, cut)
    if not models.trainable:
        raise ArgumentError(
            "requires_grad",
            f"has {listed(selection.trainable)}, inputs of the model: parameters are initializers, expected one at "
            "least for the optimizer; give the model values for these inputs",
        )
    opset = opset_of(models.evaluation)
    with building(ModelAccessor(empty_model(opset), drawn=accessor.drawn)) as empty:
        optimizer((models.trainable, models.frozen) if apart else models.parameters)
    changing = optimizer.to_model_proto() if isinstance(optimizer, ForwardBlock) else empty.model
    return Made(models, changing, selection, cut)


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
                    convert(file, self.library)
            return [file.name for file in sorted(folder.iterdir(), key=self._order)]

    def _write_models(self, models: TrainingModels, folder: Path) -> None:
        """Write the training and the eval model; if they have many large constants, these go into a file for both."""
        names = (f"{self.prefix}{name}_model.onnx" for name in ("training", "eval"))
        written = dict(zip(names, models.for_files(), strict=True))
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
        values = checkpoint.beside(self.folder, f"{self.prefix}checkpoint")
        return [f"{self.prefix}{VALUES}", *(f"{name}.data" for name in names), *values]

    def _order(self, file: Path) -> tuple[int, str]:
        """The sort key of a file: files come in the order in which they are made."""
        name = file.name.removeprefix(self.prefix)
        return next(place for place, part in enumerate(ORDER) if name.startswith(part)), name


# --- ORT format -------------------------------------------------------------------------------------------------------


CONVERTER = "onnxruntime.tools.convert_onnx_models_to_ort"


def convert(path: Path, library: str | None) -> None:
    """Write a model in ORT format, and the operators that it needs, beside it, as the installed onnxruntime does it.

    library: with operators of the user's. Raises NotImplementedError for a model with operators that the installed
    onnxruntime does not have, and where none is installed.
    """
    try:
        from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort
    except ImportError as error:
        raise NotImplementedError(f"{WHO}: ORT format needs the converter of onnxruntime: {error}") from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            convert_onnx_models_to_ort(
                path,
                output_dir=path.parent,
                optimization_styles=[OptimizationStyle.Fixed],
                custom_op_library_path=Path(library) if library else None,
            )
    except Exception as error:  # onnxruntime's exceptions have no common base class
        from opgrad.onnxruntime.private import BEFORE_FATAL, reason

        raise NotImplementedError(
            f"{WHO}: the installed onnxruntime cannot convert {path.name} to ORT format "
            f"({reason(error).rpartition(BEFORE_FATAL)[2]}); leave ORT format out, and run python -m {CONVERTER} "
            "where the onnxruntime is installed that shall read it"
        ) from None
