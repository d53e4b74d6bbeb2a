"""Activations and their gradients: the formula of one element for each operator.

For 16-bit numbers the arithmetic takes almost as long as the memory accesses, so that every instruction counts. exp2
and rsqrt flush denormals to 0 here; the formulas avoid denormal arguments and results.
"""

import triton
import triton.language as tl

from opgrad.contract.problem import Problem
from opgrad.cuda import elements
from opgrad.cuda.execute import Program
from opgrad.cuda.functions import hyperbolic_tangent, logistic

# --- the formulas --------------------------------------------------------------------------------------------------


@triton.jit
def _relu(x, alpha):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def _relu_grad(dy, x, alpha):
    return tl.where(x > 0, dy, 0.0)


@triton.jit
def _sigmoid(x, alpha):
    return logistic(x)


@triton.jit
def _sigmoid_grad(dy, y, alpha):
    return dy * y * (1.0 - y)


@triton.jit
def _tanh(x, alpha):
    return hyperbolic_tangent(x)


@triton.jit
def _tanh_grad(dy, y, alpha):
    return dy * tl.fma(-y, y, 1.0)


@triton.jit
def _quick_gelu(x, alpha):
    return x * logistic(x * alpha)


@triton.jit
def _quick_gelu_grad(dy, x, alpha):
    v = x * alpha
    s = logistic(v)
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
