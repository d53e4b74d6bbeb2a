"""The command `opgrad`. Every command imports what is heavy when it runs, so that `--help` is quick."""

import functools
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from opgrad.bench.command import bench
from opgrad.check import check
from opgrad.compile import compile_kernels
from opgrad.terminal import console

F = TypeVar("F", bound=Callable[..., Any])
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError)
ONNX = ("onnx", "onnxruntime", "flatbuffers", "google")
# What the extras install, the most complete first, under the names by which it is imported.
LIBRARIES = {"train": (*ONNX, "sklearn", "matplotlib"), "onnx": ONNX, "bench": ("matplotlib", "scipy")}
BACKENDS = ("cpu", "cuda")
TEXT_WIDTH = 200  # of a table in a file or a pipe

app = typer.Typer(
    name="opgrad",
    help="Training kernels for NumPy and for stock onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. Exit status: 0 all is well, 1 the work failed, 2 wrong usage."""
    app()


def explains_errors(extra: str | None = None) -> Callable[[F], F]:
    """Decorate a command: what goes wrong on the user's side becomes one line and exit status 1.

    extra: the extra of the package whose libraries the command needs; for a library of another, that is named.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return command(*args, **kwargs)
            except ModuleNotFoundError as error:
                if extra is None or (error.name or "opgrad").startswith("opgrad"):
                    raise
                message = f'{error.name} is not installed; pip install "opgrad[{_extra_with(error.name, extra)}]"'
            except ImportError as error:
                if not str(error).startswith("opgrad"):
                    raise
                message = str(error).removeprefix("opgrad: ")
            except KeyboardInterrupt:
                message = "interrupted"
            except typer.Exit:  # a RuntimeError
                raise
            except Exception as error:
                if not isinstance(error, USER_ERRORS) and not type(error).__module__.startswith("onnxruntime"):
                    raise
                message = " ".join(str(error).split())
            typer.echo(f"opgrad: {message}", err=True)
            raise typer.Exit(1)

        return run  # type: ignore[return-value]

    return decorate


def _extra_with(library: str | None, extra: str) -> str:
    """The extra to install for a missing library: that of the command, unless it does not have it."""
    package = str(library).partition(".")[0]
    having = [name for name, libraries in LIBRARIES.items() if package in libraries]
    return extra if extra in having or not having else having[0]


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is no number above 0")
    return value


def _file(help: str) -> Any:
    """An option that takes an existing file."""
    return typer.Option(help=help, exists=True, dir_okay=False)


ArtifactDir = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACT_DIR",
        help="Folder with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.",
        exists=True,
        file_okay=False,
    ),
]
Data = Annotated[Path | None, _file("Data: .npz, .npy or .csv; default: the dataset in recipe.toml.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the data.")]
LearningRate = Annotated[float | None, typer.Option(callback=_positive, help="Learning rate.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows of a batch.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Decides the order of the rows.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/NAME.")]
Resume = Annotated[Path | None, _file("Checkpoint to go on from: last.checkpoint of a run.")]
Validation = Annotated[
    str | None, typer.Option(metavar="FRACTION|ROWS", help="Training rows to validate every epoch with.")
]
Patience = Annotated[
    int | None, typer.Option(min=1, help="Stop after so many epochs without a better validation loss.")
]
Schedule = Annotated[str | None, typer.Option(metavar="KIND", help="Learning rate: constant, linear or cosine.")]
Warmup = Annotated[
    int | None, typer.Option(min=0, metavar="STEPS", help="Steps over which the learning rate rises from 0.")
]
Accumulate = Annotated[int | None, typer.Option(min=1, help="Batches whose gradients make one step.")]
ClipNorm = Annotated[float | None, typer.Option(callback=_positive, help="Largest norm of all gradients together.")]


@app.command()
@explains_errors(extra="train")
def train(
    directory: ArtifactDir,
    data: Data = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    output: Output = None,
    resume: Resume = None,
    validation: Validation = None,
    patience: Patience = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    accumulate: Accumulate = None,
    clip_norm: ClipNorm = None,
) -> None:
    """Train an artifact set of onnxruntime-training in stock onnxruntime.

    Writes the trained model (model.onnx, for any onnxruntime), a picture of the loss (loss.png), all figures
    (metrics.json, metrics.csv) and checkpoints (last.checkpoint, best.checkpoint). What is not given here is read
    from recipe.toml in ARTIFACT_DIR or, with --resume, from the checkpoint. Ctrl-C leaves a checkpoint behind.

    Example: opgrad train examples/digits --validation 0.1 --patience 3
    """
    options = {"epochs": epochs, "learning_rate": lr, "batch_size": batch_size, "seed": seed, "schedule": schedule}
    options |= {"validation": _rows_or_fraction(validation), "patience": patience, "warmup": warmup}
    options |= {"accumulate": accumulate, "clip_norm": clip_norm}
    _train(directory, {name: value for name, value in options.items() if value is not None}, data, output, resume)


def _train(
    directory: Path, settings: dict[str, Any], data: Path | None, output: Path | None, resume: Path | None
) -> None:
    """Train with these settings of a recipe and, for the rest, its own; print what the run came to."""
    from opgrad.training import ArtifactSet, Recipe, job, report
    from opgrad.training.fit import Interrupted
    from opgrad.training.state import Resumption

    resumption = Resumption.read(resume) if resume else None
    saved = resumption.state.recipe if resumption and resumption.state else Recipe.load(directory)
    recipe = replace(saved, **settings)
    artifacts = ArtifactSet.load(directory)
    folder = output or Path("runs") / artifacts.name
    screen = console()
    try:
        with report.TrainingBar(screen, artifacts.name) as bar:
            run = job.train(artifacts, recipe, data, folder, bar, resumption)
    except Interrupted as interruption:
        words = ["opgrad", "train", directory, "--resume", interruption.checkpoint]
        words += [word for name, value in (("--data", data), ("--output", output)) if value for word in (name, value)]
        raise RuntimeError(f"{interruption}; to go on: {shlex.join(map(str, words))}") from None
    report.print_run(screen, run)


def _rows_or_fraction(text: str | None) -> int | float | None:
    """A whole number as int, any other as float."""
    if text is None:
        return None
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"train: validation is {text!r}, expected a number of rows or a fraction") from None


@app.command()
@explains_errors(extra="train")
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder of an artifact set, or one .onnx file.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what an artifact set contains, and who runs every operator of its training graph.

    onnxruntime: the stock package alone; opgrad: with opgrad's operators; only by lowering: after `opgrad lower`.
    Exit status 1 if nobody runs some operator.

    Example: opgrad inspect examples/digits
    """
    from opgrad.training import inspection

    found = inspection.inspect(path)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        inspection.print_inspection(console(), found)
    if not found.runs:
        raise typer.Exit(1)


@app.command()
@explains_errors(extra="onnx")
def lower(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="An .onnx file.", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Print which operators can be lowered, and why the others cannot.")
    ] = False,
) -> None:
    """Turn a model's training operators into functions of plain ONNX operators, for places without opgrad.

    What the originals wrote into their inputs becomes an additional output, named after the input with .next.

    Example: opgrad lower examples/digits/training_model.onnx -o plain.onnx
    """
    from opgrad.onnxruntime import LOWERED, NOT_LOWERED, saving

    if show_list:
        typer.echo("\n".join([*sorted(LOWERED), "", *(f"{name}: {why}" for name, why in sorted(NOT_LOWERED.items()))]))
        return
    if model is None or output is None:
        raise typer.BadParameter("expected MODEL and --output, or --list")
    for line in saving.lower_file(model, output):
        typer.echo(line)


@app.command()
@explains_errors()
def ops() -> None:
    """Print every operator: formula, dtypes, backends, and its names in ONNX."""
    table = Table(row_styles=("", "dim"))
    for title in ("operator", "formula", "dtypes", "backends", "ONNX, domain com.microsoft"):
        table.add_column(title, overflow="fold")
    for row in operator_rows():
        table.add_row(*row)
    screen = console()
    if not screen.is_terminal:
        screen.width = TEXT_WIDTH
    screen.print(table)


def operator_rows() -> list[tuple[str, str, str, str, str]]:
    """What the table says of every operator."""
    from opgrad.contract import graph_operators, operators

    return [operator_row(op) for op in (*operators().values(), *graph_operators().values())]


def operator_row(op: Any) -> tuple[str, str, str, str, str]:
    """Name, formula, dtypes, backends and ONNX names of an operator, as text."""
    from opgrad.contract import FLOATS, INTEGERS

    taken = {name for tensor in op.inputs.values() for name in tensor.dtypes}
    dtypes = [name for name in FLOATS + INTEGERS if name in taken]
    onnx_names = ", ".join(item.name for item in op.onnx)
    return op.name, op.formula, ", ".join(dtypes), _backends(op), onnx_names


def _backends(operator: Any) -> str:
    """The backends that have a kernel for an operator."""
    return ", ".join(backend for backend in BACKENDS if backend in operator.support.backends)


app.command()(explains_errors(extra="bench")(bench))
app.command()(check)
app.command("compile")(explains_errors(extra="train")(compile_kernels))
