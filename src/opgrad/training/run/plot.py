"""A picture of a training run."""

import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from opgrad.base.writing import replace_file
from opgrad.training.run.metrics import EpochMetrics, best_epoch


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
