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
SPACE = "\u2003"  # stands for white space at the ends of an answer: `trim` takes it, too
FIRST, LAST = 0xF0000, 0x10FFFD  # a character of no script stands for each answer
RUNS = re.compile(f"([{SPACE}{chr(FIRST)}-{chr(LAST)}])\\1*")
ESCAPED = r"""["'\\&<>\s\x00-\x1f\x7f]"""  # what `tojson` and `escape` write as several characters, and white space
UNKNOWN = "it writes other text around other answers, so that these are not found; expected --train-on all"

Message = Mapping[str, Any]


class Renderer:
    """A template that writes the messages of a chat as one text. special: texts of special tokens by name."""

    def __init__(self, source: str, special: Mapping[str, str]):
        environment = _environment(lambda form: self._now.strftime(form))
        self._now, self._special = datetime.now(), special
        self._template = environment.from_string(source)
        kept = sorted({re.escape(each) for each in _read_constants(environment.parse(source))}, key=len, reverse=True)
        self._kept = re.compile("|".join([*kept, ESCAPED]))

    def render(self, messages: Sequence[Message], **given: Any) -> str:
        """The text of a chat. given: what else the template reads."""
        text = self._template.render({**self._special, "messages": messages, **given})
        if len(text) > LONGEST:
            raise ValueError(f"it writes more than {LONGEST} characters")
        return str(text)

    def answer(self, messages: Sequence[Message], answers: bool, **given: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and where in it the assistant's answers stand: first character and the one behind.

        The chat is rendered once more with other characters in the answers, each of which stays as long as it is, has
        its white space and all that the template asks for: so the two texts differ in the answers alone. Templates may
        leave out parts of an answer.
        """
        self._now = datetime.now()
        text = self.render(messages, **given)
        spoken = {
            number: message["content"]
            for number, message in enumerate(messages)
            if answers and message.get("role") == "assistant" and isinstance(message.get("content"), str)
        }
        if not spoken:
            return text, []
        if len(spoken) > LAST - FIRST:
            raise ValueError(f"it gets {len(spoken)} answers, expected at most {LAST - FIRST}")
        for space in (SPACE, None):  # a template may take line feeds alone from the ends of an answer
            marked = {n: self._marked(each, chr(FIRST + at), space) for at, (n, each) in enumerate(spoken.items())}
            changed = [{**each, "content": marked.get(n, each.get("content"))} for n, each in enumerate(messages)]
            with suppress(Exception):  # whatever a program raises
                return text, _places(text, self.render(changed, **given), list(marked.values()))
        raise ValueError(UNKNOWN)

    def _marked(self, content: str, mark: str, space: str | None) -> str:
        """An answer in other characters, as long as it is. space: what stands for white space at its ends."""
        inner = content.strip()
        pieces, at = [], 0
        for found in self._kept.finditer(inner):
            pieces += [mark * (found.start() - at), found[0]]
            at = found.end()
        marked = "".join([*pieces, mark * (len(inner) - at)])
        if mark not in marked:
            marked = mark * len(inner)
        ends = content[: content.index(inner)], content[content.index(inner) + len(inner) :]
        before, behind = (space * len(each) if space else each for each in ends)
        return before + marked + behind


def _places(text: str, changed: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    """Where the answers of the changed text stand. Raises ValueError if the texts differ elsewhere."""
    found: dict[str, list[int]] = {}
    at = 0
    for run in RUNS.finditer(changed):
        if text[at : run.start()] != changed[at : run.start()]:
            raise ValueError(UNKNOWN)
        at = run.end()
        found.setdefault(run[1], [run.start(), at])[1] = at
    if text[at:] != changed[at:]:
        raise ValueError(UNKNOWN)
    places = []
    for number, answer in enumerate(answers):
        mark = chr(FIRST + number)
        if mark not in found:
            continue
        first, last = found[mark]
        before, behind = answer[: answer.index(mark)], answer[answer.rindex(mark) + 1 :]
        before = next(each for each in (before, before.lstrip(), "") if changed.endswith(each, 0, first))
        behind = next(each for each in (behind, behind.rstrip(), "") if changed.startswith(each, last))
        places.append((first - len(before), last + len(behind)))
    return places


def _read_constants(tree: Any) -> list[str]:
    """The texts that a template compares, looks for or splits by, and does not only write."""
    from jinja2 import nodes

    found, todo = [], [(tree, False)]
    while todo:
        node, is_written = todo.pop()
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and node.value.strip() and not is_written:
            found.append(node.value)
        writes = isinstance(node, (nodes.Output, nodes.Add, nodes.Concat))
        todo += [(each, writes) for each in node.iter_child_nodes()]
    return found


def _environment(strftime: Callable[[str], str]) -> Any:
    """jinja2's sandbox with what templates of tokenizers use."""
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
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], cache_size=0
    )
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

    renderer = guarded(lambda: Renderer(begin["source"], begin["special"]))
    for line in sys.stdin.buffer:
        guarded(functools.partial(lambda request: renderer.answer(**json.loads(request)), line))


if __name__ == "__main__":
    main()
