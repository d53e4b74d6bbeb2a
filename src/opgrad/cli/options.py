"""Options that several commands have, in groups that are dataclasses, and errors on the user's side, in one line."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from opgrad.base.arguments import ArgumentError
from opgrad.base.files import finish_interrupted
from opgrad.base.terminal import sentence, visible

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


def opt(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """An option of a group, whose help stands under the group's PANEL. names: those that the field's does not give."""
    return field(default=default, metadata={"help": help, "names": names, **settings})


def positive(value: float | None) -> float | None:
    """A number above 0, or nothing. Raises typer.BadParameter."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is no number above 0")
    return value


def takes_groups(command: F) -> F:
    """Decorate a command: in the place of each parameter that is a dataclass it takes the fields of that."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return command(**given)

    taken: list[inspect.Parameter] = []
    for parameter in parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            taken.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        for each in fields(group):
            settings: dict[str, Any] = {"rich_help_panel": getattr(group, "PANEL", None), **each.metadata}
            names = settings.pop("names") or ((option(each.name),) if each.default is False else ())
            annotation = Annotated[each.type, typer.Option(*names, **settings)]  # type: ignore[name-defined]
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            taken.append(
                inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in taken}
    return run  # type: ignore[return-value]


def given(*groups: Any) -> dict[str, Any]:
    """The options of these groups that were given, by their names in a command line."""
    values = {each: getattr(group, each.name) for group in groups for each in fields(group)}
    return {option(each.name): value for each, value in values.items() if value not in (None, [], each.default)}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def said(error: Exception, caller: str, names: Mapping[str, str]) -> str:
    """The text of an error: of an argument, with the option in its place; else without the name of the function.

    names: options that have other names than the arguments.
    """
    if isinstance(error, ArgumentError):
        return f"{option(names.get(error.argument, error.argument))} {error.text}"
    return str(error.args[0] if error.args else type(error).__name__).removeprefix(f"{caller}: ")


def words(options: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(name if value else name.replace("--", "--no-", 1))
        else:
            found += [word for each in (value if isinstance(value, list) else [value]) for word in (name, str(each))]
    return found


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run, which a recipe has, too."""

    epochs: int | None = opt("How often all rows are trained on; default: 10, of tune 1.", min=1)
    lr: float | None = opt("The learning rate; default: 0.001, of tune 0.0002.", callback=positive)
    batch_size: int | None = opt("How many rows a batch has; default: 32, of tune 4.", min=1)
    seed: int | None = opt("The number that decides the order of the rows; default: 0.", min=0)
    validation: str | None = opt(
        "How many training rows validate every epoch, or of tune a file of others; default: none.",
        metavar="FRACTION|ROWS",
    )
    patience: int | None = opt("Stop after so many epochs without a better validation loss; default: never.", min=1)
    schedule: str | None = opt(
        "How the learning rate falls: constant, linear or cosine; default: constant, of tune cosine.", metavar="KIND"
    )
    warmup: int | None = opt("Over how many steps the learning rate rises from 0; default: 0.", min=0, metavar="STEPS")
    accumulate: int | None = opt("How many batches' gradients make one step; default: 1.", min=1)
    clip_norm: float | None = opt("Largest norm of all gradients; default: the set's, of tune 1.", callback=positive)
    log: list[str] | None = opt(
        "Where figures go besides metrics.jsonl: tensorboard; default: nowhere.", metavar="KIND"
    )
    checkpoint_every: int | None = opt(
        "Write last.checkpoint after so many steps, too; default: after epochs alone.", min=1, metavar="STEPS"
    )

    def of_recipe(self) -> dict[str, Any]:
        """The settings that were given, under the names of a recipe."""
        values, text = vars(self).copy(), self.validation
        values["learning_rate"] = values.pop("lr")
        try:
            if text is not None:
                values["validation"] = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise ArgumentError("validation", f"is {text!r}, expected a number of rows or a fraction") from None
        return {name: value for name, value in values.items() if value is not None and name != "log"}


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
                package = str(error.name).partition(".")[0]
                having = [name for name, libraries in LIBRARIES.items() if package in libraries]
                named = extra if extra in having or not having else having[0]
                message = f'{error.name} is not installed; pip install "opgrad[{named}]"'
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
