"""The programs of the optimizers on lists of arrays, and the arguments of their kernels for parameters in place."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from opgrad.contract.problem import Operand, Problem
from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.workspace import Scratch, Workspace


class AdamWStep(NamedTuple):
    """The learning rate, the number of the step and the attributes of AdamWOptimizer, for one step."""

    learning_rate: float
    number: int
    alpha: float
    beta: float
    epsilon: float
    weight_decay: float
    mode: int = 0
    corrects: bool = True

    def factors(self) -> tuple[float, float, float, float]:
        """Rate and epsilon of rate * m / (sqrt(v) + epsilon), and the factors of p before and after the step."""
        decay = 1.0 - self.learning_rate * self.weight_decay
        before, after = (decay, 1.0) if self.mode == 0 else (1.0, decay)
        if not self.corrects:
            return self.learning_rate, self.epsilon, before, after
        root = math.sqrt(1 - self.beta**self.number)
        rate = self.learning_rate * root / (1 - self.alpha**self.number)
        return rate, self.epsilon * root if self.mode == 0 else self.epsilon, before, after


def sgd_in_place(operands: Sequence[Operand], factors: int) -> dict[str, Any]:
    """The arguments of `sgd` for parameters and gradients that it overwrites."""
    p, g = operands
    return {"p": p, "g": g, "new_p": p, "new_g": g, "factors": factors}


def adamw_in_place(operands: Sequence[Operand], alpha: float, beta: float, factors: int) -> dict[str, Any]:
    """The arguments of `adamw` for parameters, gradients and moments that it overwrites."""
    state = kernels.State(*operands)
    return {"old": state, "new": state, "rates": kernels.Rates(alpha, beta), "factors": factors}


def _lists(problem: Problem, *names: str) -> list[tuple[int, list[Operand]]]:
    """The arrays at each place of the lists, and how many elements each of them has."""
    each = zip(*map(problem.listed, names), strict=True)
    return [(math.prod(problem.specs[same[0]].shape), [problem[name] for name in same]) for same in each]


def sgd_optimizer(problem: Problem) -> Program:
    workspace = Workspace("float64")
    factors = workspace.shared(kernels.FACTORS)
    steps = [Step(kernels.sgd_factors, 1, {"lr": problem["lr"], "factors": factors})]
    for size, (p, g, new_p) in _lists(problem, "weights", "gradients", "new_weights"):
        arguments = {"p": p, "g": g, "new_p": new_p, "new_g": None, "factors": factors}
        steps.append(Step(kernels.sgd, size, arguments, BLOCK))
    return Program(steps, workspace)


def adamw_optimizer(problem: Problem) -> Program:
    rates = _rates(problem)
    workspace = Workspace("float64")
    attributes, factors = problem.attributes, workspace.shared(kernels.FACTORS)
    arguments = {"lr": problem["lr"], "step": problem["step"], "factors": factors, "status": Scratch()}
    arguments |= {"log_rates": kernels.LogRates(*(math.log(rate) if rate else -math.inf for rate in rates))}
    arguments |= {"epsilon": attributes["epsilon"], "weight_decay": attributes["weight_decay"]}
    arguments |= {"mode": attributes["adam_mode"], "corrects": attributes["correct_bias"]}
    steps = [Step(kernels.adamw_factors, 1, arguments)]
    old, new = ("weights", "gradients", "momentums_1", "momentums_2"), ("weights", "momentums_1", "momentums_2")
    for size, arrays in _lists(problem, *old, *(f"new_{name}" for name in new)):
        p, m, value = arrays[len(old) :]
        states = {"old": kernels.State(*arrays[: len(old)]), "new": kernels.State(p, None, m, value)}
        steps.append(Step(kernels.adamw, size, {**states, "rates": rates, "factors": factors}, BLOCK))
    wrong = "adamw_optimizer: step is {}, expected at least 1".format
    return Program(steps, workspace, lambda position, value: ValueError(wrong(value)))


def _rates(problem: Problem) -> kernels.Rates:
    """The moments' decay rates. Raises ValueError for attributes that have no meaning."""
    attributes = problem.attributes
    if attributes["adam_mode"] not in (0, 1):
        raise ValueError(f"adamw_optimizer: adam_mode is {attributes['adam_mode']}, expected 0 or 1")
    if attributes["adam_mode"] == 0 and not attributes["correct_bias"]:
        raise ValueError("adamw_optimizer: correct_bias is False, expected True with adam_mode 0")
    for name in ("alpha", "beta"):
        if not 0 <= attributes[name] <= 1:
            raise ValueError(f"adamw_optimizer: {name} is {attributes[name]}, expected 0 to 1")
    return kernels.Rates(attributes["alpha"], attributes["beta"])


def clip_grad_norm(problem: Problem) -> Program:
    workspace, lists = Workspace("float64"), _lists(problem, "gradients", "clipped")
    parts = [partition.count(size, BLOCK) for size, _ in lists]
    found, factor = workspace.shared(sum(parts)), workspace.shared(1)
    steps, first_part = [], 0
    for (size, (gradient, _)), count in zip(lists, parts, strict=True):
        sums = Scratch(found.offset + 8 * first_part, "float64")
        steps.append(Step(kernels.squares, size, {"g": gradient, "sums": sums}, BLOCK))
        first_part += count
    arguments = {"count": sum(parts), "found": found, "factor": factor, "max_norm": problem.attributes["max_norm"]}
    steps.append(Step(kernels.clip_factor, 1, arguments))
    for size, (gradient, clipped) in lists:
        steps.append(Step(kernels.clip, size, {"factor": factor, "g": gradient, "new_g": clipped}, BLOCK))
    return Program(steps, workspace)
