"""The command `opgrad lower`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from opgrad.base.terminal import console, existing
from opgrad.cli.commands.making import made_folder

if TYPE_CHECKING:
    from opgrad.onnxruntime.runners import Lowered

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
    from opgrad.onnxruntime import LOWERED, NOT_LOWERED, runners

    if show_list:
        typer.echo("\n".join([*sorted(LOWERED), "", *(f"{name}: {why}" for name, why in sorted(NOT_LOWERED.items()))]))
        return
    if model is None or output is None:
        raise typer.BadParameter("expected MODEL and --output, or --list")
    with made_folder(output.absolute().parent):
        lowered = runners.lower_file(model, output, operator or None)
    _print(output, lowered)


def _print(target: Path, found: "Lowered") -> None:
    """Print what became of the operators, and which outputs there are now."""
    from opgrad.cli.inspect import text

    screen = console()
    text.fit(screen)
    table = Table("operator", title=f"lowered in {target}", title_justify="left")
    for title in ("nodes", "functions"):
        table.add_column(title, justify="right")
    for name, nodes in found.nodes.items():
        table.add_row(name, str(nodes), str(found.functions[name]))
    table.add_section()
    table.add_row(f"{len(found.nodes)} in all", str(sum(found.nodes.values())), str(sum(found.functions.values())))
    screen.print(table)
    if found.outputs:
        count, names = len(found.outputs), found.outputs[:MOST_OUTPUTS]
        names += [f"… and {count - MOST_OUTPUTS} more"] if count > MOST_OUTPUTS else []
        added = f"{count} outputs added: {', '.join(names)}; opgrad.feedback in the model's metadata tells their inputs"
        screen.print(added, highlight=False)
    for name in found.left:
        screen.print(f"not lowered, and not in stock onnxruntime: {name}", style="red", highlight=False)
