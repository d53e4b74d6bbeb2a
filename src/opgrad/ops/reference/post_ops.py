"""Operations applied to each result of softmax before it is stored: what `post_ops=` takes.

    opgrad.softmax(x, post_ops=[post_ops.mul(gate), post_ops.clip(0.0, 0.5)])

13 are binary, with an operand that broadcasts to the result; 21 are functions of one number s, with constants
alpha and beta. Names and formulas are those of oneDNN's binary and eltwise primitives. `VALUES`, `SLOPES` and
`OPERAND_SLOPES` hold the float64 references by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from opgrad.contract import number
from opgrad.contract.signature import record

LIMIT = 32  # operations in one list

BINARY = ("add", "sub", "mul", "div", "max", "min", "ge", "gt", "le", "lt", "eq", "ne", "select")


@record()
@dataclass(eq=False, slots=True)
class PostOp:
    """One operation: its name, its constants, and its operands (none, one, or select's condition and other)."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0
    operands: tuple[Any, ...] = ()

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # operands change: no key of a plan

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("alpha", "beta"):
            value = number(f"post_ops.{self.name}: {name}", value)
        object.__setattr__(self, name, value)


# --- binary: s is the running value, t the operand, broadcast to it --------------------------------------------------


def add(operand: Any) -> PostOp:
    """s + t. operand: t, an array of any float type, int8, uint8 or int32 that broadcasts to the result."""
    return PostOp("add", operands=(operand,))


def sub(operand: Any) -> PostOp:
    """s - t."""
    return PostOp("sub", operands=(operand,))


def mul(operand: Any) -> PostOp:
    """s * t."""
    return PostOp("mul", operands=(operand,))


def div(operand: Any) -> PostOp:
    """s / t."""
    return PostOp("div", operands=(operand,))


def max(operand: Any) -> PostOp:
    """The larger of s and t; NaN where either is."""
    return PostOp("max", operands=(operand,))


def min(operand: Any) -> PostOp:
    """The smaller of s and t; NaN where either is."""
    return PostOp("min", operands=(operand,))


def ge(operand: Any) -> PostOp:
    """1 where s >= t, else 0."""
    return PostOp("ge", operands=(operand,))


def gt(operand: Any) -> PostOp:
    """1 where s > t, else 0."""
    return PostOp("gt", operands=(operand,))


def le(operand: Any) -> PostOp:
    """1 where s <= t, else 0."""
    return PostOp("le", operands=(operand,))


def lt(operand: Any) -> PostOp:
    """1 where s < t, else 0."""
    return PostOp("lt", operands=(operand,))


def eq(operand: Any) -> PostOp:
    """1 where s == t, else 0."""
    return PostOp("eq", operands=(operand,))


def ne(operand: Any) -> PostOp:
    """1 where s != t, else 0."""
    return PostOp("ne", operands=(operand,))


def select(condition: Any, other: Any) -> PostOp:
    """s where the condition is not 0, else t. condition: may also be bool. other: t."""
    return PostOp("select", operands=(condition, other))


# --- eltwise: a is alpha, b is beta ----------------------------------------------------------------------------------


def abs() -> PostOp:
    """|s|; its slope at 0 is 0."""
    return PostOp("abs")


def clip(alpha: float, beta: float) -> PostOp:
    """min(max(s, a), b), with slope 1 where a < s <= b. Raises ValueError unless a <= b."""
    return _ordered(PostOp("clip", alpha, beta))


def clip_v2(alpha: float, beta: float) -> PostOp:
    """min(max(s, a), b), with slope 1 where a < s < b. Raises ValueError unless a <= b."""
    return _ordered(PostOp("clip_v2", alpha, beta))


def _ordered(op: PostOp) -> PostOp:
    if not op.alpha <= op.beta:
        raise ValueError(f"post_ops.{op.name}: beta is {op.beta}, expected at least alpha, {op.alpha}")
    return op


def elu(alpha: float = 1.0) -> PostOp:
    """s where s > 0, else a * (exp(s) - 1)."""
    return PostOp("elu", alpha)


def exp() -> PostOp:
    """exp(s)."""
    return PostOp("exp")


def gelu_erf() -> PostOp:
    """s / 2 * (1 + erf(s / sqrt(2)))."""
    return PostOp("gelu_erf")


def gelu_tanh() -> PostOp:
    """s / 2 * (1 + tanh(sqrt(2 / pi) * (s + 0.044715 s^3)))."""
    return PostOp("gelu_tanh")


def hardsigmoid(alpha: float, beta: float) -> PostOp:
    """max(0, min(1, a s + b))."""
    return PostOp("hardsigmoid", alpha, beta)


def hardswish(alpha: float = 1 / 6, beta: float = 0.5) -> PostOp:
    """s * max(0, min(1, a s + b))."""
    return PostOp("hardswish", alpha, beta)


def linear(alpha: float = 1.0, beta: float = 0.0) -> PostOp:
    """a s + b."""
    return PostOp("linear", alpha, beta)


def log() -> PostOp:
    """The natural logarithm: -inf for 0, NaN below."""
    return PostOp("log")


def logistic() -> PostOp:
    """1 / (1 + exp(-s))."""
    return PostOp("logistic")


def mish() -> PostOp:
    """s * tanh(log(1 + exp(s)))."""
    return PostOp("mish")


def pow(alpha: float, beta: float) -> PostOp:
    """a * s**b, by the rules of C's pow."""
    return PostOp("pow", alpha, beta)


def relu(alpha: float = 0.0) -> PostOp:
    """s where s > 0, else a s."""
    return PostOp("relu", alpha)


def round() -> PostOp:
    """The nearest integer, ties to even. It has no gradient."""
    return PostOp("round")


def soft_relu(alpha: float = 1.0) -> PostOp:
    """log(1 + exp(a s)) / a. Raises ValueError if a is 0."""
    op = PostOp("soft_relu", alpha)
    if op.alpha == 0.0:
        raise ValueError("post_ops.soft_relu: alpha is 0, expected another number")
    return op


def sqrt() -> PostOp:
    """The square root; NaN below 0."""
    return PostOp("sqrt")


def square() -> PostOp:
    """s^2."""
    return PostOp("square")


def swish(alpha: float = 1.0) -> PostOp:
    """s / (1 + exp(-a s))."""
    return PostOp("swish", alpha)


def tanh() -> PostOp:
    """The hyperbolic tangent."""
    return PostOp("tanh")


# --- references in float64 -------------------------------------------------------------------------------------------

_GELU = math.sqrt(2 / math.pi)
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _logistic(s: Any) -> Any:
    e = np.exp(-np.abs(s))
    return np.where(s >= 0, 1.0, e) / (1.0 + e)


def _softplus(s: Any) -> Any:
    return np.logaddexp(0.0, s)


def _gelu_argument(s: Any) -> Any:
    """Twice the argument of tanh: (1 + tanh(u)) / 2 is the logistic function of 2u, which does not cancel."""
    return 2 * _GELU * s * (1 + 0.044715 * s * s)


def _gelu_tanh_slope(s: Any, a: float, b: float) -> Any:
    u = _gelu_argument(s)
    return _logistic(u) * (1 + s * _logistic(-u) * 2 * _GELU * (1 + 3 * 0.044715 * s * s))


def _mish_slope(s: Any, a: float, b: float) -> Any:
    t = np.tanh(_softplus(s))
    return t + s * (1 - t * t) * _logistic(s)


def _swish_slope(s: Any, a: float, b: float) -> Any:
    r = _logistic(a * s)
    return r + a * s * r * (1 - r)


def _hardswish_slope(s: Any, a: float, b: float) -> Any:
    d = a * s + b
    return np.where(d <= 0, 0.0, np.where(d >= 1, 1.0, d + a * s))


def _wins(s: Any, t: Any) -> Any:
    """1 where s is larger, 1/2 where they are equal."""
    return 0.5 * (np.greater(s, t) + 0.0) + 0.5 * (np.greater_equal(s, t) + 0.0)


# Functions of (s, alpha, beta).
VALUES: dict[str, Callable[[Any, float, float], Any]] = {
    "abs": lambda s, a, b: np.abs(s),
    "clip": lambda s, a, b: np.minimum(np.maximum(s, a), b),
    "clip_v2": lambda s, a, b: np.minimum(np.maximum(s, a), b),
    "elu": lambda s, a, b: np.where(s > 0, s, a * np.expm1(np.minimum(s, 0.0))),
    "exp": lambda s, a, b: np.exp(s),
    "gelu_erf": lambda s, a, b: 0.5 * s * _erfc(-s / math.sqrt(2)),
    "gelu_tanh": lambda s, a, b: s * _logistic(_gelu_argument(s)),
    "hardsigmoid": lambda s, a, b: np.maximum(0.0, np.minimum(1.0, a * s + b)),
    "hardswish": lambda s, a, b: s * np.maximum(0.0, np.minimum(1.0, a * s + b)),
    "linear": lambda s, a, b: a * s + b,
    "log": lambda s, a, b: np.log(s),
    "logistic": lambda s, a, b: _logistic(s),
    "mish": lambda s, a, b: s * np.tanh(_softplus(s)),
    "pow": lambda s, a, b: a * np.power(s, b),
    "relu": lambda s, a, b: np.where(s > 0, s, a * s),
    "round": lambda s, a, b: np.rint(s),
    "soft_relu": lambda s, a, b: _softplus(a * s) / a,
    "sqrt": lambda s, a, b: np.sqrt(s),
    "square": lambda s, a, b: s * s,
    "swish": lambda s, a, b: s * _logistic(a * s),
    "tanh": lambda s, a, b: np.tanh(s),
}
SLOPES: dict[str, Callable[[Any, float, float], Any]] = {
    "abs": lambda s, a, b: np.sign(s),
    "clip": lambda s, a, b: np.where((s > a) & (s <= b), 1.0, 0.0),
    "clip_v2": lambda s, a, b: np.where((s > a) & (s < b), 1.0, 0.0),
    "elu": lambda s, a, b: np.where(s > 0, 1.0, a * np.exp(np.minimum(s, 0.0))),
    "exp": lambda s, a, b: np.exp(s),
    "gelu_erf": lambda s, a, b: 0.5 * _erfc(-s / math.sqrt(2)) + s * np.exp(-0.5 * s * s) / math.sqrt(2 * math.pi),
    "gelu_tanh": _gelu_tanh_slope,
    "hardsigmoid": lambda s, a, b: np.where((a * s + b > 0) & (a * s + b < 1), a, 0.0),
    "hardswish": _hardswish_slope,
    "linear": lambda s, a, b: np.full_like(s, a),
    "log": lambda s, a, b: 1.0 / s,
    "logistic": lambda s, a, b: _logistic(s) * _logistic(-s),
    "mish": _mish_slope,
    "pow": lambda s, a, b: a * b * np.power(s, b - 1.0),
    "relu": lambda s, a, b: np.where(s > 0, 1.0, a),
    "soft_relu": lambda s, a, b: _logistic(a * s),
    "sqrt": lambda s, a, b: 0.5 / np.sqrt(s),
    "square": lambda s, a, b: 2.0 * s,
    "swish": _swish_slope,
    "tanh": lambda s, a, b: 1.0 - np.tanh(s) ** 2,
}
# Functions of (s, t); select's are of (s, condition, t).
BINARY_VALUES: dict[str, Callable[..., Any]] = {
    "add": lambda s, t: s + t,
    "sub": lambda s, t: s - t,
    "mul": lambda s, t: s * t,
    "div": lambda s, t: s / t,
    "max": np.maximum,
    "min": np.minimum,
    "ge": lambda s, t: np.greater_equal(s, t) + 0.0,
    "gt": lambda s, t: np.greater(s, t) + 0.0,
    "le": lambda s, t: np.less_equal(s, t) + 0.0,
    "lt": lambda s, t: np.less(s, t) + 0.0,
    "eq": lambda s, t: np.equal(s, t) + 0.0,
    "ne": lambda s, t: np.not_equal(s, t) + 0.0,
    "select": lambda s, condition, t: np.where(np.not_equal(condition, 0), s, t),
}
BINARY_SLOPES: dict[str, Callable[..., Any]] = {
    "add": lambda s, t: np.ones_like(s),
    "sub": lambda s, t: np.ones_like(s),
    "mul": lambda s, t: t + np.zeros_like(s),
    "div": lambda s, t: np.divide(1.0, t, dtype=np.float64) + np.zeros_like(s),
    "max": _wins,
    "min": lambda s, t: _wins(t, s),
    "select": lambda s, condition, t: np.where(np.not_equal(condition, 0), 1.0, np.zeros_like(s)),
}
OPERAND_SLOPES: dict[str, Callable[..., Any]] = {
    "add": lambda s, t: np.ones_like(s),
    "sub": lambda s, t: -np.ones_like(s),
    "mul": lambda s, t: s,
    "div": lambda s, t: -s / t / t,
    "max": lambda s, t: _wins(t, s),
    "min": _wins,
    "select": lambda s, condition, t: np.where(np.not_equal(condition, 0), np.zeros_like(s), 1.0),
}


def apply(op: PostOp, s: Any) -> Any:
    """The reference's value of an operation at s."""
    if op.operands:
        return BINARY_VALUES[op.name](s, *op.operands)
    return VALUES[op.name](s, op.alpha, op.beta)


def slope(op: PostOp, s: Any) -> Any:
    """The reference's derivative of an operation at s. Raises ValueError for one that has none."""
    if not has_gradient(op.name):
        raise ValueError(f"post_ops: {op.name} has no gradient")
    if op.operands:
        return BINARY_SLOPES[op.name](s, *op.operands)
    return SLOPES[op.name](s, op.alpha, op.beta)


def has_gradient(name: str) -> bool:
    """Whether an operation has a gradient: round and the comparisons have none."""
    return name in SLOPES or name in BINARY_SLOPES
