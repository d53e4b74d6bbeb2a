"""The tasks of classifiers and of rerankers: a head on an encoder gives texts, or pairs of texts, scores."""

import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.base.arguments import ArgumentError, require
from opgrad.base.files import replace_file
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import copied, opset_of
from opgrad.onnx.graph.nodes import names_in
from opgrad.training.files.dataset import TensorSpec
from opgrad.training.make.checks import quantity
from opgrad.tune.examples import RowData
from opgrad.tune.language_model import LOSS, LanguageModel, finish, read
from opgrad.tune.lines import text_of
from opgrad.tune.tasks import encoder
from opgrad.tune.tasks.base import Learned, TaskModel
from opgrad.tune.tasks.embed import retrieved, texts_of
from opgrad.tune.tokenizer import folder_of, read_json

SCORES, WEIGHT, BIAS = "logits", "classifier.weight", "classifier.bias"  # of a new head
FIRST = ("text", "sentence", "text1", "sentence1", "premise", "query", "question")
SECOND = ("text_pair", "text2", "sentence2", "hypothesis", "passage", "document")
HALF = 0.5  # from which on a pair belongs together
DEVIATION = 0.02  # of a new head's weights


@dataclass(frozen=True)
class HeadTask(encoder.EncoderTask):
    """A task of a head: that of the model, the output `logits` [batch, scores], or a new one."""

    def count(self, folder: Path) -> int | None:
        """The number of scores, if it is known without the model."""
        raise NotImplementedError

    def read(self, file: Path) -> LanguageModel:
        """The graph from tokens to scores."""
        what, folder = str(file), folder_of(file)

        def choose(ranks: Mapping[str, int]) -> str:
            return SCORES if ranks.get(SCORES) == 2 else encoder.output_of(ranks, None, what)

        base, count = read(file, choose), self.count(folder)
        if base.logits == SCORES:
            # The cross-entropy of one class is always 0.
            outputs, least = base.head.outputs, 2 if isinstance(self, Classify) and not self.several else 1
            if outputs < least or outputs != (count or outputs):
                hint = f"; one score is for the task {Rank.NAME}" if outputs == 1 else ""
                expected = f"expected {max(count or 0, least)} for the task {self.NAME}"
                raise ValueError(f"{what} has {quantity(outputs, 'score')}, {expected}{hint}")
            return base
        if count is None:
            raise ArgumentError("task", f"has no labels, and {file} has no head, expected labels=A|B for a new one")
        pooling = encoder.pooling_of(folder) or encoder.POOLINGS[1]
        source, model = (_with_head(each, base, count, pooling, what) for each in (base.source, base.model))
        return replace(base, source=source, model=model, logits=SCORES)

    def trained(self, base: LanguageModel) -> tuple[str, ...]:
        """The weights of the head, beside adapters."""
        head = next((each for each in base.products if each.role == "head"), None)
        found = (WEIGHT, BIAS) if head is None else (head.weight, head.bias) if head.trainable else ()
        return tuple(filter(None, found))

    def with_loss(self, base: LanguageModel, trained: Collection[str], form: int, plain: bool) -> Learned:
        """The mean over the rows."""
        model = copied(base.model)
        body = GraphBody(opset_of(model), names_in(model.graph))
        body.scope("loss")
        spec = self.labels_spec()
        kind = helper.np_dtype_to_tensor_dtype(spec.dtype)
        model.graph.input.append(helper.make_tensor_value_info(encoder.LABELS, kind, spec.shape))
        loss = self.loss_of(Value(body, base.logits, TensorProto.FLOAT), Value(body, encoder.LABELS, kind))
        finish(model, loss, LOSS, [])
        return replace(base, model=model, loss=LOSS), {encoder.LABELS: spec, **encoder.text_inputs(base)}

    def labels_spec(self) -> TensorSpec:
        raise NotImplementedError

    def loss_of(self, scores: Value, labels: Value) -> Value:
        raise NotImplementedError


@dataclass(frozen=True)
class Classify(HeadTask):
    """Cross-entropy of classes, or, where a text may have several labels, of each label apart.

    labels: the names of the classes; none: those of config.json, for a model with a head. several: whether a text has
        any number of them. weights: of the classes, in the order of labels; none: all count the same.
    """

    labels: tuple[str, ...] = ()
    several: bool = False
    weights: tuple[float, ...] = ()

    NAME: ClassVar[str] = "classify"
    KINDS: ClassVar[str] = "text, perhaps text_pair, and label, or labels"

    def __post_init__(self) -> None:
        known = len(self.labels)
        require(known != 1 and len(set(self.labels)) == known, "labels", self.labels, "several different names")
        wrong = self.weights and (len(self.weights) != known or min(self.weights) <= 0)
        require(not wrong, "weights", self.weights, "a number above 0 for each of labels")

    def count(self, folder: Path) -> int | None:
        return len(self.names(folder)) or None

    def names(self, folder: Path) -> Sequence[str]:
        """The labels: those of the task, or of the model."""
        named = read_json(folder / "config.json").get("id2label") or {}
        return self.labels or tuple(str(named[each]) for each in sorted(named, key=int))

    def reader(self, model: TaskModel) -> encoder.Read:
        """A text, perhaps with another in one row, and its label."""
        names = self.names(model.folder) or [str(each) for each in range(model.base.head.outputs)]
        are_numbers = any(name.lstrip("-").isdecimal() for name in names)  # then a number is a name, and no place
        places = {} if are_numbers else {str(index): index for index in range(len(names))}  # tables have them as texts
        places |= {name: number for number, name in enumerate(names)}

        def read_text(values: Mapping[str, Any]) -> tuple[list[encoder.Text], Any]:
            first, second = (next((each for each in known if each in values), None) for known in (FIRST, SECOND))
            found = [values[each] for each in ("labels", "label") if each in values][:1]
            if first is None or not found:
                raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {self.KINDS}")
            given = found[0] if isinstance(found[0], list) else found
            numbers = [places.get(str(each)) for each in given]
            if None in numbers:
                raise ValueError(f"label is {found[0]!r}, expected one of {', '.join(names)}")
            if not self.several and len(numbers) != 1:
                raise ValueError(f"it has {len(numbers)} labels, expected one, or the option several=true")
            target = [float(each in numbers) for each in range(len(names))] if self.several else numbers[0]
            other = None if second is None else text_of(values, second)
            return [model.tokenizer.encode_with_types(text_of(values, first), other)], target

        return read_text

    def labels_spec(self) -> TensorSpec:
        """Numbers of classes, or for each whether the text has it."""
        if self.several:
            return TensorSpec(encoder.LABELS, np.dtype(np.float32), ("batch", "labels"))
        return TensorSpec(encoder.LABELS, np.dtype(np.int64), ("batch",))

    def loss_of(self, scores: Value, labels: Value) -> Value:
        body = scores.body
        weights = body.constant(np.array(self.weights, np.float32)) if self.weights else None
        if not self.several:
            return body.node("SoftmaxCrossEntropyLoss", scores, labels, weights)
        losses = binary(scores, labels)
        return (losses if weights is None else losses * weights).along("ReduceMean", None, keepdims=0)

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """How many rows are right, and the mean of the classes' F1."""
        assert isinstance(held, encoder.TextData)
        every = np.arange(held.rows)
        scores, given = self.computed(model, held, held.column(0, every)), held.targets(every)
        classes = np.arange(scores.shape[1])
        right = given > 0 if self.several else given[:, None] == classes
        found = scores > 0 if self.several else scores.argmax(1)[:, None] == classes
        hits, counts = (right & found).sum(0), right.sum(0) + found.sum(0)
        f1 = 2 * hits[counts > 0] / counts[counts > 0]
        return {"accuracy": float((right == found).all(1).mean()), "F1": float(f1.mean()) if f1.size else 0.0}

    def save(self, model: TaskModel, folder: Path, about: Mapping[str, Any]) -> list[str]:
        """Write the folder; config.json names the labels."""
        written, names = super().save(model, folder, about), self.names(model.folder)
        path = folder / "config.json"
        if names and path.is_file():
            told = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
            kind = "multi_label" if self.several else "single_label"
            config = {**read_json(path), **told, "problem_type": f"{kind}_classification"}
            replace_file(path, (json.dumps(config, indent=2) + "\n").encode())
        return written

    merge = save


class Queries(encoder.TextData):
    """Queries with their texts; behind what is learned from them stands a number of the query."""

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """Whether the query and each text of a row belong together."""
        return super().targets(rows)[:, :-1]

    def queries(self, rows: np.ndarray) -> np.ndarray:
        """The same number for the same query."""
        return super().targets(rows)[:, -1]


@dataclass(frozen=True)
class Rank(HeadTask):
    """Rerankers: one score for a query and a text in one row.

    loss: binary, of each pair apart, or listwise, the softmax of a query's texts, of which the first is right.
    """

    loss: str = "binary"

    NAME: ClassVar[str] = "rank"
    KINDS: ClassVar[str] = "query, passage and label, or query, positive and negative"
    DATA: ClassVar[type[encoder.TextData]] = Queries

    def __post_init__(self) -> None:
        require(self.loss in ("binary", "listwise"), "loss", self.loss, "binary or listwise")

    def count(self, folder: Path) -> int | None:
        return 1

    def reader(self, model: TaskModel) -> encoder.Read:
        """The pairs of a query, and which of them belong together."""

        def read_pairs(values: Mapping[str, Any]) -> tuple[list[encoder.Text], Any]:
            label = next((values[each] for each in ("label", "score") if each in values), None)
            query, *texts = texts_of(values, self.KINDS)
            if label is None and len(texts) < 2:
                raise ValueError(f"it has no label and no negative, expected {self.KINDS}")
            try:
                first = 1.0 if label is None else float(label)  # tables may have it as a text
            except (TypeError, ValueError):
                first = math.nan
            if label is not None and (self.loss == "listwise" or not 0 <= first <= 1):
                raise ValueError(f"label is {label!r}, expected a number from 0 to 1 for the loss binary, or none")
            pairs = [model.tokenizer.encode_with_types(query, each) for each in texts]
            return pairs, [first, *[0.0] * (len(texts) - 1), zlib.crc32(query.encode())]

        return read_pairs

    def labels_spec(self) -> TensorSpec:
        return TensorSpec(encoder.LABELS, np.dtype(np.float32), ("batch", "texts"))

    def loss_of(self, scores: Value, labels: Value) -> Value:
        body = scores.body
        rows = scores.reshape(body.concat(body.ints([-1]), labels.shape(0, 1))).transpose(1, 0)
        if self.loss == "binary":
            return binary(rows, labels).along("ReduceMean", None, keepdims=0)
        return body.node("SoftmaxCrossEntropyLoss", rows, labels.apply("ArgMax", axis=1, keepdims=0))

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """Recall and nDCG of the queries that have right and wrong texts."""
        assert isinstance(held, Queries)
        every = np.arange(held.rows)
        texts = [held.column(index, every) for index in range(len(held.examples.texts[0]))]
        scores = self.computed(model, held, [each for column in texts for each in column])
        scores, right, found = scores.reshape(len(texts), -1).T, held.targets(every) > HALF, []
        for query in np.unique(held.queries(every)):
            own = held.queries(every) == query
            hits = right[own].ravel()[np.argsort(-scores[own].ravel(), kind="stable")]
            if hits.any() and not hits.all():
                found.append((hits, int(hits.sum())))
        return retrieved(found)


def binary(scores: Value, labels: Value) -> Value:
    """The binary cross-entropy of scores before the sigmoid."""
    return scores.apply("Softplus") - scores * labels


def _with_head(given: onnx.ModelProto, base: LanguageModel, count: int, pooling: str, what: str) -> onnx.ModelProto:
    """A model with a new head after its vectors, whose scores are its only output."""
    if Graph(copied(base.source)).element_type(base.logits) != TensorProto.FLOAT or not base.width:
        raise NotImplementedError(f"{what} has vectors in halves, or of unknown width, expected float32 for a new head")
    model = copied(given)
    body = GraphBody(opset_of(model), names_in(model.graph))
    body.scope("classifier")
    weight = np.random.default_rng(0).normal(0, DEVIATION, (base.width, count)).astype(np.float32)
    for name, array in ((WEIGHT, weight), (BIAS, np.zeros(count, np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(array, body.free(name)))
    vectors = encoder.vectors_of(base, body, pooling, what)
    operands = (Value(body, name, TensorProto.FLOAT) for name in (WEIGHT, BIAS))
    finish(model, body.node("Gemm", vectors, *operands), SCORES, ["batch", count])
    return model
