"""The command `opgrad artifacts`, and training artifacts of a model as other commands are asked for them."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.text import Text

from opgrad.base.arguments import ArgumentError, naming
from opgrad.base.terminal import console, existing, visible
from opgrad.cli.options import given, opt, option, positive, said, takes_groups
from opgrad.training.make.named_blocks import Loss, Optimizer

if TYPE_CHECKING:
    from opgrad.training.run.recipe import Recipe

# The options for arguments that have other names.
OPTIONS = {
    "additional_output_names": "output_name",
    "clip_grad": "clip_norm",
    "frozen_params": "freeze",
    "loss_input_names": "loss_input",
    "max_norm": "clip_norm",
    "requires_grad": "train",
}


def numbers(text: str | None) -> str | None:
    """Text with numbers and commas between them. Raises typer.BadParameter."""
    try:
        [float(each) for each in (text or "0").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,0.5,2") from None
    return text


@dataclass(frozen=True)
class ParameterOptions:
    """Which parts of a model are trained, and how."""

    PANEL: ClassVar = "Model"
    train: list[str] | None = opt("Weights to train: a name or 'head.*'; default: all.", metavar="PATTERN")
    freeze: list[str] | None = opt("Weights to freeze: a name or 'backbone.*'; default: none.", metavar="PATTERN")
    batch_norm: str | None = opt(
        "What batch normalization does: model, train or freeze; default: model, as the model has it.", metavar="KIND"
    )
    checkpoint_segments: int | None = opt(
        "Keep activations of so many segments alone, and compute the others again; default: keep all.", min=1
    )
    untie: bool | None = opt("Make a copy for each layer that reads one tensor. Default: they share it.", "--untie")


@dataclass(frozen=True)
class LossOptions:
    """The loss of a model. Those below `loss_input` are arguments of losses."""

    PANEL: ClassVar = "Loss"
    loss: Loss | None = opt(f"The loss is {', '.join(Loss)}; default: the model's first output.", metavar="KIND")
    loss_input: list[str] | None = opt("A value that the loss takes; default: all outputs.", metavar="NAME")
    reduction: str | None = opt(
        "The loss of a batch is the mean or the sum of its losses, of kl-div also the batchmean; default: mean.",
        metavar="KIND",
    )
    label_smoothing: float | None = opt("How far cross-entropy's targets spread over all classes, 0 to 1; default: 0.")
    ignore_index: int | None = opt("The label that cross-entropy and nll leave out; default: none.")
    class_axis: int | None = opt(
        "The axis of cross-entropy's and nll's classes; default: the last, of four axes and more the second."
    )
    weight: str | None = opt("Weights of classes, such as 1,0.5,2; default: 1.", metavar="NUMBERS", callback=numbers)
    pos_weight: str | None = opt(
        "The weight of bce-with-logits' targets that are 1; default: 1.", metavar="NUMBERS", callback=numbers
    )
    delta: float | None = opt("The difference from which huber grows linearly; default: 1.", callback=positive)
    beta: float | None = opt("The difference from which smooth-l1 grows linearly; default: 1.", min=0)
    log_target: bool | None = opt("Whether kl-div's targets are logarithms, too; default: no.")


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer. Those below `optimizer` are its arguments; the learning rate is a setting of the training."""

    PANEL: ClassVar = "Optimizer"
    optimizer: Optimizer | None = opt(f"The optimizer is {', '.join(Optimizer)}; default: adamw.", metavar="KIND")
    weight_decay: float | None = opt("The weight decay of adamw; default: 0.")
    betas: str | None = opt("The decay of adamw's moments; default: 0.9,0.999.", metavar="NUMBERS", callback=numbers)
    eps: float | None = opt("What adamw adds to its divisor; default: 1e-6.")
    adam_mode: int | None = opt("The order of adamw's operations, 1 as Hugging Face, 0 as PyTorch; default: 1.")


@dataclass(frozen=True)
class QuantizationOptions:
    """How a model is quantized, and learns from what it was. Those below `quantize` are for it alone."""

    PANEL: ClassVar = "Quantization"
    quantize: str | None = opt("Train it as an integer model, int8 or int4; default: as it is.", metavar="KIND")
    quantize_weights: list[str] | None = opt("Weights to quantize, as 'layers.*'; default: all.", metavar="PATTERN")
    per_channel: bool | None = opt("A scale for each channel of a weight; default: one for all.", "--per-channel")
    calibrate: Path | None = opt("Data for scales of int8's activations; default: training rows.", callback=existing)
    distill: float | None = opt("How much it learns from the float model's scores, 0 to 1; default: nothing.")
    temperature: float | None = opt("What --distill divides the scores by; default: 2.", callback=positive)


@dataclass(frozen=True)
class Making:
    """All that says how artifacts are made."""

    parameters: ParameterOptions
    loss: LossOptions
    optimizer: OptimizerOptions
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)

    @property
    def groups(self) -> tuple[ParameterOptions, LossOptions, OptimizerOptions, QuantizationOptions]:
        return self.parameters, self.loss, self.optimizer, self.quantization

    def with_recipe(self, recipe: "Recipe") -> "Making":
        """The request with a recipe's settings where no option was given."""
        loss, parameters = self.loss, self.parameters
        if recipe.loss is not None and loss.loss is None:
            loss = replace(loss, loss=Loss(recipe.loss))
        if parameters.batch_norm is None:
            parameters = replace(parameters, batch_norm=recipe.batch_norm)
        return replace(self, loss=loss, parameters=parameters)

    def arguments(self, clip_norm: float | None = None) -> dict[str, Any]:
        """Arguments of `generate_artifacts`. Raises ValueError for what a loss or an optimizer does not take.

        clip_norm: of the optimizer model.
        """
        own, loss, optimizer = vars(self.parameters), vars(self.loss).copy(), vars(self.optimizer).copy()
        for values, name in ((loss, "weight"), (loss, "pos_weight"), (optimizer, "betas")):
            if values[name] is not None:
                values[name] = [float(each) for each in values[name].split(",")]
        if clip_norm:
            from opgrad.training.make.blocks import ClipGradNorm

            optimizer["clip_grad"] = ClipGradNorm(clip_norm)
        kind, inputs = loss.pop("loss"), loss.pop("loss_input")
        if kind is None and (others := given(replace(self.loss, loss_input=None))):
            raise ValueError(f"{next(iter(others))} is of a loss, expected --loss, too")
        found: dict[str, Any] = {
            "requires_grad": own["train"] or None,
            "frozen_params": own["freeze"] or None,
            "loss_input_names": inputs or None,
            "loss": None if kind is None else _block(kind, loss),
            "optimizer": _block(optimizer.pop("optimizer") or Optimizer.AdamW, optimizer),
            "batch_norm": own["batch_norm"] or "model",
            "untie": bool(own["untie"]),
        }
        if self.quantization.distill is not None:
            from opgrad.training.quantization import TEACHER, Distillation

            if found["loss"] is None:
                raise ValueError("--distill is of scores that a loss compares, expected --loss, too")
            share, temperature = self.quantization.distill or 0.0, self.quantization.temperature or 2.0
            found["loss"] = Distillation(found["loss"], share, temperature)
            found["frozen_params"] = [*(own["freeze"] or ()), f"{TEACHER}*"]
        segments = own["checkpoint_segments"]
        return found if segments is None else {**found, "checkpoint_segments": segments}


def _block(kind: Loss | Optimizer, arguments: dict[str, Any]) -> Any:
    """The block of this kind with the options that were given. Raises ValueError for one that it does not take."""
    from opgrad.training.make import blocks, losses

    made = getattr(losses if isinstance(kind, Loss) else blocks, kind.name)
    chosen = {name: value for name, value in arguments.items() if value is not None}
    taken = inspect.signature(made).parameters
    if wrong := [option(name) for name in chosen if name not in taken]:
        known = [option(name) for name in taken if name in arguments]
        raise ValueError(f"{kind} takes no {', '.join(wrong)}, expected {', '.join(known) or 'no options'}")
    try:
        return made(**chosen)
    except ArgumentError as error:
        raise ValueError(f"{error.caller}: {said(error, '', OPTIONS)}") from None


def make(
    model: Path, making: Making, folder: Path | None, command: str, clip_norm: float | None = None, **others: Any
) -> Any:
    """Make the artifacts of a model in a folder, which is made if need be, and is as it was after an error.

    folder: None: they are made in memory. command: for messages. clip_norm: of the optimizer model.
    others: arguments of `generate_artifacts`.
    Returns the result of `generate_artifacts` or, in memory, of `models_of`. Raises ValueError, OSError.
    """
    from opgrad.onnx.graph.loading import read_model
    from opgrad.training.make import artifacts

    arguments = {**making.arguments(clip_norm), **others}
    with naming(command):
        read = read_model(model, outside=False)
    if arguments["loss"] is None:
        first = next((each for each in read.graph.output if each.type.HasField("tensor_type")), None)
        if first is not None and any(size.dim_value != 1 for size in first.type.tensor_type.shape.dim):
            what = f"its first output {first.name!r} is not one number"
            raise ValueError(f"{command}: {model}: {what}, expected --loss: {', '.join(Loss)}")
    try:
        if folder is None:
            return artifacts.models_of(model, **arguments)
        with made_folder(folder), ExitStack() as stack:
            stack.callback(setattr, artifacts.logger, "disabled", artifacts.logger.disabled)
            artifacts.logger.disabled = True  # the commands print the notes
            return artifacts.generate_artifacts(model, artifact_directory=folder, **arguments)
    except (LookupError, NotImplementedError, TypeError, ValueError) as error:
        text = said(error, "generate_artifacts", OPTIONS)
        raise ValueError(text if str(model) in text else f"{command}: {model}: {text}") from None


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A folder that is there; what had to be made is gone after an error. Raises NotADirectoryError where a file is."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, expected a folder for what is written")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """A folder that is there and takes files, tried before any work; what had to be made is gone after an error."""
    with made_folder(folder):
        with TemporaryFile(dir=folder):
            pass
        yield


@dataclass(frozen=True)
class FileOptions:
    """Which files are written."""

    PANEL: ClassVar = "Files"
    output: Path = opt("The folder; made if need be.", "--output", "-o", default=MISSING, file_okay=False)
    prefix: str = opt("What stands in front of the names of all files; default: nothing.", default="")
    output_name: list[str] | None = opt("A value that both models have as output, too; default: none.", metavar="NAME")
    nominal: bool = opt("Write a checkpoint without values, too.", default=False)
    ort_format: bool = opt("Write the models in ORT format, too.", default=False)
    custom_op_library: Path | None = opt(
        "A library with operators of your own, for --ort-format; default: none.", callback=existing
    )
    precision: str = opt("What float16 and bfloat16 compute in: float32, or model, their own type.", default="float32")


@takes_groups
def artifacts(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", callback=existing, dir_okay=False)],
    files: FileOptions,
    parameters: ParameterOptions,
    loss: LossOptions,
    optimizer: OptimizerOptions,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            callback=positive, help="The largest norm of all gradients; default: no limit.", rich_help_panel="Optimizer"
        ),
    ] = None,
) -> None:
    """Make training artifacts of a model: training model, eval model, optimizer model and checkpoint.

    Shows what was chosen. Train them with `opgrad train DIR`, with opgrad.training.api, or with onnxruntime-training.

    Example: opgrad artifacts model.onnx --loss cross-entropy --freeze 'backbone.*' -o artifacts
    """
    screen = console()
    with screen.status(Text(visible(f"making artifacts of {model}"))):
        made = make(
            model,
            Making(parameters, loss, optimizer),
            files.output,
            "artifacts",
            clip_norm,
            prefix=files.prefix,
            additional_output_names=files.output_name or None,
            nominal_checkpoint=files.nominal,
            ort_format=files.ort_format,
            custom_op_library=files.custom_op_library,
            precision=files.precision,
        )
    from opgrad.cli import inspection, text

    text.fit(screen)
    found = inspection.inspect_made(made.directory, files.prefix, made.files)
    rows = [("files", ", ".join(f"{name} {text.size(count)}" for name, count in found.files.items()))]
    named = loss.loss or "the model's own"
    rows += [("loss", f"{named}: {made.loss}"), ("batch", inspection.ports_text(found.inputs))]
    rows += [("outputs", ", ".join(made.outputs))] if len(made.outputs) > 1 else []
    rows += [("optimizer", text.optimizer_text(node)) for node in found.optimizer]
    for what, names in (("trainable", made.trainable), ("frozen", made.frozen)):
        count = sum(made.sizes.get(name, 0) for name in names)
        rows.append((what, text.amount(len(names), count)))
    rows += [("constants", f"not trained: {', '.join(made.constants)}")] if made.constants else []
    rows += [("note", note) for note in made.notes]
    screen.print(text.facts(f"artifacts in {made.directory}", rows))
    screen.print(inspection.parameter_table(found.parameters))
