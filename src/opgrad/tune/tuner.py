"""`Tuner`: it fine-tunes a language model of ONNX, writes what was trained, and writes texts with it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.arguments import naming
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.export import export_step
from opgrad.training.export.export import Exported
from opgrad.training.run.figures import check_loggers
from opgrad.training.run.fit import Progress
from opgrad.training.run.recipe import Recipe
from opgrad.tune import fitting
from opgrad.tune.adapted_model import MAX_LENGTH, AdaptedModel
from opgrad.tune.language.model import WHO
from opgrad.tune.lora import Adapter, Lora
from opgrad.tune.tasks import TRAIN_ON, Write


class Tuner:
    """Fine-tunes a language model on texts: low-rank adapters beside its weights, or weights of its own.

    model: a folder with model.onnx and tokenizer.json, as onnxruntime-genai's builder and optimum write it, or one
        .onnx file in such a folder.
    lora: what adapters are like and where, a `Lora`, a text such as `rank=8, alpha=16, target=*q_proj*|*v_proj*`, or
        several, of which each product gets the first that fits. None: `Lora()`.
    train: names or patterns of weights that are trained themselves; then there are no adapters.
    adapter: a folder with an adapter, of this class or of PEFT, or a weights file of an exported step, that is used and
        trained further.
    memory: how many bytes a step may take; None: 1.5 times those of the base and 1 GB for each 512 tokens of a batch,
        but no more than are free. Layers are computed again in the backward part to keep that.
    max_length: the most tokens of an example; longer ones are cut, which `fit` tells.
    weight_decay: of AdamW. seed: of the adapters' first values.
    pack: whether the examples of a batch lie behind each other in one row without padding; each sees itself alone.
    task: what the model is trained for, with options: "write" texts; "embed, temperature=0.05", vectors of texts;
        "classify, labels=neg|pos", texts; or "rank", texts for a query.

    Raises FileNotFoundError, ValueError and NotImplementedError for a model, an adapter or options that do not fit.
    """

    @naming(WHO)
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

    @naming(WHO)
    def fit(
        self, data: str | PathLike[str], output: str | PathLike[str], *, train_on: str = TRAIN_ON,
        skip_bad: bool = False, samples: Sequence[str] = (), progress: Progress | None = None,
        log: Callable[[str], None] | None = None, resume: bool = False, processes: OneProcess | None = None,
        validation: float | str | PathLike[str] | None = None, loggers: Sequence[str] = (), **settings: Any,
    ) -> "fitting.Tuned":  # fmt: skip
        """Train on the examples of a file, and write what was trained into a folder.

        data: a file or a folder of files; see `TokenExamples`. train_on: "assistant", "last" or "all".
        skip_bad: whether wrong entries are left out, and told, instead of an error.
        output: the folder; adapters stand in adapter.onnx_adapter, for model.onnx beside it, and in PEFT's files;
            trained weights stand in model.onnx. metrics.json, metrics.csv, metrics.jsonl and loss.png have the figures.
        samples: prompts that are written on after every epoch. log: called with each line about the run.
        progress: called after every step with the rows done, those of all epochs, the loss, the last validation loss,
            and the tokens of a second.
        resume: go on from last.checkpoint in the folder.
        processes: those that train together, of `opgrad.training.engine.distributed`.
        validation: how many of the examples validate, their share, or a file of others.
        loggers: what gets the figures of metrics.jsonl while they come: "tensorboard".
        settings: those of `Recipe`: epochs, batch_size, learning_rate, schedule, warmup, accumulate, clip_norm,
            patience, checkpoint_every, seed.
        Returns what the run came to. Raises ValueError, OSError; `Interrupted` and `Diverged` as `opgrad train` does.
        """
        check_loggers(loggers)
        other = validation if isinstance(validation, str | PathLike) else None
        given = {"validation": validation, **settings} if other is None else settings
        self.adapted.task.refuse(samples=samples, train_on=train_on != TRAIN_ON)
        recipe = Recipe(**{**self.adapted.task.DEFAULTS, "seed": self.adapted.seed, **given})
        together = processes or OneProcess()
        with together.failing_together():
            examples = self.adapted.examples(data, train_on, skip_bad)
            held = None if other is None else self.adapted.examples(other, train_on, skip_bad)
            what = self.adapted, examples, held, recipe, Path(output), train_on, together, log or fitting.ignore
            return fitting.Fitting(*what).run(samples, progress or fitting.ignore, resume, loggers)

    @naming(WHO)
    def write(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0,
        chat: bool | None = None,
    ) -> str:  # fmt: skip
        """The text that the model, with what was trained, writes after a prompt.

        temperature: 0 takes the best token each time; else it is drawn. chat: whether the prompt is a user's message in
        the model's chat template; None: if it has one.
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
