"""The command `opgrad train`."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from opgrad.base.arguments import naming
from opgrad.base.terminal import console, existing, visible
from opgrad.cli.artifacts import (
    LossOptions,
    Making,
    OptimizerOptions,
    ParameterOptions,
    QuantizationOptions,
    made_folder,
    make,
    results_folder,
)
from opgrad.cli.options import RunSettings, given, opt, said, takes_groups, words

if TYPE_CHECKING:
    import onnx

    from opgrad.training.engine.distributed import OneProcess
    from opgrad.training.files.artifact_set import ArtifactSet
    from opgrad.training.run.job import Run
    from opgrad.training.run.recipe import Recipe
    from opgrad.training.run.state import Resumption

OPTIONS = "opgrad.options"  # a property of checkpoints: the options by which the artifacts of a model were made


@dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a training run, which a recipe has, too."""

    row_wise: str | None = opt(
        "Embedding tables of which a step changes the rows alone that its batches have read; default: none.",
        metavar="PATTERN,…",
    )
    fuse: bool | None = opt("Replace nodes of the graph by faster ones; default: yes.", "--fuse/--no-fuse")

    loss_scale: str | None = opt("Compute in float16, the loss times this; default: in float32.", metavar="X|dynamic")

    def of_recipe(self) -> dict[str, Any]:
        """The settings that were given, under the names of a recipe."""
        values = super().of_recipe()
        if self.loss_scale is not None:
            with suppress(ValueError):
                values["loss_scale"] = float(self.loss_scale)
        return values | ({"row_wise": self.row_wise.split(",")} if self.row_wise else {})


@dataclass(frozen=True)
class Paths:
    """Where things are read and written."""

    data: Path | None = opt(
        "The data as .npz, .npy or .csv; default: the dataset in recipe.toml.", callback=existing, dir_okay=False
    )
    output: Path | None = opt("Folder for the results; default: runs/NAME.", file_okay=False)
    resume: Path | None = opt(
        "The checkpoint to go on from, last.checkpoint of a run; default: none.", callback=existing, dir_okay=False
    )
    export: Path | None = opt("A file for the trained model, with the outputs it had; default: none.", dir_okay=False)
    artifacts: Path | None = opt("The folder that keeps the artifacts made of a model; default: none.", file_okay=False)
    device: str = opt("Where it trains: cpu, or cuda with onnxruntime-gpu.", default="cpu")


@takes_groups
def train(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|ARTIFACT_DIR",
            help="An .onnx file, a folder with model.onnx and recipe.toml, or one with training_model.onnx, "
            "eval_model.onnx, optimizer_model.onnx and checkpoint.",
            callback=existing,
        ),
    ],
    settings: Settings,
    paths: Paths,
    parameters: ParameterOptions,
    loss: LossOptions,
    optimizer: OptimizerOptions,
    quantization: QuantizationOptions,
) -> None:
    """Train an ONNX model, or an artifact set of onnxruntime-training, in stock onnxruntime.

    Writes the trained model (model.onnx, for any onnxruntime), a picture of the loss (loss.png), all figures
    (metrics.json, metrics.csv, metrics.jsonl) and checkpoints (last.checkpoint, best.checkpoint). What is not given
    here is read from recipe.toml beside MODEL or in ARTIFACT_DIR or, with --resume, from the checkpoint. Ctrl-C leaves
    a checkpoint behind. The options in the boxes say what is made of a MODEL. Started by torchrun, the processes share
    out every batch, and the first one writes.

    Example: opgrad train model.onnx --data data.npz --loss cross-entropy --freeze 'backbone.*'
    """
    from opgrad.base.files import destination
    from opgrad.onnxruntime import exact_products
    from opgrad.training import ArtifactSet
    from opgrad.training.engine import distributed
    from opgrad.training.files.artifact_set import FILES
    from opgrad.training.run import job, report
    from opgrad.training.run.fit import Interrupted
    from opgrad.training.run.recipe import FILE
    from opgrad.training.run.report import TrainingBar

    is_set = path.is_dir() and any((path / name).exists() for name in FILES)
    if not is_set and (path / "model.onnx").is_file():  # results of a folder with a model lie in runs/FOLDER
        paths = replace(paths, output=paths.output or Path("runs") / path.resolve().name)
        path = path / "model.onnx"
    making = Making(parameters, loss, optimizer, quantization)
    processes = distributed.begin()
    screen = console(not processes.is_first)
    _check_quantization(quantization)
    finish = _convert_file if quantization.quantize else None
    with processes.failing_together(), ExitStack() as stack:
        job.check_device(paths.device, processes)
        options = given(*making.groups) | ({"--artifacts": paths.artifacts} if paths.artifacts else {})
        if is_set and options:
            raise ValueError(f"train: what {', '.join(options)} sets is for an .onnx file; {path} is an artifact set")
        if paths.export is not None:
            stack.enter_context(made_folder(paths.export.absolute().parent))
            destination(paths.export)
        artifacts = ArtifactSet.load(path) if path.is_dir() else None
        output = paths.output or Path("runs") / (path.stem if artifacts is None else artifacts.name)
        resumption, recipe = _recipe(path, settings, paths, output, processes)
        way = shlex.join(words(given(*making.with_recipe(recipe).groups)))
        if resumption and not is_set and (before := resumption.properties.get(OPTIONS, way)) != way:
            raise ValueError(f"resume: {resumption.path} is of a run with {before or 'no options'}, expected the same")
        if artifacts is None:
            if paths.data is None and resumption is None and recipe.dataset is None:
                raise ValueError(f"train: no data for {path}, expected --data or a dataset named in {FILE} beside it")
            if processes.is_first:
                stack.enter_context(results_folder(output))
            temporary = Path(stack.enter_context(TemporaryDirectory(prefix="opgrad-")))
            model = path if finish is None else _quantized(path, quantization, recipe, paths.data, temporary)
            artifacts = _made(model, making.with_recipe(recipe), paths, recipe, processes, screen)
        exported = _outputs(artifacts) if paths.export else []
        if told := exact_products.note(artifacts.eval_model):
            screen.print(Text(visible(f"note: {told}")))
        if artifacts.scores is None:
            screen.print(f"no scores found that {artifacts.loss} compares with a label: only the loss is reported")
        try:
            with TrainingBar(screen, artifacts.name, epochs=recipe.epochs) as bar:
                what = artifacts, recipe, paths.data, output, bar, resumption, processes, finish, settings.log or ()
                run = job.train(*what, paths.device, {} if is_set else {OPTIONS: way})
        except Interrupted as interruption:
            going_on = RunSettings(log=settings.log), replace(paths, resume=None), *making.groups
            options = {"--resume": interruption.checkpoint, **given(*going_on)}
            command = shlex.join(["opgrad", "train", str(path), *words(options)])
            raise RuntimeError(f"{interruption}; to go on: {command}") from None
        if run is None:
            return
        report.print_run(screen, run)
        if run.divergence:
            raise RuntimeError(f"train: the training diverged: {run.divergence}; expected a lower --lr, or --clip-norm")
        if paths.export is not None:
            _export(run, exported, paths.export, finish, screen)


def _recipe(
    path: Path, settings: Settings, paths: Paths, output: Path, processes: "OneProcess"
) -> "tuple[Resumption | None, Recipe]":
    """The checkpoint to go on from, and the recipe with the options that were given.

    Restarted processes go on from last.checkpoint, which was written before one of them was lost.
    """
    from opgrad.training.engine import distributed
    from opgrad.training.run.recipe import Recipe
    from opgrad.training.run.state import LAST, Resumption

    restarted = processes.is_group and distributed.restarts() > 0 and (output / LAST).is_file()
    resume = output / LAST if restarted else paths.resume
    resumption = Resumption.read(resume, may_be_done=restarted) if resume else None
    saved = resumption.state.recipe if resumption and resumption.state else None
    return resumption, replace(saved or Recipe.load(path if path.is_dir() else path.parent), **settings.of_recipe())


def _made(
    model: Path, making: Making, paths: Paths, recipe: "Recipe", processes: "OneProcess", screen: Console
) -> "ArtifactSet":
    """The artifacts of a model, also in the folder that keeps them."""
    from opgrad.cli.text import amount
    from opgrad.training.make.artifacts import Files, described

    folder = paths.artifacts or Path(model.stem)
    with screen.status(Text(visible(f"making artifacts of {model}"))):
        precision = "float32" if recipe.loss_scale is None else "model"
        made = make(model, making, None, "train", precision=precision)
        if paths.artifacts is not None and processes.is_first:
            with made_folder(folder):
                Files(folder).write(made)
    told = described(folder, (), made)
    count = sum(told.sizes.get(name, 0) for name in told.trainable)
    frozen = f", {len(told.frozen)} frozen" if told.frozen else ""
    screen.print(f"artifacts of {model}: trainable {amount(len(told.trainable), count)}{frozen}")
    for note in told.notes:
        screen.print(Text(visible(f"note: {note}")))
    artifacts: ArtifactSet = made.artifact_set(folder)
    return artifacts


def _outputs(artifacts: "ArtifactSet") -> "list[onnx.ValueInfoProto]":
    """The outputs that the model had, or those of the scores. Raises ValueError where they cannot be exported."""
    from opgrad.training.engine.export import check_export, declared_outputs
    from opgrad.training.files.artifact_set import model_outputs

    computed = {name for node in artifacts.eval_model.graph.node for name in node.output}
    had = [name for name in model_outputs(artifacts.eval_model) if name in computed and name != artifacts.loss]
    found = declared_outputs(artifacts.eval_model, had or artifacts.objective.outputs)
    check_export(artifacts, found)
    return found


def _export(
    run: "Run",
    outputs: "Sequence[onnx.ValueInfoProto]",
    file: Path,
    finish: Callable[[Path], None] | None,
    screen: Console,
) -> None:
    """Write the trained model once more, with these outputs."""
    from opgrad.training.engine.export import export_model
    from opgrad.training.files.checkpoint import read_checkpoint
    from opgrad.training.run.job import parameters_kept
    from opgrad.training.run.state import BEST, LAST

    with parameters_kept(run.output):
        checkpoint = read_checkpoint(run.output / (LAST if run.best_epoch is None else BEST))
        values = {**run.artifacts.constants, **checkpoint.parameters}
        export_model(run.artifacts.eval_model, run.artifacts.name, values, outputs, file)
        if finish is not None:
            finish(file)
    names = ", ".join(each.name for each in outputs)
    screen.print(f"exported  {file}: the trained model, with the outputs {names}")


# --- a model that is trained as an integer model ----------------------------------------------------------------------


def _check_quantization(options: QuantizationOptions) -> None:
    """Raise ValueError for options that do not go together."""
    from opgrad.training.quantization import KINDS

    if options.quantize is None:
        if used := given(options):
            raise ValueError(f"train: {next(iter(used))} is of a quantized model, expected --quantize, too")
        return
    if options.quantize not in KINDS:
        raise ValueError(f"train: --quantize is {options.quantize!r}, expected {' or '.join(KINDS)}")
    if options.calibrate is not None and options.quantize != "int8":
        raise ValueError(f"train: --calibrate is for activations, and {options.quantize} rounds weights alone")
    if options.temperature is not None and options.distill is None:
        raise ValueError("train: --temperature is of what is learned from the float model, expected --distill, too")


def _quantized(model: Path, options: QuantizationOptions, recipe: "Recipe", data: Path | None, folder: Path) -> Path:
    """The file of the model that is trained, in a folder: it rounds as the integer model will."""
    from opgrad.base.files import new_file
    from opgrad.onnx.graph.loading import read_model
    from opgrad.training.quantization import calibration, prepare, with_teacher

    with naming("train"):
        given, kind = read_model(model), options.quantize or ""
    try:
        rows = calibration(given, recipe, data, options.calibrate) if kind == "int8" else ()
        weights = options.quantize_weights or None
        made = prepare(given, kind, rows, per_channel=bool(options.per_channel), weights=weights)
        if options.distill is not None:
            made = with_teacher(made, given)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = {"weights": "quantize_weights", "kind": "quantize"}
        raise ValueError(f"train: {model}: {said(error, getattr(error, 'caller', ''), names)}") from None
    new_file(folder / model.name, made.SerializeToString())
    return folder / model.name


def _convert_file(file: Path) -> None:
    """Make the integer model of a trained one, in its file."""
    from opgrad.base.files import replace_file
    from opgrad.training.quantization import convert

    replace_file(file, convert(file).SerializeToString())
