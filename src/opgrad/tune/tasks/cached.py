"""GradCache: batches of an embedding model that are larger than the memory, as their texts are encoded in chunks.

First all vectors are computed, then the loss and its gradient by each of them, and then, chunk by chunk, the gradients
of sum(vectors · gradient). The result is that of the whole batch. Source: arXiv 2101.06983.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from opgrad.onnx.gradients.differentiation import gradients
from opgrad.onnx.graph.messages import copied, import_microsoft, keep
from opgrad.onnx.graph.nodes import needed, read_by
from opgrad.training.engine.binding import run
from opgrad.training.engine.evaluation import Evaluation
from opgrad.training.engine.trainer import BATCH_ROWS, Trainer
from opgrad.training.engine.training_graph import open_session
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.dataset import Examples, batches
from opgrad.tune.language.loss import LOSS
from opgrad.tune.language.model import WHO
from opgrad.tune.token_data import padded

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
        self._contrast = open_session(gradients(contrast, LOSS, vectors), options, WHO)
        encoder = copied(artifacts.evaluation)
        del encoder.graph.output[:]
        encoder.graph.output.add().name = vectors
        keep(encoder.graph.node, needed(list(encoder.graph.node), [vectors]))
        keep(encoder.graph.input, [each for each in encoder.graph.input if each.name in read_by(encoder.graph.node)])
        import_microsoft(encoder)
        self._encoder = open_session(encoder, options, WHO)

    def gradients_of(self, data: Examples, batches: Iterable[np.ndarray]) -> Iterator[float]:
        """Fill `gradients` for batches of rows."""
        for rows in batches:
            yield self.compute_gradients(data.take(rows).arrays)

    def compute_gradients(self, batch: Mapping[str, np.ndarray]) -> float:
        """Fill `gradients` for one batch and return its loss."""
        parts = list(self._parts(batch))
        loss, gradient = self._loss(batch, parts)
        total = np.zeros_like(self.gradients.flat)
        for rows, arrays in parts:
            given = {**arrays, GRADIENT: gradient[rows]}
            self._run([given[spec.name] for spec in self.artifacts.inputs])
            total += self.gradients.flat
        np.copyto(self.gradients.flat, total)
        return loss

    def evaluate(self, data: Examples, batch_size: int = BATCH_ROWS) -> Evaluation:
        """The loss of the present parameters."""
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
        known = {item.name for item in self._encoder.get_inputs()}
        for _, arrays in parts:
            feeds = {name: array for name, array in {**fixed, **arrays}.items() if name in known}
            found.append(run(self._encoder, [self._vectors], feeds, WHO)[0])
        vectors = np.empty((sum(map(len, found)), found[0].shape[1]), np.float32)
        vectors[np.concatenate([rows for rows, _ in parts])] = np.concatenate(found)
        given = {self._vectors: vectors, self._labels: batch[self._labels]}
        loss, gradient = run(self._contrast, [LOSS, f"{self._vectors}_grad"], given, WHO)
        return float(loss), gradient
