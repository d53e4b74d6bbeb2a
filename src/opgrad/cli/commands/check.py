"""The command `opgrad check`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opgrad.base.terminal import console

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

    extent = self_test.FULL if full else self_test.QUICK
    self_test.compile_missing(extent, Console(quiet=True) if as_json else screen)
    found = self_test.examine(progress, extent)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        self_test.show(screen, found)
    raise typer.Exit(0 if found["right"] else 1)
