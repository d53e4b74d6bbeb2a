"""AdamW and SGD as an optimizer model describes them: float32, in place, over all parameters at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx
from onnx.helper import get_attribute_value

from opgrad.cpu import optimizer as kernels
from opgrad.cpu import parallel, parts
from opgrad.cpu.native import Kernel


class Optimizer(Protocol):
    """What turns gradients into new parameters.

    learning_rate: may be changed between steps.
    steps: how many there were.
    moments: its running means, float32 [n] each, by their names in a checkpoint.
    """

    learning_rate: float
    steps: int
    moments: Mapping[str, np.ndarray]

    def step(self) -> None:
        """Change the parameters in place by one step along their gradients."""


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent: `p -= learning_rate * g` (SGDOptimizerV2)."""

    def start(self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float) -> "SGD":
        """An optimizer of these parameters; see `SGD`."""
        return SGD(parameters, gradients, learning_rate)


@dataclass(frozen=True)
class AdamWRule:
    """The attributes of AdamWOptimizer, with the operator's defaults.

    alpha, beta: the decay rates of the first and second moment.
    epsilon: what keeps the denominator from 0.
    weight_decay: the decay of the parameters, times the learning rate.
    adam_mode: 0 is PyTorch's order of operations, 1 that of Hugging Face; see `AdamW`.
    correct_bias: whether the moments' start at 0 is made up for.
    """

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1

    def __post_init__(self) -> None:
        if self.adam_mode not in (0, 1):
            raise ValueError(f"AdamWOptimizer: adam_mode is {self.adam_mode}, expected 0 or 1")
        if self.adam_mode == 0 and not self.correct_bias:
            raise ValueError("AdamWOptimizer: correct_bias is 0, expected 1 with adam_mode 0")

    def start(self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float) -> "AdamW":
        """An optimizer of these parameters; see `AdamW`."""
        return AdamW(parameters, gradients, learning_rate, self)


Rule = SGDRule | AdamWRule


def read_rule(model: onnx.ModelProto) -> Rule:
    """The rule that an optimizer model applies.

    model: one node, AdamWOptimizer or SGDOptimizerV2, as in optimizer_model.onnx.
    Raises NotImplementedError if it has another node, ValueError if an attribute has no meaning.
    """
    nodes = [node.op_type for node in model.graph.node]
    if nodes == ["SGDOptimizerV2"]:
        return SGDRule()
    if nodes == ["AdamWOptimizer"]:
        return AdamWRule(**{item.name: get_attribute_value(item) for item in model.graph.node[0].attribute})
    found = ", ".join(nodes) or "none"
    raise NotImplementedError(
        f"optimizer model: it has the nodes {found}, expected one AdamWOptimizer or SGDOptimizerV2"
    )


class _Pass:
    """A kernel of `opgrad.cpu.optimizer` over float32 arrays of one length, shared out to opgrad's threads.

    Keyword arguments give the kernel's other parameters; a call sets those that change.
    """

    def __init__(self, kernel: Kernel, *arrays: np.ndarray, **numbers: float):
        for array in arrays:
            _check(array, arrays[0])
        self._arrays = arrays
        self._kernel_task = kernel.task("float32" for _ in arrays)
        self._places = {name: place for place, name in enumerate(kernel.parameters)}
        self._words = np.zeros(len(self._places), np.int64)
        self._numbers = self._words.view(np.float64)
        size = arrays[0].size
        per_part = parts.per_part(size, 4 * len(arrays))
        self._parts = parts.count(size, per_part)
        self._words[: 2 + len(arrays)] = [
            per_part,
            size,
            *(array.ctypes.data for array in arrays),
        ]
        self._set(numbers)
        self._address = self._words.ctypes.data

    def _set(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._numbers[self._places[name]] = number

    def __call__(self, **numbers: float) -> None:
        self._set(numbers)
        pool = parallel.pool() if self._parts > 1 else 0
        parallel.run.call(pool, self._kernel_task, self._address, self._parts)


def _check(array: np.ndarray, model: np.ndarray) -> None:
    """Raise unless native code can step through the array."""
    if array.dtype != np.float32:
        raise TypeError(f"optimizer: an array has dtype {array.dtype}, expected float32")
    if array.ndim != 1 or array.shape != model.shape:
        raise ValueError(f"optimizer: an array has shape {array.shape}, expected ({model.size},)")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("optimizer: an array is read-only or strided, expected contiguous memory to write to")


class SGD:
    """Gradient descent, `p -= learning_rate * g`.

    parameters: float32 [n], changed by every step.
    gradients: float32 [n], read by every step.
    """

    def __init__(self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float):
        self.learning_rate = learning_rate
        self.steps = 0
        self.moments: Mapping[str, np.ndarray] = {}
        self._pass = _Pass(kernels.sgd, parameters, gradients)

    def step(self) -> None:
        """Change the parameters in place."""
        self.steps += 1
        self._pass(rate=self.learning_rate)


class AdamW:
    """AdamW with the moments m and v, which start at 0; t counts the steps from 1.

    parameters: float32 [n], changed by every step.
    gradients: float32 [n], read by every step.

        m = alpha * m + (1 - alpha) * g
        v = beta * v + (1 - beta) * g * g
        c1, c2 = 1 - alpha**t, 1 - beta**t      (1 without correct_bias)
        adam_mode 0:  p *= 1 - learning_rate * weight_decay
                      p -= learning_rate / c1 * m / (sqrt(v / c2) + epsilon)
        adam_mode 1:  p -= learning_rate * sqrt(c2) / c1 * m / (sqrt(v) + epsilon)
                      p *= 1 - learning_rate * weight_decay

    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101; AdamWOptimizer of com.microsoft.
    """

    def __init__(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        learning_rate: float,
        rule: AdamWRule,
    ):
        self.learning_rate = learning_rate
        self.rule = rule
        self.steps = 0
        self.first_moment = np.zeros_like(parameters)
        self.second_moment = np.zeros_like(parameters)
        self.moments: Mapping[str, np.ndarray] = {"momentum0": self.first_moment, "momentum1": self.second_moment}
        arrays = parameters, gradients, self.first_moment, self.second_moment
        self._pass = _Pass(kernels.adamw, *arrays, alpha=rule.alpha, beta=rule.beta)

    def step(self) -> None:
        """Change the moments and the parameters in place."""
        self.steps += 1
        rate, epsilon = self._rate_and_epsilon()
        decay = 1 - self.learning_rate * self.rule.weight_decay
        before, after = (decay, 1.0) if self.rule.adam_mode == 0 else (1.0, decay)
        self._pass(rate=rate, epsilon=epsilon, before=before, after=after)

    def _rate_and_epsilon(self) -> tuple[float, float]:
        """Step size and epsilon of `rate * m / (sqrt(v) + epsilon)`, with the bias correction in them."""
        rule = self.rule
        if not rule.correct_bias:
            return self.learning_rate, rule.epsilon
        root = math.sqrt(1 - rule.beta**self.steps)
        rate = self.learning_rate * root / (1 - rule.alpha**self.steps)
        return rate, rule.epsilon * root if rule.adam_mode == 0 else rule.epsilon
