"""LinearLRScheduler: a learning rate that rises and falls in straight lines."""

from opgrad.training.api.optimizer import Optimizer


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
