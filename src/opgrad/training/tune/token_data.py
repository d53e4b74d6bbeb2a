"""Batches of tokens: examples of similar lengths together, padded to the longest one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from opgrad.training.data.batches import TensorSpec
from opgrad.training.data.dataset import Buffer, Dataset, Fill
from opgrad.training.tune.examples import Examples

IGNORED = -100  # the label of a token that is not trained
# Lengths of batches are multiples of this, so that there are few of them: a graph keeps memory and plans for each.
MULTIPLE = 16
WINDOW = 64  # batches; that many are sorted by their lengths together


@dataclass(frozen=True)
class TokenBatch(Dataset):
    """The arrays of a batch; its weight is the number of trained tokens."""

    labels: str = ""

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The number of trained tokens, in all rows or in some."""
        labels = self.arrays[self.labels]
        return float(np.count_nonzero((labels if rows is None else labels[rows]) != IGNORED))


@dataclass(frozen=True)
class TokenData:
    """Examples as rows of tokens, for a graph with inputs for the tokens and for the labels.

    A row's inputs are its tokens but the last. The label of each is the token that follows, if that is trained.
    examples: of a file. chosen: the numbers of those that belong to this part, int64 [n].
    tokens, labels: the inputs' names. batch_size: how many rows make a batch.
    """

    examples: Examples
    chosen: np.ndarray
    tokens: str
    labels: str
    batch_size: int

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(self.chosen)

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The number of trained tokens, in all rows or in some."""
        return float(self.examples.counts[self.chosen if rows is None else self.chosen[rows]].sum())

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of tokens that the graph gets of these rows."""
        return self.examples.lengths[self.chosen[rows]] - 1

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """The rows in the order of an epoch, int64 [n]: shuffled, but with rows of similar lengths in each batch."""
        shuffled, size = generator.permutation(self.rows), self.batch_size
        batches: list[np.ndarray] = []
        for start in range(0, self.rows, WINDOW * size):
            window = shuffled[start : start + WINDOW * size]
            window = window[np.argsort(self.lengths(window), kind="stable")]
            rest = len(window) % size  # these rows make the last batch of all
            kept = window[: len(window) - rest]
            batches += [kept[at : at + size] for at in range(0, len(kept), size)]
            last = window[len(kept) :]
        mixed = [batches[place] for place in generator.permutation(len(batches))]
        return np.concatenate([*mixed, last])

    def take(self, rows: np.ndarray) -> TokenBatch:
        """The arrays of some rows, padded on the right."""
        length = padded(int(self.lengths(rows).max()))
        tokens = np.zeros((len(rows), length), np.int64)
        labels = np.full((len(rows), length), IGNORED, np.int64)
        for place, row in enumerate(rows):
            example = self.examples[int(self.chosen[row])]
            count = len(example.tokens) - 1
            tokens[place, :count] = example.tokens[:-1]
            labels[place, :count] = np.where(example.trained[1:], example.tokens[1:], IGNORED)
        return TokenBatch({self.tokens: tokens, self.labels: labels}, labels=self.labels)

    def filler(self, inputs: Sequence[TensorSpec]) -> Fill:
        """What writes the rows of a batch into the memory of a graph's inputs."""

        def fill(rows: np.ndarray, buffer: Buffer) -> None:
            arrays = self.take(rows).arrays
            for place, spec in enumerate(inputs):
                np.copyto(buffer(place, arrays[spec.name].shape), arrays[spec.name])

        return fill

    def split(self, rows: int, seed: int) -> tuple["TokenData", "TokenData"]:
        """Part into training and validation rows, as `Dataset.split` does."""
        if not 0 < rows < self.rows:
            raise ValueError(f"TokenData.split: rows is {rows}, expected 1 to {self.rows - 1}")
        order = self.chosen[np.random.default_rng(seed).permutation(self.rows)]
        return replace(self, chosen=order[:-rows]), replace(self, chosen=order[-rows:])


def padded(length: int) -> int:
    """The length of a batch whose longest row has so many tokens."""
    return -(-length // MULTIPLE) * MULTIPLE
