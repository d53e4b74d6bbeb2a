"""What the commands share: what they print on, and how they take folders."""

from typing import Any

import typer
from rich.console import Console


def console(quiet: bool = False) -> Console:
    """A console that prints text as it is: file names, shapes and messages have brackets, which are no markup."""
    return Console(markup=False, quiet=quiet)


def folders_argument(help: str) -> Any:
    """An argument that takes existing folders, or none."""
    return typer.Argument(metavar="[DIR ...]", help=help, exists=True, file_okay=False, show_default=False)
