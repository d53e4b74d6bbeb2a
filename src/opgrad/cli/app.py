"""The command `opgrad`. Every command imports what is heavy when it runs, so that `--help` is quick."""

import json
import sys
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import opgrad
from opgrad.base.terminal import console, existing, show_failure
from opgrad.cli.commands.artifacts import artifacts
from opgrad.cli.commands.check import check
from opgrad.cli.commands.compile import compile_kernels
from opgrad.cli.commands.errors import explains_errors
from opgrad.cli.commands.lower import lower
from opgrad.cli.commands.step import step
from opgrad.cli.commands.train import train
from opgrad.cli.commands.tune import tune

TEXT_WIDTH = 200  # of a table in a file or a pipe

app = typer.Typer(
    name="opgrad",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    """Print it and end, if it was asked for."""
    if asked:
        typer.echo(f"opgrad {opgrad.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Training kernels for NumPy and for stock onnxruntime."""


def run() -> None:
    """Run the command line; see `opgrad.cli.main`."""
    try:
        app()
    except Exception as error:
        show_failure(error)
        sys.exit(1)


def _add(command: Callable[..., Any], extra: str | None = None, name: str | None = None) -> None:
    """Add a command, whose help has the paragraphs of its docstring without their ends of lines."""
    paragraphs = getdoc(command) or ""
    help = "\n\n".join(" ".join(each.split()) for each in paragraphs.split("\n\n"))
    app.command(name, help=help)(explains_errors(extra)(command))


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Folder of an artifact set or a language model, or one .onnx file.", callback=existing
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show what an artifact set contains, or what training would make of a model, and who runs every operator.

    onnxruntime: the stock package alone; opgrad: with opgrad's operators; only by lowering: after `opgrad lower`.
    Exit status 1 if onnxruntime with opgrad does not run it as it is; then it says what to do. Of a model it tells what
    is trainable, which losses fit, and every node that has no gradient; of a language model also which adapters `opgrad
    tune` would train, and the memory that a step would take.

    Example: opgrad inspect model.onnx
    """
    from opgrad.cli.inspect import inspection, tables

    found = inspection.inspect(path)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        tables.print_inspection(console(), found)
    if not found.runs:
        raise typer.Exit(1)


def bench(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Say where operators are measured: in a checkout of the source code, by `make bench`."""
    typer.echo("opgrad bench: operators are measured in a checkout of the source code, by: python -m bench", err=True)
    raise typer.Exit(2)


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
    """Name, formula, dtypes, backends and ONNX names of every operator, as text."""
    from opgrad.contract import FLOATS, INTEGERS
    from opgrad.ops import public_operators

    rows = []
    for op in public_operators().values():
        taken = {name for tensor in op.inputs.values() for name in tensor.dtypes}
        dtypes = ", ".join(name for name in FLOATS + INTEGERS if name in taken)
        onnx_names = ", ".join(item.name for item in op.onnx)
        rows.append((op.name, op.formula, dtypes, ", ".join(op.support.backends), onnx_names))
    return rows


_add(train, "train")
_add(tune, "tune")
_add(artifacts, "onnx")
_add(step, "train")
_add(inspect, "train")
_add(lower, "onnx")
_add(ops)
app.command(hidden=True, context_settings={"ignore_unknown_options": True})(bench)
_add(check)
_add(compile_kernels, "train", "compile")
