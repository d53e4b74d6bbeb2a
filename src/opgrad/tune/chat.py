"""Chat templates: programs of a tokenizer's author in jinja2's language, which a process of their own renders."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opgrad.base.locks import settling
from opgrad.tune.template_process import Message, Part, said_of

__all__ = ["ChatTemplate", "Message", "Part", "said_of"]

WHO = "tune"
MEMORY, SECONDS = 1 << 30, 10  # that a template may take: bytes in all, and time of the processor for a chat
PROCESS = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A template that writes the messages of a chat as one text.

    It is rendered by a process of its own, in jinja2's sandbox, with limits of memory and time; that is started here,
    and ends with this object.

    source: in jinja2's language. special: texts of special tokens by name. origin: the file, for messages.
    Raises ValueError if the source is no template, or takes more than the limits.
    """

    def __init__(self, source: str, special: Mapping[str, str], origin: str):
        importlib.import_module("jinja2")  # if it is missing, here is where to say so
        self._origin = origin
        self._begin = {"path": [each for each in sys.path if each], "memory": MEMORY, "seconds": SECONDS}
        self._begin |= {"source": source, "special": dict(special)}
        self._process: Any = None
        self._owner = os.getpid()
        try:
            with settling:
                self._start()
        except ValueError as error:
            raise ValueError(f"{WHO}: {origin}: {error}") from None

    def render(self, messages: Sequence[Message], tools: Any = None, begin_answer: bool = False) -> str:
        """The text of a chat. begin_answer: whether the beginning of an answer follows the messages.

        Raises ValueError for whatever the template finds wrong, and if it takes more than the limits.
        """
        return self._render(messages, tools, begin_answer, False)[0]

    def render_with_parts(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[Part], list[Part]]:
        """The text of a chat, what of it is written for each message, and what of it the model writes.

        The model writes what the template puts into `{% generation %}`, or all that is written for an assistant's
        message behind the end of a prompt. Raises what `render` raises, and ValueError if the template does not write
        what a message says.
        """
        return self._render(messages, tools, False, True)

    def _render(
        self, messages: Sequence[Message], tools: Any, begin_answer: bool, parts: bool
    ) -> tuple[str, list[Part], list[Part]]:
        request = {"messages": messages, "tools": tools, "add_generation_prompt": begin_answer, "parts": parts}
        try:
            with settling:  # a chat at a time; no fork happens meanwhile
                if self._process is None or self._owner != os.getpid():
                    self._start()
                text, turns, answers = self._ask(request)
        except ValueError as error:
            raise ValueError(f"the chat template of {self._origin} fails: {error}") from None
        return text, turns, answers

    def _start(self) -> None:
        """Start the process, and have it read the template."""
        process: Any = subprocess.Popen(
            [sys.executable, "-I", str(PROCESS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )  # fmt: skip
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        self._ask(self._begin)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """What the process answers to a request. Raises ValueError for its error, or if it dies of the request."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError:
            raise ValueError("the chat is nested too deeply") from None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            status, self._process = self._process.wait(), None
            self._end()
            is_late = status == -getattr(signal, "SIGPROF", 0)
            raise ValueError(f"it takes more than {SECONDS} s" if is_late else f"its process ends with status {status}")
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(found["error"])
        return found["answer"]


def _end(process: Any, owner: int) -> None:
    """End a process, unless this is a forked child of its owner."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
