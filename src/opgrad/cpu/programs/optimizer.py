"""The programs of the optimizers on lists of arrays, and the arguments of their kernels for parameters in place."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from opgrad.contract.signature import Operand, Problem
from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.kernels.several import sum_squares
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.plan import Program, Scratch, ceil_div


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
    steps = ProgramSteps(problem)
    factors = steps.workspace.shared(kernels.FACTORS, "float64")
    steps.add_parts(kernels.sgd_factors, factors=factors)
    for size, (p, g, new_p) in _lists(problem, "weights", "gradients", "new_weights"):
        steps.add_parts(kernels.sgd, size, BLOCK, p=p, g=g, new_p=new_p, new_g=None, factors=factors)
    return steps


def adamw_optimizer(problem: Problem) -> Program:
    steps, attributes = ProgramSteps(problem), problem.attributes
    checked = {name: attributes[name] for name in ("alpha", "beta", "adam_mode", "correct_bias")}
    rates = checked_rates("adamw_optimizer", **checked)
    factors = steps.workspace.shared(kernels.FACTORS, "float64")
    log_alpha, log_beta = (math.log(rate) if rate else -math.inf for rate in rates)
    given = {"mode": attributes["adam_mode"], "corrects": attributes["correct_bias"]}
    given |= {"log_alpha": log_alpha, "log_beta": log_beta}
    steps.add_parts(kernels.adamw_factors, factors=factors, status=Scratch(), **given)
    old, new = ("weights", "gradients", "momentums_1", "momentums_2"), ("weights", "momentums_1", "momentums_2")
    for size, arrays in _lists(problem, *old, *(f"new_{name}" for name in new)):
        p, m, value = arrays[len(old) :]
        states = {"old": kernels.State(*arrays[: len(old)]), "new": kernels.State(p, None, m, value)}
        steps.add_parts(kernels.adamw, size, BLOCK, rates=rates, factors=factors, **states)
    wrong = "adamw_optimizer: step is {}, expected at least 1".format
    steps.explain = lambda position, value: ValueError(wrong(value))
    return steps


def checked_rates(operator: str, alpha: float, beta: float, adam_mode: int, correct_bias: bool) -> kernels.Rates:
    """The moments' decay rates. Raises the operator's ValueError for attributes that have no meaning."""
    if adam_mode not in (0, 1):
        raise ValueError(f"{operator}: adam_mode is {adam_mode}, expected 0 or 1")
    if adam_mode == 0 and not correct_bias:
        raise ValueError(f"{operator}: correct_bias is False, expected True with adam_mode 0")
    for name, rate in (("alpha", alpha), ("beta", beta)):
        if not 0 <= rate <= 1:
            raise ValueError(f"{operator}: {name} is {rate}, expected 0 to 1")
    return kernels.Rates(alpha, beta)


def clip_grad_norm(problem: Problem) -> Program:
    steps, lists, first_part = ProgramSteps(problem), _lists(problem, "gradients", "clipped"), 0
    parts = [ceil_div(size, BLOCK) for size, _ in lists]
    found, factor = (steps.workspace.shared(size, "float64") for size in (sum(parts), 1))
    for (size, (gradient, _)), count in zip(lists, parts, strict=True):
        steps.add_parts(sum_squares, size, BLOCK, x=gradient, partial=found, first=first_part)
        first_part += count
    steps.add_parts(kernels.clip_factor, count=sum(parts), found=found, factor=factor)
    for size, (gradient, clipped) in lists:
        steps.add_parts(kernels.clip, size, BLOCK, factor=factor, g=gradient, new_g=clipped)
    return steps
