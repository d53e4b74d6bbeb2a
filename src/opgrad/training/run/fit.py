"""The epochs of a training run: steps, validation, checkpoints, early stopping, and interruption without loss."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from opgrad.training.engine.distributed import OneProcess
from opgrad.training.engine.evaluation import Evaluation
from opgrad.training.engine.memory import Flat, zeros_like
from opgrad.training.engine.trainer import BATCH_ROWS, Trainer
from opgrad.training.files.checkpoint import write_checkpoint
from opgrad.training.files.dataset import Examples
from opgrad.training.run.metrics import EpochMetrics, Log, best_epoch, logged, write_csv
from opgrad.training.run.recipe import Recipe, Schedule
from opgrad.training.run.state import BEST, LAST, PROPERTY, RunState

# Rows done, rows in all, loss of the batches of the step, validation loss of the epoch before, rows in a second.
Progress = Callable[[int, int, float, float | None, float], None]


@dataclass(frozen=True)
class BatchPart:
    """The rows of a batch that one process computes.

    rows: their numbers. batch: its number in the step. of_batch, of_step: their share of its weight, of the step's.
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


def step_rows(
    order: np.ndarray, recipe: Recipe, processes: OneProcess, whole: bool, weight: Callable[[np.ndarray], float] = len
) -> Iterator[StepCounts]:
    """The rows of all steps for a process, in this order; the last step has what is left.

    whole: each batch is computed by one process, for graphs that take only one number of rows; otherwise each process
    computes a part of every batch. weight: that of some rows in the mean of the loss.
    """
    of_batch, of_step = recipe.batch_size, recipe.batch_size * recipe.accumulate
    for start in range(0, len(order), of_step):
        rows = order[start : start + of_step]
        batches = [rows[begin : begin + of_batch] for begin in range(0, len(rows), of_batch)]
        total, parts = weight(rows), []
        for number, batch in enumerate(batches):
            if whole:
                own = batch if number % processes.size == processes.rank else batch[:0]
            else:
                own = np.array_split(batch, processes.size)[processes.rank]
            if own.size:
                share = weight(own)
                parts.append(BatchPart(own, number, share / weight(batch), share / total))
        yield StepCounts(len(rows), len(batches), tuple(parts))


class Interrupted(RuntimeError):
    """The user stopped the training. `checkpoint`: the file to go on from."""

    caller = ""  # no function is named before the text

    def __init__(self, checkpoint: Path, state: RunState):
        begun = f" and {state.rows:,} rows of the next" if state.rows else ""
        super().__init__(f"interrupted after {len(state.history)} of {state.recipe.epochs} epochs{begun}")
        self.checkpoint = checkpoint


class Diverged(RuntimeError):
    """A parameter is not finite any more, and no further step could make it so."""

    caller = "train"  # as the text says


class Fit:
    """Trains for the epochs of a recipe and keeps checkpoints, metrics.csv and metrics.jsonl in a folder.

    trainer: what is trained.
    training, validation: the rows; without the latter there is no best epoch.
    state: how far the training has come; it is updated by the training.
    output: the folder for last.checkpoint, best.checkpoint, metrics.csv and metrics.jsonl.
    validation_batch: how many rows are evaluated at once.
    properties: what else the checkpoints hold.
    processes: those that train together, each on a share of every step; the first one writes.
    loggers: of `LOGGERS`, which get the figures of metrics.jsonl, too.

    batch_losses: for each epoch of this fit the loss of every batch; in an unfinished epoch only this process's part.
    communication: the seconds of this fit's steps in which gradients were exchanged, or others waited for.
    """

    def __init__(
        self, trainer: Trainer, training: Examples, validation: Examples | None, state: RunState, output: Path,
        properties: Mapping[str, int | float | str], processes: OneProcess, validation_batch: int = BATCH_ROWS,
        loggers: Sequence[str] = (),
    ):  # fmt: skip
        recipe = state.recipe
        self.trainer, self.training, self.validation = trainer, training, validation
        self.state, self._recipe, self.output, self._properties = state, recipe, output, properties
        batches = math.ceil(training.rows / recipe.batch_size)
        steps = recipe.epochs * math.ceil(batches / recipe.accumulate)
        self._schedule = Schedule(recipe.learning_rate, recipe.schedule, recipe.warmup, steps)
        self._mean = GradientMean(trainer.gradients.flat) if recipe.accumulate > 1 else None
        self._processes, self._all_stop, self._validation_batch = processes, False, validation_batch
        self._loggers = loggers
        self._log: Log = lambda *_: None
        self._whole = processes.size > 1 and trainer.artifacts.batch_rows is not None
        if self._whole and recipe.accumulate < processes.size:
            raise ValueError(
                f"train: accumulate is {recipe.accumulate}, expected at least {processes.size}: the graphs take one "
                "batch size alone, so that each process needs a batch of every step"
            )
        self.batch_losses: list[list[float]] = []
        self.communication = 0.0

    def run(self, progress: Progress) -> None:
        """Train until the last epoch, or until the validation loss has not fallen for the recipe's patience.

        progress: called after every step.
        Raises `Diverged` when a parameter is no finite number any more; what was kept before stays as it is.
        Raises `Interrupted` after Ctrl-C, with last.checkpoint written; a second Ctrl-C ends at once.
        """
        state = self.state
        if self._processes.is_group and not state.steps:
            self._write(LAST)  # a restart goes on from it if a process is lost before the first epoch ends
        logs = logged(self.output, self._loggers, state.steps) if self._processes.is_first else nullcontext(self._log)
        with _deferred_interrupt() as interrupt, logs as self._log:
            while len(state.history) < self._recipe.epochs and not state.stopped_early:
                self._train(progress, interrupt)
                if state.rows == self.training.rows:
                    self._finish_epoch()
                else:
                    self._write(LAST)
                if self._stops(interrupt) and len(state.history) < self._recipe.epochs:
                    raise Interrupted(self.output / LAST, state)

    def _train(self, progress: Progress, interrupt: SimpleNamespace) -> None:
        """The remaining steps of an epoch, or those up to the next checkpoint."""
        state, recipe, rows, every = self.state, self._recipe, self.training.rows, self._recipe.checkpoint_every
        if not self._processes.is_first:
            state.loss_sum = 0.0  # the first process alone keeps the sum of the rows before
        epoch = len(state.history)
        order = self.training.order(np.random.default_rng(recipe.seed + epoch))[state.rows :]
        steps = list(step_rows(order, recipe, self._processes, self._whole, self.training.weight))
        batches = self.trainer.gradients_ahead(self.training, (part.rows for step in steps for part in step.parts))
        validation_loss = state.history[-1].validation_loss if state.history else None
        if not state.rows or not self.batch_losses:
            self.batch_losses.append([])
        own: list[float] = []
        for step in steps:
            before, exchanged = time.perf_counter(), self._processes.seconds
            losses = self._step(batches, step, interrupt)
            state.seconds += time.perf_counter() - before
            self.communication += self._processes.seconds - exchanged
            state.rows += step.rows
            state.batches += step.batches
            state.loss_sum += sum(losses)
            own += losses
            done = epoch * rows + state.rows
            speed = done / state.all_seconds
            progress(done, recipe.epochs * rows, losses[-1], validation_loss, speed)
            if not self._processes.is_group:
                figures = {"loss": sum(losses) / len(losses), "learning_rate": self._schedule.at(state.steps - 1)}
                self._log(state.steps, {**figures, "samples_per_second": speed})
                if not np.isfinite(losses).all():
                    self._check_finite()
            if self._stops(interrupt) or (every is not None and not state.steps % every):
                break
        # Each process has added its part of each batch's loss.
        parts = np.array([state.loss_sum, *own])
        self._processes.add(parts)
        state.loss_sum = float(parts[0])
        self.batch_losses[-1] += parts[1:].tolist()

    def _stops(self, interrupt: SimpleNamespace) -> bool:
        """Whether the user has stopped the training; several processes stop after the same step."""
        return self._all_stop if self._processes.is_group else interrupt.requested

    def _step(
        self, batches: Iterator[Callable[[], float]], step: StepCounts, interrupt: SimpleNamespace
    ) -> list[float]:
        """One step of the optimizer on the next rows; returns this process's part of the batches' losses."""
        trainer, found, weight = self.trainer, [], 0.0
        for number, part in enumerate(step.parts, 1):
            found.append(next(batches))
            if trainer.rows is not None and (self._mean is not None or self._processes.is_group):
                trainer.rows.keep(part.of_step)
            if number == len(step.parts):
                weight = part.of_step
            elif self._mean is not None:
                self._mean.add(part.of_step)
        gradients = trainer.gradients  # of the last batch; they become this process's part of the step's
        if self._mean is not None:
            self._mean.finish(weight)
        elif self._processes.is_group and weight:
            gradients.flat *= weight
        elif self._processes.is_group:
            gradients.flat[...] = 0  # an earlier batch may have left infinities there, which cannot be multiplied by 0
        gradients.extended[-1] = interrupt.requested  # then all processes stop
        self._processes.add(gradients.extended)
        self._all_stop = bool(gradients.extended[-1])
        if trainer.rows is not None and self._processes.is_group:
            trainer.rows.add_up(self._processes)
        trainer.optimizer.learning_rate = self._schedule.at(self.state.steps)
        trainer.update()
        self.state.steps += 1
        losses = [0.0] * step.batches
        for part, loss in zip(step.parts, found, strict=True):  # which wait for a device
            losses[part.batch] = loss() * part.of_batch
        return losses

    def _validate(self) -> Evaluation | None:
        """The evaluation of the validation rows by the first process, on all of them."""
        if self.validation is None:
            return None
        found, validation = np.full(2, np.nan), self.validation
        evaluation = self._processes.on_first(lambda: self.trainer.evaluate(validation, self._validation_batch))
        if evaluation is not None:
            found[:] = evaluation.loss, np.nan if evaluation.accuracy is None else evaluation.accuracy
        self._processes.from_first(found)
        return Evaluation(float(found[0]), None if np.isnan(found[1]) else float(found[1]))

    def _check_finite(self) -> None:
        """Raise `Diverged` if a trainable parameter is no finite number.

        A loss may be NaN although all parameters are finite, such as the mean over a batch with only ignored labels.
        """
        state = self.state
        arrays = ((name, self.trainer.parameters[name]) for name in self.trainer.artifacts.trainable)
        ends = ((name, [each.min(initial=0), each.max(initial=0)]) for name, each in arrays)  # NaN where one is NaN
        wrong = next((name for name, both in ends if not np.isfinite(both).all()), None)
        if wrong is None:
            return
        epoch, rate = len(state.history), self._schedule.at(state.steps - 1)
        best = best_epoch(state.history)
        kept = f"; {self.output / (LAST if best is None else BEST)} has the parameters of epoch {best or epoch}"
        raise Diverged(
            f"train: the training diverged: after step {state.steps}, in epoch {epoch + 1}, the parameter {wrong!r} is "
            f"not finite; expected a learning rate below {rate:g} (--lr), or a limit of the gradients (--clip-norm)"
            + (kept if epoch else "")
        )

    def _finish_epoch(self) -> None:
        """Validate, record the metrics of the epoch, and write the checkpoints."""
        state = self.state
        self._check_finite()
        found = self._validate()
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
        figures = asdict(state.history[-1])
        self._log(figures.pop("steps"), figures)
        state.rows = state.batches = 0
        state.loss_sum = state.seconds = 0.0
        # LAST goes first: until BEST is written, it has the parameters of the best epoch itself.
        self._write(LAST, *[BEST] * (best_epoch(state.history) == len(state.history)), with_metrics=True)

    def _write(self, *names: str, with_metrics: bool = False) -> None:
        """Write checkpoints of these names, and the epochs' metrics, on the first process alone."""

        def work() -> None:
            self.state.optimizer_steps = self.trainer.optimizer.steps
            properties = {**self._properties, PROPERTY: self.state.to_text()}
            self._log(self.state.steps, {})
            for name in names:
                write_checkpoint(self.trainer.checkpoint(properties), self.output / name)
            if with_metrics:
                write_csv(self.state.history, self.output / "metrics.csv")

        self._processes.on_first(work)


class GradientMean:
    """The weighted sum of the gradients of several batches.

    gradients: float32 [n], on the host or on a device; overwritten by every batch.
    """

    def __init__(self, gradients: Flat):
        self._gradients, self._sums = gradients, zeros_like(gradients)

    def add(self, weight: float) -> None:
        """Add the gradients of a batch, which are scaled on the way."""
        self._gradients *= weight
        self._sums += self._gradients

    def finish(self, weight: float) -> None:
        """Add the last batch's gradients, unless its weight is 0, put the sum in their place, and begin anew."""
        if weight:
            self._gradients *= weight
            self._gradients += self._sums
        else:
            self._gradients[...] = self._sums
        self._sums[...] = 0


@contextmanager
def _deferred_interrupt() -> Iterator[SimpleNamespace]:
    """Within the `with` block the first Ctrl-C is only noted, as `requested`; the second raises KeyboardInterrupt."""
    interrupt = SimpleNamespace(requested=False)

    def note(*_: object) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    if threading.current_thread() is not threading.main_thread():  # other threads cannot set signal handlers
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
