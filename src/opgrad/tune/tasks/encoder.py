"""Encoders as tasks train them: their texts as padded tokens, their files, and an output folder like the model's."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import helper

from opgrad.training.files.batches import TensorSpec
from opgrad.training.files.dataset import Dataset
from opgrad.tune import deployed, outputs
from opgrad.tune.examples import REASONS, Told
from opgrad.tune.language.model import LanguageModel
from opgrad.tune.lines import Lines
from opgrad.tune.tasks.base import DEFAULTS, Task, TaskModel
from opgrad.tune.token_data import RowData, padded
from opgrad.tune.tokenizer import read_json

LABELS = "labels"
# The most tokens of a text, as the files of a folder name it.
LIMITS = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"),
          ("config.json", "max_position_embeddings"))  # fmt: skip
Text = np.ndarray  # int32 [2, n], the tokens and their types: 1 in the second of two texts
Read = Callable[[dict[str, Any]], tuple[list[Text], Any]]


@dataclass(frozen=True)
class TextExamples:
    """Examples of texts. texts: of each, as many as of the others. targets: of each, what is learned from it."""

    texts: list[list[Text]]
    targets: np.ndarray
    told: Told
    checksum: int
    form: int = 0

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(path: Path, read: Read, kinds: str, max_length: int, skip_bad: bool) -> TextExamples:
    """The examples of a file or a folder; see `Lines`.

    read: makes the texts of an object, and what is learned from it, or raises ValueError. kinds: what an object shall
    have, for messages. max_length: of a text in tokens; of longer ones the first are taken, and the last.
    """
    lines, bad, texts, targets = Lines(path), list[str](), list[list[Text]](), list[Any]()
    count = cut = longest = checksum = 0
    for number, _, line in lines:
        count += 1
        try:
            values = lines.object(line, number, kinds)
            with lines.naming(number):
                found, target = read(values)
                if texts and len(found) != len(texts[0]):
                    raise ValueError(f"it has {len(found)} texts, expected {len(texts[0])} as in the first example")
        except ValueError as error:
            if not skip_bad:
                raise
            bad.append(str(error))
            continue
        longest = max(longest, *(each.shape[1] for each in found))
        cut += any(each.shape[1] > max_length for each in found)
        texts.append([_shortened(each, max_length) for each in found])
        targets.append(target)
        checksum = zlib.crc32(repr(target).encode(), zlib.crc32(b"".join(each.tobytes() for each in found), checksum))
    if not texts:
        raise ValueError(bad[0] if bad else f"{path} has no example, expected lines with {kinds}")
    tokens = sum(each.shape[1] for example in texts for each in example)
    told = Told(count, cut, longest, 0, 0, len(bad), tuple(bad[:REASONS]), tokens, tokens)
    return TextExamples(texts, np.array(targets), told, checksum)


def _shortened(text: Text, length: int) -> Text:
    """The first tokens of a text and its last, which ends it."""
    return text if text.shape[1] <= length else np.concatenate([text[:, : length - 1], text[:, -1:]], 1)


def text_inputs(base: LanguageModel) -> dict[str, TensorSpec]:
    """The inputs of an encoder that are of the tokens' shape."""
    found = {}
    for each in base.model.graph.input:
        kind = each.type.tensor_type
        if each.name == base.tokens or any(part in each.name for part in ("mask", "type", "segment")):
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            found[each.name] = TensorSpec(each.name, dtype, ("batch", "length"))
    return found


def padded_texts(texts: Sequence[Text], inputs: Mapping[str, TensorSpec], tokens: str, pad: int) -> dict[str, Any]:
    """The inputs of an encoder for some texts, padded on the right."""
    shape = len(texts), padded(max(each.shape[1] for each in texts))
    found = {name: np.full(shape, pad if name == tokens else 0, spec.dtype) for name, spec in inputs.items()}
    for name, array in found.items():
        for row, text in zip(array, texts, strict=True):
            row[: text.shape[1]] = text[0] if name == tokens else 1 if "mask" in name else text[1]
    return found


@dataclass(frozen=True)
class TextData(RowData):
    """Examples of texts as batches: the first texts of all rows, then the second ones, and so on, and the targets.

    inputs: those of the encoder. tokens: the name of that of the tokens. pad: the token of padding.
    """

    examples: TextExamples
    inputs: Mapping[str, TensorSpec]
    tokens: str
    pad: int

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of the longest text of each row."""
        return np.array([max(each.shape[1] for each in self.examples.texts[number]) for number in self.chosen[rows]])

    def shape(self) -> tuple[int, int]:
        """The texts of a batch, and the tokens of the longest."""
        rows, length = super().shape()
        return rows * len(self.examples.texts[0]), length

    def column(self, place: int, rows: np.ndarray) -> list[Text]:
        """One of the texts of some rows."""
        return [self.examples.texts[number][place] for number in self.chosen[rows]]

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """What is learned from some rows."""
        return np.asarray(self.examples.targets[self.chosen[rows]])

    def arrays(self, rows: np.ndarray) -> Dataset:
        """The arrays of some rows."""
        columns = (self.column(place, rows) for place in range(len(self.examples.texts[0])))
        texts = [text for column in columns for text in column]
        targets = self.targets(rows)
        labels = targets.astype(np.float32) if targets.dtype.kind == "f" else targets
        return Dataset({LABELS: labels, **padded_texts(texts, self.inputs, self.tokens, self.pad)})


@dataclass(frozen=True)
class EncoderTask(Task):
    """A task of encoders. KINDS: what the object of a line shall have."""

    DEFAULTS: ClassVar[dict[str, Any]] = {**DEFAULTS, "batch_size": 32}
    KINDS: ClassVar[str]
    DATA: ClassVar[type[TextData]] = TextData

    def longest(self, folder: Path) -> int | None:
        """The most tokens of a text, as the files of a folder name it."""
        given = (read_json(folder / file).get(name) for file, name in LIMITS)
        return min((each for each in given if type(each) is int and each > 1), default=None)

    def reader(self, model: TaskModel) -> Read:
        """What makes the texts of a line's object, and what is learned from it; see `read_texts`."""
        raise NotImplementedError

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> TextExamples:
        """Texts as tokens."""
        return read_texts(data, self.reader(model), self.KINDS, model.max_length, skip_bad)

    def rows(self, model: TaskModel, examples: TextExamples, batch_size: int) -> TextData:
        """Texts as rows of tokens."""
        inputs, pad = text_inputs(model.base), model.tokenizer.pad
        return self.DATA(examples, np.arange(len(examples)), batch_size, inputs, model.base.tokens, pad)

    def computed(self, model: TaskModel, data: TextData, texts: Sequence[Text]) -> np.ndarray:
        """The output of the present model for some texts, so many at a time, those of similar lengths together."""
        compute, size = model.computing(), data.batch_size
        order = np.argsort([each.shape[1] for each in texts], kind="stable")
        found: list[np.ndarray] = []
        for start in range(0, len(order), size):
            part = [texts[number] for number in order[start : start + size]]
            found.append(compute(padded_texts(part, data.inputs, data.tokens, data.pad)))
        whole = np.concatenate(found)
        whole[order] = whole.copy()
        return whole

    def try_output(self, model: TaskModel, folder: Path) -> None:
        """Make the model that will be written, and drop it."""
        deployed.merged(model.base, model.adapters, model.values)

    def save(self, model: TaskModel, folder: Path, about: Mapping[str, Any]) -> list[str]:
        """Write a folder like the model's: adapters are added to its weights, or beside those that are quantized."""
        graph, values = deployed.merged(model.base, model.adapters, model.values)
        return outputs.write_like(folder, model.folder, model.file, graph, values, about)

    merge = save
