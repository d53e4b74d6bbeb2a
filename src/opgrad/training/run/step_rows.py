"""The rows of each step of the optimizer, divided into batches, and these among the processes of a training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchPart:
    """The rows of a batch that one process computes.

    rows: their numbers. batch: the number of the batch in the step. of_batch, of_step: the weight of these rows as a
    share of that of the whole batch, and of the step.
    """

    rows: np.ndarray
    batch: int
    of_batch: float
    of_step: float


@dataclass(frozen=True)
class StepCounts:
    """The numbers of rows and batches of a step, of all processes together, and what one process computes of it."""

    rows: int
    batches: int
    parts: tuple[BatchPart, ...]


@dataclass(frozen=True)
class StepRows:
    """The rows of all steps for process `rank` of `size`.

    batch_size: rows of a batch, of all processes together. accumulate: batches of a step.
    whole: each batch is computed by one process, for graphs that take only one number of rows; otherwise each process
    computes a part of every batch. weight: that of some rows in the mean of the loss.
    """

    batch_size: int
    accumulate: int
    rank: int = 0
    size: int = 1
    whole: bool = False
    weight: Callable[[np.ndarray], float] = len

    def steps(self, order: np.ndarray) -> Iterator[StepCounts]:
        """The steps over rows in this order; the last ones have what is left."""
        for start in range(0, len(order), self.batch_size * self.accumulate):
            rows = order[start : start + self.batch_size * self.accumulate]
            batches = [rows[begin : begin + self.batch_size] for begin in range(0, len(rows), self.batch_size)]
            parts = self._parts(batches, self.weight(rows))
            yield StepCounts(len(rows), len(batches), tuple(parts))

    def _parts(self, batches: list[np.ndarray], whole: float) -> Iterator[BatchPart]:
        """What this process computes of the batches of a step. whole: the weight of all of its rows."""
        for number, batch in enumerate(batches):
            rows = self._part(number, batch)
            if rows.size:
                weight = self.weight(rows)
                yield BatchPart(rows, number, weight / self.weight(batch), weight / whole)

    def _part(self, number: int, batch: np.ndarray) -> np.ndarray:
        if self.whole:
            return batch if number % self.size == self.rank else batch[:0]
        each, more = divmod(len(batch), self.size)  # the first processes get one row more if rows are left
        begin = self.rank * each + min(self.rank, more)
        return batch[begin : begin + each + (self.rank < more)]
