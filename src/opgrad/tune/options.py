"""Options in one text, such as `rank=8, alpha=16`: the fields of a dataclass."""

import re
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from opgrad.base.arguments import ArgumentError, require

T = TypeVar("T")
BETWEEN = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # a comma outside of quotes


def parsed(kind: type[T], text: str, argument: str) -> T:
    """A value of a dataclass, whose fields a text names; texts with commas or with spaces at their ends are quoted.

    argument: for messages. Raises ArgumentError of that argument, which tells the option.
    """
    known, values = {each.name: each.type for each in fields(kind)}, dict[str, Any]()  # type: ignore[arg-type]
    for part in filter(None, (each.strip() for each in BETWEEN.split(text))):
        name, separator, value = (each.strip() for each in part.partition("="))
        if name not in known or not separator:
            raise ArgumentError(argument, f"has {part!r}, expected NAME=VALUE with one of {', '.join(known)}")
        values[name] = value
    try:
        return kind(**{name: _value(name, known[name], value) for name, value in values.items()})
    except ArgumentError as error:
        raise ArgumentError(argument, f"option {error.argument} {error.text}") from None


def _value(name: str, kind: Any, text: str) -> Any:
    if get_origin(kind) is UnionType:  # or None, which is not written
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return tuple(_value(name, get_args(kind)[0], each.strip()) for each in text.split("|"))
    if kind is bool:
        require(text in ("true", "false"), name, text, "true or false")
        return text == "true"
    try:
        return kind(text) if kind in (int, float) else text[1:-1] if text[:1] == text[-1:] == '"' else text
    except ValueError:
        raise ArgumentError(name, f"is {text!r}, expected a number") from None
