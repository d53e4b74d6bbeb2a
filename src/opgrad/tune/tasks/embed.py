"""The task of embedding models: texts that belong together get vectors near each other, all others of a batch not."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, require
from opgrad.onnx.gradients.differentiation import gradients
from opgrad.onnx.graph.formulas import LAST, GraphBody, Value
from opgrad.onnx.graph.messages import copied, opset_of
from opgrad.onnx.graph.nodes import names_in, rename
from opgrad.training.engine.evaluation import Evaluation, session_of, with_results
from opgrad.training.engine.trainer import BATCH_ROWS, Trainer
from opgrad.training.engine.training_graph import open_session, run
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.dataset import Dataset, Examples, TensorSpec, batches
from opgrad.tune.examples import RowData, padded
from opgrad.tune.language_model import LOSS, LanguageModel, finish, read
from opgrad.tune.lines import text_of
from opgrad.tune.lora import DRAW
from opgrad.tune.tasks import encoder
from opgrad.tune.tasks.base import Learned, TaskModel
from opgrad.tune.tokenizer import folder_of, read_json

GRADIENT = "gradient"  # an input of the graph of a chunk: that of the loss by its vectors


class CachedTrainer(Trainer):
    """A trainer whose graphs are those of a chunk.

    contrast: the graph from `vectors` and labels to the loss. vectors: their name in both graphs. chunk: so many texts
    are encoded at once. The others are those of `Trainer`.
    """

    __slots__ = ("_chunk", "_contrast", "_encoder", "_labels", "_vectors")

    def __init__(
        self, contrast: onnx.ModelProto, vectors: str, labels: str, chunk: int, artifacts: ArtifactSet, *given: Any
    ):
        super().__init__(artifacts, *given)
        self._vectors, self._labels, self._chunk = vectors, labels, chunk
        options = given[1]
        self._contrast = open_session(gradients(contrast, LOSS, vectors), options, "the loss")
        self._encoder = session_of(artifacts, vectors, "the encoder", options)

    def _computed(self, batch: Mapping[str, np.ndarray]) -> Callable[[], float]:
        parts = list(self._parts(batch))
        loss, gradient = self._loss(batch, parts)
        total = np.zeros_like(self.gradients.flat)
        for rows, arrays in parts:
            given = {**arrays, GRADIENT: gradient[rows]}
            super()._computed(given)
            total += self.gradients.flat
        np.copyto(self.gradients.flat, total)
        return partial(float, loss)

    _gradients_ahead = _computed  # without checks, which know the inputs of a chunk alone

    def evaluate(self, data: Examples, batch_size: int = BATCH_ROWS) -> Evaluation:
        weights, losses = list[float](), list[float]()
        for _, batch in batches(data, batch_size):
            losses.append(self._loss(batch.arrays, list(self._parts(batch.arrays)))[0])
            weights.append(batch.weight())
        return Evaluation(float(np.average(losses, weights=weights)), None)

    def _parts(self, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """The chunks of texts of similar lengths, without what all of a chunk are padded with, and their rows."""
        names = [spec.name for spec in self.artifacts.inputs if spec.name != GRADIENT]
        lengths = next(batch[name] for name in names if "mask" in name).sum(1)
        order = np.argsort(lengths, kind="stable")
        for start in range(0, len(order), self._chunk):
            rows = order[start : start + self._chunk]
            length = padded(int(lengths[rows].max()))
            yield rows, {name: np.ascontiguousarray(batch[name][rows, :length]) for name in names}

    def _loss(self, batch: Mapping[str, np.ndarray], parts: Sequence[Any]) -> tuple[float, np.ndarray]:
        """The loss of a batch, and its gradient by each vector."""
        fixed, found = {**self.parameters, **self.artifacts.constants}, list[np.ndarray]()
        for _, arrays in parts:
            values = with_results(self._encoder, [self._vectors], {**fixed, **arrays}, "the encoder")
            found.append(values[self._vectors])
        vectors = np.empty((sum(map(len, found)), found[0].shape[1]), np.float32)
        vectors[np.concatenate([rows for rows, _ in parts])] = np.concatenate(found)
        given = {self._vectors: vectors, self._labels: batch[self._labels]}
        loss, gradient = run(self._contrast, [LOSS, f"{self._vectors}_grad"], given, "the loss")
        return float(loss), gradient


# The names under which data sets have texts that are asked for, that are found, and that are not to be found.
ANCHORS = ("anchor", "query", "question", "sentence1", "title", "premise")
POSITIVES = ("positive", "pos", "passage", "document", "answer", "response", "sentence2", "abstract", "text", "body")
NEGATIVES = ("negative", "neg")  # the beginnings of their names; a value may be a list
RANKS = (1, 10)
LONG = "long/"  # before the names of the encoder of a batch's longer texts
VECTORS = "vectors"  # the value of the graph with them
ORDER = "order"  # an input: for each text, anchors first, the index of its vector among those of both encoders
NUMBERS = {encoder.LABELS: ("pairs",), ORDER: ("texts",)}
OPSET = 17  # of the graph of the loss alone


@dataclass(frozen=True)
class Embed(encoder.EncoderTask):
    """InfoNCE: of all texts of a batch that are to be found, the anchor's own shall be the nearest by its cosine.

    temperature: what the cosines are divided by. sizes: of prefixes of the vectors that shall serve alone; the loss is
        the mean of theirs; none: the whole. pooling: mean, cls or last; None: as 1_Pooling/config.json says.
    query, passage: what stands before texts; None: as config_sentence_transformers.json says.
    chunk: so many texts are encoded at once, each twice, so that a batch may be larger than the memory; 0: all at once.

    Source: InfoNCE, arXiv 1807.03748; Matryoshka, arXiv 2205.13147; GradCache, arXiv 2101.06983.
    """

    temperature: float = 0.05
    sizes: tuple[int, ...] = ()
    pooling: str | None = None
    query: str | None = None
    passage: str | None = None
    chunk: int = 0

    NAME: ClassVar[str] = "embed"
    KINDS: ClassVar[str] = "anchor and positive, query and passage, question and answer, perhaps negative"

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature", self.temperature, "a number above 0")
        poolings = encoder.POOLINGS
        require(self.pooling in (None, *poolings), "pooling", self.pooling, f"one of {', '.join(poolings)}")
        require(all(each > 0 for each in self.sizes), "sizes", self.sizes, "whole numbers above 0")
        require(self.chunk >= 0, "chunk", self.chunk, "a whole number of at least 0")

    def read(self, file: Path) -> LanguageModel:
        """The graph from tokens to vectors of length 1."""
        what = str(file)
        base = read(file, lambda ranks: encoder.output_of(ranks, self.pooling, what))
        is_pooled = base.logits in encoder.SENTENCE  # by all modules
        pooling = None if is_pooled else encoder.pooling_of(folder_of(file), self.pooling)
        if pooling is None and not is_pooled:
            lack = f"and {folder_of(file)} has no 1_Pooling/config.json"
            raise ArgumentError("task", f"has no pooling, {lack}, expected pooling=mean, cls or last")
        model = copied(base.model)
        body = GraphBody(opset_of(model), names_in(model.graph))
        body.scope("embed")
        vectors = encoder.unit(encoder.vectors_of(base, body, str(pooling), what))
        finish(model, vectors, VECTORS, ["batch", base.width or None])
        fit = not base.width or max(self.sizes, default=0) <= base.width
        require(fit, "sizes", self.sizes, f"at most {base.width}, the model's own")
        return replace(base, model=model, logits=VECTORS)

    def reader(self, model: TaskModel) -> encoder.Read:
        """The anchor, what is to be found, and what is not."""
        prompts = read_json(model.folder / "config_sentence_transformers.json").get("prompts") or {}
        found = prompts.get("document", prompts.get("passage", ""))
        before = [prompts.get("query", "") if self.query is None else self.query]
        before.append(found if self.passage is None else self.passage)

        def read_pair(values: Mapping[str, Any]) -> tuple[list[encoder.Text], Any]:
            if (name := next((each for each in ("label", "score") if each in values), None)) is not None:
                expected = "pairs that belong together; the tasks classify and rank take it"
                raise ValueError(f"it has a {name}, expected {expected}")
            texts = texts_of(values, self.KINDS)
            prefixes = [before[0], *before[1:] * (len(texts) - 1)]
            return [model.tokenizer.encode_with_types(f"{a}{b}") for a, b in zip(prefixes, texts, strict=True)], 0

        return read_pair

    def rows(self, model: TaskModel, examples: Any, batch_size: int) -> encoder.TextData:
        return Pairs(**vars(super().rows(model, examples, batch_size)), chunk=self.chunk)

    def with_loss(self, base: LanguageModel, trained: Collection[str], form: int, plain: bool) -> Learned:
        """The mean over the anchors, and over sizes."""
        model, inputs = copied(base.model), encoder.text_inputs(base)
        if self.chunk:
            # The sum of the products of vectors with gradients, which are an input.
            body, width = GraphBody(opset_of(model), names_in(model.graph)), base.width or None
            body.scope("loss")
            gradient = helper.make_tensor_value_info(GRADIENT, TensorProto.FLOAT, ["batch", width])
            model.graph.input.append(gradient)
            factors = (Value(body, name, TensorProto.FLOAT) for name in (VECTORS, GRADIENT))
            finish(model, body.node("Mul", *factors).sum(keepdims=False), LOSS, [])
            inputs[GRADIENT] = TensorSpec(GRADIENT, np.dtype(np.float32), ("batch", base.width or "width"))
        else:
            add_long(model)
            add_contrast(model, self.sizes, self.temperature)
            dtypes = {f"{LONG}{name}": each.dtype for name, each in inputs.items()}
            inputs |= {name: TensorSpec(name, dtype, ("long", "long_length")) for name, dtype in dtypes.items()}
            inputs |= {name: TensorSpec(name, np.dtype(np.int64), axes) for name, axes in NUMBERS.items()}
        return replace(base, model=model, loss=LOSS), inputs

    def ends_of_layers(self, layers: Sequence[str], model: onnx.ModelProto) -> Sequence[str]:
        """Those of both encoders."""
        made = {name for node in model.graph.node for name in node.output}
        return [*layers, *(name for each in layers if (name := f"{LONG}{each}") in made)]

    def trainer(self, model: TaskModel) -> Callable[..., Trainer]:
        """What makes a trainer: with chunks one that has the loss of whole batches."""
        if not self.chunk:
            return Trainer
        if any(each.lora.dropout for each in model.adapters):
            raise ArgumentError("task", "has chunk, which encodes texts twice alike, expected adapters without dropout")
        kind, shape = helper.make_tensor_value_info, ["batch", model.base.width or None]
        graph = helper.make_graph([], "contrast", [kind(VECTORS, TensorProto.FLOAT, shape)], [])
        contrast = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        add_contrast(contrast, self.sizes, self.temperature)
        return partial(CachedTrainer, contrast, VECTORS, encoder.LABELS, self.chunk)

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """Recall and nDCG of the anchors among all texts of the part that validates."""
        assert isinstance(held, encoder.TextData)
        every = np.arange(held.rows)
        columns = [held.column(index, every) for index in range(len(held.examples.texts[0]))]
        keys = {text.tobytes(): text for column in columns[1:] for text in column}
        places = {key: index for index, key in enumerate(keys)}
        own = dict[bytes, set[int]]()
        for anchor, text in zip(columns[0], columns[1], strict=True):
            own.setdefault(anchor.tobytes(), set()).add(places[text.tobytes()])
        vectors = self.computed(model, held, [*columns[0], *keys.values()])
        return ranked(vectors[: held.rows], vectors[held.rows :], [own[each.tobytes()] for each in columns[0]])


@dataclass(frozen=True)
class Pairs(encoder.TextData):
    """Pairs of texts, of which the labels are the indices in the batch. chunk: so many are encoded at once; 0: all."""

    chunk: int = 0

    def shape(self) -> tuple[int, int]:
        """Those of a chunk, or of half of the texts of a batch."""
        rows, length = super().shape()
        return min(rows, self.chunk or -(-rows // 2)), length

    def arrays(self, rows: np.ndarray) -> Dataset:
        """The arrays of some rows: without chunks short and long texts apart, each padded to the longest of its own.

        They are parted where the least padding is needed.
        """
        if self.chunk:
            return super().arrays(rows)
        texts = [text for index in range(len(self.examples.texts[0])) for text in self.column(index, rows)]
        lengths = np.array([padded(each.shape[1]) for each in texts])
        order, count = np.argsort(lengths, kind="stable"), np.arange(1, len(texts))
        short = 1 + int(np.argmin(count * lengths[order[:-1]] + count[::-1] * lengths[order[-1]]))
        apart = ([texts[number] for number in part] for part in (order[:short], order[short:]))
        first, last = (encoder.padded_texts(part, self.inputs, self.tokens, self.pad) for part in apart)
        long = {f"{LONG}{name}": array for name, array in last.items()}
        return Dataset({encoder.LABELS: self.targets(rows), ORDER: np.argsort(order), **first, **long})

    def targets(self, rows: np.ndarray) -> np.ndarray:
        return np.arange(len(rows))


def ranked(anchors: np.ndarray, texts: np.ndarray, own: list[set[int]]) -> dict[str, float]:
    """Mean recall at 1 and 10, and nDCG at 10, of anchors among texts. own: the numbers of each anchor's texts."""
    found = []
    for anchor, right in zip(anchors, own, strict=True):
        best = np.argsort(-(texts @ anchor), kind="stable")[: max(RANKS)]
        found.append((np.isin(best, list(right)), len(right)))
    return retrieved(found)


def retrieved(lists: Sequence[tuple[np.ndarray, int]]) -> dict[str, float]:
    """The same of lists of texts: which of these, from the best on, are right, and how many there are in all."""
    gains, found = 1 / np.log2(np.arange(max(RANKS)) + 2), []
    for hits, count in lists:
        best = hits[: max(RANKS)]
        gained = (gains[: len(best)] * best).sum() / gains[:count].sum()
        found.append([*(best[:rank].sum() / min(count, rank) for rank in RANKS), gained])
    if not found:
        return {}
    names = [*(f"recall@{rank}" for rank in RANKS), f"nDCG@{max(RANKS)}"]
    return {name: float(value) for name, value in zip(names, np.mean(found, axis=0), strict=True)}


def add_long(model: onnx.ModelProto) -> None:
    """Add the encoder once more, with the same weights, for longer texts."""
    graph, held = model.graph, {each.name for each in model.graph.initializer}
    own = [each.name for each in graph.input if each.name not in held and each.name != DRAW]
    names = {name: f"{LONG}{name}" for name in [*own, *(each for node in graph.node for each in node.output if each)]}
    for value in [each for each in graph.input if each.name in own]:
        dtype = value.type.tensor_type.elem_type
        graph.input.append(helper.make_tensor_value_info(names[value.name], dtype, ["long", "long_length"]))
    for node in list(graph.node):
        added = graph.node.add()
        added.CopyFrom(node)
        added.name = f"{LONG}{node.name}" if node.name else ""
        rename(added, names)


def add_contrast(model: onnx.ModelProto, sizes: Collection[int], temperature: float) -> None:
    """Give a graph of vectors of length 1 the loss as its only output. sizes: of prefixes.

    The vectors, in ORDER those of both encoders of `add_long`, are first the anchors', of which there are as many as of
    the labels, an input, then those of the texts that belong to them, and the others.
    """
    apart = any(f"{LONG}{VECTORS}" in node.output for node in model.graph.node)
    body = GraphBody(opset_of(model), names_in(model.graph))
    body.scope("loss")
    whole, labels = Value(body, VECTORS, TensorProto.FLOAT), Value(body, encoder.LABELS, TensorProto.INT64)
    for name in NUMBERS if apart else (encoder.LABELS,):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, NUMBERS[name]))
    if apart:
        both = body.node("Concat", whole, Value(body, f"{LONG}{VECTORS}", TensorProto.FLOAT), axis=0)
        whole = body.node("Gather", both, Value(body, ORDER, TensorProto.INT64))
    parts, losses = (whole.slice(0, labels.shape()), whole.slice(labels.shape(), LAST)), []
    for size in sizes or (0,):
        anchors, texts = (encoder.unit(each.slice(0, size, axis=1)) if size else each for each in parts)
        scores = body.node("MatMul", anchors, texts.transpose(1, 0)) / temperature
        losses.append(body.node("SoftmaxCrossEntropyLoss", scores, labels))
    finish(model, losses[0] if len(losses) == 1 else body.node("Sum", *losses) / len(losses), LOSS, [])


def texts_of(values: Mapping[str, Any], kinds: str) -> list[str]:
    """The texts of an example: the anchor, what is to be found, and what is not. Raises ValueError."""
    anchor, positive = (next((each for each in names if each in values), None) for names in (ANCHORS, POSITIVES))
    if anchor is None or positive is None:
        raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {kinds}")
    found = [text_of(values, anchor)]
    for name in (positive, *(each for each in values if each.startswith(NEGATIVES) and "score" not in each)):
        value = values[name]
        several = value if isinstance(value, list) else [value]
        if name == positive and not several:
            raise ValueError(f"{positive} is empty, expected a text")
        for index, each in enumerate(several[:1] if name == positive else several, 1):
            what = f"{name} {index}" if several is value and name != positive else name
            found.append(text_of({what: each}, what))
    return found
