"""Make training artifacts of an ONNX model; the names are those of onnxruntime.training.artifacts."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming
from opgrad.onnx.graph.messages import size_of
from opgrad.training.make.blocks import loss as losses
from opgrad.training.make.blocks import optim
from opgrad.training.make.blocks.accessor import library_file
from opgrad.training.make.blocks.block import Block
from opgrad.training.make.checks import listed, quantity, refused_types
from opgrad.training.make.generation import WHO, ArtifactRequest, Files, Made, make, names_in
from opgrad.training.make.models import FLOAT32
from opgrad.training.make.outputs import cut_note
from opgrad.training.make.selection import torn_note
from opgrad.training.make.trainability import softmax_before_loss

__all__ = ["Artifacts", "BatchNorm", "LossType", "OptimType", "generate_artifacts"]

MOST_SHARED = 4  # tensors that a note describes
logger = logging.getLogger(__name__)


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
    sizes: the numbers of elements of the parameters. notes: warnings about what is probably a mistake or cannot be
    trained by opgrad.
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


@naming(WHO)
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
    files = Files(_folder(artifact_directory), _prefix(prefix), bool(nominal_checkpoint), bool(ort_format), library)
    files.check()
    made = models_of(
        model, requires_grad, frozen_params, loss, optimizer, additional_output_names, loss_input_names,
        batch_norm=batch_norm, checkpoint_segments=checkpoint_segments, precision=precision, untie=untie,
    )  # fmt: skip
    result = described(files.folder, files.write(made), made)
    logger.info("%s", result)
    for note in result.notes:
        logger.warning("%s: %s", WHO, note)
    return result


@naming(WHO)
def models_of(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | str | None = None, frozen_params: Sequence[str] | str | None = None,
    loss: LossType | Block | None = None, optimizer: OptimType | Block | None = None,
    additional_output_names: Sequence[str] | None = None, loss_input_names: Sequence[str] | None = None, *,
    batch_norm: BatchNorm | str = BatchNorm.MODEL, checkpoint_segments: int | Sequence[str] | None = None,
    precision: str = FLOAT32, untie: bool = False,
) -> Made:  # fmt: skip
    """The models that `generate_artifacts` writes, of the same arguments, in memory."""
    request = ArtifactRequest(
        requires_grad, frozen_params, _block("loss", loss, LossType, losses),
        None if loss_input_names is None else names_in("loss_input_names", loss_input_names),
        names_in("additional_output_names", additional_output_names or ()), _batch_norm(batch_norm).value,
        checkpoint_segments, precision, bool(untie),
    )  # fmt: skip
    return make(model, request, _block("optimizer", optimizer, OptimType, optim))


def _block(what: str, given: Any, kinds: type[Enum], module: ModuleType) -> Block | None:
    """The block that was given, or a block of the kind that was given; None for None."""
    if given is None or isinstance(given, Block):
        return given
    if isinstance(given, kinds):
        made: Block = getattr(module, given.name)()
        return made
    raise ArgumentTypeError(what, f"is {given!r}, expected {kinds.__name__}, a block of onnxblock, or None")


def _batch_norm(given: BatchNorm | str) -> BatchNorm:
    try:
        return BatchNorm(given)
    except ValueError:
        raise ArgumentError("batch_norm", f"is {given!r}, expected 'model', 'train' or 'freeze'") from None


def _folder(given: str | bytes | os.PathLike[str] | None) -> Path:
    folder = Path(os.fsdecode(given)) if given is not None else Path()
    if not folder.is_dir():
        raise FileNotFoundError(f"{WHO}: there is no folder {folder}")
    return folder


def _prefix(given: str) -> str:
    if not isinstance(given, str) or Path(given + "checkpoint").name != given + "checkpoint":
        raise ArgumentError("prefix", f"is {given!r}, expected the beginning of file names, without folders")
    return given


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
    if shared := made.selection.shared:
        described = [f"{name!r} by {listed(layers, 3)}" for name, layers in list(shared.items())[:MOST_SHARED]]
        more = [f"{len(shared) - MOST_SHARED} more tensors"] if len(shared) > MOST_SHARED else []
        yield (
            f"{quantity(len(shared), 'tensor')} read by several layers, trained or frozen as one: "
            f"{'; '.join([*described, *more])}; untie them if only their first values are the same"
        )
    for bias, weight in made.selection.torn:
        yield torn_note(bias, weight)
    held = {each.name for each in made.models.trainable}
    if given := [name for name in made.selection.trainable if name not in held]:
        yield (
            f"{listed(given)} are inputs of the model, which get gradients, but Trainer, Module and `opgrad train` "
            "train parameters alone; make them initializers of the model, with values, to train them"
        )
