"""AdamW and SGD by the rule of an optimizer model; a step updates all parameters at once, in place."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgrad.contract.signature import Operand
from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.kernels.several import sum_squares
from opgrad.cpu.programs.optimizer import AdamWStep, adamw_in_place, sgd_in_place
from opgrad.cpu.runtime.plan import Pass, per_part
from opgrad.cpu.runtime.program import Address, ceil_div
from opgrad.training.files.artifact_set import AdamWRule, Rule, SGDRule

# A pass over fewer bytes runs in one thread. After a run of the graph onnxruntime's threads keep spinning, so that
# threads of the optimizer wait for a core, and the next run waits for them. With two threads on two cores an optimizer
# step of 0.1 ms took 2.2 ms between runs, and the graph 5.6 ms instead of 3.8 (ViT, 1.0 million parameters). A step of
# 2.7 ms took no longer between runs, but the graph took 27 ms instead of 21 (GPT-2, 5.8 million parameters).
LEAST_SHARED_BYTES = 1 << 27


# --- passes over memory ----------------------------------------------------------------------------------------------


class GradientNorm:
    """The Euclidean norm of all gradients together, summed in float64; the same with any number of threads.

    gradients: float32 or float64 [n], read by every call.
    """

    def __init__(self, gradients: np.ndarray):
        parts = ceil_div(gradients.size, per_part(gradients.size, gradients.nbytes))
        self._sums = np.zeros(parts)
        sums = Address(self._sums.ctypes.data, "float64")
        arguments = {"partial": sums, "first": 0}
        self._pass = Pass(sum_squares, [gradients], lambda given: {"x": given[0], **arguments}, LEAST_SHARED_BYTES)

    def measure(self, squares: float = 0.0) -> float:
        """The norm of the gradients as they are now. squares: the sum of the squares of further gradients."""
        self._pass()
        return math.sqrt(float(self._sums.sum()) + squares)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most `max_norm`; NaN for a NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor


# --- optimizers ------------------------------------------------------------------------------------------------------


class _FlatOptimizer:
    """A rule that is applied to all parameters at once, by one pass of a kernel over memory.

    arrays: parameters, gradients and moments. named: the kernel's arguments for these and the address of the factors.
    """

    __slots__ = ("__weakref__", "_factors", "_norm", "_pass", "learning_rate", "rule", "steps")

    rule: Rule

    def __init__(
        self, kernel: Any, arrays: Sequence[np.ndarray], named: Callable[..., Any], learning_rate: float, rule: Rule
    ):
        self.learning_rate, self.rule, self.steps = learning_rate, rule, 0
        self._norm = None if rule.max_norm is None else GradientNorm(arrays[1])
        self._factors = np.ones(kernels.FACTORS)
        factors = self._factors.ctypes.data
        self._pass = Pass(kernel, arrays, lambda given: named(given, factors), LEAST_SHARED_BYTES)

    @property
    def moments(self) -> dict[str, np.ndarray]:
        """The moments by the names that they have in a checkpoint, arrays like the parameters."""
        return {}

    def _set_factors(self) -> None:
        """Set the numbers of this step that the kernel reads, except for the factor of the gradients."""
        raise NotImplementedError

    def step(self) -> None:
        """Change the parameters, and the moments if there are some, in place."""
        self._step_beside(0.0)

    def _step_beside(self, squares: float) -> float:
        """A step beside those of other parameters; returns the factor by which all gradients are clipped.

        squares: the sum of the squares of the others' gradients, which count for the norm.
        """
        if self._norm is not None and self.rule.max_norm is not None:
            self._factors[kernels.CLIP] = clip_factor(self._norm.measure(squares), self.rule.max_norm)
        self.steps += 1
        self._set_factors()
        self._pass()
        return float(self._factors[kernels.CLIP])


class SGD(_FlatOptimizer):
    """Gradient descent, `p -= learning_rate * g`.

    parameters: float32 or float64 [n], changed by every step.
    gradients: the same dtype [n], read by every step; clipped in place first if the rule has a `max_norm`.
    learning_rate: an attribute, which may be set at any time.
    rule: the rule's attributes.

    steps: how many steps there have been.
    """

    __slots__ = ()

    def __init__(
        self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float, rule: SGDRule | None = None
    ):
        super().__init__(kernels.sgd, (parameters, gradients), sgd_in_place, learning_rate, rule or SGDRule())

    def _set_factors(self) -> None:
        self._factors[kernels.RATE] = self.learning_rate


class AdamW(_FlatOptimizer):
    """AdamW with the moments m and v, which start at 0; t counts the steps from 1.

    parameters: float32 or float64 [n], changed by every step.
    gradients: the same dtype [n], read by every step; clipped in place first if the rule has a `max_norm`.
    learning_rate: an attribute, which may be set at any time.
    rule: the rule's attributes.

    steps: how many steps there have been.
    first_moment, second_moment: like the parameters.

        g *= min(1, max_norm / (|g| + 1e-6))    (with max_norm)
        m = alpha * m + (1 - alpha) * g
        v = beta * v + (1 - beta) * g * g
        c1, c2 = 1 - alpha**t, 1 - beta**t      (1 without correct_bias)
        adam_mode 0:  p *= 1 - learning_rate * weight_decay
                      p -= learning_rate / c1 * m / (sqrt(v / c2) + epsilon)
        adam_mode 1:  p -= learning_rate * sqrt(c2) / c1 * m / (sqrt(v) + epsilon)
                      p *= 1 - learning_rate * weight_decay

    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101; AdamWOptimizer of com.microsoft.
    """

    __slots__ = ("first_moment", "second_moment")

    rule: AdamWRule

    def __init__(self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float, rule: AdamWRule):
        self.first_moment, self.second_moment = np.zeros_like(parameters), np.zeros_like(parameters)
        arrays = parameters, gradients, self.first_moment, self.second_moment
        alpha, beta = rule.alpha, rule.beta

        def named(operands: Sequence[Operand], factors: int) -> dict[str, Any]:
            return adamw_in_place(operands, alpha, beta, factors)

        super().__init__(kernels.adamw, arrays, named, learning_rate, rule)

    @property
    def moments(self) -> dict[str, np.ndarray]:
        """The moments by the names that they have in a checkpoint, arrays like the parameters."""
        return {"momentum0": self.first_moment, "momentum1": self.second_moment}

    def _set_factors(self) -> None:
        rule = self.rule
        decay = rule.epsilon, rule.weight_decay, rule.adam_mode, bool(rule.correct_bias)
        step = AdamWStep(float(self.learning_rate), self.steps, rule.alpha, rule.beta, *decay)
        self._factors[: kernels.CLIP] = step.factors()


def started(rule: Rule, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float) -> SGD | AdamW:
    """The optimizer of a rule for these parameters; see `SGD` and `AdamW`."""
    if isinstance(rule, SGDRule):
        return SGD(parameters, gradients, learning_rate, rule)
    return AdamW(parameters, gradients, learning_rate, rule)
