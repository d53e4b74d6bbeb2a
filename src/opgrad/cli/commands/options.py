"""Options that several commands have: each group is a dataclass whose fields are options."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar

import typer

from opgrad.base.arguments import ArgumentError
from opgrad.base.terminal import existing

F = TypeVar("F", bound=Callable[..., Any])


def file_option(help: str) -> Any:
    """An option that takes an existing file."""
    return typer.Option(help=help, callback=existing, dir_okay=False)


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
    for name, parameter in parameters.items():
        own = map(_parameter, fields(groups[name])) if name in groups else [parameter]
        taken += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in taken}
    return run  # type: ignore[return-value]


def _parameter(option: "Field[Any]") -> inspect.Parameter:
    default = inspect.Parameter.empty if option.default is MISSING else option.default
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.type)


def given(*groups: Any) -> dict[str, Any]:
    """The options of these groups that were given, by their names in a command line."""
    values = {each.name: getattr(group, each.name) for group in groups for each in fields(group)}
    return {option(name): value for name, value in values.items() if value is not None and value != []}


def option(name: str) -> str:
    """The name of an option in a command line."""
    return "--" + name.replace("_", "-")


def said(error: Exception, caller: str, names: Mapping[str, str]) -> str:
    """What an error says: of an argument, with the option in its place; else without the name of the function.

    names: options that have other names than the arguments.
    """
    if isinstance(error, ArgumentError):
        return f"{option(names.get(error.argument, error.argument))} {error.text}"
    return str(error.args[0] if error.args else type(error).__name__).removeprefix(f"{caller}: ")


def words(options: dict[str, Any]) -> list[str]:
    """A command line with these options."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(name if value else name.replace("--", "--no-", 1))
        else:
            found += [word for each in (value if isinstance(value, list) else [value]) for word in (name, str(each))]
    return found


@dataclass(frozen=True)
class RunSettings:
    """What a recipe says of every run, too."""

    epochs: Annotated[
        int | None, typer.Option(min=1, help="How often all rows are trained on; default: 10, of tune 1.")
    ] = None
    lr: Annotated[
        float | None, typer.Option(callback=positive, help="The learning rate; default: 0.001, of tune 0.0002.")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="How many rows a batch has; default: 32, of tune 4.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="The number that decides the order of the rows; default: 0.")
    ] = None
    validation: Annotated[
        str | None,
        typer.Option(metavar="FRACTION|ROWS", help="How many training rows validate every epoch; default: none."),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after so many epochs without a better validation loss; default: never."),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="How the learning rate falls: constant, linear or cosine; default: constant, of tune cosine.",
        ),
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEPS", help="Over how many steps the learning rate rises from 0; default: 0."),
    ] = None
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="How many batches' gradients make one step; default: 1.")
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            callback=positive, help="The largest norm of all gradients together; default: the set's, of tune 1."
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="STEPS", help="Write last.checkpoint after so many steps, too; default: after epochs alone."
        ),
    ] = None

    def of_recipe(self) -> dict[str, Any]:
        """Those that were given, under the names of a recipe."""
        values = {**vars(self), "validation": _rows_or_fraction(self.validation)}
        values["learning_rate"] = values.pop("lr")
        return {name: value for name, value in values.items() if value is not None}


def _rows_or_fraction(text: str | None) -> int | float | None:
    """A whole number as int, any other as float."""
    if text is None:
        return None
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ArgumentError("validation", f"is {text!r}, expected a number of rows or a fraction") from None
