"""AdamW and SGD as an optimizer model describes them: in place, over all parameters at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.helper import get_attribute_value

from opgrad.cpu import optimizer as kernels
from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.runtime import parallel, partition

CLIP = "InplaceClipGradNorm"
# Below, waking a worker takes longer than the pass: 7 µs against 5 for 17,000 parameters.
LEAST_SHARED_BYTES = 1 << 20


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent: `p -= learning_rate * g` (SGDOptimizerV2).

    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    max_norm: float | None = None

    def start(self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float) -> "SGD":
        """An optimizer of these parameters; see `SGD`."""
        return SGD(parameters, gradients, learning_rate, self)


@dataclass(frozen=True)
class AdamWRule:
    """The attributes of AdamWOptimizer, with the operator's defaults.

    alpha, beta: the decay rates of the first and second moment.
    epsilon: what keeps the denominator from 0.
    weight_decay: the decay of the parameters, times the learning rate.
    adam_mode: 0 is PyTorch's order of operations, 1 that of Hugging Face; see `AdamW`.
    correct_bias: whether the moments' start at 0 is made up for.
    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1
    max_norm: float | None = None

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

    model: one node, AdamWOptimizer or SGDOptimizerV2, as in optimizer_model.onnx, and before it InplaceClipGradNorm
        if the gradients shall be clipped.
    Raises NotImplementedError if it has another node, ValueError if an attribute has no meaning.
    """
    nodes = list(model.graph.node)
    found = ", ".join(node.op_type for node in nodes) or "none"
    clip: dict[str, Any] = {}
    if nodes and nodes[0].op_type == CLIP:
        clip = {"max_norm": _attributes(nodes.pop(0)).get("max_norm", 1.0)}
    kinds = [node.op_type for node in nodes]
    if kinds == ["SGDOptimizerV2"]:
        return SGDRule(**clip)
    if kinds == ["AdamWOptimizer"]:
        return AdamWRule(**_attributes(nodes[0]), **clip)
    raise NotImplementedError(
        f"optimizer model: it has the nodes {found}, expected one AdamWOptimizer or SGDOptimizerV2, "
        f"or one {CLIP} and one of these"
    )


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: get_attribute_value(item) for item in node.attribute}


# --- passes over memory ----------------------------------------------------------------------------------------------


class _Pass:
    """A kernel of `opgrad.cpu.optimizer` over arrays of one length and dtype, shared out to opgrad's threads.

    Keyword arguments give the kernel's other parameters; a call sets those that change.
    """

    def __init__(self, kernel: Kernel, *arrays: np.ndarray, **numbers: float):
        for array in arrays:
            _check(array, arrays[0])
        self._arrays = arrays
        self._kernel_task = kernel.task(array.dtype.name for array in arrays)
        size = arrays[0].size
        traffic = size * sum(array.itemsize for array in arrays)
        self._set_up(kernel, size, traffic, [array.ctypes.data for array in arrays])
        self._set(numbers)

    def _set_up(self, kernel: Kernel, size: int, traffic: int, addresses: list[int]) -> None:
        self._places = {name: place for place, name in enumerate(kernel.parameters)}
        self._words = np.zeros(len(self._places), np.int64)
        self._numbers = self._words.view(np.float64)
        per_part = partition.per_part(size, traffic / size) if size else 1
        # Every part but the last holds whole vectors.
        per_part = -(-per_part // 64) * 64
        self._parts = partition.count(size, per_part)
        self._shared = self._parts > 1 and traffic >= LEAST_SHARED_BYTES
        self._words[: 2 + len(addresses)] = [per_part, size, *addresses]
        self._address = self._words.ctypes.data

    def _set(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            words = self._words if isinstance(number, int) else self._numbers
            words[self._places[name]] = number

    def __call__(self, **numbers: float) -> None:
        self._set(numbers)
        pool = parallel.pool() if self._shared else 0
        parallel.run.call(pool, self._kernel_task, self._address, self._parts)


def _check(array: np.ndarray, model: np.ndarray) -> None:
    """Raise unless native code can step through the array."""
    if array.dtype not in (np.float32, np.float64) or array.dtype != model.dtype:
        raise TypeError(f"optimizer: an array has dtype {array.dtype}, expected float32 or float64, the same for all")
    if array.ndim != 1 or array.shape != model.shape:
        raise ValueError(f"optimizer: an array has shape {array.shape}, expected ({model.size},)")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("optimizer: an array is read-only or strided, expected contiguous memory to write to")


class GradientNorm(_Pass):
    """The Euclidean norm of all gradients together, summed in float64; the same with any number of threads.

    gradients: float32 or float64 [n], read by every call.
    """

    def __init__(self, gradients: np.ndarray):
        _check(gradients, gradients)
        self._arrays = (gradients,)
        self._kernel_task = kernels.squares.task((gradients.dtype.name, "float64"))
        self._set_up(kernels.squares, gradients.size, gradients.nbytes, [gradients.ctypes.data, 0])
        self._sums = np.zeros(self._parts)
        self._words[self._places["sums"]] = self._sums.ctypes.data

    def measure(self) -> float:
        """The norm of the gradients as they are now."""
        self()
        return math.sqrt(float(self._sums.sum()))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most `max_norm`; NaN for a NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor


class _Clip:
    """The arguments `clips` and `clip` of a pass."""

    def __init__(self, gradients: np.ndarray, max_norm: float | None):
        self._max_norm = max_norm
        self._norm = None if max_norm is None else GradientNorm(gradients)

    def factor(self) -> float:
        if self._norm is None or self._max_norm is None:
            return 1.0
        return clip_factor(self._norm.measure(), self._max_norm)


# --- optimizers ------------------------------------------------------------------------------------------------------


class SGD:
    """Gradient descent, `p -= learning_rate * g`.

    parameters: float32 or float64 [n], changed by every step.
    gradients: the same dtype [n], read by every step; clipped in place first if the rule has a `max_norm`.
    learning_rate: an attribute, which may be set at any time.
    rule: the rule's attributes.

    steps: how many steps there have been.
    """

    def __init__(
        self, parameters: np.ndarray, gradients: np.ndarray, learning_rate: float, rule: SGDRule | None = None
    ):
        self.learning_rate = learning_rate
        self.rule = rule or SGDRule()
        self.steps = 0
        self._clip = _Clip(gradients, self.rule.max_norm)
        self._pass = _Pass(kernels.sgd, parameters, gradients)

    @property
    def moments(self) -> dict[str, np.ndarray]:
        """The moments by name, arrays like the parameters: none."""
        return {}

    def step(self) -> None:
        """Change the parameters in place."""
        clip = self._clip.factor()
        self.steps += 1
        self._pass(rate=float(self.learning_rate), clip=clip, clips=int(clip != 1))


class AdamW:
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
        arrays = parameters, gradients, self.first_moment, self.second_moment
        self._clip = _Clip(gradients, rule.max_norm)
        self._pass = _Pass(kernels.adamw, *arrays, alpha=float(rule.alpha), beta=float(rule.beta))

    @property
    def moments(self) -> dict[str, np.ndarray]:
        """The moments by the names that they have in a checkpoint, arrays like the parameters."""
        return {"momentum0": self.first_moment, "momentum1": self.second_moment}

    def step(self) -> None:
        """Change the moments and the parameters in place."""
        clip = self._clip.factor()
        self.steps += 1
        rate, epsilon = self._rate_and_epsilon()
        decay = 1.0 - self.learning_rate * self.rule.weight_decay
        before, after = (decay, 1.0) if self.rule.adam_mode == 0 else (1.0, decay)
        self._pass(rate=rate, epsilon=epsilon, before=before, after=after, clip=clip, clips=int(clip != 1))

    def _rate_and_epsilon(self) -> tuple[float, float]:
        """Step size and epsilon of `rate * m / (sqrt(v) + epsilon)`, with the bias correction in them."""
        rule = self.rule
        if not rule.correct_bias:
            return float(self.learning_rate), float(rule.epsilon)
        root = math.sqrt(1 - rule.beta**self.steps)
        rate = self.learning_rate * root / (1 - rule.alpha**self.steps)
        return rate, rule.epsilon * root if rule.adam_mode == 0 else float(rule.epsilon)
