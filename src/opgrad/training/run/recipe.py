"""The settings of a training run, as a folder keeps them beside its artifact set, and its learning rates."""

import math
import tomllib
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.arguments import naming
from opgrad.base.files import read_regular
from opgrad.training.make.named_blocks import Loss

FILE = "recipe.toml"
BATCH_NORM = ("model", "train", "freeze")

# Settings that are whole numbers, and the least of each.
COUNTS = {"split_seed": 0, "seed": 0, "epochs": 1, "batch_size": 1, "warmup": 0, "accumulate": 1}
MOST, MOST_SEED = 2**31 - 1, 2**63 - 1
FLOAT32 = np.finfo(np.float32)
KINDS = ("constant", "linear", "cosine")  # of schedules


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run; every one may be left out of recipe.toml.

    loss: the loss of a model beside the recipe, as `--loss`; None: its first output. An artifact set has its own.
    batch_norm: what batch normalization of such a model does, as `--batch-norm`; None: what the model says.
    dataset: the name of a dataset that opgrad can find itself ("digits"), or None.
    divide: by input, the number that its values are divided by before they reach the graph.
    test_rows: how many rows are kept for the test; None keeps a fifth.
    validation: how many of the other rows validate every epoch: a number of rows, a fraction below 1, or None.
    split_seed: rows are parted in the order of `default_rng(split_seed).permutation`, the test rows last; what is
        left is parted once more in the same way, the validation rows last.
    seed: epoch e (from 0) takes its rows in the order of `default_rng(seed + e).permutation`.
    epochs: passes over the training rows.
    learning_rate: the largest of the schedule.
    batch_size: rows of a batch.
    schedule: how the learning rate changes: "constant", "linear" or "cosine"; see `Schedule`.
    warmup: steps over which the learning rate rises from 0.
    accumulate: how many batches make one step; its gradient is that of the mean over all their rows.
    clip_norm: the largest Euclidean norm of all gradients together, to which longer ones are scaled; None: the set's.
    row_wise: names or patterns of embedding tables of which a step changes the rows that it has read; see `Trainer`.
    fuse: whether nodes of the training graph become one, such as the loss and its gradient; see `Trainer`.
    loss_scale: the number that the loss of a graph in float16 is multiplied by, or "dynamic"; see `Trainer`.
    patience: after how many epochs without a better validation loss training ends; None: never.
    checkpoint_every: after how many steps last.checkpoint is written, as after every epoch; None: after epochs alone.
    """

    dataset: str | None = None
    divide: dict[str, float] = field(default_factory=dict)
    test_rows: int | None = None
    validation: int | float | None = None
    split_seed: int = 0
    seed: int = 0
    epochs: int = 10
    learning_rate: float = 1e-3
    batch_size: int = 32
    schedule: str = "constant"
    warmup: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    row_wise: list[str] = field(default_factory=list)
    fuse: bool = True
    loss_scale: float | str | None = None
    patience: int | None = None
    checkpoint_every: int | None = None
    loss: str | None = None
    batch_norm: str | None = None

    @naming("Recipe")
    def __post_init__(self) -> None:
        _require(isinstance(self.dataset, str | None), "dataset", self.dataset, "a name")
        for name, known in (("loss", tuple(Loss)), ("batch_norm", BATCH_NORM)):
            value = getattr(self, name)
            _require(value in (None, *known), name, value, f"one of {', '.join(known)}")
        _require(isinstance(self.divide, dict), "divide", self.divide, "a table of numbers")
        for name, divisor in self.divide.items():
            right = _is_number(divisor) and _is_positive(abs(divisor))
            _require(right, f"divide.{name}", divisor, "a number but 0 that float32 holds")
        names = self.row_wise
        is_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        _require(is_names and len(set(names)) == len(names), "row_wise", names, "a list of different names")
        _require(isinstance(self.fuse, bool), "fuse", self.fuse, "true or false")
        for name in ("test_rows", "patience", "checkpoint_every"):
            value = getattr(self, name)
            _require(value is None or is_count(value, 1), name, value, f"a whole number of at least 1, at most {MOST}")
        for name, least in COUNTS.items():
            value = getattr(self, name)
            most = MOST_SEED if "seed" in name else MOST
            expected = f"a whole number of at least {least}, at most {most}"
            _require(is_count(value, least, most), name, value, expected)
        rate, norm, part = self.learning_rate, self.clip_norm, self.validation
        _require(_is_positive(rate), "learning_rate", rate, "a number above 0 that float32 holds")
        _require(norm is None or _is_positive(norm), "clip_norm", norm, "a number above 0 that float32 holds")
        scale = self.loss_scale
        _require(scale in (None, "dynamic") or _is_positive(scale), "loss_scale", scale, "a number above 0, or dynamic")
        _require(self.schedule in KINDS, "schedule", self.schedule, "one of " + ", ".join(KINDS))
        is_part = part is None or is_count(part, 1) or (isinstance(part, float) and 0 < part < 1)
        _require(is_part, "validation", part, "a number of rows or a fraction between 0 and 1")
        _require(
            self.patience is None or part is not None, "patience", self.patience, "validation, on which it depends, too"
        )

    @naming("Recipe")
    def validation_rows(self, rows: int) -> int:
        """How many of so many training rows are for validation; 0 if none are.

        Raises ValueError if none would be left for training.
        """
        if self.validation is None:
            return 0
        part = self.validation if isinstance(self.validation, int) else max(1, round(self.validation * rows))
        _require(part < rows, "validation", self.validation, f"fewer than the {rows} rows beside the test rows")
        return part

    @classmethod
    @naming("Recipe")
    def load(cls, directory: str | PathLike[str]) -> "Recipe":
        """Read recipe.toml of a folder; without that file everything has its default.

        Raises ValueError if the file is no TOML, holds an unknown key or a value that makes no sense.
        """
        path = Path(directory) / FILE
        if not path.exists():
            return cls()
        content = read_regular(path)
        try:
            settings = tomllib.loads(content.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is no TOML file: {error}") from None
        unknown = settings.keys() - {item.name for item in fields(cls)}
        if unknown:
            known = ", ".join(item.name for item in fields(cls))
            raise ValueError(f"{path} has the unknown key {min(unknown)!r}, expected {known}")
        return cls(**settings)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and float(FLOAT32.tiny) <= value <= float(FLOAT32.max)


def is_count(value: Any, least: int, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step, s from 0.

    learning_rate: the largest one.
    kind: constant, linear or cosine.
    warmup: over so many steps W it rises from 0 to the largest.
    steps: of the whole training, T; linear and cosine would reach 0 in the step after the last.
    Raises ValueError if the warm-up is as long as the training.

        s < W:     learning_rate * s / W
        constant:  learning_rate
        linear:    learning_rate * (T - s) / (T - W)
        cosine:    learning_rate * (1 + cos(pi * (s - W) / (T - W))) / 2

    Source: LinearLRScheduler of onnxruntime-training; cosine: SGDR, arXiv 1608.03983, one period.
    """

    learning_rate: float
    kind: str
    warmup: int
    steps: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Schedule: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.warmup >= self.steps:
            raise ValueError(f"Schedule: warmup is {self.warmup}, expected fewer than all {self.steps} steps")

    def at(self, step: int) -> float:
        """The learning rate of a step, 0 behind the last one of a schedule that falls."""
        if step < self.warmup:
            return self.learning_rate * step / self.warmup
        if self.kind == "constant":
            return self.learning_rate
        gone = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        share = 1 - gone if self.kind == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.learning_rate * share
