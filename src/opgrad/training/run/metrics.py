"""The metrics that a training run measures in every epoch, and their files."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from opgrad.base.writing import replace_file


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch.

    epoch: its number, from 1.
    steps: the optimizer's steps from the first epoch on.
    learning_rate: that of the last step.
    train_loss: the mean over the batches, each before its step.
    validation_loss, validation_accuracy: of the parameters after the epoch; None without validation rows, the
        accuracy also where the label is no class.
    seconds: the time that training took, without evaluation and writing.
    samples_per_second: training rows through forward, backward and optimizer.
    """

    epoch: int
    steps: int
    learning_rate: float
    train_loss: float
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float
    samples_per_second: float


def best_epoch(history: Sequence[EpochMetrics]) -> int | None:
    """The number of the epoch with the lowest validation loss, the first of several; None without validation."""
    losses = [each.validation_loss for each in history if each.validation_loss is not None]
    if not losses:
        return None
    return 1 + min(range(len(losses)), key=lambda place: math.inf if math.isnan(losses[place]) else losses[place])


def write_csv(history: Sequence[EpochMetrics], path: Path) -> None:
    """Write a line of names and a line for every epoch; missing values are left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(EpochMetrics)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(each) for each in history)
    replace_file(path, text.getvalue().encode())
