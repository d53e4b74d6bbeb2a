"""The command `opgrad train`."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from opgrad.base.terminal import console, existing, visible
from opgrad.cli.commands import quantizing
from opgrad.cli.commands.making import (
    LossOptions,
    Making,
    OptimizerOptions,
    ParameterOptions,
    QuantizationOptions,
    made_folder,
    make,
    results_folder,
)
from opgrad.cli.commands.options import RunSettings, file_option, given, takes_groups, words

if TYPE_CHECKING:
    import onnx

    from opgrad.training.engine.distributed import OneProcess
    from opgrad.training.files.artifact_set import ArtifactSet
    from opgrad.training.run.job import Run
    from opgrad.training.run.recipe import Recipe


@dataclass(frozen=True)
class Settings(RunSettings):
    """What a recipe says, too."""

    row_wise: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN,…",
            help="Embedding tables of which a step changes the rows alone that its batches have read; default: none.",
        ),
    ] = None
    fuse: Annotated[
        bool | None, typer.Option("--fuse/--no-fuse", help="Replace nodes of the graph by faster ones; default: yes.")
    ] = None

    loss_scale: Annotated[
        str | None,
        typer.Option(
            metavar="X|dynamic", help="Compute float16 as it is, with the loss times this; default: in float32."
        ),
    ] = None

    def of_recipe(self) -> dict[str, Any]:
        """Those that were given, under the names of a recipe."""
        values = super().of_recipe()
        if self.loss_scale is not None:
            values["loss_scale"] = _number(self.loss_scale)
        return values | ({"row_wise": self.row_wise.split(",")} if self.row_wise else {})


@dataclass(frozen=True)
class Places:
    """Where things are read and written."""

    data: Annotated[
        Path | None, file_option("The data as .npz, .npy or .csv; default: the dataset in recipe.toml.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: runs/NAME.", file_okay=False)
    ] = None
    resume: Annotated[
        Path | None, file_option("The checkpoint to go on from, last.checkpoint of a run; default: none.")
    ] = None
    export: Annotated[
        Path | None,
        typer.Option(help="A file for the trained model, with the outputs that it had; default: none.", dir_okay=False),
    ] = None
    artifacts: Annotated[
        Path | None,
        typer.Option(help="The folder that keeps the artifacts made of a model; default: none does.", file_okay=False),
    ] = None


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
    places: Places,
    parameters: ParameterOptions,
    loss: LossOptions,
    optimizer: OptimizerOptions,
    quantization: QuantizationOptions,
) -> None:
    """Train an ONNX model, or an artifact set of onnxruntime-training, in stock onnxruntime.

    Writes the trained model (model.onnx, for any onnxruntime), a picture of the loss (loss.png), all figures
    (metrics.json, metrics.csv) and checkpoints (last.checkpoint, best.checkpoint). What is not given here is read
    from recipe.toml beside MODEL or in ARTIFACT_DIR or, with --resume, from the checkpoint. Ctrl-C leaves a
    checkpoint behind. The options in the boxes say what is made of a MODEL. Started by torchrun, the processes share
    out every batch, and the first one writes.

    Example: opgrad train model.onnx --data data.npz --loss cross-entropy --freeze 'backbone.*'
    """
    from opgrad.training.engine import distributed

    path, places = _model_of(path, places)
    making = _with_recipe(Making(parameters, loss, optimizer, quantization), path, places)
    processes = distributed.begin()
    quantizing.check(quantization)
    with processes.failing_together():
        if path.is_dir():
            _check_folder(path, making, places)
            _train(path, path, settings, places, making, path, processes)
            return
        _check_model(path, settings, places)
        with (
            results_folder(places.output or Path("runs") / path.stem) if processes.is_first else nullcontext(),
            _trained_model(path, settings, places, quantization) as model,
            _artifacts(model, making, places, _scales(path, settings, places), processes) as folder,
        ):
            _train(path, folder, settings, places, making, path.parent, processes)


def _model_of(path: Path, places: Places) -> tuple[Path, Places]:
    """The model of a folder that has one and no artifact set, whose results lie in runs/FOLDER; else what is given."""
    from opgrad.training.files.artifact_set import FILES

    file = path / "model.onnx"
    if not file.is_file() or any((path / name).exists() for name in FILES):
        return path, places
    return file, replace(places, output=places.output or Path("runs") / path.resolve().name)


def _with_recipe(making: Making, path: Path, places: Places) -> Making:
    """What is made of a model, with what the recipe says of it where no option does."""
    if path.is_dir():
        return making
    from opgrad.training.make.named_blocks import Loss

    recipe, loss, parameters = _saved(path, places), making.loss, making.parameters
    if recipe.loss is not None and loss.loss is None:
        loss = replace(loss, loss=Loss(recipe.loss))
    if parameters.batch_norm is None:
        parameters = replace(parameters, batch_norm=recipe.batch_norm)
    return replace(making, loss=loss, parameters=parameters)


def _saved(path: Path, places: Places) -> "Recipe":
    """The recipe of the run that goes on, or the one beside a model."""
    from opgrad.training import Recipe
    from opgrad.training.run.state import Resumption

    state = Resumption.read(places.resume).state if places.resume else None
    return state.recipe if state else Recipe.load(path.parent)


@contextmanager
def _trained_model(path: Path, settings: Settings, places: Places, quantization: QuantizationOptions) -> Iterator[Path]:
    """The model that is trained: the given one, or one that rounds as the integer model will."""
    from opgrad.training import Recipe

    if quantization.quantize is None:
        yield path
        return
    recipe = replace(Recipe.load(path.parent), **settings.of_recipe())
    with TemporaryDirectory(prefix="opgrad-") as folder:
        yield quantizing.prepared(path, quantization, recipe, places.data, Path(folder))


def _check_folder(folder: Path, making: Making, places: Places) -> None:
    """Raise ValueError for options that say what is made of a model, if the folder has a set or a part of one."""
    from opgrad.training.files.artifact_set import FILES

    options = given(*making.groups) | ({"--artifacts": places.artifacts} if places.artifacts else {})
    if options and any((folder / name).exists() for name in FILES):
        are = "is" if len(options) == 1 else "are"
        raise ValueError(
            f"train: {', '.join(options)} {are} for an .onnx file; {folder} is an artifact set, where this is settled"
        )
    _check_export(places.export)


def _check_export(file: Path | None) -> None:
    """Raise an error where the exported model, or a folder for it, cannot be made."""
    from opgrad.base.writing import destination

    if file is not None:
        destination(file)
        there = next(each for each in file.absolute().parents if each.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"train: {there} is a file, expected a folder for --export {file}")


def _check_model(path: Path, settings: Settings, places: Places) -> None:
    """Raise ValueError, or FileNotFoundError, for what can be known before anything is made."""
    from opgrad.training.run.recipe import FILE, Recipe

    settings.of_recipe()
    _check_export(places.export)
    if places.data is None and places.resume is None and Recipe.load(path.parent).dataset is None:
        raise ValueError(f"train: no data for {path}, expected --data or a dataset named in {FILE} beside it")


def _scales(path: Path, settings: Settings, places: Places) -> bool:
    """Whether the loss will be scaled, so that float16 is computed as it is."""
    return replace(_saved(path, places), **settings.of_recipe()).loss_scale is not None


@contextmanager
def _artifacts(model: Path, making: Making, places: Places, scales: bool, processes: "OneProcess") -> Iterator[Path]:
    """The folder with the artifacts of a model: one that is kept, or one that is gone at the end."""
    from opgrad.cli.inspect.text import amount

    screen = console(not processes.is_first)
    with TemporaryDirectory(prefix="opgrad-") as temporary:
        kept = places.artifacts if processes.is_first else None
        folder = kept or Path(temporary) / model.stem
        with screen.status(Text(visible(f"making artifacts of {model}"))):
            made = make(model, making, folder, "train", precision="model" if scales else "float32")
        count = sum(made.sizes.get(name, 0) for name in made.trainable)
        frozen = f", {len(made.frozen)} frozen" if made.frozen else ""
        screen.print(f"artifacts of {model}: trainable {amount(len(made.trainable), count)}{frozen}")
        for note in made.notes:
            screen.print(Text(visible(f"note: {note}")))
        yield folder


def _train(
    path: Path,
    folder: Path,
    settings: Settings,
    places: Places,
    making: Making,
    recipes: Path,
    processes: "OneProcess",
) -> None:
    """Train the artifacts in a folder, which are of the model at `path`; print what the run came to."""
    from opgrad.onnxruntime import exact_products
    from opgrad.training import ArtifactSet, Recipe
    from opgrad.training.engine import distributed
    from opgrad.training.run import job
    from opgrad.training.run.fit import Interrupted
    from opgrad.training.run.report import TrainingBar
    from opgrad.training.run.state import LAST, Resumption

    artifacts = ArtifactSet.load(folder)
    output = places.output or Path("runs") / (artifacts.name if path.is_dir() else path.stem)
    restarted = processes.is_group and distributed.restarts() > 0 and (output / LAST).is_file()
    resume = output / LAST if restarted else places.resume  # written before one of the processes was lost
    resumption = Resumption.read(resume, may_be_done=restarted) if resume else None
    saved = resumption.state.recipe if resumption and resumption.state else Recipe.load(recipes)
    recipe: Recipe = replace(saved, **settings.of_recipe())
    screen = console(not processes.is_first)
    exported = _outputs(artifacts) if places.export else []
    if told := exact_products.note(artifacts.eval_model):
        screen.print(Text(visible(f"note: {told}")))
    if artifacts.scores is None:
        screen.print(f"no scores found that {artifacts.loss} compares with a label: only the loss is reported")
    try:
        with TrainingBar(screen, artifacts.name, epochs=recipe.epochs) as bar:
            finish = quantizing.convert_file if making.quantization.quantize else None
            run = job.train(artifacts, recipe, places.data, output, bar, resumption, processes, finish)
    except Interrupted as interruption:
        options = {"--resume": interruption.checkpoint, **given(replace(places, resume=None), *making.groups)}
        command = shlex.join(["opgrad", "train", str(path), *words(options)])
        raise RuntimeError(f"{interruption}; to go on: {command}") from None
    if run is not None:
        _finish(run, exported, places.export, finish, screen)


def _finish(
    run: "Run",
    outputs: "list[onnx.ValueInfoProto]",
    file: Path | None,
    finish: Callable[[Path], None] | None,
    screen: Console,
) -> None:
    """Print what a run came to, and export its model. Raises RuntimeError for one that diverged."""
    from opgrad.training.run import report

    report.print_run(screen, run)
    if run.divergence:
        raise RuntimeError(f"train: the training diverged: {run.divergence}; expected a lower --lr, or --clip-norm")
    if file:
        _export(run, outputs, file, finish, screen)


def _outputs(artifacts: "ArtifactSet") -> "list[onnx.ValueInfoProto]":
    """The outputs that the model had, or those of the scores. Raises ValueError where they cannot be exported."""
    from opgrad.training.engine.export import check_export, declared_outputs
    from opgrad.training.files.objective import model_outputs

    computed = {name for node in artifacts.eval_model.graph.node for name in node.output}
    had = [name for name in model_outputs(artifacts.eval_model) if name in computed and name != artifacts.loss]
    found = declared_outputs(artifacts.eval_model, had or artifacts.objective.outputs, "train")
    check_export(artifacts, found, "train")
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
        with made_folder(file.absolute().parent):
            export_model(run.artifacts, checkpoint.parameters, outputs, file)
            if finish is not None:
                finish(file)
    names = ", ".join(each.name for each in outputs)
    screen.print(f"exported  {file}: the trained model, with the outputs {names}")


def _number(text: str) -> float | str:
    """A text as a number, if it is one."""
    with suppress(ValueError):
        return float(text)
    return text
