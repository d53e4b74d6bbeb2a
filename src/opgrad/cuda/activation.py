"""Activations and their gradients: the formula of one element for each operator.

On 16-bit numbers the arithmetic is close to taking longer than the memory, so that instructions count. The frame
lets exp2 and rsqrt flush denormals; the formulas keep their arguments and results clear of them.
"""

import triton
import triton.language as tl

from opgrad.cuda import elements
from opgrad.cuda.execute import Program
from opgrad.cuda.numbers import LEAST_EXPONENT, LN_2
from opgrad.problem import Problem

# log2(e) / 2 as the sum of two float32: the error of one alone would be 9 ulp of exp(-80).
HALF_LOG2_E: tl.constexpr = tl.constexpr(0.7213475108146667)
HALF_LOG2_E_REST: tl.constexpr = tl.constexpr(9.6298149e-9)
MINUS_2_LOG2_E: tl.constexpr = tl.constexpr(-2.8853900817779268)
NEAR_0: tl.constexpr = tl.constexpr(0.625)

# --- sigmoid and tanh ----------------------------------------------------------------------------------------------


@triton.jit
def _reciprocal(x):
    """1 / x for x between 1 and 2: in float32 4 instructions, where a division is 8."""
    if x.dtype == tl.float64:
        inverse = 1.0 / x
    else:
        root = tl.rsqrt(x)
        rough = root * root
        inverse = tl.fma(-rough, tl.fma(x, rough, -1.0), rough)
    return inverse


@triton.jit
def _exp_minus(x):
    """exp(-x) for x >= 0: in float32 the square of exp(-x / 2), which is never denormal; see also numbers.exp."""
    if x.dtype == tl.float64:
        power = tl.exp(-x)
    else:
        bounded = tl.minimum(x, -LEAST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
        exponent = bounded * -HALF_LOG2_E
        rounded_off = tl.fma(bounded, HALF_LOG2_E_REST, tl.fma(bounded, HALF_LOG2_E, exponent))
        root = tl.exp2(exponent) * tl.fma(rounded_off, -LN_2, 1.0)
        power = root * root
    return power


@triton.jit
def _logistic(x):
    """1 / (1 + exp(-x)), without overflow or cancellation on either side."""
    e = _exp_minus(tl.abs(x))
    return tl.where(x >= 0, 1.0, e) * _reciprocal(1.0 + e)


@triton.jit
def _then(value, x, COEFFICIENT: tl.constexpr):
    """A step of Horner's rule. fma would take the number as float32, whatever x is."""
    return tl.fma(value, x, tl.full(x.shape, COEFFICIENT, x.dtype))


@triton.jit
def _tail_single(z):
    """(tanh(x) - x) / x**3 for z = x * x up to 0.4: a Chebyshev fit, by which tanh errs by 0.3 of a rounding."""
    p = tl.full(z.shape, -6.0967141659e-3, z.dtype)
    p = _then(p, z, 2.0997178999e-2)
    p = _then(p, z, -5.3850909579e-2)
    p = _then(p, z, 0.13332769737)
    return _then(p, z, -0.33333328944)


@triton.jit
def _tail_double(z):
    p = tl.full(z.shape, -1.7244874494844330172e-5, z.dtype)
    p = _then(p, z, 7.9599557352648080002e-5)
    p = _then(p, z, -2.30776162695198579e-4)
    p = _then(p, z, 5.8743728600943818973e-4)
    p = _then(p, z, -1.455309297534642025e-3)
    p = _then(p, z, 3.5920589774734553151e-3)
    p = _then(p, z, -8.8632298309257087457e-3)
    p = _then(p, z, 2.1869488260559114645e-2)
    p = _then(p, z, -5.3968253961395570821e-2)
    p = _then(p, z, 0.13333333333326657736)
    return _then(p, z, -0.33333333333333322565)


@triton.jit
def _hyperbolic_tangent(x):
    """tanh(x) = (1 - e) / (1 + e) with e = exp(-2 * x), but for x near 0, where that cancels."""
    size, square = tl.abs(x), x * x
    if x.dtype == tl.float64:
        e = tl.exp(-2.0 * size)
        tail = _tail_double(square)
    else:
        # Where the rounding of the exponent would show, e no longer does.
        e = tl.exp2(size * MINUS_2_LOG2_E)
        tail = _tail_single(square)
    near = tl.fma(x * square, tail, x)
    far = (1.0 - e) * _reciprocal(1.0 + e)
    return tl.where(size < NEAR_0, near, tl.where(x < 0, -far, far))


# --- the formulas --------------------------------------------------------------------------------------------------


@triton.jit
def _relu(x, alpha):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def _relu_grad(dy, x, alpha):
    return tl.where(x > 0, dy, 0.0)


@triton.jit
def _sigmoid(x, alpha):
    return _logistic(x)


@triton.jit
def _sigmoid_grad(dy, y, alpha):
    return dy * y * (1.0 - y)


@triton.jit
def _tanh(x, alpha):
    return _hyperbolic_tangent(x)


@triton.jit
def _tanh_grad(dy, y, alpha):
    return dy * tl.fma(-y, y, 1.0)


@triton.jit
def _quick_gelu(x, alpha):
    return x * _logistic(x * alpha)


@triton.jit
def _quick_gelu_grad(dy, x, alpha):
    v = x * alpha
    s = _logistic(v)
    return dy * s * tl.fma(v, 1.0 - s, 1.0)


@triton.jit
def _leaky_relu(x, alpha):
    return tl.where(x > 0, x, x * alpha)


@triton.jit
def _leaky_relu_grad(dy, y, alpha):
    return tl.where(y > 0, dy, dy * alpha)


def relu(problem: Problem) -> Program:
    return elements.program(problem, _relu, "y", a=problem["x"])


def relu_grad(problem: Problem) -> Program:
    return elements.program(problem, _relu_grad, "dx", a=problem["dy"], b=problem["x"])


def sigmoid(problem: Problem) -> Program:
    return elements.program(problem, _sigmoid, "y", a=problem["x"])


def sigmoid_grad(problem: Problem) -> Program:
    return elements.program(problem, _sigmoid_grad, "dx", a=problem["dy"], b=problem["y"])


def tanh(problem: Problem) -> Program:
    return elements.program(problem, _tanh, "y", a=problem["x"])


def tanh_grad(problem: Problem) -> Program:
    return elements.program(problem, _tanh_grad, "dx", a=problem["dy"], b=problem["y"])


def quick_gelu(problem: Problem) -> Program:
    return elements.program(problem, _quick_gelu, "y", problem.attributes["alpha"], a=problem["x"])


def quick_gelu_grad(problem: Problem) -> Program:
    alpha = problem.attributes["alpha"]
    return elements.program(problem, _quick_gelu_grad, "dx", alpha, a=problem["dy"], b=problem["x"])


def leaky_relu(problem: Problem) -> Program:
    return elements.program(problem, _leaky_relu, "y", problem.attributes["alpha"], a=problem["x"])


def leaky_relu_grad(problem: Problem) -> Program:
    alpha = problem.attributes["alpha"]
    return elements.program(problem, _leaky_relu_grad, "dx", alpha, a=problem["dy"], b=problem["y"])
