"""Batches of tokens: examples of similar lengths together, padded to the longest one, or all in one row."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from opgrad.training.files.batches import TensorSpec
from opgrad.training.files.dataset import Buffer, Dataset, Fill
from opgrad.tune.examples import TokenExample, TokenExamples
from opgrad.tune.insertion import DRAW
from opgrad.tune.language.loss import IGNORED, WEIGHTS
from opgrad.tune.language.packing import PLACES, STARTS

# Lengths of batches are multiples of this, so that there are few of them: a graph keeps memory and plans for each.
MULTIPLE = 16
MOST = 2**32  # of the numbers that are drawn
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
WINDOW = 64  # batches; that many are sorted by their lengths together


@dataclass(frozen=True)
class TokenBatch(Dataset):
    """The arrays of a batch; its weight is that of all tokens."""

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The sum of the weights of tokens, in all rows or in some."""
        weights = self.arrays[WEIGHTS]
        return float((weights if rows is None else weights[rows]).sum())


@dataclass(frozen=True)
class RowData:
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
        """The number of examples."""
        return len(self.chosen)

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The weight of all rows, or of some, in the mean of a loss: their number, unless a class says otherwise."""
        return float(self.rows if rows is None else len(rows))

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

    def filler(self, inputs: Sequence[TensorSpec]) -> Fill:
        """What writes the rows of a batch into the memory of a graph's inputs."""

        def fill(rows: np.ndarray, buffer: Buffer) -> None:
            arrays = self.take(rows).arrays
            for place, spec in enumerate(inputs):
                np.copyto(buffer(place, arrays[spec.name].shape), arrays[spec.name])

        return fill

    def split(self, rows: int, seed: int) -> "tuple[Self, Self]":
        """Part into training and validation rows, as `Dataset.split` does."""
        if self.rows < 2:
            raise ValueError(f"TokenData.split: rows is {self.rows}, expected at least 2, one of each part")
        if not 0 < rows < self.rows:
            raise ValueError(f"TokenData.split: rows is {rows}, expected 1 to {self.rows - 1}")
        order = self.chosen[np.random.default_rng(seed).permutation(self.rows)]
        return replace(self, chosen=order[:-rows]), replace(self, chosen=order[-rows:])


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
        """The arrays of some rows, padded on the right."""
        examples = [self.examples[int(self.chosen[row])] for row in rows]
        return TokenBatch(self._packed(examples) if self.packed else self._padded(examples))

    def _padded(self, examples: Sequence[TokenExample]) -> dict[str, np.ndarray]:
        arrays = self._empty(len(examples), max(len(each.tokens) for each in examples) - 1)
        for place, example in enumerate(examples):
            _enter(example, arrays, place, 0)
        return dict(zip(self._names, arrays, strict=True))

    def _packed(self, examples: Sequence[TokenExample]) -> dict[str, np.ndarray]:
        """One row; the padding behind it counts as an example of its own."""
        ends = np.cumsum([0, *(len(each.tokens) - 1 for each in examples)])
        arrays = self._empty(1, int(ends[-1]))
        places = np.zeros_like(arrays[0])
        for start, end, example in zip(ends[:-1], ends[1:], examples, strict=True):
            _enter(example, arrays, 0, start)
            places[0, start:end] = np.arange(end - start)
        starts = np.append(ends, places.shape[1])[None].astype(np.int64)
        return {**dict(zip(self._names, arrays, strict=True)), STARTS: starts, PLACES: places}

    @property
    def _names(self) -> tuple[str, str, str]:
        return self.tokens, self.labels, WEIGHTS

    @staticmethod
    def _empty(rows: int, length: int) -> Arrays:
        """Tokens, labels and weights for so many rows with at least such a length, nothing of which is trained."""
        shape = rows, padded(length)
        return np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.float32)


def _enter(example: TokenExample, arrays: Arrays, row: int, start: int) -> None:
    """Write what the graph gets of an example: its tokens but the last, and of each that which follows as the label."""
    part = row, slice(start, start + len(example.tokens) - 1)
    labels = np.where(example.trained[1:], example.tokens[1:], IGNORED)
    for array, values in zip(arrays, (example.tokens[:-1], labels, example.weights[1:]), strict=True):
        array[part] = values


def padded(length: int) -> int:
    """The length of a batch whose longest row has so many tokens."""
    return -(-length // MULTIPLE) * MULTIPLE
