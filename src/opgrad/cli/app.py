"""The command `opgrad`, and its small commands. All import what is heavy when they run, so that `--help` is quick."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import opgrad
from opgrad.base.terminal import console, existing, folders_argument, show_failure
from opgrad.cli.artifacts import artifacts, made_folder
from opgrad.cli.options import explains_errors, opt, takes_groups
from opgrad.cli.step import step
from opgrad.cli.train import train
from opgrad.cli.tune import tune

if TYPE_CHECKING:
    from opgrad.contract import Operator


def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Test all dtypes and examples.")] = False,
) -> None:
    """Test every operator on this machine against its float64 reference.

    With an example in float32; with --full with all examples in four dtypes,
    which takes minutes where no kernels are compiled yet. Says what was found:
    the CPU, its vectors, the threads, the cache of compiled kernels, the CUDA
    device, the packages that opgrad works with. Where there is a CUDA device,
    every operator is tested on it too. Exit status 0: all is right; 1:
    something is wrong.
    """
    from rich.console import Console
    from rich.progress import track

    from opgrad.cli import check as self_test

    screen = console()

    def progress(items: "list[Operator]") -> Any:
        return items if as_json else track(items, "testing", console=screen, transient=True)

    self_test.compile_missing(full, Console(quiet=True) if as_json else screen)
    found = self_test.examine(progress, full)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        self_test.show(screen, found)
    raise typer.Exit(0 if found["right"] else 1)


@dataclass(frozen=True)
class CompileOptions:
    """What is compiled, and for which processors."""

    model: list[Path] | None = opt("A set, as DIR; default: none.", metavar="DIR")
    ops: str = opt("The operators; default: all, or with DIR those of the graphs.", default="", metavar="NAME,…")
    dtypes: str = opt("Dtypes of operators; default: float32,float64,float16,bfloat16.", default="", metavar="NAME,…")
    jobs: int | None = opt("How many processes compile; default: one for each CPU.", "--jobs", "-j", min=1)
    processors: str = opt(
        "Make a pack for x86-64-v2, x86-64-v3, x86-64-v4, x86-64-v4-bf16, aarch64; sm_80, sm_90, sm_100: for CUDA "
        "devices; default: no pack.",
        "--for",
        default="",
        metavar="NAME,…",
    )
    program: str = opt("Program of a pack; default: none.", "--run", default="", metavar="'PROGRAM.py ARG…'")
    output: Path | None = opt("Write the pack, whose folder is made; default: none.", "--output", "-o", metavar="FILE")


@takes_groups
def compile_kernels(
    folders: Annotated[
        list[Path] | None, folders_argument("Artifact sets: the kernels of their graphs and optimizers.")
    ] = None,
    *,
    options: CompileOptions,
) -> None:
    """Compile kernels into the cache, so that no later process has to.

    Without arguments the kernels that plain calls of all operators take;
    with DIR those that training and evaluation of artifact sets take. Meant
    for images of containers, which then start warm: docs/guides/cache.md. Kernels
    fit the kind of CPU that they are compiled on.

    With --for they go into one file for other machines, which need no
    compiler then: docs/guides/packs.md.

    Example: opgrad compile examples/digits
    Example: opgrad compile --for x86-64-v3,aarch64 examples/digits -o kernels.pack
    """
    from opgrad.cli.compile import compile_all

    given = {**vars(options)}
    with nullcontext() if options.output is None else made_folder(options.output.absolute().parent):
        compile_all([*(folders or []), *(given.pop("model") or [])], **given)


TEXT_WIDTH = 200  # of a table in a file or a pipe
app = typer.Typer(name="opgrad", no_args_is_help=True, pretty_exceptions_enable=False)
MOST_OUTPUTS = 8  # that are named


def lower(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="An .onnx file.", callback=existing, dir_okay=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write, whose folder is made; default: none, with --list."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(help="Lower these operators alone, of those that --list prints; default: all.", metavar="NAME"),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Print which operators can be lowered, and why the others cannot.")
    ] = False,
) -> None:
    """Turn a model's training operators into functions of plain ONNX operators, for places without opgrad.

    What the originals wrote into their inputs becomes an additional output, named after the input with .next.

    Example: opgrad lower examples/digits/training_model.onnx -o plain.onnx
    """
    from opgrad.cli import text
    from opgrad.onnxruntime import LOWERED, NOT_LOWERED, loading

    if show_list:
        typer.echo("\n".join([*sorted(LOWERED), "", *(f"{name}: {why}" for name, why in sorted(NOT_LOWERED.items()))]))
        return
    if model is None or output is None:
        raise typer.BadParameter("expected MODEL and --output, or --list")
    with made_folder(output.absolute().parent):
        lowered = loading.lower_file(model, output, operator or None)
    screen = console()
    text.fit(screen)
    table = Table("operator", title=f"lowered in {output}", title_justify="left")
    for title in ("nodes", "functions"):
        table.add_column(title, justify="right")
    for name, nodes in lowered.nodes.items():
        table.add_row(name, str(nodes), str(lowered.functions[name]))
    table.add_section()
    table.add_row(
        f"{len(lowered.nodes)} in all", str(sum(lowered.nodes.values())), str(sum(lowered.functions.values()))
    )
    screen.print(table)
    if lowered.outputs:
        count, names = len(lowered.outputs), lowered.outputs[:MOST_OUTPUTS]
        names += [f"… and {count - MOST_OUTPUTS} more"] if count > MOST_OUTPUTS else []
        added = f"{count} outputs added: {', '.join(names)}; opgrad.feedback in the model's metadata tells their inputs"
        screen.print(added, highlight=False)
    for name in lowered.left:
        screen.print(f"not lowered, and not in stock onnxruntime: {name}", style="red", highlight=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
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
    from opgrad.cli.inspection import inspect as look_at
    from opgrad.cli.inspection import print_inspection

    found = look_at(path)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        print_inspection(console(), found)
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
