"""Options that several commands have: each group is a dataclass whose fields are options."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])


def file_option(help: str) -> Any:
    """An option that takes an existing file."""
    return typer.Option(help=help, exists=True, dir_okay=False)


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


def words(options: dict[str, Any]) -> list[str]:
    """A command line with these options."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(name if value else name.replace("--", "--no-", 1))
        else:
            found += [word for each in (value if isinstance(value, list) else [value]) for word in (name, str(each))]
    return found
