"""The distribution of the rows of a step over processes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """The part of a batch that one process computes.

    rows: their numbers. place: the number of the batch in the step. of: how many rows the whole batch has.
    """

    rows: np.ndarray
    place: int
    of: int


@dataclass(frozen=True)
class Step:
    """The rows and batches of a step of the optimizer, of all processes together, and the shares of one."""

    rows: int
    batches: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Sharing:
    """Shares of the steps for process `rank` of `size`.

    batch_size: rows of a batch, of all processes together. accumulate: batches of a step.
    whole: each batch is computed by one process, for graphs that take only one number of rows; otherwise each process
    computes a part of every batch.
    """

    batch_size: int
    accumulate: int
    rank: int = 0
    size: int = 1
    whole: bool = False

    def steps(self, order: np.ndarray) -> Iterator[Step]:
        """The steps over rows in this order; the last ones have what is left."""
        for start in range(0, len(order), self.batch_size * self.accumulate):
            rows = order[start : start + self.batch_size * self.accumulate]
            batches = [rows[begin : begin + self.batch_size] for begin in range(0, len(rows), self.batch_size)]
            shares = (self._share(place, batch) for place, batch in enumerate(batches))
            yield Step(len(rows), len(batches), tuple(share for share in shares if share.rows.size))

    def _share(self, place: int, batch: np.ndarray) -> Share:
        if self.whole:
            rows = batch if place % self.size == self.rank else batch[:0]
        else:  # if the rows cannot be divided evenly, the first processes get one row more
            each, more = divmod(len(batch), self.size)
            begin = self.rank * each + min(self.rank, more)
            rows = batch[begin : begin + each + (self.rank < more)]
        return Share(rows, place, len(batch))
