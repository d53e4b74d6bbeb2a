"""Chat templates: programs of a tokenizer's author in jinja2's language, which are run in its sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

WHO = "tune"
LARGEST = 1 << 24  # characters that a template may make at once
MARK = "\ue000\ue001\ue002"  # in the place of a message, to find where it stands in the text; of no script

Message = Mapping[str, Any]


class ChatTemplate:
    """A template that writes the messages of a chat as one text.

    source: in jinja2's language. special: texts of special tokens by name. origin: the file, for messages.
    Raises ValueError if the source is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str], origin: str):
        import jinja2

        self._special, self._origin = dict(special), origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{WHO}: {origin}: {_said(error)}") from None

    def render(self, messages: Sequence[Message], tools: Any = None, begin_answer: bool = False) -> str:
        """The text of a chat. begin_answer: whether the beginning of an answer follows the messages.

        Raises ValueError for whatever the template finds wrong.
        """
        given = {**self._special, "messages": messages, "tools": tools, "add_generation_prompt": begin_answer}
        try:
            return self._template.render(given)
        except Exception as error:  # whatever a program raises
            raise ValueError(f"the chat template of {self._origin} fails: {_said(error)}") from None

    def render_with_answers(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and where in it the assistant's answers stand: first character and the one behind.

        An answer is found by what changes in the text when another stands in its place; so templates may leave out
        parts of earlier answers.
        """
        text, places = self.render(messages, tools), []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
                continue
            other = self.render([*messages[:number], {**message, "content": MARK}, *messages[number + 1 :]], tools)
            first = _common(text, other)
            last = len(text) - _common(text[first:][::-1], other[first:][::-1])
            if MARK in other and first < last:
                places.append((first, last))
        return text, places


def _common(one: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _environment() -> Any:
    """jinja2's sandbox with what templates of tokenizers use; a product of a text is limited in its size."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` … `{% endgeneration %}`, which marks answers and writes what it holds."""

        tags = {"generation"}  # noqa: RUF012 - as its class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in (left, right)]
            if (operator == "**" and max(sizes) > 64) or (operator == "*" and sizes[0] * sizes[1] > LARGEST):
                raise SecurityError(f"{operator} of large values")
            return super().call_binop(context, operator, left, right)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
