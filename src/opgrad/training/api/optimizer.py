"""Optimizer: takes a step along the gradients that a module has computed; and the schedule of its learning rate."""

import os

import numpy as np

from opgrad.training.api.module import Module
from opgrad.training.engine.memory import SGD, AdamW, TrainingMemory
from opgrad.training.engine.training_graph import read_model
from opgrad.training.files.artifact_set import Rule, read_rule

LEARNING_RATE = 1e-3  # before one is set, if the checkpoint has no state of an optimizer


class Optimizer:
    """Updates the parameters as an optimizer model says.

    optimizer_uri: the file of the optimizer model, or its bytes: one AdamWOptimizer or SGDOptimizerV2, and before it
        InplaceClipGradNorm if gradients shall be clipped.
    module: what computes the gradients. If its checkpoint holds the state of an optimizer, this one goes on from there;
        optimizers of one state share step count, learning rate and moments.

    Raises FileNotFoundError if there is no such file; ValueError if it is no model, or if the checkpoint's optimizer
    state belongs to another model or optimizer; NotImplementedError for another optimizer.
    """

    __slots__ = ("__weakref__", "_memory", "_module", "_update")  # a misspelt attribute is an AttributeError

    def __init__(self, optimizer_uri: str | os.PathLike[str] | bytes, module: Module):
        if not isinstance(module, Module):
            raise TypeError(f"Optimizer: module is {type(module).__name__}, expected Module")
        rule = read_rule(read_model(optimizer_uri, "Optimizer"))
        self._module, self._memory = module, module._state._memory
        self._update = _optimizer(self._memory, rule)

    def step(self) -> None:
        """Change the parameters by one step along their gradients, which stay as they are unless they are clipped.

        Of a module with a process group they are first made the mean of all processes'.

        Raises RuntimeError before the first call of a module in training mode, if no gradient was set otherwise.
        """
        if not self._memory.computed and not self._memory.gradients.flat.any():
            raise RuntimeError("Optimizer.step: there are no gradients yet, call the module in training mode first")
        self._memory.computed = True
        self._module.reduce_gradients()
        self._update.step()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps; it is rounded to float32, as checkpoints hold it."""
        if isinstance(learning_rate, str):
            raise TypeError("Optimizer.set_learning_rate: learning_rate is str, expected float")
        self._update.learning_rate = float(np.float32(float(learning_rate)))

    def get_learning_rate(self) -> float:
        """The present learning rate."""
        return self._update.learning_rate


def _optimizer(memory: TrainingMemory, rule: Rule) -> SGD | AdamW:
    """The present optimizer if it has this rule, else a new one that goes on from its state or the checkpoint's."""
    if memory.optimizer is not None and memory.optimizer.rule == rule:
        return memory.optimizer
    group = memory.group()
    rate = LEARNING_RATE if group is None else group.learning_rate
    return memory.start(rule, float(np.float32(rate)), group)


class LinearLRScheduler:
    """Sets an optimizer's learning rate as a function of its step count t.

    optimizer: whose learning rate it sets, at once and in every `step`.
    warmup_step_count: steps in which the learning rate rises from 0 to `initial_lr`.
    total_step_count: steps after which it has fallen back to 0.
    initial_lr: the highest learning rate.

        initial_lr * t / warmup_step_count                                             for t < warmup_step_count
        initial_lr * max(0, (total_step_count - t) / (total_step_count - warmup_step_count))           otherwise
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float):
        self._optimizer = optimizer
        self._warmup, self._total = warmup_step_count, total_step_count
        self._initial = initial_lr
        self.step()

    def step(self) -> None:
        """Set the learning rate for the optimizer's next step; to be called after each of its steps."""
        self._optimizer.set_learning_rate(self._initial * self._factor(self._optimizer._update.steps))

    def _factor(self, step: int) -> float:
        if step < self._warmup:
            return step / self._warmup
        if step >= self._total:
            return 0.0
        return (self._total - step) / (self._total - self._warmup)
