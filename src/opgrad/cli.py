"""The command `opgrad`. Every command imports what is heavy when it runs, so that `--help` is quick."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opgrad.bench.command import bench
from opgrad.check import check

F = TypeVar("F", bound=Callable[..., Any])
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError)
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

    extra: the extra of the package whose libraries the command needs.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return command(*args, **kwargs)
            except ModuleNotFoundError as error:
                if extra is None or (error.name or "opgrad").startswith("opgrad"):
                    raise
                message = f'{error.name} is not installed; pip install "opgrad[{extra}]"'
            except KeyboardInterrupt:
                message = "interrupted"
            except Exception as error:
                if not isinstance(error, USER_ERRORS) and not type(error).__module__.startswith("onnxruntime"):
                    raise
                message = " ".join(str(error).split())
            typer.echo(f"opgrad: {message}", err=True)
            raise typer.Exit(1)

        return run  # type: ignore[return-value]

    return decorate


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is no number above 0")
    return value


@app.command()
@explains_errors(extra="train")
def train(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="ARTIFACT_DIR",
            help="Folder with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.",
            exists=True,
            file_okay=False,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data: .npz, .npy or .csv; default: the dataset in recipe.toml.", exists=True, dir_okay=False
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(callback=_positive, help="Learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a batch.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides the order of the rows.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/NAME.")] = None,
) -> None:
    """Train an artifact set of onnxruntime-training in stock onnxruntime.

    Writes the trained model (model.onnx, for any onnxruntime), a picture of the loss (loss.png) and all
    figures (metrics.json). What is not given here is read from recipe.toml in ARTIFACT_DIR.

    Example: opgrad train examples/digits
    """
    from opgrad.training import ArtifactSet, Recipe, job, report

    options = {"epochs": epochs, "learning_rate": lr, "batch_size": batch_size, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    recipe = replace(Recipe.load(directory), **given)
    artifacts = ArtifactSet.load(directory)
    console = Console()
    with report.TrainingBar(console, artifacts.name) as bar:
        run = job.train(artifacts, recipe, data, output or Path("runs") / artifacts.name, bar)
    report.print_run(console, run)


@app.command()
@explains_errors()
def ops() -> None:
    """Print every operator: formula, dtypes, backends, and its names in ONNX."""
    table = Table(row_styles=("", "dim"))
    for title in ("operator", "formula", "dtypes", "backends", "ONNX, domain com.microsoft"):
        table.add_column(title, overflow="fold")
    for row in operator_rows():
        table.add_row(*map(escape, row))  # formulas have brackets
    console = Console()
    if not console.is_terminal:
        console.width = TEXT_WIDTH
    console.print(table)


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
    return ", ".join(backend for backend in BACKENDS if operator.has_kernel(backend))


app.command()(explains_errors(extra="bench")(bench))
app.command()(check)
