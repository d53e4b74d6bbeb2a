"""The metrics of epochs: as CSV, as a plot, and for boards such as TensorBoard."""

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from opgrad.base.arguments import require
from opgrad.base.files import alone, open_regular, replace_file


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch.

    epoch: its number, from 1.
    steps: the optimizer's steps from the first epoch on.
    learning_rate: that of the last step.
    train_loss: the mean over the batches, each before its step.
    validation_loss, validation_accuracy: after the epoch; None without validation rows, the accuracy also
        where the label is no class.
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


FILE = "metrics.jsonl"
LOGGERS = ("tensorboard",)  # a folder of that name gets the event files
INTERVAL = 1.0  # seconds between two writes to the disk, unless a step takes longer; a step may take less than 0.1 ms
Log = Callable[[int, Mapping[str, Any]], None]


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown logger, ModuleNotFoundError where its package is missing."""
    for name in names:
        require(name in LOGGERS, "loggers", name, " or ".join(LOGGERS))
        import tensorboardX  # noqa: F401


@contextmanager
def logged(output: Path, names: Sequence[str], steps: int) -> Iterator[Log]:
    """What writes the figures of a step, or of the epoch that ends with it, into a folder, within the `with` block.

    Without figures those before go to the disk. names: of `LOGGERS`. steps: how many a run that goes on has made;
    figures of later ones are written anew. Raises OSError if another run writes into the folder, whose checkpoints
    would be taken for this one's.
    """
    path, before = output / FILE, list[bytes]()
    with alone(path), ExitStack() as stack:
        if steps and path.is_file():  # a last line that was not written to its end is left out
            with open_regular(path) as lines:
                before = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= steps]
        replace_file(path, b"".join(before))
        file, written = stack.enter_context(path.open("a", encoding="utf-8")), time.perf_counter()
        boards = []
        for name in names:
            from tensorboardX import SummaryWriter

            # TensorBoard shows no figures of steps that are made anew.
            board = SummaryWriter(str(output / name), purge_step=steps + 1 if steps else None, flush_secs=10)
            stack.callback(board.close)
            boards.append(board)

        def log(step: int, figures: Mapping[str, Any]) -> None:
            nonlocal written
            if figures:
                file.write(json.dumps({"step": step, **figures}) + "\n")
            if not figures or time.perf_counter() - written >= INTERVAL:
                file.flush()
                written = time.perf_counter()
            for board in boards:
                for name, value in figures.items():
                    if value is not None:
                        board.add_scalar(name, value, step)

        yield log


def plot_losses(
    history: Sequence[EpochMetrics],
    batch_losses: Sequence[Sequence[float]],
    test_loss: float | None,
    title: str,
    path: str | PathLike[str],
) -> None:
    """Draw the loss of every batch, its mean over every epoch, the validation and the test loss, into a PNG.

    history: the epochs.
    batch_losses: of the last epochs, the losses of their batches.
    test_loss: of the exported parameters; None: there are no test rows.
    title: stands above the picture.
    path: the file.
    """
    figure = Figure(figsize=(7.0, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if batch_losses:  # a run that was over when it was resumed has none
        # The losses of the batches; those of an epoch end where it ends, and each has the same width.
        first = len(history) - len(batch_losses)
        width = 1 / max(map(len, batch_losses))
        places = [
            first + epoch + 1 - width * np.arange(len(losses), 0, -1) for epoch, losses in enumerate(batch_losses)
        ]
        middles = np.concatenate(places) + width / 2
        axes.plot(middles, np.concatenate(batch_losses), alpha=0.4, linewidth=0.8, label="batch")
    ends = np.arange(len(history)) + 1.0
    means = [epoch.train_loss for epoch in history]
    axes.plot(ends - 0.5, means, "o-", color="tab:blue", markersize=4, label="mean of the epoch")
    if (best := best_epoch(history)) is not None:
        losses = np.array([epoch.validation_loss for epoch in history], dtype=np.float64)
        axes.plot(ends, losses, "s-", color="tab:green", markersize=4, label="validation")
        axes.plot(best, losses[best - 1], "*", color="tab:green", markersize=12, label=f"best: epoch {best}")
    if test_loss is not None:
        axes.axhline(test_loss, color="tab:orange", linestyle="--", label=f"test, at the end: {test_loss:.4f}")
    axes.set(title=title, xlabel="epoch", ylabel="loss", xlim=(0, len(history) + 0.05))
    lowest = min([0.0, *means, *(loss for losses in batch_losses for loss in losses)])
    axes.set_ylim(bottom=lowest if np.isfinite(lowest) else None)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    replace_file(Path(path), content.getvalue())
