"""Examples of a .jsonl file as tokens: chats, prompts with completions, and plain texts.

A file may be larger than the memory: of each line its place, its length and the number of tokens that are trained are
kept, and of the first lines the tokens; those of others are made when they are needed.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.arguments import ArgumentError
from opgrad.base.reading import open_regular
from opgrad.tune.tokenizer import Tokenizer

TRAIN_ON = ("completions", "all")
KINDS = "messages, prompt and completion, or text"
LONGEST_LINE = 1 << 26  # bytes
KEPT, OVERHEAD = 1 << 26, 1 << 9  # bytes of the tokens that are kept, and what Python takes for those of a line


@dataclass(frozen=True)
class TokenExample:
    """tokens: int32 [n]. trained: bool [n], which of them the model shall learn to write; never the first one."""

    tokens: np.ndarray
    trained: np.ndarray

    def cut(self, length: int) -> "TokenExample":
        """The first tokens alone."""
        return TokenExample(self.tokens[:length], self.trained[:length])


@dataclass(frozen=True)
class Told:
    """What was done with the lines of a file.

    lines: how many examples it has. cut: how many are longer than the limit, and were cut. longest: the most tokens of
    an example. empty: how many have no token to learn from, and were left out. tokens, trained: of all others.
    """

    lines: int
    cut: int
    longest: int
    empty: int
    tokens: int
    trained: int


class TokenExamples:
    """The examples of a .jsonl file.

    path: each line is an object with `messages` (a list of objects with `role` and `content`), with `prompt` and
        `completion`, or with `text`.
    max_length: the most tokens of an example; what lies behind is cut off.
    train_on: "completions": answers of the assistant, and completions; "all": everything. Texts are always learned
        whole.

    lengths, counts: of each example, the number of its tokens and of those that are trained, int64 [n].
    told: what was done with the lines. checksum: of all tokens.
    Raises OSError, and ValueError that names the line of what is wrong.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, max_length: int, train_on: str = "completions"):
        if train_on not in TRAIN_ON:
            raise ArgumentError("train_on", f"is {train_on!r}, expected one of {', '.join(TRAIN_ON)}")
        self.path, self._tokenizer, self._max_length, self._all = path, tokenizer, max_length, train_on == "all"
        self._kept: dict[int, tuple[bytes, TokenExample]] = {}
        room = KEPT
        places, lengths, counts, cut, most, empty, checksum = [], [], [], 0, 0, 0, 0
        reason = f"expected lines with {KINDS}"
        for number, place, line in self._lines():
            example = self._read(line, number)
            size = len(example.tokens)
            most, cut, example = max(most, size), cut + (size > max_length), example.cut(max_length)
            count = int(example.trained.sum())
            if not count:
                reason = reason if empty else f"line {number} {self._lack(json.loads(line))}"
                empty += 1
                continue
            places.append((place, number))
            lengths.append(len(example.tokens))
            counts.append(count)
            checksum = zlib.crc32(example.trained.tobytes(), zlib.crc32(example.tokens.tobytes(), checksum))
            room -= example.tokens.nbytes + example.trained.nbytes + OVERHEAD
            if room >= 0:
                self._kept[number] = _digest(line), TokenExample(example.tokens.copy(), example.trained.copy())
        if not places:
            raise ValueError(f"{path}: it has no example with a token to learn from: {reason}")
        self._places = np.array(places, np.int64)
        self.lengths, self.counts, self.checksum = np.array(lengths), np.array(counts), checksum
        self.told = Told(len(places) + empty, cut, most, empty, int(self.lengths.sum()), int(self.counts.sum()))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> TokenExample:
        """An example by its number. Raises ValueError if the file was changed meanwhile."""
        place, line = self._places[number]
        with open_regular(self.path) as file:
            file.seek(place)
            content = file.readline(LONGEST_LINE)
        digest, kept = self._kept.get(int(line), (b"", None))
        if kept is not None and digest == _digest(content):
            return kept
        example = self._read(content, int(line)).cut(self._max_length)
        if len(example.tokens) != self.lengths[number] or example.trained.sum() != self.counts[number]:
            raise ValueError(f"{self.path}: line {line} was changed since the file was first read")
        return example

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """The lines that are not empty: number, place in the file, and content."""
        place, number = 0, 0
        with open_regular(self.path) as file:
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    raise ValueError(f"{self.path}: line {number} has {LONGEST_LINE} bytes or more, expected fewer")
                if line.strip():
                    yield number, place, line
                place += len(line)

    def _read(self, line: bytes, number: int) -> TokenExample:
        """The example of a line."""
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{self.path}: line {number} is no JSON, expected an object with {KINDS}") from None
        try:
            tokens, trained = self._tokens(values)
        except ValueError as error:
            raise ValueError(f"{self.path}: line {number}: {error}") from None
        trained[:1] = False
        return TokenExample(tokens, trained)

    def _tokens(self, values: Any) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of an example, and which of them are trained."""
        if not isinstance(values, dict):
            raise ValueError(f"it is {type(values).__name__}, expected an object with {KINDS}")
        if "messages" in values:
            return self._chat(_messages(values, "messages"), values.get("tools"))
        if "prompt" in values and "completion" in values:
            if isinstance(values["prompt"], list):
                answer = _messages(values, "completion")
                return self._chat([*_messages(values, "prompt"), *answer], values.get("tools"))
            return self._completion(_text(values, "prompt"), _text(values, "completion"))
        if "text" in values:
            tokens = self._ended(self._tokenizer.encode(_text(values, "text"), special=True))
            return tokens, np.ones(len(tokens), np.bool_)
        raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {KINDS}")

    def _lack(self, values: Mapping[str, Any]) -> str:
        """Why nothing is learned from the object of a line."""
        messages = values.get("messages", values.get("completion"))
        if not isinstance(messages, list) or self._all:
            return f"has no token behind the first, up to the limit of {self._max_length}"
        answers = [each for each in messages if each["role"] == "assistant"]
        if not answers:
            return "has no message of the role assistant, expected one, or train_on all"
        if not any(isinstance(text := each.get("content"), str) and text.strip() for each in answers):
            found = answers[0].get("content")
            what = "empty" if isinstance(found, str) else type(found).__name__
            return f"has an answer whose content is {what}, expected a text"
        return f"has no answer that the chat template writes before the limit of {self._max_length} tokens"

    def _completion(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        first = self._tokenizer.encode(prompt, special=True)
        if len(first) and first[-1] == self._tokenizer.end:  # some tokenizers end every text
            first = first[:-1]
        answer = self._ended(self._tokenizer.encode(completion, special=False))
        tokens = np.concatenate([first, answer])
        return tokens, (np.arange(len(tokens)) >= len(first)) | self._all

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens with the one that ends a text behind them."""
        end = self._tokenizer.end
        if end is None or (len(tokens) and tokens[-1] == end):
            return tokens
        return np.append(tokens, np.int32(end))

    def _chat(self, messages: list[Mapping[str, Any]], tools: Any) -> tuple[np.ndarray, np.ndarray]:
        template = self._tokenizer.template
        if template is None:
            raise ValueError("it has messages, expected a chat template in tokenizer_config.json for them")
        if self._all:
            tokens = self._tokenizer.encode(template.render(messages, tools), special=False)
            return tokens, np.ones(len(tokens), np.bool_)
        text, answers = template.render_with_answers(messages, tools)
        tokens, places = self._tokenizer.encode_with_places(text)
        trained = np.zeros(len(tokens), np.bool_)
        begins, ends = np.maximum.accumulate(places, 0).T
        for first, last in answers:
            inside = slice(np.searchsorted(ends, first, "right"), np.searchsorted(begins, last))
            trained[inside] = True
            if inside.start < inside.stop < len(tokens) and self._tokenizer.is_added(int(tokens[inside.stop])):
                trained[inside.stop] = True  # it ends the turn
        return tokens, trained


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()


def _text(values: Mapping[str, Any], name: str) -> str:
    found = values[name]
    if not isinstance(found, str):
        raise ValueError(f"{name} is {type(found).__name__}, expected a text")
    return found


def _messages(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = values[name]
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise ValueError(f"{name} is no list of objects with role and content")
    return found
