"""What the commands share: what they print on, and how they take files and folders."""

import os
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from opgrad.base.files import finish_interrupted

Paths = TypeVar("Paths", Path | None, list[Path] | None)

# Categories of characters that act on a terminal or hide what stands there: controls, directions of writing and other
# formats, halves of surrogates, ends of lines and paragraphs.
ACTING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """A text in which characters that act on a terminal are written as Python writes them, \\x1b for an escape.

    Names in models and files come from anybody, and may hold such characters.
    """
    if text.isprintable():
        return text
    return "".join(ascii(each)[1:-1] if unicodedata.category(each) in ACTING else each for each in text)


def sentence(error: Exception) -> str:
    """What an error says, in one line; of the system's, the file and the reason without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return " ".join(str(error).split()) or "there is not enough memory"
    return " ".join(str(error).split()) or type(error).__name__


class _Screen(Console):
    """A console on which text that it is given as str is one line, whatever characters that has."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def console(quiet: bool = False, **options: Any) -> Console:
    """A console that prints text as it is: file names, shapes and messages have brackets, which are no markup.

    options: further ones of rich's Console.
    """
    return _Screen(markup=False, quiet=quiet, **options)


def show_failure(error: BaseException) -> None:
    """Write the traceback of an error that nobody expected to stderr."""
    for line in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
        print(visible(line), file=sys.stderr)


def existing(value: Paths) -> Paths:
    """A path of the command line that must be there, or several, or none.

    One whose writer was ended while it replaced files takes its place first. Raises typer.BadParameter.
    """
    for path in [value] if isinstance(value, Path) else value or ():
        try:
            there = path.exists() or (finish_interrupted(path.parent) and path.exists())
        except (OSError, ValueError) as error:
            raise typer.BadParameter(sentence(error)) from None
        if not there:
            raise typer.BadParameter(f"{os.fspath(path)!r} does not exist.")
    return value


def folders_argument(help: str) -> Any:
    """An argument that takes existing paths, or none; `ArtifactSet.load` says of a file what makes a folder."""
    return typer.Argument(metavar="DIR", help=help, callback=existing, show_default=False)
