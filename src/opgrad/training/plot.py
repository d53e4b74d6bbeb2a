"""A picture of a training run."""

from collections.abc import Sequence
from os import PathLike

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_losses(
    batch_losses: Sequence[Sequence[float]], test_loss: float, title: str, path: str | PathLike[str]
) -> None:
    """Draw the loss of every batch, its mean over every epoch, and the test loss, into a PNG.

    batch_losses: by epoch, the losses of its batches.
    test_loss: after the last epoch.
    title: stands above the picture.
    path: the file.
    """
    figure = Figure(figsize=(7.0, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    every = np.concatenate(batch_losses)
    epochs = np.arange(len(batch_losses))
    means = [np.mean(losses) for losses in batch_losses]
    axes.plot(
        (np.arange(every.size) + 0.5) * len(epochs) / every.size,
        every,
        alpha=0.4,
        linewidth=0.8,
        label="batch",
    )
    axes.plot(epochs + 0.5, means, "o-", color="tab:blue", markersize=4, label="mean of the epoch")
    axes.axhline(test_loss, color="tab:orange", linestyle="--", label=f"test, at the end: {test_loss:.4f}")
    axes.set(title=title, xlabel="epoch", ylabel="loss", xlim=(0, len(epochs)))
    axes.set_ylim(bottom=min(0.0, every.min()))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
