"""Encoders as tasks train them: texts as padded tokens, one vector for each, and a folder like that of the model."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.training.files.dataset import Dataset, TensorSpec
from opgrad.tune import outputs
from opgrad.tune.examples import REASONS, RowData, Told, padded
from opgrad.tune.language_model import ENCODED, LanguageModel
from opgrad.tune.lines import Lines
from opgrad.tune.tasks.base import DEFAULTS, Task, TaskModel
from opgrad.tune.tokenizer import read_json

POOLINGS = ("mean", "cls", "last")
# What configurations of sentence-transformers' poolings call these, and the modules that may stand behind an encoder.
MODES, MODULES = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}, ("Pooling", "Normalize", "Dropout")
SENTENCE = ("sentence_embedding", "embeddings")  # outputs that are pooled already
SMALLEST = 1e-12


def output_of(ranks: Mapping[str, int], pooling: str | None, what: str) -> str:
    """The output that the vectors are made of: those of tokens, or, unless a pooling is given, those of texts."""
    texts = [name for name, rank in ranks.items() if rank == 2 and name in SENTENCE and pooling is None]
    tokens = [name for name, rank in ranks.items() if rank == 3 and name in ENCODED]
    if not (found := texts or tokens):
        known = ", ".join((*ENCODED, *SENTENCE))
        raise ValueError(f"{what} has the outputs {', '.join(ranks)}, expected one of {known}, as encoders have")
    return found[0]


def vectors_of(base: LanguageModel, body: GraphBody, pooling: str, what: str) -> Value:
    """The vectors of texts, whose nodes are written behind an encoder's output."""
    hidden = Value(body, base.logits, TensorProto.FLOAT)
    if base.logits in SENTENCE:
        return hidden
    if pooling == "cls":
        return hidden.slice(0, 1, axis=1).squeeze(1)
    name = next((each.name for each in base.model.graph.input if "mask" in each.name), None)
    if name is None:
        raise ValueError(f"{what} has no input attention_mask, expected one for texts of different lengths")
    counted = Value(body, name, TensorProto.INT64).cast(TensorProto.FLOAT)
    if pooling == "last":
        ends = body.node("CumSum", counted, body.constant(np.array(1))).equals(counted.sum([1]))
        counted = counted * ends.cast(TensorProto.FLOAT)
    total = (hidden * counted.unsqueeze(2)).sum([1], keepdims=False)
    return total / body.node("Max", counted.sum([1]), body.number(SMALLEST, hidden))


def unit(vectors: Value) -> Value:
    """Vectors with the length 1."""
    square = (vectors * vectors).sum([1])
    return vectors / vectors.body.node("Max", square.apply("Sqrt"), vectors.body.number(SMALLEST, vectors))


def pooling_of(folder: Path, given: str | None = None) -> str | None:
    """The pooling of a model's folder, as sentence-transformers writes it down; None if it does not.

    given: the one that is asked for in its place.
    """
    path = folder / "modules.json"
    listed = json.loads(path.read_bytes()) if path.is_file() else [{}, {"type": "Pooling", "path": "1_Pooling"}]
    modules = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in listed[1:]}
    config = read_json(folder / modules.get("Pooling", "1_Pooling") / "config.json")
    if others := [each for each in modules if each not in MODULES]:
        raise NotImplementedError(f"{folder} has a module {others[0]} behind its encoder, expected Pooling, Normalize")
    if config.get("include_prompt") is False:
        raise NotImplementedError(f"{folder} leaves prompts out of its pooling, expected include_prompt true")
    named, modes = [name for name, value in config.items() if value is True], config.get("pooling_mode") or []
    named = [each.removeprefix("pooling_mode_") for each in named if each.startswith("pooling_mode_")]
    found = [MODES.get(each, each) for each in named or ([modes] if isinstance(modes, str) else modes)]
    if given is None and found and (len(found) > 1 or found[0] not in POOLINGS):
        raise ArgumentError("task", f"and {folder} with the pooling {found}, expected pooling=mean, cls or last")
    return given or (found[0] if found else None)


LABELS = "labels"
# The most tokens of a text, as the files of a folder name it.
LIMITS = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"),
          ("config.json", "max_position_embeddings"))  # fmt: skip
Text = np.ndarray  # int32 [2, n], the tokens and their types: 1 in the second of two texts
Read = Callable[[Mapping[str, Any]], tuple[list[Text], Any]]


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
    have, for messages. max_length: of a text in tokens; longer ones are cut, see `_cut`.
    """
    bad, texts, targets = list[str](), list[list[Text]](), list[Any]()
    cut = longest = checksum = 0

    def make(values: Mapping[str, Any]) -> tuple[list[Text], Any]:
        found, target = read(values)
        if texts and len(found) != len(texts[0]):
            raise ValueError(f"it has {len(found)} texts, expected {len(texts[0])} as in the first example")
        return found, target

    lines = Lines(path)
    for _, (found, target) in lines.made(make, kinds, skip_bad, bad):
        longest = max(longest, *(each.shape[1] for each in found))
        cut += any(each.shape[1] > max_length for each in found)
        texts.append([_cut(each, max_length) for each in found])
        targets.append(target)
        checksum = zlib.crc32(repr(target).encode(), zlib.crc32(b"".join(each.tobytes() for each in found), checksum))
    if not texts:
        raise ValueError(bad[0] if bad else f"{path} has no example, expected lines with {kinds}")
    tokens = sum(each.shape[1] for example in texts for each in example)
    counts = len(texts) + len(bad), cut, longest, 0, 0, len(bad)
    told = Told(*counts, tuple(bad[:REASONS]), tokens, tokens, tuple(lines.unread))
    return TextExamples(texts, np.array(targets), told, checksum)


def _cut(text: Text, most: int) -> Text:
    """The first tokens of a text and the last, which ends it; of two texts the longer is cut first, as elsewhere."""
    room = most - np.count_nonzero(text[2] == 0) if len(text) > 2 else 0
    if text.shape[1] <= most or room < 2:
        return np.delete(text, np.s_[most - 1 : -1], 1)[:2]
    one, other = (np.flatnonzero(text[2] == part) for part in (1, 2))
    half = (room + (len(one) > len(other))) // 2
    kept = min(len(one), max(room - len(other), half))
    return np.delete(text, [*one[kept:], *other[room - kept :]], 1)[:2]


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

    def column(self, index: int, rows: np.ndarray) -> list[Text]:
        """One of the texts of some rows."""
        return [self.examples.texts[number][index] for number in self.chosen[rows]]

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """What is learned from some rows."""
        return np.asarray(self.examples.targets[self.chosen[rows]])

    def arrays(self, rows: np.ndarray) -> Dataset:
        columns = (self.column(index, rows) for index in range(len(self.examples.texts[0])))
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
        given = (read_json(folder / file).get(name) for file, name in LIMITS)
        return min((each for each in given if type(each) is int and each > 1), default=None)

    def reader(self, model: TaskModel) -> Read:
        """What makes the texts of a line's object, and what is learned from it; see `read_texts`."""
        raise NotImplementedError

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> TextExamples:
        return read_texts(data, self.reader(model), self.KINDS, model.max_length, skip_bad)

    def rows(self, model: TaskModel, examples: TextExamples, batch_size: int) -> TextData:
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
        outputs.merged(model.base, model.adapters, model.values)

    def save(self, model: TaskModel, folder: Path, about: Mapping[str, Any]) -> list[str]:
        """Write a folder like the model's: adapters are added to its weights, or beside those that are quantized."""
        graph, values = outputs.merged(model.base, model.adapters, model.values)
        return outputs.write_like(folder, model.folder, model.file, graph, values, about)

    merge = save
