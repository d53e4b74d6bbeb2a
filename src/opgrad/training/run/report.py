"""The output of a training run: a progress bar in a terminal, lines elsewhere, and the results."""

import math
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from opgrad.base.terminal import visible
from opgrad.training.make.checks import quantity
from opgrad.training.run.job import Run
from opgrad.training.run.state import BEST, LAST

INTERVAL = 0.1  # seconds between two updates of the bar; a training step may take less than 0.1 ms
SILENCE = 30.0  # the most seconds between two lines, unless a step takes longer
BLOCKS = "▁▂▃▄▅▆▇█"
BLOCKS_OF_A_RUN = 20
LOGARITHMIC = 10  # the blocks' scale is logarithmic if the highest loss is so many times the lowest one or more


class TrainingLines:
    """A line at the end of each epoch, and after half a minute without one: what a file or a pipe shows of a training.

    Its loss is the mean of the steps since the line before. See `TrainingBar`.
    """

    def __init__(self, console: Console, description: str, unit: str, epochs: int):
        self._console, self._title, self._unit, self._epochs = console, visible(description), unit, epochs
        self._losses: list[float] = []
        self._begin: tuple[float, int] | None = None  # when the first step was done, and the rows by then
        self._said = 0.0

    def __call__(self, done: int, total: int, loss: float, validation_loss: float | None, speed: float) -> None:
        """Take note of a step, and print a line if it is time for one."""
        now = time.perf_counter()
        if self._begin is None:
            self._begin, self._said = (now, done), now
        self._losses.append(loss)
        rows = total // self._epochs
        if done % rows and now - self._said < SILENCE:
            return
        epoch, since, before = math.ceil(done / rows), now - self._begin[0], done - self._begin[1]
        facts = [f"epoch {epoch} of {self._epochs}", f"{done / total:.0%}"]
        facts.append(f"loss {loss_text(sum(self._losses) / len(self._losses))}")
        if validation_loss is not None:
            facts.append(f"validation {loss_text(validation_loss)} after epoch {epoch - 1}")
        facts.append(f"{speed:,.0f} {self._unit}/s")
        if before:
            facts.append(f"{timedelta(seconds=round(since / before * (total - done)))} left")
        self._console.print(f"{self._title}: {', '.join(facts)}", soft_wrap=True, highlight=False)
        self._losses, self._said = [], now


class LossBlocks:
    """The losses of a run as a line of blocks, each as high as the mean loss of an equal share of the run."""

    def __init__(self) -> None:
        self._sums, self._counts = [0.0] * BLOCKS_OF_A_RUN, [0] * BLOCKS_OF_A_RUN

    def add(self, share: float, loss: float) -> None:
        """Add the loss of a step, unless it is not finite. share: of the run that is done, from 0 to 1."""
        if math.isfinite(loss):
            index = min(int(share * BLOCKS_OF_A_RUN), BLOCKS_OF_A_RUN - 1)
            self._sums[index] += loss
            self._counts[index] += 1

    def __str__(self) -> str:
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True) if count]
        if not means:
            return ""
        low, high = min(means), max(means)
        scale = math.log if low > 0 and high >= LOGARITHMIC * low else float
        step = (scale(high) - scale(low)) / (len(BLOCKS) - 1) or 1.0
        return "".join(BLOCKS[round((scale(mean) - scale(low)) / step)] for mean in means)


class TrainingBar(AbstractContextManager["TrainingBar"]):
    """A progress bar with losses and speed; use it in a `with` block and call it after every step.

    unit: of the speed, in a second. epochs: of the whole run.
    lines: what is shown instead where the console is no terminal, or one that cannot draw a bar; else None.
    """

    def __init__(self, console: Console, description: str, unit: str = "samples", epochs: int = 1):
        self.lines = None if console.is_interactive else TrainingLines(console, description, unit, epochs)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(BLOCKS_OF_A_RUN),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[blocks]} loss {task.fields[loss]}{task.fields[validation]}"),
            TextColumn("{task.fields[speed]:,.0f} " + unit + "/s"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # the thread that refreshes would slow down the training steps
        )
        self._task = self._progress.add_task(visible(description), loss="nan", validation="", speed=0.0, blocks="")
        self._blocks, self._has_blocks = LossBlocks(), not console.options.ascii_only
        self._is_shown, self._shown = False, 0.0

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            self._progress.stop()

    def __call__(self, done: int, total: int, loss: float, validation_loss: float | None, speed: float) -> None:
        """Show that `done` of `total` rows are trained, the last losses, and the rows of a second."""
        if self.lines is not None:
            self.lines(done, total, loss, validation_loss, speed)
            return
        self._blocks.add(done / total, loss)
        now = time.perf_counter()
        if not self._is_shown:
            self._progress.start()
            self._is_shown = True
        elif now - self._shown < INTERVAL and done < total:
            return
        self._shown = now
        validation = "" if validation_loss is None else f", validation {loss_text(validation_loss)}"
        losses: dict[str, Any] = {"loss": loss_text(loss), "validation": validation}
        losses["blocks"] = str(self._blocks) if self._has_blocks else ""
        self._progress.update(self._task, completed=done, total=total, speed=speed, **losses)
        self._progress.refresh()


def loss_text(loss: float) -> str:
    """A loss with four places, or with an exponent where that would be long."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.3e}"


def print_run(console: Console, run: Run) -> None:
    """Print what a training run came to and what was written where."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    history, best = run.state.history, run.best_epoch
    early = ", then no better validation loss" if len(history) < run.state.recipe.epochs else ""
    table.add_row("training", f"{run.train_rows:,} rows of {run.data}, {quantity(len(history), 'epoch')}{early}")
    losses = history[0].train_loss, history[-1].train_loss
    table.add_row("training loss", f"{loss_text(losses[0])} in the first epoch, {loss_text(losses[1])} in the last")
    if best is not None:
        loss = f"{history[best - 1].validation_loss:.4f} on {run.validation_rows:,} rows after epoch {best}"
        table.add_row("validation loss", f"{loss}, the best, which is kept")
    table.add_row("speed", f"{run.samples_per_second:,.0f} samples/s")
    if run.skipped is not None:
        what = f", of which {run.skipped:,} were skipped: gradients overflowed float16" if run.skipped else ""
        table.add_row("loss scaling", f"{quantity(run.state.steps, 'step')}{what or ', none skipped'}")
    if run.processes > 1:
        table.add_row("processes", f"{run.processes}, {run.communication:.1%} of the time in communication")
    table.add_row("test loss", f"{loss_text(run.test.loss)} on {run.test_rows:,} rows")
    if run.test.accuracy is not None:
        table.add_row("test accuracy", f"{run.test.accuracy:.2%}")
    if run.exported_accuracy is not None:
        table.add_row("exported model", f"{run.exported_accuracy:.2%} in stock onnxruntime, without opgrad")
    written = {"model.onnx": "the trained model", "loss.png": "the loss curve", "metrics.json": "all figures"}
    written |= {"metrics.csv": "the figures of every epoch", LAST: "to go on from, with --resume"}
    if best is not None:
        written[BEST] = f"the same of epoch {best}"
    for index, (name, meaning) in enumerate(written.items()):
        table.add_row("" if index else "written", f"{run.output / name}: {meaning}")
    console.print(table)
