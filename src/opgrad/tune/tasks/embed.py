"""The task of embedding models: texts that belong together get vectors near each other, all others of a batch not."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.body import GraphBody
from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import copied, keep, opset_of
from opgrad.onnx.graph.nodes import names_in, needed
from opgrad.training.engine.trainer import Trainer
from opgrad.training.files.batches import TensorSpec
from opgrad.tune.conversations import text_of
from opgrad.tune.language import LanguageModel, read
from opgrad.tune.language.loss import LOSS
from opgrad.tune.language.model import ENCODED, WHO
from opgrad.tune.options import require
from opgrad.tune.tasks.base import TaskModel
from opgrad.tune.tasks.cached import GRADIENT, CachedTrainer
from opgrad.tune.tasks.encoder import LABELS, EncoderTask, Read, Text, TextData, encoded, module_folder, text_inputs
from opgrad.tune.token_data import RowData
from opgrad.tune.tokenizer import folder_of, read_json

POOLINGS = ("mean", "cls", "last")
# What configurations of sentence-transformers' poolings call these.
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
SENTENCE = ("sentence_embedding", "embeddings")  # outputs that are pooled already
# The names under which data sets have texts that are asked for, that are found, and that are not to be found.
ANCHORS = ("anchor", "query", "question", "sentence1", "title", "premise")
POSITIVES = ("positive", "pos", "passage", "document", "answer", "response", "sentence2", "abstract", "text", "body")
NEGATIVES = ("negative", "neg")  # the beginnings of their names; a value may be a list
RANKS = (1, 10)
SMALLEST = 1e-12
VECTORS = "vectors"  # the value of the graph with them
OPSET = 17  # of the graph of the loss alone


@dataclass(frozen=True)
class Embed(EncoderTask):
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
        require(self.pooling in (None, *POOLINGS), "pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        require(all(each > 0 for each in self.sizes), "sizes", self.sizes, "whole numbers above 0")
        require(self.chunk >= 0, "chunk", self.chunk, "a whole number of at least 0")

    def read(self, file: Path) -> LanguageModel:
        """The graph from tokens to vectors of length 1."""
        what = f"{WHO}: {file}"
        base = read(file, lambda ranks: _output(ranks, self.pooling, what))
        pooled = base.logits in SENTENCE
        pooling = "" if pooled else self.pooling or _pooling(folder_of(file))
        model = copied(base.model)
        body = GraphBody(opset_of(model), names_in(model.graph))
        body.scope("embed")
        hidden = Value(body, base.logits, TensorProto.FLOAT)
        name = next((each.name for each in model.graph.input if "mask" in each.name), None)
        if name is None and not pooled:
            raise ValueError(f"{what} has no input attention_mask, expected one for texts of different lengths")
        vector = hidden if pooled else _pooled(hidden, Value(body, str(name), TensorProto.INT64), pooling)
        unit = _unit(vector)
        model.graph.initializer.extend(body.initializers)
        model.graph.node.extend(body.nodes)
        model.graph.node.append(helper.make_node("Identity", [unit.name], [VECTORS], VECTORS))
        _only_output(model, VECTORS, ["batch", base.width or None])
        if self.sizes and base.width and max(self.sizes) > base.width:
            raise ArgumentError("sizes", f"is {self.sizes}, expected at most {base.width}, the model's own")
        return replace(base, model=model, logits=VECTORS)

    def reader(self, model: TaskModel) -> Read:
        """The anchor, what is to be found, and what is not."""
        prompts = read_json(model.folder / "config_sentence_transformers.json").get("prompts") or {}
        found = prompts.get("document", prompts.get("passage", ""))
        before = [prompts.get("query", "") if self.query is None else self.query]
        before.append(found if self.passage is None else self.passage)

        def read_pair(values: dict[str, Any]) -> tuple[list[Text], Any]:
            texts = _texts(values)
            prefixes = [before[0], *before[1:] * (len(texts) - 1)]
            return [encoded(model.tokenizer, f"{a}{b}") for a, b in zip(prefixes, texts, strict=True)], 0

        return read_pair

    def rows(self, model: TaskModel, examples: Any, batch_size: int) -> TextData:
        """Pairs, of which the labels are the places in the batch."""
        found = super().rows(model, examples, batch_size)
        return Pairs(**vars(found), chunk=self.chunk)

    def with_loss(
        self, base: LanguageModel, trained: Collection[str], form: int, plain: bool
    ) -> tuple[LanguageModel, dict[str, TensorSpec]]:
        """The mean over the anchors, and over sizes."""
        model, inputs = copied(base.model), text_inputs(base)
        if self.chunk:
            add_product(model, base.width)
            inputs[GRADIENT] = TensorSpec(GRADIENT, np.dtype(np.float32), ("batch", base.width or "width"))
        else:
            add_contrast(model, self.sizes, self.temperature)
            inputs[LABELS] = TensorSpec(LABELS, np.dtype(np.int64), ("pairs",))
        return replace(base, model=model, loss=LOSS), inputs

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
        return partial(CachedTrainer, contrast, VECTORS, LABELS, self.chunk)

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """Recall and nDCG of the anchors among all texts of the part that validates."""
        assert isinstance(held, TextData)
        every = np.arange(held.rows)
        columns = [held.column(place, every) for place in range(len(held.examples.texts[0]))]
        keys = {text.tobytes(): text for column in columns[1:] for text in column}
        places = {key: place for place, key in enumerate(keys)}
        own = dict[bytes, set[int]]()
        for anchor, text in zip(columns[0], columns[1], strict=True):
            own.setdefault(anchor.tobytes(), set()).add(places[text.tobytes()])
        vectors = self.computed(model, held, [*columns[0], *keys.values()])
        return ranked(vectors[: held.rows], vectors[held.rows :], [own[each.tobytes()] for each in columns[0]])


@dataclass(frozen=True)
class Pairs(TextData):
    """Pairs of texts. chunk: how many texts are encoded at once; 0: all."""

    chunk: int = 0

    def shape(self) -> tuple[int, int]:
        """Those of a chunk."""
        rows, length = super().shape()
        return min(rows, self.chunk or rows), length

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """The place of each row."""
        return np.arange(len(rows))


def ranked(anchors: np.ndarray, texts: np.ndarray, own: list[set[int]]) -> dict[str, float]:
    """Mean recall at 1 and 10, and nDCG at 10, of anchors among texts. own: the numbers of each anchor's texts."""
    most = min(max(RANKS), len(texts))
    gains, found = 1 / np.log2(np.arange(most) + 2), []
    for anchor, right in zip(anchors, own, strict=True):
        best = np.argsort(-(texts @ anchor), kind="stable")[:most]
        hits = np.isin(best, list(right))
        ideal = gains[: len(right)].sum()
        found.append([*(hits[:rank].sum() / min(len(right), rank) for rank in RANKS), (gains * hits).sum() / ideal])
    names = [*(f"recall@{rank}" for rank in RANKS), f"nDCG@{max(RANKS)}"]
    return {name: float(value) for name, value in zip(names, np.mean(found, axis=0), strict=True)}


def add_product(model: onnx.ModelProto, width: int) -> None:
    """Give a graph of vectors the sum of their products with gradients, which are an input, as its only output."""
    body = GraphBody(opset_of(model), names_in(model.graph))
    body.scope("loss")
    model.graph.input.append(helper.make_tensor_value_info(GRADIENT, TensorProto.FLOAT, ["batch", width or None]))
    factors = (Value(body, name, TensorProto.FLOAT) for name in (VECTORS, GRADIENT))
    _finish(model, body, body.node("Mul", *factors).sum(keepdims=False))


def add_contrast(model: onnx.ModelProto, sizes: Collection[int], temperature: float) -> None:
    """Give a graph of vectors of length 1 the loss as its only output, and the labels as an input.

    The vectors are those of all anchors, then those of their texts, then those of others. sizes: of prefixes.
    """
    body = GraphBody(opset_of(model), names_in(model.graph))
    body.scope("loss")
    model.graph.input.append(helper.make_tensor_value_info(LABELS, TensorProto.INT64, ["pairs"]))
    labels, whole = Value(body, LABELS, TensorProto.INT64), Value(body, VECTORS, TensorProto.FLOAT)
    count, losses = labels.shape(), []
    for size in sizes or (0,):
        unit = _unit(whole.slice(0, size, axis=1)) if size else whole
        anchors, texts = unit.slice(0, count), unit.slice(count, LAST)
        scores = body.node("MatMul", anchors, texts.transpose(1, 0)) / temperature
        losses.append(body.node("SoftmaxCrossEntropyLoss", scores, labels))
    _finish(model, body, losses[0] if len(losses) == 1 else body.node("Sum", *losses) / len(losses))


def _finish(model: onnx.ModelProto, body: GraphBody, loss: Value) -> None:
    """Append nodes to a graph, of which the loss becomes the only output."""
    body.nodes.append(helper.make_node("Identity", [loss.name], [LOSS], "loss/Identity"))
    model.graph.initializer.extend(body.initializers)
    model.graph.node.extend(body.nodes)
    _only_output(model, LOSS, [])


def _only_output(model: onnx.ModelProto, name: str, shape: list[Any]) -> None:
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    keep(model.graph.node, needed(list(model.graph.node), [name]))


def _unit(vectors: Value) -> Value:
    """Vectors with the length 1."""
    body, square = vectors.body, (vectors * vectors).sum([1])
    return vectors / body.node("Max", square.apply("Sqrt"), body.number(SMALLEST, vectors))


def _pooled(hidden: Value, mask: Value, pooling: str) -> Value:
    """One vector of those of all tokens [batch, length, width]."""
    body = hidden.body
    if pooling == "cls":
        return hidden.slice(0, 1, axis=1).squeeze(1)
    counted = mask.cast(TensorProto.FLOAT)
    if pooling == "last":
        ends = body.node("CumSum", counted, body.constant(np.array(1))).equals(counted.sum([1]))
        counted = counted * ends.cast(TensorProto.FLOAT)
    weights = counted.unsqueeze(2)
    return (hidden * weights).sum([1], keepdims=False) / body.node("Max", counted.sum([1]), body.number(1e-9, hidden))


def _output(ranks: Mapping[str, int], pooling: str | None, what: str) -> str:
    """The output that the vectors are made of: those of tokens, or, unless a pooling is given, those of texts."""
    texts = [name for name, rank in ranks.items() if rank == 2 and name in SENTENCE and pooling is None]
    tokens = [name for name, rank in ranks.items() if rank == 3 and name in ENCODED]
    if not (found := texts or tokens):
        raise ValueError(
            f"{what} has the outputs {', '.join(ranks)}, expected one of {', '.join((*ENCODED, *SENTENCE))}, "
            "as embedding models have"
        )
    return found[0]


def _pooling(folder: Path) -> str:
    """The pooling of a model's folder, as sentence-transformers writes it down."""
    place = module_folder(folder, "Pooling") or folder / "1_Pooling"
    config = read_json(place / "config.json")
    if module_folder(folder, "Dense"):
        raise NotImplementedError(f"{WHO}: {folder} has a module Dense behind its pooling, expected none")
    named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = [MODES.get(each, each) for each in named] or [str(config["pooling_mode"])] if config else []
    if len(found) == 1 and found[0] in POOLINGS:
        return found[0]
    has = f"the pooling {' and '.join(found)}" if found else "no 1_Pooling/config.json"
    raise ArgumentError("task", f"has no pooling, and {folder} has {has}, expected pooling=mean, cls or last")


def _texts(values: Mapping[str, Any]) -> list[str]:
    """The texts of an example: the anchor, what is to be found, and what is not. Raises ValueError."""
    told = next((name for name in ("label", "score") if name in values), None)
    if told is not None:
        raise ValueError(f"it has a {told}, expected pairs that belong together; the tasks classify and rank take it")
    anchor, positive = (next((each for each in names if each in values), None) for names in (ANCHORS, POSITIVES))
    if anchor is None or positive is None:
        raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {Embed.KINDS}")
    flat = {name: value for name, value in values.items() if not isinstance(value, list)}
    for name, value in values.items():
        if isinstance(value, list) and (name == positive or name.startswith(NEGATIVES)):
            part = value[:1] if name == positive else value
            flat |= {name if name == positive else f"{name} {place}": each for place, each in enumerate(part, 1)}
    if positive not in flat:
        raise ValueError(f"{positive} is empty, expected a text")
    return [text_of(flat, name) for name in (anchor, positive, *(name for name in flat if name.startswith(NEGATIVES)))]
