"""The main function of a process that renders the chat template of one file, under limits of memory and time.

It is run as a file and imports nothing of opgrad, so that it starts soon and takes little memory. A line of its input
is a request, a line of its output the answer, both JSON. It ends when its input ends, so it never outlives the process
that started it, and dies where a template takes more time than it may.
"""

import functools
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

LONGEST = 1 << 26  # characters of a text
MARKS = range(0x10FFFD, 0xF0000, -1)  # characters of no script: one that a chat has not stands around a mark
BEGIN, END = "+", "-"  # the marks of `{% generation %}`; those of loops are numbers
# What a message may say, by the roles whose messages must be written.
SPOKEN = {
    "assistant": ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"),
    "user": ("content",),
}

Message = Mapping[str, Any]
Part = tuple[int, int, int]  # a message's index, the first character of a part of the text, and the one behind it


def said_of(message: Message, role: str) -> frozenset[str]:
    """The names of what a message of a role says: of `SPOKEN`, and not blank."""
    given = ((name, message.get(name)) for name in SPOKEN.get(role, ()))
    return frozenset(name for name, value in given if (value.strip() if isinstance(value, str) else value))


class Renderer:
    """A template that writes the messages of a chat as one text. special: texts of special tokens by name. date: ISO's.

    A loop of the template that comes to a message writes a mark, and another one at its end. The marks are taken out of
    the text again, and tell what is written for each message, whatever it is.
    """

    def __init__(self, source: str, special: Mapping[str, str], date: str):
        environment = _environment(lambda form: self._now.strftime(form), self._mark)
        self._now, self._special, self._source = datetime.fromisoformat(date), special, source
        self._indices: dict[int, int] = {}  # of messages, by their identity
        self._character = ""
        self._begun, self._written = set[str](), set[tuple[str, str, frozenset[str]]]()
        self._template = environment.from_string(_marked(environment.parse(source)))

    def answer(self, messages: Sequence[Message], parts: bool, **given: Any) -> tuple[str, list[Part], list[Part]]:
        """The text of a chat; with `parts` what it has for each message, and what of that the model writes.

        given: what else the template reads. The model writes what `{% generation %}` marks, or all of an assistant's
        message behind the end of a prompt for it. Raises ValueError for a message of which the template leaves out
        something wherever it stands.
        """
        every = self._source + json.dumps([messages, given, self._special], ensure_ascii=False)
        self._character = next(each for each in map(chr, MARKS) if each not in every)
        text, turns, generated = self._render(messages, **given)
        if not parts:
            return text, [], []
        for index in range(len(messages)):
            self._check(messages[: index + 1], given)
        if turns and turns[-1][0] == len(messages) - 1:  # what ends the text may stand behind the loop
            turns[-1] = (*turns[-1][:2], len(text))
        if generated:
            around = [next((turn[0] for turn in turns if turn[1] <= at < turn[2]), -1) for _, at, _ in generated]
            return text, turns, [(index, *each[1:]) for index, each in zip(around, generated, strict=True)]
        tails, answers = dict[str, str](), list[Part]()
        for index, first, last in turns:
            if messages[index].get("role") == "assistant":
                before = messages[:index] or [{"role": "user", "content": "?"}]
                role = str(before[-1].get("role"))
                if role not in tails:
                    tails[role] = self._tail(before, given)
                answers.append((index, first + common(tails[role], text[first:last]), last))
        return text, turns, answers

    def _render(self, messages: Sequence[Message], **given: Any) -> tuple[str, list[Part], list[Part]]:
        """The text of a chat, what it has for each message, and what `{% generation %}` marks."""
        self._indices = {id(each): index for index, each in enumerate(messages)}
        self._begun.clear()
        pieces = self._template.render({**self._special, "messages": messages, **given}).split(self._character)
        open_, turns, generated, at = list[tuple[str, int, int]](), list[Part](), list[Part](), 0
        for piece, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            at += len(piece)
            loop, _, index = mark.partition(":")
            while any(each[0] == loop for each in open_):
                _, message, first = open_.pop()
                turns.append((message, first, at))
            if index:
                open_.append((loop, int(index), at))
            elif mark == BEGIN:
                generated.append((-1, at, at))
            elif mark == END:
                generated[-1] = -1, generated[-1][1], at
        if at > LONGEST:
            raise ValueError(f"it writes more than {LONGEST} characters")
        text = "".join(pieces[::2])
        return text, [turn for turn in turns if text[slice(*turn[1:])].strip()], generated

    def _mark(self, name: str, *reached: Any) -> str:
        """A mark. reached: what a loop has come to; only loops over messages write marks."""
        index = self._indices.get(id(reached[0])) if reached else None
        if index is not None:
            self._begun.add(name)
            name = f"{name}:{index}"
        elif reached or (name not in (BEGIN, END) and name not in self._begun):
            return ""
        return f"{self._character}{name}{self._character}"

    def _tail(self, before: Sequence[Message], given: Mapping[str, Any]) -> str:
        """What a prompt for an answer has behind all that is written for the messages before it."""
        plain, turns, _ = self._render(before, **given)
        text, prompted, _ = self._render(before, **{**given, "add_generation_prompt": True})
        if not turns or not prompted:
            return ""
        (_, first, last), (_, start, _) = turns[-1], prompted[-1]
        return text[start + common(text[start:], plain[first:last]) :]

    def _check(self, chat: Sequence[Message], given: Mapping[str, Any]) -> None:
        """Raise ValueError if something that the last message says makes no difference to the text."""
        *before, message = chat
        role = str(message.get("role"))
        said = said_of(message, role)
        for name in said:
            if (role, name, said) in self._written:
                continue
            other, is_same = {key: value for key, value in message.items() if key != name}, False
            with suppress(Exception):  # what fails without it reads it
                is_same = self._render(chat, **given)[0] == self._render([*before, other], **given)[0]
            if is_same:
                known = ", ".join(each for each in SPOKEN[role] if re.search(rf"\b{each}\b", self._source))
                has = f"which has {', '.join(sorted(said))}; it names {known or 'none of them'}"
                raise ValueError(f"it does not write {name} of message {len(chat)}, {has}")
            self._written.add((role, name, said))


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters two texts, or messages two chats, begin with alike."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _marked(tree: Any) -> Any:
    """A template whose loops write marks where they come to a message, and behind themselves."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Marking(NodeTransformer):
        def visit_For(self, loop: Any) -> Any:
            self.generic_visit(loop)
            if not isinstance(loop.target, nodes.Name):
                return loop
            name = nodes.Const(str(id(loop)))
            loop.body.insert(0, _mark_node(name, nodes.Name(loop.target.name, "load")))
            return [loop, _mark_node(name)]

    return Marking().visit(tree)


def _mark_node(*arguments: Any) -> Any:
    """A node of a template that writes a mark."""
    from jinja2 import nodes

    call = nodes.Call(nodes.EnvironmentAttribute("mark"), list(arguments), [], None, None)
    return nodes.Output([call])


def _environment(strftime: Callable[[str], str], mark: Callable[..., str]) -> Any:
    """jinja2's sandbox with what templates of tokenizers use. mark: writes marks of loops and of answers."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` … `{% endgeneration %}`, which marks answers and writes what it holds."""

        tags = {"generation"}  # noqa: RUF012 - as its class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = [_mark_node(nodes.Const(each)) for each in (BEGIN, END)]
            return nodes.Scope([marks[0], *body, marks[1]]).set_lineno(line)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], cache_size=0
    )
    vars(made)["mark"] = mark
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime
    return made


def main() -> None:
    """Answer requests until the input ends. The first is the template with its limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the process that started this one
    begin = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = begin["path"]
    memory, seconds = begin["memory"], begin["seconds"]
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except ImportError:  # Windows
        seconds = 0

    def guarded(work: Callable[[], Any]) -> Any:
        if seconds:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        made, answer = None, ""
        try:
            made = work()
            answer = json.dumps({"answer": made if isinstance(made, tuple) else None})
        except MemoryError:
            answer = json.dumps({"error": f"it takes more than {memory >> 20} MiB of memory"})
        except RecursionError:
            answer = json.dumps({"error": "it is nested too deeply, or calls itself without end"})
        except Exception as error:  # whatever a program raises
            answer = json.dumps({"error": " ".join(str(error).split()) or type(error).__name__})
        if seconds:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
        return made

    renderer = guarded(lambda: Renderer(begin["source"], begin["special"], begin["date"]))
    for line in sys.stdin.buffer:
        guarded(functools.partial(lambda request: renderer.answer(**json.loads(request)), line))


if __name__ == "__main__":
    main()
