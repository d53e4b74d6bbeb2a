"""The epochs of a training run: steps, validation, checkpoints, an early end, an interruption that loses nothing."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import numpy as np

from opgrad.training.checkpoint import write_checkpoint
from opgrad.training.data import Dataset
from opgrad.training.loop import Trainer
from opgrad.training.metrics import EpochMetrics, best_epoch, write_csv
from opgrad.training.schedule import Schedule
from opgrad.training.state import BEST, LAST, PROPERTY, RunState

# Rows done, rows in all, loss of the batches of the step, validation loss of the epoch before.
Progress = Callable[[int, int, float, float | None], None]


class Interrupted(RuntimeError):
    """The user stopped the training. `checkpoint`: the file to go on from."""

    def __init__(self, checkpoint: Path, state: RunState):
        begun = f" and {state.rows:,} rows of the next" if state.rows else ""
        super().__init__(f"interrupted after {len(state.history)} of {state.recipe.epochs} epochs{begun}")
        self.checkpoint = checkpoint


class Fit:
    """Trains for the epochs of a recipe and keeps checkpoints and metrics.csv in a folder.

    trainer: what is trained.
    training, validation: the rows; without the latter there is no best epoch.
    state: how far the training is; it is changed as the training goes on.
    output: the folder for last.checkpoint, best.checkpoint and metrics.csv.
    properties: what else the checkpoints hold.

    batch_losses: by epoch, the loss of every batch, of the epochs of this fit.
    """

    def __init__(
        self,
        trainer: Trainer,
        training: Dataset,
        validation: Dataset | None,
        state: RunState,
        output: Path,
        properties: Mapping[str, int | float | str],
    ):
        recipe = state.recipe
        self.trainer, self.training, self.validation = trainer, training, validation
        self.state, self._recipe, self.output, self._properties = state, recipe, output, properties
        batches = math.ceil(training.rows / recipe.batch_size)
        steps = recipe.epochs * math.ceil(batches / recipe.accumulate)
        self._schedule = Schedule(recipe.learning_rate, recipe.schedule, recipe.warmup, steps)
        self._mean = GradientMean(trainer.gradients) if recipe.accumulate > 1 else None
        self.batch_losses: list[list[float]] = []

    def run(self, progress: Progress) -> None:
        """Train until the last epoch, or until the validation loss has not fallen for the recipe's patience.

        progress: called after every step.
        Raises `Interrupted` after Ctrl-C, with last.checkpoint written; a second Ctrl-C ends at once.
        """
        state = self.state
        with _DeferredInterrupt() as interrupt:
            while len(state.history) < self._recipe.epochs and not state.stopped_early:
                self._train(progress, interrupt)
                if state.rows == self.training.rows:
                    self._finish_epoch()
                elif interrupt.requested:
                    self._save(LAST)
                if interrupt.requested and len(state.history) < self._recipe.epochs:
                    raise Interrupted(self.output / LAST, state)

    def _train(self, progress: Progress, interrupt: "_DeferredInterrupt") -> None:
        """The steps of an epoch, or of what is left of it."""
        state, recipe, rows = self.state, self._recipe, self.training.rows
        epoch = len(state.history)
        order = np.random.default_rng(recipe.seed + epoch).permutation(rows)[state.rows :]
        batches = self.trainer.gradient_batches(self.training, recipe.batch_size, order)
        validation_loss = state.history[-1].validation_loss if state.history else None
        self.batch_losses.append([])
        while state.rows < rows and not interrupt.requested:
            before = time.perf_counter()
            step_rows = min(recipe.batch_size * recipe.accumulate, rows - state.rows)
            losses = self._step(batches, step_rows)
            state.seconds += time.perf_counter() - before
            state.rows += step_rows
            state.batches += len(losses)
            state.loss_sum += sum(losses)
            self.batch_losses[-1] += losses
            progress(epoch * rows + state.rows, recipe.epochs * rows, losses[-1], validation_loss)

    def _step(self, batches: Iterator[float], rows: int) -> list[float]:
        """One step of the optimizer along the gradient of the next rows; the losses of their batches."""
        trainer, recipe = self.trainer, self._recipe
        if self._mean is None:
            losses = [next(batches)]
        else:
            losses = []
            for loss in islice(batches, math.ceil(rows / recipe.batch_size)):
                batch_rows = min(recipe.batch_size, rows - len(losses) * recipe.batch_size)
                self._mean.add(batch_rows / rows)
                losses.append(loss)
            self._mean.take()
        trainer.optimizer.learning_rate = self._schedule.at(self.state.steps)
        trainer.optimizer.step()
        self.state.steps += 1
        return losses

    def _finish_epoch(self) -> None:
        """Validate, and write down what there is."""
        state = self.state
        found = self.trainer.evaluate(self.validation) if self.validation is not None else None
        state.history.append(
            EpochMetrics(
                epoch=len(state.history) + 1,
                steps=state.steps,
                learning_rate=self._schedule.at(state.steps - 1),
                train_loss=state.loss_sum / state.batches,
                validation_loss=found.loss if found else None,
                validation_accuracy=found.accuracy if found else None,
                seconds=state.seconds,
                samples_per_second=state.rows / state.seconds,
            )
        )
        state.begin_epoch()
        if best_epoch(state.history) == len(state.history):
            self._save(BEST)
        self._save(LAST)
        write_csv(state.history, self.output / "metrics.csv")

    def _save(self, name: str) -> None:
        self.state.optimizer_steps = self.trainer.optimizer.steps
        properties = {**self._properties, PROPERTY: self.state.to_text()}
        write_checkpoint(self.trainer.checkpoint(properties), self.output / name)


class GradientMean:
    """The weighted sum of the gradients of several batches.

    gradients: by name; overwritten by every batch.
    """

    def __init__(self, gradients: Mapping[str, np.ndarray]):
        self._gradients = gradients
        self._sums = {name: np.zeros_like(array) for name, array in gradients.items()}

    def add(self, weight: float) -> None:
        """Add the gradients of a batch, which are scaled on the way."""
        for name, gradient in self._gradients.items():
            np.multiply(gradient, weight, out=gradient)
            np.add(self._sums[name], gradient, out=self._sums[name])

    def take(self) -> None:
        """Put the sum in place of the last batch's gradients and begin anew."""
        for name, gradient in self._gradients.items():
            np.copyto(gradient, self._sums[name])
            self._sums[name][...] = 0


class _DeferredInterrupt:
    """Within the `with` block the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()  # others may not set handlers
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
