"""How well a model does: loss and accuracy over a dataset."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
import onnx
import onnxruntime
from onnx.helper import get_node_attr_value

from opgrad.onnxruntime import loading
from opgrad.onnxruntime.messages import copied, import_microsoft
from opgrad.training.artifact_set import FILES, ArtifactSet, TensorSpec
from opgrad.training.data import Dataset
from opgrad.training.graph import open_session

EVALUATION = FILES[1]


@dataclass(frozen=True)
class Evaluation:
    """The loss, a mean over all rows, and the share of right answers; None if the label is no class."""

    loss: float
    accuracy: float | None


class Evaluator:
    """Runs the eval graph, with the scores as a second output.

    score_type: what onnxruntime knows of the scores: name, type and shape.
    classes: how many classes the scores tell apart; None if the label is no class, or nothing is known.
    """

    def __init__(self, artifacts: ArtifactSet, options: onnxruntime.SessionOptions):
        self._loss, self._scores, self._label = artifacts.loss, artifacts.scores, artifacts.label
        model = copied(artifacts.eval_model)
        model.graph.output.add().name = self._scores
        import_microsoft(model)  # for nodes that onnxruntime fuses, where opgrad's operators are registered
        self._session = open_session(model, options, f"Evaluator: {artifacts.directory / EVALUATION}")
        self.score_type = next(item for item in self._session.get_outputs() if item.name == self._scores)
        self.classes = _classes(self._label, self.score_type.shape)
        self._ignored = ignored_label(artifacts.eval_model.graph)

    def check_labels(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ValueError, naming the first row, if a label is neither a class nor ignored."""
        labels = arrays[self._label.name]
        if self.classes is None or not labels.size or 0 <= labels.min() <= labels.max() < self.classes:
            return
        wrong = (labels < 0) | (labels >= self.classes)
        if self._ignored is not None:
            wrong &= labels != self._ignored
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            name, last = self._label.name, self.classes - 1
            raise ValueError(f"{name}: row {row} is {labels[row]}, expected classes from 0 to {last}")

    def evaluate(self, data: Dataset, parameters: Mapping[str, np.ndarray], batch_size: int) -> Evaluation:
        """Loss and accuracy over a dataset.

        data: arrays in the dtypes and shapes of the graph's inputs.
        parameters: by name.
        batch_size: rows computed at once.
        """
        loss = right = counted = 0.0
        names = [item.name for item in self._session.get_inputs() if item.name not in parameters]
        for batch in _batches(data, batch_size):
            feeds = {name: batch.arrays[name] for name in names}
            result = self._session.run([self._loss, self._scores], {**feeds, **parameters})
            hits, answers = self._count(result[1], batch.arrays[self._label.name])
            loss += float(result[0]) * answers
            right += hits
            counted += answers
        counted = counted or 1.0
        return Evaluation(loss / counted, right / counted if self.classes is not None else None)

    def exported_accuracy(self, model: str | PathLike[str], data: Dataset, batch_size: int = 512) -> float | None:
        """The share of right answers of an exported model, in a session that knows nothing of opgrad.

        model: the file. data, batch_size: as in `evaluate`. Returns None if the label is no class.
        """
        session = loading.open_session(model, onnxruntime.SessionOptions(), f"exported_accuracy: {model}", stock=True)
        names = [item.name for item in session.get_inputs()]
        right = counted = 0
        for batch in _batches(data, batch_size):
            (scores,) = session.run(None, {name: batch.arrays[name] for name in names})
            hits, answers = self._count(scores, batch.arrays[self._label.name])
            right += hits
            counted += answers
        return right / (counted or 1) if self.classes is not None else None

    def _count(self, scores: np.ndarray, labels: np.ndarray) -> tuple[int, int]:
        """Right answers, and answers that count."""
        if self.classes is None:
            return 0, len(labels)
        counts = labels != self._ignored if self._ignored is not None else np.ones(labels.shape, np.bool_)
        return int((counts & (scores.argmax(axis=1) == labels)).sum()), int(counts.sum())


def _batches(data: Dataset, size: int) -> Iterator[Dataset]:
    for start in range(0, data.rows, size):
        yield data.take(np.arange(start, min(start + size, data.rows)))


def _classes(label: TensorSpec, scores: Sequence[int | str | None]) -> int | None:
    known = label.dtype.kind in "iu" and len(scores) == len(label.shape) + 1
    return scores[1] if known and isinstance(scores[1], int) else None


def ignored_label(graph: onnx.GraphProto) -> int | None:
    """The label that does not count, as a loss node says."""
    for node in graph.node:
        if any(item.name == "ignore_index" for item in node.attribute):
            return int(get_node_attr_value(node, "ignore_index"))
    return None
