"""A fine-tuning from the examples to the files: steps, validation, samples of text, and what the run came to."""

import json
import math
import platform
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from opgrad.base.reading import json_object
from opgrad.base.writing import alone, new_file, staged
from opgrad.onnxruntime.exact_products import note
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.files.checkpoint import read_checkpoint
from opgrad.training.run import job
from opgrad.training.run.fit import Fit, Progress
from opgrad.training.run.metrics import best_epoch
from opgrad.training.run.plot import plot_losses
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import BEST, LAST, Resumption, RunState
from opgrad.tune import deployed, outputs
from opgrad.tune.adapted_model import AdaptedModel
from opgrad.tune.examples import TokenExamples, Told
from opgrad.tune.language.loss import LABELS
from opgrad.tune.lora import WHO
from opgrad.tune.summary import summary
from opgrad.tune.token_data import TokenData

PROPERTY = "opgrad.tune"  # of a checkpoint: what identifies the fine-tuning
SAMPLE = 40  # tokens of a sample


@dataclass(frozen=True)
class FitRequest:
    """What a fine-tuning is asked to do; see `Tuner.fit`."""

    recipe: Recipe
    output: Path
    train_on: str
    samples: tuple[str, ...]
    resume: bool


@dataclass(frozen=True)
class Tuned:
    """The results of a fine-tuning.

    state: the settings, and the metrics of every epoch. batch_losses: for each epoch of this run the loss of every
    batch. told: what was done with the examples. rows, validation_rows: how many examples were trained on and
    validated with. output: the folder. files: the names of the files that make the result.
    trained: how many numbers were trained. samples: for each epoch, prompts with the texts behind them.
    processes: how many trained together.
    """

    state: RunState
    batch_losses: list[list[float]]
    told: Told
    rows: int
    validation_rows: int
    output: Path
    files: tuple[str, ...]
    trained: int
    samples: list[dict[str, str]]
    processes: int = 1

    @property
    def best_epoch(self) -> int | None:
        """The number of the epoch whose values were written; None without validation."""
        return best_epoch(self.state.history)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of training examples through forward, backward and optimizer."""
        rows = self.rows * len(self.state.history)
        each = self.told.tokens / (self.told.lines - self.told.empty)
        return rows * each / self.state.all_seconds if self.state.all_seconds else math.nan

    def perplexities(self) -> list[float | None]:
        """The perplexity of the validation examples, exp of their loss, before the first epoch and after each."""
        losses = [self.state.initial_loss, *(each.validation_loss for each in self.state.history)]
        return [None if loss is None else _exp(loss) for loss in losses]

    def metrics(self) -> dict[str, Any]:
        """The run as plain values, for JSON."""
        return {
            "settings": asdict(self.state.recipe),
            "trained_numbers": self.trained,
            "examples": asdict(self.told),
            "train_rows": self.rows,
            "validation_rows": self.validation_rows,
            "epochs": [asdict(each) for each in self.state.history],
            "initial_validation_loss": self.state.initial_loss,
            "perplexities": self.perplexities(),
            "best_epoch": self.best_epoch,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.state.all_seconds,
            "samples": self.samples,
            "threads": self.state.threads,
            "processes": self.processes,
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "onnxruntime": onnxruntime.__version__,
            },
        }


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def fit(
    tuner: AdaptedModel,
    examples: TokenExamples,
    request: FitRequest,
    progress: Progress | None,
    told: Callable[[str], None] | None,
    processes: OneProcess,
) -> Tuned:
    """Train what a tuner trains on examples; see `Tuner.fit`."""
    recipe, tell = request.recipe, told or _ignore
    training, validation = split(tuner, examples, recipe)
    for line in notes(examples.told, tuner.longest):
        tell(line)
    if inexact := note(tuner.base.model):
        tell(f"note: {inexact}")
    identity = tuner.identity(examples, request.train_on)
    resumption = _resumption(request, identity)
    shape = 1 if tuner.pack else recipe.batch_size, training.longest_batch()
    setting = tuner.setting(*shape)
    for line in setting.notes:
        tell(f"note: {line}")
    for name, fact in summary(tuner, *shape).facts().items():
        tell(f"{name}: {fact}")
    data = zlib.crc32(identity.encode(), zlib.crc32(training.chosen.tobytes()))
    trainer, state = job.begin(setting.artifacts, recipe, training, data, resumption, processes, patterns=False)
    tuner.use(trainer.parameters)
    processes.on_first(lambda: _try_output(tuner, request.output, resumption))
    if state.initial_loss is None and validation is not None:
        state.initial_loss = trainer.evaluate(validation, recipe.batch_size).loss
    properties, rows = {PROPERTY: identity}, recipe.batch_size
    fitting = Fit(trainer, training, validation, state, request.output, properties, processes, rows)
    tokens = examples.told.tokens / len(examples)
    shown = _Shown(tuner, request, training.rows, tokens, progress or _ignore, tell if processes.is_first else None)
    fitting.run(shown)
    return _finish(tuner, examples, request, fitting, shown.samples, processes)


def _try_output(tuner: AdaptedModel, output: Path, resumption: Resumption | None) -> None:
    """Make the folder, and what will be written there, and drop it: what cannot be made fails before the training.

    Of the base's files there is no trial copy: there must be room for it.
    """
    job.make_folder(output, resumption)
    outputs.check_space(tuner.base, output)
    if not tuner.adapters:
        deployed.replaced(tuner.base, tuner.values)
        return
    outputs.check_names(output, tuner.base)
    with alone(output / "trial") as folder:
        outputs.write_tuned(
            folder, tuner.base, tuner.file, tuner.adapters, tuner.values, tuner.about(), with_base=False
        )


def _ignore(*_: Any) -> None:
    """Show nothing."""


def split(tuner: AdaptedModel, examples: TokenExamples, recipe: Recipe) -> tuple[TokenData, TokenData | None]:
    """The training and the validation examples."""
    every = TokenData(examples, np.arange(len(examples)), tuner.base.tokens, LABELS, recipe.batch_size, tuner.pack)
    rows = recipe.validation_rows(every.rows)
    return every.split(rows, recipe.split_seed) if rows else (every, None)


def notes(told: Told, longest: int) -> list[str]:
    """What was done with the examples, in words."""
    found = [f"{told.lines - told.empty:,} examples with {told.tokens:,} tokens, of which {told.trained:,} are learned"]
    if told.cut:
        found.append(
            f"{told.cut:,} of {told.lines:,} examples are longer than {longest:,} tokens and were cut; the longest has "
            f"{told.longest:,}: a larger limit (longest) keeps them whole"
        )
    if told.empty:
        found.append(f"{told.empty:,} of {told.lines:,} examples have no token to learn from and were left out")
    return found


def _resumption(request: FitRequest, identity: str) -> Resumption | None:
    """The checkpoint to go on from. Raises FileNotFoundError, and ValueError for one of another fine-tuning."""
    if not request.resume:
        return None
    path = request.output / LAST
    if not path.is_file():
        raise FileNotFoundError(f"{WHO}: there is no {path} to go on from")
    found = Resumption.read(path, may_be_done=False)
    noted = str(found.properties.get(PROPERTY, "{}"))
    before, now = json_object(noted, f"{WHO}: property {PROPERTY} of {path}"), json.loads(identity)
    if other := [name for name in now if before.get(name) != now[name]]:
        was, now_is = before.get(other[0]), now[other[0]]
        raise ValueError(f"{WHO}: {path} is of another fine-tuning: {other[0]} was {was!r}, and is {now_is!r}")
    return found


class _Shown:
    """What is called after every step: it shows the progress and, at the end of each epoch, samples of text.

    rows: of an epoch. tokens: of a row, in the mean. tell: shows a line; None: there are no samples here.
    """

    def __init__(
        self, tuner: AdaptedModel, request: FitRequest, rows: int, tokens: float, progress: Progress,
        tell: Callable[[str], None] | None,
    ):  # fmt: skip
        self._tuner, self._request, self._rows, self._tokens = tuner, request, rows, tokens
        self._progress, self._tell = progress, tell
        self.samples: list[dict[str, str]] = []

    def __call__(self, done: int, total: int, loss: float, validation_loss: float | None, speed: float) -> None:
        self._progress(done, total, loss, validation_loss, speed * self._tokens)
        if done % self._rows or self._tell is None or not self._request.samples:
            return
        texts = {prompt: self._tuner.write(prompt, most=SAMPLE) for prompt in self._request.samples}
        self.samples.append(texts)
        for prompt, text in texts.items():
            self._tell(f"after epoch {done // self._rows}: {prompt!r} → {text!r}")


def _finish(
    tuner: AdaptedModel,
    examples: TokenExamples,
    request: FitRequest,
    fit: Fit,
    samples: list[dict[str, str]],
    processes: OneProcess,
) -> Tuned:
    """Write the results, on the first process alone."""
    trainer, output = fit.trainer, request.output
    run = Tuned(
        state=fit.state, batch_losses=fit.batch_losses, told=examples.told, rows=fit.training.rows,
        validation_rows=fit.validation.rows if fit.validation else 0, output=output, files=(),
        trained=sum(each.size for each in trainer.artifacts.trainable.values()), samples=samples,
        processes=processes.size,
    )  # fmt: skip

    def write() -> tuple[str, ...]:
        with job.parameters_kept(output):
            return (*tuner.save(output, {"run": run.metrics()}), *_write_figures(run))

    if run.best_epoch is not None:
        trainer.restore(processes.on_first(lambda: read_checkpoint(output / BEST)) or trainer.checkpoint())
    files = processes.on_first(write) or ()
    return Tuned(**{**vars(run), "files": files})


def _write_figures(run: Tuned) -> tuple[str, ...]:
    """Write the picture of the loss and the figures of the run."""
    with staged(run.output) as folder:
        plot_losses(
            run.state.history, run.batch_losses, None, f"{run.output.resolve().name}: loss", folder / "loss.png"
        )
        new_file(folder / "metrics.json", (json.dumps(run.metrics(), indent=1) + "\n").encode())
    return ("loss.png", "metrics.json", "metrics.csv", LAST)
