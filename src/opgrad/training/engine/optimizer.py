"""AdamW and SGD by the attributes of an optimizer model; a step updates all parameters at once, in place."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx
from onnx.helper import get_attribute_value

from opgrad.contract.problem import Operand
from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.kernels.several import sum_squares
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.optimizer import AdamWStep, adamw_in_place, sgd_in_place
from opgrad.cpu.programs.program import Address
from opgrad.native.passes import Pass, per_part

CLIP = "InplaceClipGradNorm"
# A pass over fewer bytes runs in one thread. After a run of the graph onnxruntime's threads keep spinning, so that
# threads of the optimizer wait for a core, and the next run waits for them. With two threads on two cores an optimizer
# step of 0.1 ms took 2.2 ms between runs, and the graph 5.6 ms instead of 3.8 (ViT, 1.0 million parameters). A step of
# 2.7 ms took no longer between runs, but the graph took 27 ms instead of 21 (GPT-2, 5.8 million parameters).
LEAST_SHARED_BYTES = 1 << 27


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
ADAMW = tuple(field.name for field in fields(AdamWRule) if field.name != "max_norm")


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
        clip = {"max_norm": 1.0, **_attributes(nodes.pop(0), ("max_norm",))}
    kinds = [node.op_type for node in nodes]
    if kinds == ["SGDOptimizerV2"]:
        return SGDRule(**clip)
    if kinds == ["AdamWOptimizer"]:
        return AdamWRule(**_attributes(nodes[0], ADAMW), **clip)
    raise NotImplementedError(
        f"optimizer model: it has the nodes {found}, expected one AdamWOptimizer or SGDOptimizerV2, "
        f"or one {CLIP} and one of these"
    )


def _attributes(node: onnx.NodeProto, known: Collection[str]) -> dict[str, Any]:
    """The attributes of a node, which must be numbers of these names."""
    found = {item.name: get_attribute_value(item) for item in node.attribute}
    for name, value in found.items():
        if name not in known or not isinstance(value, int | float):
            what = f"{value!r}" if name in known else f"in the node {node.op_type}"
            expected = "a number" if name in known else f"none but {', '.join(known)}"
            raise ValueError(f"optimizer model: the attribute {name!r} is {what}, expected {expected}")
    return found


# --- passes over memory ----------------------------------------------------------------------------------------------


class GradientNorm:
    """The Euclidean norm of all gradients together, summed in float64; the same with any number of threads.

    gradients: float32 or float64 [n], read by every call.
    """

    def __init__(self, gradients: np.ndarray):
        parts = partition.count(gradients.size, per_part(gradients.size, gradients.nbytes))
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
