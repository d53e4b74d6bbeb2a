"""Errors on the user's side, in one line."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

from opgrad.base.arguments import ArgumentError
from opgrad.base.terminal import sentence, visible
from opgrad.base.writing import finish_interrupted
from opgrad.cli.commands.options import option

F = TypeVar("F", bound=Callable[..., Any])
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, MemoryError)
ONNX = ("onnx", "onnxruntime", "flatbuffers", "google")
# What the extras install, under the names by which it is imported; the first that has a library is named for it.
LIBRARIES = {
    "train": (*ONNX, "matplotlib"),
    "onnx": ONNX,
    "tune": (*ONNX, "matplotlib", "tokenizers", "jinja2"),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboardX",),
}


def explains_errors(extra: str | None = None) -> Callable[[F], F]:
    """Decorate a command: what goes wrong on the user's side becomes one line and exit status 1.

    Before it begins, files whose writer was ended while it replaced them take their places where it reads and writes.

    extra: the extra of the package whose libraries the command needs; for a library of another, that is named.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                for path in filter(lambda each: isinstance(each, Path), kwargs.values()):
                    finish_interrupted(path if path.is_dir() else path.parent)
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
                message = sentence(error)
                if isinstance(error, ArgumentError) and error.argument in kwargs:
                    message = f"{command.__name__}: {option(error.argument)} {error.text}"
            typer.echo(f"opgrad: {visible(message)}", err=True)
            raise typer.Exit(1)

        return run  # type: ignore[return-value]

    return decorate


def _extra_with(library: str | None, extra: str) -> str:
    """The extra to install for a missing library: that of the command, unless it does not have it."""
    package = str(library).partition(".")[0]
    having = [name for name, libraries in LIBRARIES.items() if package in libraries]
    return extra if extra in having or not having else having[0]
