"""What a training run shows in a terminal: a progress bar, and what came out."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from opgrad.training.job import Run

INTERVAL = 0.1  # seconds between two looks of the bar: a training step may take less than 0.1 ms


class TrainingBar:
    """A progress bar with the loss and the speed; use it in a `with` block and call it after every batch."""

    def __init__(self, console: Console, description: str):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} samples/s"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # its thread would hold up the training steps
        )
        self._task = self._progress.add_task(description, loss=float("nan"), speed=0.0)
        self._start = self._shown = 0.0
        self._first = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._start:
            self._progress.stop()

    def __call__(self, done: int, total: int, loss: float) -> None:
        """Show that `done` of `total` rows are trained and the last batch had this loss."""
        now = time.perf_counter()
        if not self._start:
            self._start, self._first = now, done
            self._progress.start()
        if now - self._shown < INTERVAL and done < total:
            return
        self._shown = now
        speed = (done - self._first) / max(now - self._start, 1e-6)
        self._progress.update(self._task, completed=done, total=total, loss=loss, speed=speed, refresh=True)


def print_run(console: Console, run: Run) -> None:
    """Print what a training run came to and what was written where."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    losses = run.epoch_losses
    table.add_row("training", f"{run.train_rows:,} rows of {run.data}, {len(losses)} epochs")
    table.add_row("training loss", f"{losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
    table.add_row("speed", f"{run.samples_per_second:,.0f} samples/s")
    table.add_row("test loss", f"{run.test.loss:.4f} on {run.test_rows:,} rows")
    if run.test.accuracy is not None:
        table.add_row("test accuracy", f"{run.test.accuracy:.2%}")
    if run.exported_accuracy is not None:
        table.add_row("exported model", f"{run.exported_accuracy:.2%} in stock onnxruntime, without opgrad")
    table.add_row("written", f"{run.output / 'model.onnx'}: the trained model")
    table.add_row("", f"{run.output / 'loss.png'}: the loss curve")
    table.add_row("", f"{run.output / 'metrics.json'}: all figures")
    console.print(table)
