"""`Tuner`: it fine-tunes a language model of ONNX, writes what was trained, and writes texts with it."""

import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.arguments import naming
from opgrad.base.files import json_object
from opgrad.onnxruntime.exact_products import note
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.export import export_step
from opgrad.training.export.export import Exported
from opgrad.training.files.checkpoint import read_checkpoint
from opgrad.training.make.checks import listed
from opgrad.training.run import job
from opgrad.training.run.fit import Fit, Progress
from opgrad.training.run.metrics import FILE as FIGURES
from opgrad.training.run.metrics import check_loggers
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import BEST, LAST, Resumption
from opgrad.tune import outputs
from opgrad.tune.adapted_model import MAX_LENGTH, AdaptedModel, summary
from opgrad.tune.examples import Told
from opgrad.tune.lora import Adapter, Lora
from opgrad.tune.tasks import TRAIN_ON, Write

PROPERTY = "opgrad.tune"  # of a checkpoint: what identifies the fine-tuning
SAMPLE = 40  # tokens of a sample
LARGEST_LOSS = math.log(sys.float_info.max)  # whose exponential is a number


@dataclass(frozen=True)
class Tuned(job.Trained):
    """The results of a fine-tuning.

    told: what was done with the examples. rows, validation_rows: how many trained and validated. files: their names.
    trained: how many numbers were trained. samples: for each epoch, prompts with the texts behind them.
    processes: how many trained together. figures: of the validation examples by the task's measures, before the
    training and with what was written; the first is None in a run that was resumed.
    has_perplexity: whether the loss is that of tokens, whose perplexity is exp of it.
    """

    told: Told
    rows: int
    validation_rows: int
    files: tuple[str, ...]
    trained: int
    samples: list[dict[str, str]]
    processes: int = 1
    figures: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    has_perplexity: bool = True

    @property
    def tokens_per_second(self) -> float:
        """Tokens of training examples through forward, backward and optimizer."""
        rows = self.rows * len(self.state.history)
        each = self.told.tokens / self.told.used
        return rows * each / self.state.all_seconds if self.state.all_seconds else math.nan

    def perplexities(self) -> list[float | None]:
        """The perplexity of the validation examples, exp of their loss, before the first epoch and after each."""
        losses = [self.state.initial_loss, *(each.validation_loss for each in self.state.history)]
        if not self.has_perplexity:
            return []
        return [None if loss is None else math.exp(loss) if loss <= LARGEST_LOSS else math.inf for loss in losses]

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
            "figures": dict(self.figures),
            "best_epoch": self.best_epoch,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.state.all_seconds,
            "samples": self.samples,
            "threads": self.state.threads,
            "processes": self.processes,
            "versions": job.versions(),
        }


def _resumption(path: Path) -> tuple[Resumption, dict[str, Any]]:
    """The checkpoint to go on from, and what identifies its fine-tuning. Raises FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path} to go on from")
    found = Resumption.read(path)
    return found, json_object(str(found.properties.get(PROPERTY, "{}")), f"property {PROPERTY} of {path}")


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint's fine-tuning is the present one."""
    for name in dict.fromkeys([*now, *before]):
        was, value = before.get(name), now.get(name)
        if was != value:
            raise ValueError(f"{path} is of another fine-tuning: {name} was {was!r}, and is {value!r}")


def _try_output(model: AdaptedModel, output: Path, resumption: Resumption | None) -> None:
    """Make the folder, and what will be written, and drop it: what cannot be made fails before the training.

    The base's files are not copied on trial: there must be room for them.
    """
    job.make_folder(output, resumption)
    outputs.check_space(model.base, output)
    model.task.try_output(model, output)


def _write_run(model: AdaptedModel, run: Tuned) -> tuple[str, ...]:
    """Write what was trained and its figures into the run's folder; the names of the files."""
    with job.parameters_kept(run.output):
        values = run.metrics()
        saved = model.save(run.output, {"run": values})
        job.write_metrics(run, run.output.resolve().name, None, values)
    return (*saved, "loss.png", "metrics.json", "metrics.csv", FIGURES, LAST)


def notes(told: Told, max_length: int) -> list[str]:
    """What was done with the examples, in words."""
    learned = f", of which {told.trained:,} are learned" if told.trained < told.tokens else ""
    found = [f"{told.used:,} examples with {told.tokens:,} tokens{learned}"]
    if told.cut:
        found.append(
            f"{told.cut:,} of {told.lines:,} examples are longer than {max_length:,} tokens and were cut; the longest "
            f"has {told.longest:,}: a larger max length keeps them whole, if the model takes more"
        )
    if told.endless:
        found.append(
            f"{told.endless:,} of {told.lines:,} examples have no token to learn that ends a text, as the tokenizer's "
            "files name it: the model does not learn to stop there"
        )
    if told.bad:
        shown = "; ".join(told.reasons)
        found.append(f"{told.bad:,} of {told.lines:,} examples are wrong and were left out, such as: {shown}")
    if told.unread:
        found.append(f"not read of the examples: {listed(told.unread)}")
    if told.empty:
        found.append(f"{told.empty:,} of {told.lines:,} examples have no token to learn from and were left out")
    return found


class Tuner:
    """Fine-tunes a language model on texts: low-rank adapters beside its weights, or weights of its own.

    model: a folder with model.onnx and tokenizer.json, as of onnxruntime-genai's builder and optimum, or an .onnx file.
    lora: what adapters are like and where, a `Lora`, a text such as `rank=8, alpha=16, target=*q_proj*|*v_proj*`, or
        several, of which each product gets the first that fits. None: `Lora()`.
    train: names or patterns of weights that are trained themselves; then there are no adapters.
    adapter: an adapter to train further: a folder of this class or of PEFT, or a weights file of an exported step.
    memory: how many bytes a step may take; None: 1.5 times those of the base and 1 GB for each 512 tokens of a batch,
        but no more than are free. Layers are computed again in the backward part to keep that.
    max_length: the most tokens of an example; longer ones are cut, which `fit` tells.
    weight_decay: of AdamW. seed: of the adapters' first values.
    pack: whether the examples of a batch lie behind each other in one row without padding; each sees itself alone.
    task: what the model is trained for, with options: "write" texts; "embed, temperature=0.05", vectors of texts;
        "classify, labels=neg|pos", texts; or "rank", texts for a query.

    Raises FileNotFoundError, ValueError and NotImplementedError for a model, an adapter or options that do not fit.
    """

    def __init__(
        self, model: str | PathLike[str], *, lora: Lora | str | Sequence[Lora | str] | None = None,
        train: str | Sequence[str] = (), adapter: str | PathLike[str] | None = None, memory: int | None = None,
        max_length: int = MAX_LENGTH, weight_decay: float = 0.0, seed: int = 0, pack: bool = False,
        task: str = Write.NAME,
    ):  # fmt: skip
        self.adapted = AdaptedModel(
            model, lora=lora, train=train, adapter=adapter, memory=memory, max_length=max_length,
            weight_decay=weight_decay, seed=seed, pack=pack, task=task,
        )  # fmt: skip

    @property
    def adapters(self) -> list[Adapter]:
        """Where adapters are."""
        return self.adapted.adapters

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The present values of what is trained, by name, float32."""
        return self.adapted.values

    @naming("tune")
    def fit(
        self, data: str | PathLike[str], output: str | PathLike[str], *, train_on: str = TRAIN_ON,
        skip_bad: bool = False, samples: Sequence[str] = (), progress: Progress | None = None,
        log: Callable[[str], None] | None = None, resume: bool = False, processes: OneProcess | None = None,
        validation: float | str | PathLike[str] | None = None, loggers: Sequence[str] = (), **settings: Any,
    ) -> "Tuned":  # fmt: skip
        """Train on the examples of a file, and write what was trained into a folder.

        data: a file or a folder of files; see `TokenExamples`. train_on: "assistant", "last" or "all".
        skip_bad: whether wrong entries are left out, and told, instead of an error.
        output: the folder; adapters stand in adapter.onnx_adapter, for model.onnx beside it, and in PEFT's files;
            trained weights stand in model.onnx. metrics.json, metrics.csv, metrics.jsonl and loss.png have the figures.
        samples: prompts that are written on after every epoch. log: called with each line about the run.
        progress: called after every step: rows done and in all, loss, last validation loss, tokens of a second.
        resume: go on from last.checkpoint in the folder, with its settings where none are given.
        processes: those that train together, of `opgrad.training.engine.distributed`.
        validation: how many of the examples validate, their share, or a file of others.
        loggers: what gets the figures of metrics.jsonl while they come: "tensorboard".
        settings: those of `Recipe`: epochs, batch_size, learning_rate, schedule, warmup, accumulate, clip_norm,
            patience, checkpoint_every, seed.
        Returns what the run came to. Raises ValueError, OSError; `Interrupted` and `Diverged` as `opgrad train` does.
        """
        check_loggers(loggers)
        model, task, output, processes = self.adapted, self.adapted.task, Path(output), processes or OneProcess()
        other = validation if isinstance(validation, str | PathLike) else None
        given = settings if validation is None else {"validation": validation if other is None else 1, **settings}
        task.refuse(samples=samples, train_on=train_on != TRAIN_ON)
        written = list[dict[str, str]]()  # for each epoch, samples with the texts after them

        def tell(line: str) -> None:
            if log is not None:
                log(line)

        def figures() -> Mapping[str, float]:
            """The task's figures of the present model, on the first process."""
            held = validating
            return {} if held is None else processes.on_first(lambda: task.figures(model, held)) or {}

        def shown(done: int, total: int, loss: float, validation_loss: float | None, speed: float) -> None:
            if progress is not None:
                progress(done, total, loss, validation_loss, speed * examples.told.tokens / len(examples))
            if samples and processes.is_first and not done % training.rows:
                written.append({prompt: model.write(prompt, SAMPLE) for prompt in samples})
                for prompt, text in written[-1].items():
                    tell(f"after epoch {done // training.rows}: {prompt!r} → {text!r}")

        with processes.failing_together():
            resumption, before = _resumption(output / LAST) if resume else (None, {})
            saved = vars(resumption.state.recipe) if resumption is not None and resumption.state is not None else {}
            recipe = Recipe(**{**task.DEFAULTS, "seed": model.seed, **saved, **given})
            if (template := model.tokenizer.template) is not None and before.get("date"):
                template.use_date(str(before["date"]))
            examples = model.examples(data, train_on, skip_bad)
            held = None if other is None else model.examples(other, train_on, skip_bad)
            apart: dict[str, Any] = {} if held is None else {"validation": held.checksum}
            apart |= {"date": template.date} if template is not None and template.date else {}
            about = {**model.about(), "train_on": train_on, "data": examples.checksum, **apart}
            identity = json.dumps(about, sort_keys=True)  # is the same for runs of which one may go on with the other
            if resume:
                _check_same(output / LAST, before, json.loads(identity))
            training, validating = task.rows(model, examples, recipe.batch_size), None
            if held is None and (validation_rows := recipe.validation_rows(training.rows)):
                training, validating = training.split(validation_rows, recipe.split_seed)
            for line in notes(examples.told, model.max_length):
                tell(line)
            if held is not None:
                validating, recipe = task.rows(model, held, recipe.batch_size), replace(recipe, validation=len(held))
                for line in notes(held.told, model.max_length):
                    tell(f"validation: {line}")
            if inexact := note(model.base.model):
                tell(f"note: {inexact}")
            rows, lengths = zip(*(each.shape() for each in (training, validating) if each is not None), strict=True)
            shape = max(rows), max(lengths)
            setting = model.setting(*shape, max(each.form for each in (examples, held) if each is not None))
            if task.WRITES:
                model.check_sight()
            for line in setting.notes:
                tell(f"note: {line}")
            for name, fact in summary(model, *shape).facts().items():
                tell(f"{name}: {fact}")
            checksum = zlib.crc32(identity.encode(), zlib.crc32(training.chosen.tobytes()))
            begun = setting.artifacts, recipe, training, checksum, resumption, processes
            trainer, state = job.begin(*begun, patterns=False, kind=task.trainer(model))
            model.use(trainer.parameters)
            processes.on_first(lambda: _try_output(model, output, resumption))
            if state.initial_loss is None and validating is not None:
                state.initial_loss = trainer.evaluate(validating, recipe.batch_size).loss
            properties = {PROPERTY: identity}
            what = trainer, training, validating, state, output, properties, processes, recipe.batch_size, loggers
            fit, first = Fit(*what), {} if resume else figures()
            fit.run(shown)
            run = Tuned(
                state=fit.state, batch_losses=fit.batch_losses, told=examples.told, rows=training.rows,
                validation_rows=validating.rows if validating else 0, output=output, files=(),
                trained=sum(each.size for each in trainer.artifacts.trainable.values()), samples=written,
                processes=processes.size, has_perplexity=task.PERPLEXITY,
            )  # fmt: skip
            if run.best_epoch is not None:
                trainer.restore(processes.on_first(lambda: read_checkpoint(output / BEST)) or trainer.checkpoint())
            run = replace(run, figures={name: (first.get(name), value) for name, value in figures().items()})
            return replace(run, files=processes.on_first(lambda: _write_run(model, run)) or ())

    def write(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0,
        chat: bool | None = None,
    ) -> str:  # fmt: skip
        """The text that the model, with what was trained, writes after a prompt.

        temperature: 0 takes the best token each time; else it is drawn. chat: whether the chat template is used for the
        prompt; None: if there is one.
        """
        return self.adapted.write(prompt, max_new_tokens, temperature, seed, chat)

    def save(self, output: str | PathLike[str]) -> list[str]:
        """Write what was trained, as `fit` does, into a folder; returns the files' names."""
        return self.adapted.save(output)

    def merge(self, output: str | PathLike[str]) -> list[str]:
        """Write one model that needs no adapter file: with adapters added to float weights, or as nodes beside others.

        Returns the files' names.
        """
        return self.adapted.merge(output)

    def export_step(self, output: str | PathLike[str], **options: Any) -> Exported:
        """Write the training of what is trained, from its present values on, as one plain ONNX model that learns.

        output: the file; files in which the base keeps its weights are copied beside it, as they are, unless they lie
            there. options: those of `opgrad.training.export.export_step`, which raises the same.
        `Tuner(model, adapter=file)` takes the weights file that a client of the step has written.
        """
        setting, about = self.adapted.for_other_runtimes(), json.dumps(self.adapted.about())
        artifacts = replace(setting.artifacts, trainable=dict(self.values), tune=about)
        return export_step(artifacts, output, **options)
