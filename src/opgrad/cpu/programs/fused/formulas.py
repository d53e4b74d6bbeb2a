"""The formulas that each element of a softmax call with attributes goes through, in order.

Forward    logit_scale, where | softmax | result_scale, dropout, post-ops, out_scale
Gradient   the same way back from dy, with the post-ops' inputs computed again from y | softmax | logit_scale

Each is an `Applied`, as post-ops are: with the names of its operands and with its numbers.
"""

import math
from collections.abc import Sequence
from typing import Final

from opgrad.contract.signature import Problem
from opgrad.ops.reference.primitive import Applied
from opgrad.ops.reference.random import kept_scale

LEAST: Final = 1e-37


def of_call(problem: Problem) -> tuple[list[Applied], ...]:
    """The groups of formulas of a call, as its form has them."""
    return gradient(problem) if "dy" in problem.specs else (before(problem), after(problem))


def before(problem: Problem) -> list[Applied]:
    """What comes before softmax. A problem of attention may have a bias, which is added last."""
    found = _times(factors(problem.attributes["logit_scale"]))
    if "where" in problem.specs:
        found.append(Applied("where", float("-inf"), operands=("where",)))
    if "bias" in problem.specs:
        found.append(Applied("add", operands=("bias",)))
    return found


def after(problem: Problem) -> list[Applied]:
    """What comes behind softmax. The result's scale and the output's are one factor unless post-ops stand between."""
    attributes = problem.attributes
    scaled, last = _scales(problem)
    dropped = [Applied("dropout", kept_scale(attributes["dropout"]))] if drops(problem) else []
    return [*scaled, *dropped, *attributes["post_ops"], *last]


def gradient(problem: Problem) -> tuple[list[Applied], ...]:
    """The five groups of a gradient's formulas, as `GradientForm` has them.

    The scales commute with what follows, but the post-ops' operands have their gradients before.
    """
    attributes, applied = problem.attributes, [*problem.attributes["post_ops"]]
    scaled, first = _scales(problem)
    dropped = [Applied("dropout", kept_scale(attributes["dropout"]))] if drops(problem) else []
    masked = [Applied("where", operands=("where",))] if "where" in problem.specs else []
    inputs = [*scaled, *dropped] if applied else []
    return first, inputs, applied, [*scaled, *dropped, *masked], _times(factors(attributes["logit_scale"]))


def _scales(problem: Problem) -> tuple[list[Applied], list[Applied]]:
    """The factors before the post-ops, and those behind them."""
    attributes = problem.attributes
    scale, divisor, applied = attributes["result_scale"], attributes["out_scale"], attributes["post_ops"]
    return _times(factors(scale)) if applied else [], _times(quotient(1.0 if applied else scale, divisor))


def _times(by: Sequence[float]) -> list[Applied]:
    return [Applied("times", factor) for factor in by if factor != 1.0]


def quotient(scale: float, divisor: float) -> list[float]:
    """Factors of scale / divisor that are normal in float32 too: 0 / 1e-40 is 0, but 0 * (1 / 1e-40) would be NaN."""
    if scale == 0.0 or LEAST < abs(scale / divisor) < 1 / LEAST:
        return [scale / divisor]
    return [*factors(scale), *(1.0 / each for each in factors(divisor))]


def factors(scale: float) -> list[float]:
    if scale == 0.0 or LEAST < abs(scale) < 1 / LEAST:
        return [scale]
    root = math.sqrt(abs(scale))
    return [*factors(root), *factors(math.copysign(root, scale))]


def drops(problem: Problem) -> bool:
    """Whether elements are dropped, or the mask of those that are kept is a result though none is dropped."""
    return bool(problem.attributes["dropout"]) or "mask" in problem.specs


def is_exact(problem: Problem) -> bool:
    """Whether sums keep what is rounded off their terms: for 2 ulp in place of 4, and for a sum that is a result."""
    return problem.attributes["accumulation"] == "strict" or "stats" in problem.specs
