"""Docstrings as Markdown, for mkdocstrings: what tells of a parameter becomes a list, formulas are typeset."""

import inspect
import re
from typing import Any

import griffe
from formulas import latex
from latex2mathml.converter import convert

from opgrad.ops import graph_operators, operators

ABOUT = re.compile(r"(\w+(?:, \w+)*): (.*)", re.DOTALL)
FORMULA = re.compile(r"Formula: (?P<formula>.*?)(?:(?:\.\s+|\s+)Source: (?P<source>.*))?", re.DOTALL)
ITEM = "\n- "
OPERATORS = {**operators(), **graph_operators()}


class Docstrings(griffe.Extension):
    """What Griffe calls for each object that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite its docstring; that of an operator is what its declaration makes of it."""
        if obj.docstring:
            text = obj.docstring.value
            if obj.path.startswith("opgrad.ops.") and obj.name in OPERATORS:
                text = inspect.getdoc(OPERATORS[obj.name].reference) or ""
            known = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
            obj.docstring.value = markdown(text, known)


def markdown(text: str, names: set[str]) -> str:
    """A docstring as Markdown; names: of the parameters and members that its lines may tell of."""
    return "\n\n".join(_paragraph(each, names) for each in re.split(r"\n\s*\n", text.strip("\n")))


def _paragraph(text: str, names: set[str]) -> str:
    if text.startswith(" "):
        return text  # code
    if formula := FORMULA.fullmatch(text):
        source = f"\n\n**Source:** {' '.join(formula['source'].split())}" if formula["source"] else ""
        typeset = convert(latex(" ".join(formula["formula"].split())), display="block")
        return f'<div class="formula">{typeset}</div>{source}'
    if text.startswith("Example:\n"):
        return f"**Example:**\n\n```pycon\n{text.partition(chr(10))[2]}\n```"
    return "\n".join(_statement(" ".join(each.split()), names) for each in re.split(r"\n(?! )", text))


def _statement(text: str, names: set[str]) -> str:
    """One line with those that continue it."""
    about = ABOUT.match(text)
    if about and names.intersection(about[1].split(", ")):
        return f"{ITEM}**{', '.join(f'`{name}`' for name in about[1].split(', '))}**: {about[2]}"
    return f"\n{text}" if re.match(r"(Returns?|Raises) ", text) else text
