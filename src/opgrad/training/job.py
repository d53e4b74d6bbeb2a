"""A whole training run: read, train, evaluate, export, write down."""

import json
import platform
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from opgrad.cpu.parallel import get_num_threads
from opgrad.training.artifacts import ArtifactSet
from opgrad.training.data import Dataset, load_file, load_named
from opgrad.training.evaluation import Evaluation
from opgrad.training.loop import Trainer, session_options
from opgrad.training.plot import plot_losses
from opgrad.training.recipe import FILE, Recipe

Progress = Callable[[int, int, float], None]  # rows done, rows in all, loss of the batch


@dataclass(frozen=True)
class Run:
    """What a training run was and came to.

    batch_losses: by epoch, the loss of every batch.
    threads: of onnxruntime.
    seconds: the time that training took, without reading, progress bar, evaluation and writing.
    samples_per_second: training rows through forward, backward and optimizer.
    test: of the trained parameters, on the test rows.
    exported_accuracy: of the exported model in a session without opgrad; None if the label is no class.
    """

    artifacts: ArtifactSet
    recipe: Recipe
    data: str
    train_rows: int
    test_rows: int
    batch_losses: list[list[float]]
    threads: int
    seconds: float
    test: Evaluation
    exported_accuracy: float | None
    output: Path

    @property
    def epoch_losses(self) -> list[float]:
        """The mean over the batches of every epoch."""
        return [float(np.mean(losses)) for losses in self.batch_losses]

    @property
    def samples_per_second(self) -> float:
        return self.train_rows * len(self.batch_losses) / self.seconds


def load_data(artifacts: ArtifactSet, recipe: Recipe, file: Path | None) -> Dataset:
    """The data of a run: those of a file, or else of the recipe's dataset."""
    if file is not None:
        return load_file(file, artifacts.inputs, recipe.divide)
    if recipe.dataset is None:
        raise ValueError(f"{artifacts.directory}: no data, expected a file or a dataset named in {FILE}")
    return load_named(recipe.dataset, artifacts.inputs, recipe.divide)


def train(artifacts: ArtifactSet, recipe: Recipe, file: Path | None, output: Path, progress: Progress) -> Run:
    """Train an artifact set and write model.onnx, loss.png and metrics.json.

    artifacts: what is trained.
    recipe: the settings.
    file: the data; None stands for the recipe's dataset.
    output: the folder for the results, made if need be.
    progress: called after every batch.
    """
    data = load_data(artifacts, recipe, file)
    training, test = data.split(recipe.test_rows or max(1, data.rows // 5), recipe.split_seed)
    trainer, threads = _fastest_trainer(artifacts, recipe, training)
    batch_losses, seconds = fit(trainer, training, recipe, progress)
    output.mkdir(parents=True, exist_ok=True)
    trainer.export(output / "model.onnx")
    run = Run(
        artifacts=artifacts,
        recipe=recipe,
        data=str(file or recipe.dataset),
        train_rows=training.rows,
        test_rows=test.rows,
        batch_losses=batch_losses,
        threads=threads,
        seconds=seconds,
        test=trainer.evaluate(test),
        exported_accuracy=trainer.evaluator.exported_accuracy(output / "model.onnx", test),
        output=output,
    )
    plot_losses(batch_losses, run.test.loss, f"{artifacts.name}: loss", output / "loss.png")
    (output / "metrics.json").write_text(json.dumps(metrics(run), indent=1) + "\n", encoding="utf-8")
    return run


def _fastest_trainer(artifacts: ArtifactSet, recipe: Recipe, data: Dataset) -> tuple[Trainer, int]:
    """A trainer whose kernels are compiled, and its threads: all of them, or one if that is faster."""
    batch = data.take(np.arange(min(recipe.batch_size, data.rows))).arrays
    trials = []
    for threads in sorted({1, get_num_threads()}):
        trainer = Trainer(artifacts, recipe.learning_rate, session_options(threads))
        times = timeit.repeat(partial(trainer.compute_gradients, batch), number=1, repeat=8)
        trials.append((min(times), threads, trainer))
    _, threads, trainer = min(trials)
    return trainer, threads


def fit(trainer: Trainer, data: Dataset, recipe: Recipe, progress: Progress) -> tuple[list[list[float]], float]:
    """Train for the recipe's epochs; by epoch the loss of every batch, and the seconds this took."""
    history: list[list[float]] = []
    seconds, before = 0.0, time.perf_counter()
    for epoch in range(recipe.epochs):
        order = np.random.default_rng(recipe.seed + epoch).permutation(data.rows)
        history.append([])
        for loss in trainer.epoch(data, recipe.batch_size, order):
            history[-1].append(loss)
            seconds += time.perf_counter() - before
            done = min(len(history[-1]) * recipe.batch_size, data.rows)
            progress(epoch * data.rows + done, recipe.epochs * data.rows, loss)
            before = time.perf_counter()
    return history, seconds


def metrics(run: Run) -> dict[str, Any]:
    """A run as plain values, for JSON."""
    rule = run.artifacts.rule
    return {
        "artifacts": run.artifacts.name,
        "data": run.data,
        "train_rows": run.train_rows,
        "test_rows": run.test_rows,
        "settings": asdict(run.recipe),
        "optimizer": {"name": type(rule).__name__.removesuffix("Rule"), **asdict(rule)},
        "train_loss_per_epoch": run.epoch_losses,
        "test_loss": run.test.loss,
        "test_accuracy": run.test.accuracy,
        "exported_accuracy": run.exported_accuracy,
        "threads": run.threads,
        "seconds": run.seconds,
        "samples_per_second": run.samples_per_second,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }
