"""A whole training run: it reads the data, trains, evaluates, exports the model and writes the figures."""

import json
import math
import platform
import timeit
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import onnxruntime

from opgrad.base.arguments import naming
from opgrad.base.files import check_destinations, new_file, staged
from opgrad.base.terminal import sentence
from opgrad.cpu.runtime.threads import get_num_threads
from opgrad.training.engine.device import opened
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.engine.evaluation import Evaluation, check_labels, label_shape
from opgrad.training.engine.trainer import BATCH_ROWS, Trainer
from opgrad.training.engine.training_graph import session_options
from opgrad.training.files import mapped_files
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.checkpoint import read_checkpoint, write_checkpoint
from opgrad.training.files.dataset import Dataset, Examples, load_file, load_named
from opgrad.training.run.fit import Fit, Progress
from opgrad.training.run.metrics import FILE as FIGURES
from opgrad.training.run.metrics import best_epoch, check_loggers, plot_losses
from opgrad.training.run.recipe import FILE, Recipe
from opgrad.training.run.state import BEST, LAST, Resumption, RunState, fingerprint

MODEL = "model.onnx"  # the file of the trained model among a run's results
RESULTS = (MODEL, "loss.png", "metrics.json", "metrics.csv", FIGURES, LAST, BEST)
LONG_STEP = 0.1  # seconds; a longer step is never faster with one thread alone
DIVERGED = 100.0  # a last loss of more than so many times the initial loss means that the training diverged


@dataclass(frozen=True)
class Trained:
    """The results of any training.

    state: settings, and metrics of every epoch. batch_losses: by epoch since the start or resume. output: the folder.
    """

    state: RunState
    batch_losses: list[list[float]]
    output: Path

    @property
    def best_epoch(self) -> int | None:
        """The number of the epoch whose parameters are kept; None without validation."""
        return best_epoch(self.state.history)


@dataclass(frozen=True)
class Run(Trained):
    """The results of a training run.

    train_rows, validation_rows, test_rows: the numbers of rows in each part of the data.
    test: the evaluation on the test rows of what is exported: the best epoch or, without validation, the last one.
    exported_accuracy: the accuracy of the exported model in a session without opgrad; None if the label is no class.
    processes: how many trained together. communication: the share of the time that the first process spent on
    exchanging gradients, including waiting for the others.
    skipped: the steps that were left out as gradients overflowed float16; None: the loss was not scaled.
    """

    artifacts: ArtifactSet
    data: str
    train_rows: int
    validation_rows: int
    test_rows: int
    test: Evaluation
    exported_accuracy: float | None
    processes: int = 1
    communication: float = 0.0
    skipped: int | None = None

    @property
    def divergence(self) -> str | None:
        """The sign that the training diverged although its parameters are finite, in words; None if there is none."""
        before, after = self.state.initial_loss, self.state.history[-1].train_loss
        if before is not None and after > DIVERGED * max(1.0, abs(before)):
            return f"the training loss of the last epoch is {after:.3g}, and {before:.3g} before the training"
        return None if math.isfinite(self.test.loss) else f"the test loss is {self.test.loss}"

    @property
    def seconds(self) -> float:
        """The time that training took, without reading, progress bar, evaluation and writing."""
        return self.state.all_seconds

    @property
    def samples_per_second(self) -> float:
        """Training rows through forward, backward and optimizer."""
        return self.train_rows * len(self.state.history) / self.seconds


def load_data(artifacts: ArtifactSet, recipe: Recipe, file: Path | None) -> Dataset:
    """The data of a run: those of a file, or else of the recipe's dataset."""
    if file is not None:
        return load_file(file, artifacts.inputs, recipe.divide)
    if recipe.dataset is None:
        raise ValueError(f"{artifacts.directory}: no data, expected a file or a dataset named in {FILE}")
    return load_named(recipe.dataset, artifacts.inputs, recipe.divide)


def split(data: Dataset, recipe: Recipe) -> tuple[Dataset, Dataset | None, Dataset]:
    training, test = data.split(recipe.test_rows or max(1, data.rows // 5), recipe.split_seed)
    rows = recipe.validation_rows(training.rows)
    if not rows:
        return training, None, test
    return *training.split(rows, recipe.split_seed), test


def train(
    artifacts: ArtifactSet, recipe: Recipe, file: Path | None, output: Path, progress: Progress,
    resumption: Resumption | None = None, processes: OneProcess | None = None,
    finish: Callable[[Path], None] | None = None, loggers: Sequence[str] = (), device: str = "cpu",
    properties: Mapping[str, str] | None = None,
) -> Run | None:  # fmt: skip
    """Train an artifact set and write what it gives into a folder.

    artifacts: what is trained.
    recipe: the settings.
    file: the data; None stands for the recipe's dataset.
    output: the folder for model.onnx, loss.png, metrics.json, metrics.csv, metrics.jsonl, last.checkpoint and, with
        validation, best.checkpoint; made if need be, when everything else is found to be right.
    progress: called after every step.
    resumption: the checkpoint to go on from; None begins with that of the artifact set.
    processes: which train together, all calling; the first writes, and alone returns a run. None: this one alone.
    finish: changes the file of the trained model before it is evaluated; None leaves it as it is.
    loggers: what gets the figures while they come, of `LOGGERS`.
    device: where this process trains, see `Trainer`; several processes train on CPUs. properties: of the checkpoints.
    Raises `Interrupted` after Ctrl-C, `Diverged` for parameters that are no numbers, ValueError for what does not fit.
    """
    check_loggers(loggers)
    processes = processes or OneProcess()
    with processes.failing_together():
        check_device(device, processes)
        rows, origin = artifacts.batch_rows, str(file or recipe.dataset)
        if rows is not None and recipe.batch_size != rows:
            axes = [f"axis {each.axis} of {each.name!r}" for each in artifacts.inputs if each.axis is not None]
            raise ValueError(
                f"train: batch_size is {recipe.batch_size}, expected {rows}, the only one that the graphs take: "
                f"--batch-size {rows}, or export the model with {' and '.join(axes)} of any size"
            )
        data = load_data(artifacts, recipe, file)
        check_labels(artifacts, data, origin)
        training, validation, test = split(data, recipe)
        training, test = training.whole(rows), test.whole(rows)
        validation = None if validation is None else validation.whole(rows)
        kind, given = partial(Trainer, device=device), (artifacts, recipe, training, fingerprint(training))
        trainer, state = begin(*given, resumption, processes, kind=kind)
        artifacts = trainer.artifacts
        if state.initial_loss is None:
            first = np.arange(rows or min(BATCH_ROWS, training.rows))
            state.initial_loss = trainer.evaluate(training.take(first), recipe.batch_size).loss
        trainer.check_export()
        own = {**(resumption.properties if resumption else {}), **(properties or {})}
        fit = Fit(trainer, training, validation, state, output, own, processes, loggers=loggers)
        processes.on_first(lambda: make_folder(output, resumption))
        before = state.all_seconds
        fit.run(progress)
        if not processes.is_first:
            return None
        with parameters_kept(output):
            if validation is not None:
                trainer.restore(read_checkpoint(output / BEST))
            trainer.export(output / MODEL)
            if finish is not None:
                finish(output / MODEL)
            seconds, evaluation = state.all_seconds - before, trainer.evaluate(test)
            for array in artifacts.values.values():
                mapped_files.release(array)  # frees memory: the exported model holds the same values
            run = Run(
                artifacts=artifacts,
                data=origin,
                train_rows=training.rows,
                validation_rows=validation.rows if validation else 0,
                test_rows=test.rows,
                state=state,
                batch_losses=fit.batch_losses,
                test=evaluation,
                exported_accuracy=trainer.evaluator.exported_accuracy(output / MODEL, test, rows or BATCH_ROWS),
                output=output,
                processes=processes.size,
                communication=fit.communication / seconds if seconds else 0.0,
                skipped=None if trainer.loss_scale is None else trainer.loss_scale.skipped,
            )
            write_metrics(run, artifacts.name, run.test.loss, metrics(run))
    return run


@naming("train")
def check_device(device: str, processes: OneProcess) -> None:
    """Raise what `Trainer` raises for a device, and NotImplementedError for several processes on one."""
    if opened(device) is not None and processes.is_group:
        raise NotImplementedError(f"device is {device!r}, expected 'cpu' for {processes.size} processes")


def write_metrics(run: Trained, name: str, test_loss: float | None, values: Mapping[str, Any]) -> None:
    """Write loss.png, with `name` above the picture, and metrics.json into a run's folder: both, or none."""
    with staged(run.output) as folder:
        plot_losses(run.state.history, run.batch_losses, test_loss, f"{name}: loss", folder / "loss.png")
        new_file(folder / "metrics.json", (json.dumps(values, indent=1) + "\n").encode())


@contextmanager
def parameters_kept(output: Path) -> Iterator[None]:
    """Within the `with` block, an error also says where the trained parameters were saved."""
    try:
        yield
    except Exception as error:
        kept = f"the training is done, its parameters are in {output / LAST}"
        raise RuntimeError(f"{kept}, but: {sentence(error)}") from error


def begin(
    artifacts: ArtifactSet, recipe: Recipe, training: Examples, data: int, resumption: Resumption | None,
    processes: OneProcess, patterns: bool = True, kind: Callable[..., Trainer] = Trainer,
) -> tuple[Trainer, RunState]:  # fmt: skip
    """A trainer whose kernels are compiled, and the state from which the run begins or goes on.

    data: the fingerprint of the training rows. patterns: see `session_options`. kind: makes a trainer.
    """
    if recipe.clip_norm is not None:
        artifacts = replace(artifacts, rule=replace(artifacts.rule, max_norm=recipe.clip_norm))

    def make(threads: int) -> Trainer:
        options = session_options(threads, patterns)
        return kind(artifacts, recipe.learning_rate, options, recipe.row_wise, recipe.fuse, recipe.loss_scale)

    if resumption is None or resumption.state is None:
        trainer, threads = _fastest_trainer(make, training.take(np.arange(min(recipe.batch_size, training.rows))))
        state = RunState(recipe, data, threads)
    else:
        state = replace(resumption.state, recipe=recipe, history=list(resumption.state.history))
        done, file = len(state.history), f"resume: {resumption.path}"
        if state.data != data:
            raise ValueError(f"{file}: the training rows are others than those that the checkpoint was trained on")
        if state.rows >= training.rows:
            raise ValueError(f"{file}: {state.rows} rows of an epoch are done, expected fewer than its {training.rows}")
        if done >= recipe.epochs and not resumption.may_be_done:
            raise ValueError(f"{file}: the checkpoint has {done} epochs done, expected epochs to be more than {done}")
        if state.stopped_early and not resumption.may_be_done:
            patience = f"a patience above {recipe.patience}"
            raise ValueError(f"{file}: the run ended early in epoch {done}, expected {patience}")
        trainer = make(state.threads)
    if resumption is not None:
        trainer.restore(resumption.checkpoint)
    if processes.is_group:
        number = np.array([state.threads])  # another number of threads may change the last digits
        processes.from_first(number)
        if number[0] != state.threads:
            state.threads, before = int(number[0]), trainer
            trainer = make(state.threads)
            trainer.restore(before.checkpoint())
        processes.check_same("data, settings or progress", state.to_text())
        sums = [zlib.crc32(np.ascontiguousarray(trainer.parameters[name]).data) for name in artifacts.trainable]
        processes.check_same("parameters", str(sums))
    return trainer, state


def make_folder(folder: Path, resumption: Resumption | None) -> None:
    """Make the folder unless it is there, try whether files can be written, and keep the best checkpoint so far."""
    folder.mkdir(parents=True, exist_ok=True)
    check_destinations(folder, RESULTS)
    with TemporaryFile(dir=folder):
        pass
    if resumption and resumption.best:
        write_checkpoint(resumption.best, folder / BEST)


def _fastest_trainer(make: Callable[[int], Trainer], batch: Dataset) -> tuple[Trainer, int]:
    """A trainer whose kernels are compiled, and its number of threads: all of them, or one if that is faster.

    make: makes a trainer with so many threads. One exists at a time, for the memory of parameters and moments.
    """
    threads = get_num_threads()
    trainer = make(threads)
    seconds = _seconds(trainer, batch.arrays)
    if threads == 1 or seconds > LONG_STEP or trainer.on_device:
        return trainer, threads
    del trainer
    trainer = make(1)
    if _seconds(trainer, batch.arrays) <= seconds:
        return trainer, 1
    del trainer
    return make(threads), threads


def _seconds(trainer: Trainer, batch: Mapping[str, np.ndarray]) -> float:
    """The time of the gradients of a batch, the shortest of several; statistics that these update are as before."""
    step, before = partial(trainer.compute_gradients, batch), deepcopy(trainer.statistics)
    step()  # the first step compiles kernels, and is not measured
    first = timeit.timeit(step, number=1)
    shortest = first if first > LONG_STEP else min(first, *timeit.repeat(step, number=1, repeat=7))
    for name, values in before.items():
        trainer.statistics[name][...] = values
    return shortest


def metrics(run: Run) -> dict[str, Any]:
    """A run as plain values, for JSON."""
    rule, state = run.artifacts.rule, run.state
    return {
        "artifacts": run.artifacts.name,
        "data": run.data,
        "train_rows": run.train_rows,
        "validation_rows": run.validation_rows,
        "test_rows": run.test_rows,
        "settings": asdict(state.recipe),
        "optimizer": {"name": type(rule).__name__.removesuffix("Rule"), **asdict(rule)},
        "epochs": [asdict(epoch) for epoch in state.history],
        "train_loss_per_epoch": [epoch.train_loss for epoch in state.history],
        "best_epoch": run.best_epoch,
        "stopped_early": state.stopped_early and len(state.history) < state.recipe.epochs,
        "test_loss": run.test.loss,
        "test_accuracy": run.test.accuracy,
        "exported_accuracy": run.exported_accuracy,
        "skipped_steps": run.skipped,
        "threads": state.threads,
        "processes": run.processes,
        "communication": run.communication,
        "seconds": run.seconds,
        "samples_per_second": run.samples_per_second,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "onnxruntime": onnxruntime.__version__}


def sample_batch(artifacts: ArtifactSet, rows: int) -> dict[str, np.ndarray]:
    """So many rows of the set's own dataset, over and over; without one, random numbers, and 0 or 1 for integers."""
    recipe = Recipe.load(artifacts.directory)
    if recipe.dataset is not None:
        data = load_named(recipe.dataset, artifacts.inputs, recipe.divide)
        return dict(data.take(np.arange(rows) % data.rows).arrays)
    random = np.random.default_rng(0)
    arrays = {}
    for spec in artifacts.inputs:
        shape = [size if isinstance(size, int) else 1 for size in spec.shape]
        if spec.axis is not None:
            shape[spec.axis] = rows
        drawn = random.standard_normal(shape) if spec.dtype.kind not in "iub" else random.integers(0, 2, shape)
        arrays[spec.name] = drawn.astype(spec.dtype)
    label, sizes = artifacts.label, label_shape(artifacts, arrays)
    if sizes is not None and sizes != arrays[label.name].shape:
        arrays[label.name] = random.integers(0, 2, sizes).astype(label.dtype)
    return arrays
