"""How the learning rate changes from step to step."""

import math
from dataclasses import dataclass

KINDS = ("constant", "linear", "cosine")


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
