"""The reference of the commands and of recipe.toml as Markdown, from what parses both."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

# An entry of a docstring's list: the names of settings, and what they are.
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)


def commands(root: Path, folder: Path) -> str:
    """A section for each command: its help, then a row for each of its arguments and options."""
    import typer.main

    from opgrad.cli.app import app

    found = typer.main.get_command(app)
    return "\n\n".join(
        _command(f"opgrad {name}", command) for name, command in sorted(found.commands.items()) if command.params
    )


def _command(name: str, command: Any) -> str:
    arguments = "".join(f" {_metavar(item)}" for item in command.params if item.param_type_name == "argument")
    lines = [f"## {name}", "", f"`{name} [OPTIONS]{arguments}`", "", command.help, ""]
    rows = [_row(item) for item in command.params if item.name != "help" and not item.hidden]
    return "\n".join([*lines, "| option | meaning |", "|:--|:--|", *rows])


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [_metavar(parameter)]
    metavar = f" {parameter.metavar}" if is_option and parameter.metavar else ""
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    if parameter.show_default and type(default) in (str, int, float) and default != "":
        text += f" Default: `{default}`."  # the help tells other defaults
    return _cells(", ".join(f"`{name}`" for name in [*names[:-1], names[-1] + metavar]), text)


def _cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _metavar(argument: Any) -> str:
    """How the help names an argument."""
    return str(argument.metavar or argument.name.upper())


def recipe(root: Path, folder: Path) -> str:
    """A row for each key of recipe.toml, from the class that reads it."""
    from opgrad.training.run.recipe import Recipe

    text = inspect.getdoc(Recipe) or ""
    meanings = {
        names: " ".join(meaning.split()) for names, meaning in ENTRY.findall("    " + text.replace("\n", "\n    "))
    }
    defaults = {item.name: getattr(Recipe(), item.name) for item in fields(Recipe)}
    lines = ["| key | default | meaning |", "|:--|:--|:--|"]
    for names, meaning in meanings.items():
        for name in names.split(", "):
            value = defaults[name]
            shown = "" if value in (None, [], {}) else f"`{json.dumps(value)}`"
            lines.append(_cells(f"`{name}`", shown, meaning))
    return "\n".join(lines)
