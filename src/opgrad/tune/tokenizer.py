"""The tokenizer of a model folder: texts to tokens and back, by the package `tokenizers`, and chats to texts.

Chat templates are programs of a tokenizer's author in jinja2's language, which a process of their own renders.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.files import json_object, read_regular
from opgrad.base.locks import settling
from opgrad.tune.template_process import Message, Part

CANNOT = "cannot encode a text"
CONFIGS = ("genai_config.json", "generation_config.json", "config.json")  # that name tokens which end a text
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
MEMORY, SECONDS = 1 << 30, 10  # that a template may take: bytes in all, and time of the processor for a chat
PROCESS = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A template that writes the messages of a chat as one text.

    A process of its own, which ends with this object, renders it in jinja2's sandbox, within limits of memory and time.

    source: in jinja2's language, kept. special: texts of special tokens by name. origin: the file, for messages.
    date: the present for it, in ISO's form; "" if it does not ask.
    Raises ValueError if the source is no template, or takes more than the limits.
    """

    def __init__(self, source: str, special: Mapping[str, str], origin: str):
        importlib.import_module("jinja2")  # if it is missing, here is where to say so
        self._origin, self.source = origin, source
        self._begin = {"path": [each for each in sys.path if each], "memory": MEMORY, "seconds": SECONDS}
        self.date = date.today().isoformat() if "strftime_now" in source else ""
        self._begin |= {"source": source, "special": dict(special)}
        self._process: Any = None
        self._owner = os.getpid()
        try:
            with settling:
                self._start()
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None

    def use_date(self, date: str) -> None:
        """Let this be the present, in ISO's form."""
        self._end()
        self.date, self._process = date, None

    def render(self, messages: Sequence[Message], begin_answer: bool = False) -> str:
        """The text of a chat. begin_answer: whether the beginning of an answer follows the messages.

        Raises ValueError for whatever the template finds wrong, and if it takes more than the limits.
        """
        return self._render(messages=messages, tools=None, add_generation_prompt=begin_answer, parts=False)[0]

    def render_with_parts(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[Part], list[Part]]:
        """The text of a chat, what of it is written for each message, and what of it the model writes.

        The model writes what the template puts into `{% generation %}`, or all that is written for an assistant's
        message behind the end of a prompt. Raises what `render` raises, and ValueError if the template does not write
        what a message says.
        """
        return self._render(messages=messages, tools=tools, add_generation_prompt=False, parts=True)

    def _render(self, **request: Any) -> tuple[str, list[Part], list[Part]]:
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
        self._ask({**self._begin, "date": self.date or "1970-01-01"})

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


class Tokenizer:
    """The tokenizer of a folder.

    folder: with tokenizer.json and, as far as there are such, tokenizer_config.json, chat_template.jinja and
        genai_config.json, generation_config.json.
    end: the token that ends a text; None if the folder does not say. ends: all tokens after which a text is finished.
    special: the texts of special tokens by their names in tokenizer_config.json.
    template: what writes the messages of a chat as one text; None if the folder has no template.
    Raises FileNotFoundError without tokenizer.json, ValueError if one of the files is damaged.
    """

    def __init__(self, folder: Path):
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json, expected the file that the package tokenizers writes"
            )
        self._path = path
        with self._naming("is no tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(read_regular(path, str(path)).decode())
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        self.special = {name: text for name in SPECIAL if (text := _text(config.get(name))) is not None}
        named = [self._tokenizer.token_to_id(self.special.get("eos_token", ""))]
        for found in (read_json(folder / name) for name in CONFIGS):
            inner = found.get("model")
            given = (inner if isinstance(inner, dict) else found).get("eos_token_id")
            named += given if isinstance(given, list) else [given]
        self.ends = list(dict.fromkeys(each for each in named if type(each) is int))
        self.end = self.ends[0] if self.ends else None
        self.template = _template(folder, config, self.special)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn what the package raises, which is Exception itself or a panic of Rust, into a ValueError."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._path} {what}: {' '.join(str(error).split())}") from None

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, special: bool) -> np.ndarray:
        """The tokens of a text, int32 [n]. special: whether the tokenizer adds those that begin or end a text."""
        with self._naming(CANNOT):
            return np.array(self._tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    @property
    def pad(self) -> int:
        """The token that fills rows; 0 if the folder does not say."""
        return self._tokenizer.token_to_id(self.special.get("pad_token", "")) or 0

    def encode_with_types(self, text: str, other: str | None = None) -> np.ndarray:
        """The tokens of a text with special ones, and the types of these, int32 [2, n].

        Of two texts in one row int32 [3, n]: the last tells which of them a token is of, 1 or 2, 0 for special ones.
        """
        with self._naming(CANNOT):
            found = self._tokenizer.encode(text, other)
            parts = [] if other is None else [[0 if each is None else each + 1 for each in found.sequence_ids]]
            return np.array([found.ids, found.type_ids, *parts], np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text, int32 [n], and the first and last character behind of each, int64 [n, 2]."""
        with self._naming(CANNOT):
            found = self._tokenizer.encode(text, add_special_tokens=False)
            return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, tokens: "np.ndarray | list[int]", special: bool = False) -> str:
        """The text of tokens. special: with special ones."""
        with self._naming("cannot decode"):
            return str(self._tokenizer.decode([int(each) for each in tokens], skip_special_tokens=not special))


def folder_of(file: Path) -> Path:
    """The folder with the tokenizer of a model: its file may lie in a folder of that, such as onnx."""
    above = file.parent.parent
    is_above = not (file.parent / "tokenizer.json").is_file() and (above / "tokenizer.json").is_file()
    return above if is_above else file.parent


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file. Raises ValueError for another content."""
    return {} if not path.is_file() else json_object(read_regular(path, str(path)), str(path))


def _text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a text or an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _template(folder: Path, config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """The template for chats: that of chat_template.jinja, or the default one of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = read_regular(path, str(path)).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from None
        return ChatTemplate(source, special, str(path))
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default", next(iter(named.values()), None))
    if given is None:
        return None
    path = folder / "tokenizer_config.json"
    if not isinstance(given, str):
        raise ValueError(f"chat_template in {path} is {type(given).__name__}, expected a text")
    return ChatTemplate(given, special, str(path))
