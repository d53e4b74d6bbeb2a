"""Examples as tokens (chats, prompts with completions, plain texts), and their batches, padded or all in one row.

A file may be larger than the memory: tokens lie in a temporary file, which is mapped.
"""

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from opgrad.base.arguments import require
from opgrad.training.files.dataset import Dataset, Examples
from opgrad.tune.caches import PLACES, STARTS
from opgrad.tune.language_model import IGNORED, WEIGHTS
from opgrad.tune.lines import (
    Lines,
    json_of,
    messages_of,
    question_and_answer,
    says,
    system_of,
    text_of,
    unpacked,
    with_arguments,
)
from opgrad.tune.lora import DRAW
from opgrad.tune.template_process import Message, Part
from opgrad.tune.tokenizer import Tokenizer

TRAIN_ON = ("assistant", "last", "all")
NO_LOOP = "the chat template writes messages in no loop over them, so that answers are not found; expected train_on all"
KNOWN = {"role", "content", "weight", "name", "id", "tool_calls", "tool_call_id"}  # of a message
REASONS = 3  # why lines are wrong, of those that are left out
# Lengths of batches are multiples of this, so that there are few of them: a graph keeps memory and plans for each.
MULTIPLE = 16
MOST = 2**32  # of the numbers that are drawn
WINDOW = 64  # batches; that many are sorted by their lengths together


@dataclass(frozen=True)
class TokenExample:
    """tokens: int32 [n]. weights: float32 [n], of the tokens' losses: 0 where nothing is learned, as of the first."""

    tokens: np.ndarray
    weights: np.ndarray

    @property
    def trained(self) -> np.ndarray:
        """Which tokens the model shall learn to write, bool [n]."""
        return self.weights > 0

    def cut(self, length: int) -> "TokenExample":
        """The first tokens alone."""
        return TokenExample(self.tokens[:length], self.weights[:length])

    def spans(self) -> Iterator[tuple[np.ndarray, bool]]:
        """Tokens that follow each other, and whether they are trained."""
        bounds = np.flatnonzero(np.diff(self.trained)) + 1
        for part, trained in zip(np.split(self.tokens, bounds), np.split(self.trained, bounds), strict=True):
            yield part, bool(trained[0])


@dataclass(frozen=True)
class Told:
    """What was done with the lines of a file.

    lines: how many examples it has. cut: how many are longer than the limit, and were cut. longest: the most tokens of
    an example. empty: how many have no token to learn from, and were left out. endless: how many learn no token that
    ends a text. bad: how many are wrong, and were left out; reasons: why the first of these are.
    tokens, trained: of all that are used. unread: names of values that stand beside examples, and say nothing here.
    """

    lines: int
    cut: int
    longest: int
    empty: int
    endless: int
    bad: int
    reasons: tuple[str, ...]
    tokens: int
    trained: int
    unread: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        return self.lines - self.empty - self.bad


class TokenExamples:
    """The examples of a file, or of the files in a folder; see `Lines`.

    path: each entry is an object with `messages` (a list of objects with `role` and `content`), `conversations` (of
        objects with `from` and `value`), `prompt` and `completion`, `instruction`, perhaps `input`, and `output`,
        `prompt` and `response`, or `text`.
    max_length: the most tokens of an example; what lies behind is cut off.
    train_on: "assistant": answers of the assistant, and completions; "last": of a chat the last answer alone; "all":
        everything. Texts are always learned whole, messages whose weight is 0 never.
    skip_bad: whether wrong entries are left out.

    lengths, counts: of each example, the number of its tokens, int64 [n], and the sum of their weights, float64 [n].
    weighted: whether some weights are neither 0 nor 1. told: what was done with the lines. checksum: of all tokens.
    Raises OSError, and ValueError that names the line of what is wrong.
    """

    KINDS: ClassVar[str] = "messages, conversations, prompt and completion, instruction and output, or text"

    def __init__(
        self, path: Path, tokenizer: Tokenizer, max_length: int, train_on: str = "assistant", skip_bad: bool = False
    ):
        require(train_on in TRAIN_ON, "train_on", train_on, f"one of {', '.join(TRAIN_ON)}")
        self.path, self._tokenizer, self._max_length, self._train_on = path, tokenizer, max_length, train_on
        self._lines, self._numbers = Lines(path), list[int]()
        lengths, counts, bad = list[int](), list[float](), list[str]()
        cut = most = empty = endless = checksum = trained = 0
        reason, self.weighted = f"expected lines with {self.KINDS}", False
        with tempfile.TemporaryFile(prefix="opgrad-") as store:
            entries = self._lines.made(self._read, self.KINDS, skip_bad, bad)
            for number, values, whole in ((number, *each) for number, found in entries for each in found):
                is_endless = not np.isin(whole.tokens[whole.trained], tokenizer.ends).any()
                most, cut = max(most, len(whole.tokens)), cut + (len(whole.tokens) > max_length)
                example = whole.cut(max_length)
                count = int(example.trained.sum())
                if not count:
                    if not empty:
                        reason = f"{self._lines.where(number)} {self._lack(values)}"
                    empty += 1
                    continue
                endless += is_endless
                self._numbers.append(number)
                lengths.append(len(example.tokens))
                counts.append(float(example.weights.sum()))
                trained += count
                self.weighted |= bool((example.weights % 1).any() or (example.weights > 1).any())
                for part in (example.tokens.tobytes(), example.weights.tobytes()):
                    checksum = zlib.crc32(part, checksum)
                    store.write(part)
            if not lengths:
                reason = bad[0] if bad and not empty else reason
                raise ValueError(f"{path}: it has no example with a token to learn from: {reason}")
            store.flush()
            self._store = np.asarray(np.memmap(store, np.int32, "r"))
        self.lengths, self.counts, self.checksum = np.array(lengths), np.array(counts), checksum
        self._ends = 2 * np.cumsum(self.lengths)
        told = len(lengths) + empty + len(bad), cut, most, empty, endless, len(bad), tuple(bad[:REASONS])
        self.told = Told(*told, int(self.lengths.sum()), trained, tuple(self._lines.unread))

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def form(self) -> int:
        """Whether some weights are neither 0 nor 1."""
        return int(self.weighted)

    def origin(self, number: int) -> str:
        """Where an example came from, by its number."""
        return self._lines.where(self._numbers[number])

    def __getitem__(self, number: int) -> TokenExample:
        """An example by its number."""
        end, length = self._ends[number], self.lengths[number]
        tokens, weights = self._store[end - 2 * length : end].reshape(2, -1)
        return TokenExample(tokens, weights.view(np.float32))

    def _read(self, values: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], TokenExample]]:
        """The examples of the object of a line, each with its own object."""
        found = []
        for each in self._objects(values):
            tokens, weights = self._tokens(each)
            weights = weights.astype(np.float32)
            weights[:1] = 0
            found.append((each, TokenExample(tokens, weights)))
        return found

    def _objects(self, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The objects of the examples in the object of a line."""
        return [values]

    def _tokens(self, values: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of an example, and their weights."""
        has_template = self._tokenizer.template is not None
        pair = question_and_answer(values)
        if (messages := messages_of(values, self._train_on == "all")) is not None and (has_template or pair is None):
            return self._chat(messages, values.get("tools"))
        if "prompt" in values and "completion" in values:
            return self._completion(text_of(values, "prompt"), text_of(values, "completion"))
        if pair is not None:
            return self._completion("\n\n".join([*filter(None, (system_of(values), pair[0])), ""]), pair[1])
        if "text" in values:
            tokens = self._ended(self._tokenizer.encode(text_of(values, "text"), special=True))
            return tokens, np.ones(len(tokens), np.bool_)
        raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {self.KINDS}")

    def _lack(self, values: Mapping[str, Any]) -> str:
        """Why nothing is learned from the object of a line."""
        messages = messages_of(values, self._train_on == "all")
        if messages is None or self._train_on == "all":
            return f"has no token behind the first, up to the limit of {self._max_length}"
        answers = [each for each in messages if each["role"] == "assistant"]
        if not answers:
            return "has no message of the role assistant, expected one, or train_on all"
        if not any(each["weight"] and says(each) for each in answers):
            return "has answers alone that say nothing, or whose weight is 0"
        return f"has no answer that the chat template writes before the limit of {self._max_length} tokens"

    def _completion(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        first = self._tokenizer.encode(prompt, special=True)
        if len(first) and first[-1] == self._tokenizer.end:  # some tokenizers end every text
            first = first[:-1]
        answer = self._ended(self._tokenizer.encode(completion, special=False))
        tokens = np.concatenate([first, answer])
        return tokens, (np.arange(len(tokens)) >= len(first)) | (self._train_on == "all")

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens with the one that ends a text behind them."""
        end = self._tokenizer.end
        if end is None or (len(tokens) and tokens[-1] == end):
            return tokens
        return np.append(tokens, np.int32(end))

    def _chat(self, messages: list[Message], tools: Any) -> tuple[np.ndarray, np.ndarray]:
        text, turns, answers = self._written(messages, tools)
        source = self._tokenizer.template.source if self._tokenizer.template is not None else ""
        more = {name for each in messages for name in each.keys() - KNOWN if name not in source}
        self._lines.note(f"{name} of messages" for name in sorted(more))
        tokens, places = self._tokenizer.encode_with_places(text)
        begins, ends = np.maximum.accumulate(places, 0).T

        def inside(first: int, last: int) -> slice:
            return slice(np.searchsorted(ends, first, "right"), np.searchsorted(begins, last))

        if self._train_on == "all":
            weights = np.ones(len(tokens))
            for index, *part in turns:
                weights[inside(*part)] = messages[index]["weight"]
            return tokens, weights
        if not turns and not answers:
            raise ValueError(NO_LOOP)
        weights = np.zeros(len(tokens))
        spoken = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        chosen = set(spoken[-1:] if self._train_on == "last" else spoken)
        chosen = {index for index in chosen if messages[index]["weight"] and says(messages[index])}
        for index, *part in answers:
            if index < 0 or index in chosen:
                if "None" in text[slice(*part)] and "None" not in json.dumps(messages[index]):
                    raise ValueError(f"the chat template writes None for what message {index + 1} does not say")
                own = inside(*part)
                follows, stops = tokens[own.stop : own.stop + 1], self._tokenizer.ends
                ends_behind = np.isin(follows, stops).any() and not np.isin(tokens[own], stops).any()
                weights[own.start : own.stop + ends_behind] = 1 if index < 0 else messages[index]["weight"]
        return tokens, weights

    def _written(self, messages: list[Message], tools: Any) -> tuple[str, list[Part], list[Part]]:
        """What the template writes: arguments of tools as objects, as most templates take them, else as their JSON."""
        template = self._tokenizer.template
        if template is None:
            raise ValueError("it has messages, expected a chat template in tokenizer_config.json for them")
        tools = unpacked(tools)
        messages = [{name: value for name, value in each.items() if name != "weight"} for each in messages]
        try:
            return template.render_with_parts([with_arguments(each, unpacked) for each in messages], tools)
        except ValueError:
            if not any(each.get("tool_calls") for each in messages):
                raise
            return template.render_with_parts([with_arguments(each, json_of) for each in messages], tools)


@dataclass(frozen=True)
class TokenBatch(Dataset):
    """The arrays of a batch; its weight is that of all tokens."""

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The sum of the weights of tokens, in all rows or in some."""
        weights = self.arrays[WEIGHTS]
        return float((weights if rows is None else weights[rows]).sum())


@dataclass(frozen=True)
class RowData(Examples):
    """Examples as the rows of batches, which are made when they are needed; those of a batch have similar lengths.

    A class of a task says what `lengths`, the `weight` and the `arrays` of rows are.
    examples: of a file. chosen: the numbers of those that belong to this part, int64 [n].
    batch_size: how many rows make a batch. packed: whether these lie behind each other in one.
    drawn: a number that `order` draws for an epoch; of it and of a batch's rows is made what decides about dropout.
    """

    examples: Any
    chosen: np.ndarray
    batch_size: int
    packed: bool = field(default=False, kw_only=True)
    drawn: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64), kw_only=True)

    @property
    def rows(self) -> int:
        return len(self.chosen)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of tokens that the graph gets of these rows."""
        raise NotImplementedError

    def arrays(self, rows: np.ndarray) -> Dataset:
        """The arrays of some rows, padded."""
        raise NotImplementedError

    def shape(self) -> tuple[int, int]:
        """The most rows of tokens of a batch, and the most tokens of one of these, padding included."""
        lengths = np.sort(self.lengths(np.arange(self.rows)))
        return self.batch_size, padded(int(lengths[-1]))

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """The rows in the order of an epoch, int64 [n]: shuffled, but with rows of similar lengths in each batch.

        Packed ones need not be similar.
        """
        shuffled, size = generator.permutation(self.rows), self.batch_size
        if self.packed:
            self.drawn[0] = generator.integers(MOST)
            return shuffled
        batches: list[np.ndarray] = []
        for start in range(0, self.rows, WINDOW * size):
            window = shuffled[start : start + WINDOW * size]
            window = window[np.argsort(self.lengths(window), kind="stable")]
            rest = len(window) % size  # these rows make the last batch of all
            kept = window[: len(window) - rest]
            batches += [kept[at : at + size] for at in range(0, len(kept), size)]
            last = window[len(kept) :]
        mixed = [batches[place] for place in generator.permutation(len(batches))]
        self.drawn[0] = generator.integers(MOST)
        return np.concatenate([*mixed, last])

    def take(self, rows: np.ndarray) -> Dataset:
        """The arrays of some rows, and what decides about their dropout."""
        draw = zlib.crc32(np.ascontiguousarray(rows, np.int64).data, int(self.drawn[0]))
        found = self.arrays(rows)
        return replace(found, arrays={**found.arrays, DRAW: np.array([draw], np.int64)})

    def _some(self, rows: np.ndarray) -> Self:
        return replace(self, chosen=self.chosen[rows])


@dataclass(frozen=True)
class TokenData(RowData):
    """Examples as rows of tokens, for a graph with inputs for the tokens and for the labels.

    A row's inputs are its tokens but the last. The label of each is the token that follows, if that is trained.
    tokens, labels: the inputs' names. packed: for a graph of `packed_rows`.
    """

    examples: TokenExamples
    tokens: str
    labels: str

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The sum of the weights of tokens, in all rows or in some."""
        return float(self.examples.counts[self.chosen if rows is None else self.chosen[rows]].sum())

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of tokens that the graph gets of these rows."""
        return self.examples.lengths[self.chosen[rows]] - 1

    def shape(self) -> tuple[int, int]:
        """One row, where examples are packed."""
        lengths = np.sort(self.lengths(np.arange(self.rows)))
        return (1, padded(int(lengths[-self.batch_size :].sum()))) if self.packed else super().shape()

    def arrays(self, rows: np.ndarray) -> TokenBatch:
        """The arrays of some rows, padded on the right, or all in one row, where padding counts as an example."""
        examples = [self.examples[int(self.chosen[row])] for row in rows]
        tokens, labels, weights, places, ends = token_rows(examples, self.packed)
        arrays: dict[str, np.ndarray] = {self.tokens: tokens, self.labels: labels, WEIGHTS: weights}
        if self.packed:
            arrays |= {STARTS: np.append(ends, tokens.shape[1])[None].astype(np.int64), PLACES: places}
        return TokenBatch(arrays)


def token_rows(examples: Sequence[TokenExample], packed: bool = False, whole: bool = False) -> tuple[np.ndarray, ...]:
    """The tokens of examples but the last, their labels, weights and positions, and where each example ends.

    packed: whether examples lie in one row, one after the other. whole: whether all tokens have labels.
    """
    lengths = [len(each.tokens) - 1 for each in examples]
    ends = np.cumsum([0, *lengths])
    shape = (1, padded(int(ends[-1]))) if packed else (len(examples), padded(max(lengths)))
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    weights, places = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for row, (each, length) in enumerate(zip(examples, lengths, strict=True)):
        part = (0, slice(ends[row], ends[row] + length)) if packed else (row, slice(length))
        tokens[part], weights[part], places[part] = each.tokens[:-1], each.weights[1:], np.arange(length)
        labels[part] = each.tokens[1:] if whole else np.where(each.trained[1:], each.tokens[1:], IGNORED)
    return tokens, labels, weights, places, ends


def padded(length: int) -> int:
    """The length of a batch whose longest row has so many tokens."""
    return -(-length // MULTIPLE) * MULTIPLE
