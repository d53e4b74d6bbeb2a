"""Make training artifacts of an ONNX model; the names are those of onnxruntime.training.artifacts."""

import contextlib
import inspect
import io
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming, require
from opgrad.base.files import check_destinations, new_file, staged
from opgrad.onnx.graph import conversion
from opgrad.onnx.graph.loading import check_and_repair
from opgrad.onnx.graph.messages import opset_of, size_of
from opgrad.onnx.graph.nodes import all_nodes, attributes_of, call_of
from opgrad.training.files import checkpoint
from opgrad.training.files.artifact_set import FILES, ArtifactSet, note_outputs, read_rule
from opgrad.training.files.checkpoint import Checkpoint, write_checkpoint
from opgrad.training.files.tensor_values import (
    LARGEST_MODEL,
    VALUES,
    Apart,
    ValuesFile,
    is_placeholder,
    nbytes_of,
    read_apart,
    without_huge,
    write_model,
)
from opgrad.training.make import blocks, forms, losses
from opgrad.training.make.blocks import (
    Block,
    ForwardBlock,
    ModelAccessor,
    building,
    empty_model,
    library_file,
    names_of,
)
from opgrad.training.make.checks import listed, quantity, refused_inputs, refused_types
from opgrad.training.make.models import FLOAT32, TrainingModels, training_models
from opgrad.training.make.outputs import cut_maps, cut_note
from opgrad.training.make.selection import Candidates, Selection, select
from opgrad.training.make.tensors import part_statistics
from opgrad.training.make.tensors import untie as copy_shared
from opgrad.training.make.trainability import softmax_before_loss

__all__ = ["Artifacts", "BatchNorm", "LossType", "OptimType", "generate_artifacts"]

logger = logging.getLogger(__name__)
ORDER = ("training_model", "eval_model", "weights", "checkpoint", "nominal_checkpoint", "optimizer_model")
# If the large tensors that are no parameters have so many bytes in all, they are written once, into their own file.
OUTSIDE_FROM = 1 << 20


@dataclass(frozen=True)
class Made:
    """The models of `generate_artifacts`. cut: see `cut_maps`."""

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


def _own(model: onnx.ModelProto | str | os.PathLike[str]) -> Apart:
    """A copy of a model that may be changed, with placeholders for its huge tensors, and their values by name.

    Raises TypeError, ValueError, FileNotFoundError.
    """
    if isinstance(model, str | os.PathLike):
        return read_apart(Path(model))
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model is of type {type(model).__name__}, expected onnx.ModelProto or a path")
    if model.ByteSize() > LARGEST_MODEL:
        raise ValueError(f"model has {model.ByteSize()} bytes, expected at most {LARGEST_MODEL}; give its path")
    outside = [each.name for each in model.graph.initializer if uses_external_data(each)]
    if outside:
        raise ValueError(f"model keeps {listed(outside)} in another file; give its path, or load these tensors")
    own, apart = without_huge(model)
    check_and_repair(own, "model")
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
        names = (*FILES, VALUES, "nominal_checkpoint")
        check_destinations(self.folder, [f"{self.prefix}{name}" for name in names])

    def _beside(self, names: Collection[str]) -> list[str]:
        """The further files of an older set with these names, which are removed because only that set needs them."""
        values = checkpoint.beside(self.folder, f"{self.prefix}checkpoint")
        return [f"{self.prefix}{VALUES}", *(f"{name}.data" for name in names), *values]

    def _order(self, file: Path) -> tuple[int, str]:
        """The sort key of a file: files come in the order in which they are made."""
        name = file.name.removeprefix(self.prefix)
        return next(index for index, part in enumerate(ORDER) if name.startswith(part)), name


CONVERTER = "onnxruntime.tools.convert_onnx_models_to_ort"


def convert(path: Path, library: str | None) -> None:
    """Write a model in ORT format, and the operators that it needs, beside it, as the installed onnxruntime does it.

    library: with operators of the user's. Raises NotImplementedError for a model with operators that the installed
    onnxruntime does not have, and where none is installed.
    """
    try:
        from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort
    except ImportError as error:
        raise NotImplementedError(f"ORT format needs the converter of onnxruntime: {error}") from None
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
            f"the installed onnxruntime cannot convert {path.name} to ORT format "
            f"({reason(error).rpartition(BEFORE_FATAL)[2]}); leave ORT format out, and run python -m {CONVERTER} "
            "where the onnxruntime is installed that shall read it"
        ) from None


class LossType(Enum):
    """Losses with their default arguments; those of `onnxblock.loss` take arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4
    NLLLoss = 5
    HuberLoss = 6
    SmoothL1Loss = 7
    KLDivLoss = 8


class OptimType(Enum):
    """Optimizers with their default arguments; those of `onnxblock.optim` take arguments."""

    AdamW = 1
    SGD = 2


class BatchNorm(Enum):
    """Which statistics batch normalization uses in training.

    MODEL: what each node's mode says, but the stored ones where these are in `frozen_params`. TRAIN: those of the
    batch, as onnxruntime-training always did. FREEZE: the stored ones.
    """

    MODEL = "model"
    TRAIN = "train"
    FREEZE = "freeze"


@dataclass(frozen=True)
class Artifacts:
    """A description of the artifacts that were made.

    directory: the folder. files: the names of the files, in the order in which they were made.
    trainable, frozen: the names of the parameters, in the order in which the models have them as inputs.
    constants: float tensors of more than one number that the model keeps as they are.
    inputs: the arrays of a batch, in the models' order. outputs: those of the models; the loss is the first.
    sizes: elements of the parameters. notes: warnings of probable mistakes, and of what opgrad cannot train.
    """

    directory: Path
    files: tuple[str, ...]
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return self.outputs[0]

    def __str__(self) -> str:
        lines = [f"artifacts in {self.directory}: {', '.join(self.files)}"]
        lines += [f"batch: {', '.join(self.inputs)}", f"outputs: {', '.join(self.outputs)}"]
        for what, names in (("trainable", self.trainable), ("frozen", self.frozen)):
            count = sum(self.sizes.get(name, 0) for name in names)
            amount = f"{quantity(len(names), 'tensor')}, {quantity(count, 'number')}"
            lines.append(f"{what}: {amount}: {', '.join(names) or 'none'}")
        if self.constants:
            lines.append(f"constants, not trained: {', '.join(self.constants)}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


@naming("generate_artifacts")
def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | str | None = None, frozen_params: Sequence[str] | str | None = None,
    loss: LossType | Block | None = None, optimizer: OptimType | Block | None = None,
    artifact_directory: str | bytes | os.PathLike[str] | None = None, prefix: str = "", ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None, nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None, *, batch_norm: BatchNorm | str = BatchNorm.MODEL,
    checkpoint_segments: int | Sequence[str] | None = None, precision: str = FLOAT32, untie: bool = False,
) -> Artifacts:  # fmt: skip
    """Make a training model, an eval model, a checkpoint and an optimizer model.

    model: an onnx.ModelProto, which is not changed, or the path of a file.
    requires_grad: what is trained, names of initializers, of Constant nodes or of inputs, or patterns such as
        "head.*", which stand for the weights that they match. None: all weights on which the loss depends.
    frozen_params: names or patterns of parameters that the checkpoint has, too, and that stay as they are.
    loss: a `LossType`, a block of `onnxblock.loss`, or a block of one's own that returns the name of the loss, or
        several names, of which the loss is the first. None: the model's first output is the loss.
    optimizer: an `OptimType` or a block of `onnxblock.optim`. None: no optimizer model.
    artifact_directory: the folder, which must exist. None: the current one. prefix: in front of all files' names.
    nominal_checkpoint, ort_format: whether a checkpoint without values, and models in ORT format, are written, too.
    custom_op_library: the library with the operators of one's own that the model has, for `ort_format`.
    additional_output_names: values that both models have as outputs behind the loss.
    loss_input_names: what the loss is called with. None: the model's outputs, in their order.
    batch_norm: whose statistics batch normalization takes; see `BatchNorm`.
    checkpoint_segments: less memory for more time; see `opgrad.gradients.gradients`.
    precision: of a model in float16 or bfloat16: "float32", in which the training model computes, with trainable
        parameters in float32, or "model": it has the model's own types.
    untie: whether layers that read one tensor get a copy each, as exporters store equal tensors once.

    Returns `Artifacts`, which says what was chosen and written; nothing is written unless everything could be made.
    Raises TypeError and ValueError for other arguments, for a model that is damaged or has no way from the parameters
    to the loss, and for names that it does not have; LookupError for outputs that it does not have; FileNotFoundError;
    NotImplementedError, which names all nodes that have no gradient.
    """
    library = None if custom_op_library is None else library_file(custom_op_library)
    folder = Path(os.fsdecode(artifact_directory)) if artifact_directory is not None else Path()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    is_name = isinstance(prefix, str) and Path(f"{prefix}checkpoint").name == f"{prefix}checkpoint"
    require(is_name, "prefix", prefix, "the beginning of file names, without folders")
    files = Files(folder, prefix, bool(nominal_checkpoint), bool(ort_format), library)
    files.check()
    made = models_of(
        model, requires_grad, frozen_params, loss, optimizer, additional_output_names, loss_input_names,
        batch_norm=batch_norm, checkpoint_segments=checkpoint_segments, precision=precision, untie=untie,
    )  # fmt: skip
    result = described(files.folder, files.write(made), made)
    logger.info("%s", result)
    for note in result.notes:
        logger.warning("generate_artifacts: %s", note)
    return result


@naming("generate_artifacts")
def models_of(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | str | None = None, frozen_params: Sequence[str] | str | None = None,
    loss: LossType | Block | None = None, optimizer: OptimType | Block | None = None,
    additional_output_names: Sequence[str] | None = None, loss_input_names: Sequence[str] | None = None, *,
    batch_norm: BatchNorm | str = BatchNorm.MODEL, checkpoint_segments: int | Sequence[str] | None = None,
    precision: str = FLOAT32, untie: bool = False,
) -> Made:  # fmt: skip
    """The models that `generate_artifacts` writes, of the same arguments, in memory."""
    loss, optimizer = _block("loss", loss, LossType, losses), _block("optimizer", optimizer, OptimType, blocks)
    names = None if loss_input_names is None else names_in("loss_input_names", loss_input_names)
    more = names_in("additional_output_names", additional_output_names or ())
    try:
        statistics = BatchNorm(batch_norm)
    except ValueError:
        raise ArgumentError("batch_norm", f"is {batch_norm!r}, expected 'model', 'train' or 'freeze'") from None
    own, apart = _own(model)
    if refusal := refused_inputs(own.graph):
        raise ValueError(refusal)
    cut = cut_maps(own)
    forms.normalize(own)
    had = [each.name for each in own.graph.output]
    if statistics == BatchNorm.TRAIN:
        forms.train(own)
    elif statistics == BatchNorm.FREEZE:
        conversion.freeze(own, list(conversion.batch_norms(own)))
    if names is None:  # where maps are cut off, the loss takes the tensors in their places alone
        names = list(dict.fromkeys(cut.values())) or [each.name for each in own.graph.output]
    (copy_shared if untie else part_statistics)(own, apart)
    candidates = Candidates(own, apart)
    accessor = ModelAccessor(own, apart=apart, known=candidates.graph)
    with building(accessor):
        outputs = names if loss is None else _called(loss, names)
        chosen = select(accessor.graph(), outputs[0], requires_grad, frozen_params, candidates)
    if statistics == BatchNorm.MODEL:  # statistics in frozen_params stay as they are
        held, opset = set(chosen.held), opset_of(own)
        nodes = [node for node in conversion.batch_norms(own) if conversion.trains(node, opset)]
        conversion.freeze(own, [node for node in nodes if held.issuperset(node.input[3:5])])
    wanted = [*outputs, *more]
    models = training_models(accessor, wanted, chosen.trainable, chosen.frozen, checkpoint_segments, precision)
    note_outputs(models.evaluation, had)
    if optimizer is None:
        return Made(models, None, chosen, cut)
    if not models.trainable:
        raise ArgumentError(
            "requires_grad",
            f"has {listed(chosen.trainable)}, inputs of the model: parameters are initializers, expected one at "
            "least for the optimizer; give the model values for these inputs",
        )
    opset = opset_of(models.evaluation)
    with building(ModelAccessor(empty_model(opset), drawn=accessor.drawn)) as empty:
        optimizer((models.trainable, models.frozen) if apart else models.parameters)
    changing = optimizer.to_model_proto() if isinstance(optimizer, ForwardBlock) else empty.model
    return Made(models, changing, chosen, cut)


def _called(loss: Block, names: Sequence[str]) -> list[str]:
    """The results of a loss block for these values. Raises ArgumentError if it takes another number of values."""
    kind = type(loss).__name__
    try:
        inspect.signature(loss.build).bind(*names)
    except TypeError as error:
        text = f"says what the loss takes: {kind} cannot take {listed(names)}: {error}"
        raise ArgumentError("loss_input_names", text) from None
    with naming(kind):
        return names_of(loss(*names))


def _block(what: str, given: Any, kinds: type[Enum], module: ModuleType) -> Block | None:
    """The block that was given, or a block of the kind that was given; None for None."""
    if given is None or isinstance(given, Block):
        return given
    if isinstance(given, kinds):
        made: Block = getattr(module, given.name)()
        return made
    raise ArgumentTypeError(what, f"is {given!r}, expected {kinds.__name__}, a block of onnxblock, or None")


def described(folder: Path, files: Sequence[str], made: Made) -> Artifacts:
    """A description of models, and of the files in a folder that they were written into."""
    graph, chosen = made.models.evaluation.graph, made.selection
    parameters = {each.name: size_of(each) for each in (*made.models.trainable, *made.models.frozen)}
    return Artifacts(
        directory=folder,
        files=tuple(files),
        trainable=chosen.trainable,
        frozen=chosen.frozen,
        constants=chosen.constants,
        inputs=tuple(each.name for each in graph.input if each.name not in parameters),
        outputs=tuple(each.name for each in graph.output),
        sizes=parameters,
        notes=tuple(_notes(made)),
    )


def _notes(made: Made) -> Iterator[str]:
    """Warnings about what is probably a mistake or cannot be trained by opgrad."""
    yield from (cut_note(*each) for each in made.cut.items())
    if refusal := refused_types(each.data_type for each in made.models.trainable):
        yield refusal
    if twice := softmax_before_loss(made.models.evaluation):
        yield (
            f"{twice[0]!r} are probabilities, and the loss applies a softmax itself: give the loss {twice[1]!r}, of "
            "which they are made"
        )
    nodes = [(node.op_type, attributes_of(node)) for node in all_nodes(made.models.training.graph.node)]
    if any(op == "Dropout" or each.get("dropout") for op, each in nodes):  # or attention that it has become part of
        yield "Dropout with training_mode drops values in every step, as the model was exported to train"
    calls = "".join(map(call_of, all_nodes(made.models.evaluation.graph.node)))
    if "%detach" in calls and "aten.detach" not in calls:
        yield "the exporter left detach() out, and gradients go through: export with optimize=False, which keeps it"
    if smoothed := re.search(r"cross_entropy_loss\.\w+\]\(args = \([^()]*, (\d\.\d+)\)", calls):
        yield f"the exporter left label_smoothing={smoothed[1]} out of the model's loss: export the scores instead"
    yield from made.selection.notes()
    held = {each.name for each in made.models.trainable}
    if given := [name for name in made.selection.trainable if name not in held]:
        yield (
            f"{listed(given)} are inputs of the model, which get gradients, but Trainer, Module and `opgrad train` "
            "train parameters alone; make them initializers of the model, with values, to train them"
        )
