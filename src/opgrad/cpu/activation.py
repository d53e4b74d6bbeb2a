"""Activations and their gradients: the formula of one vector for each operator."""

from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector, fma, select
from opgrad.cpu.loops import elements
from opgrad.cpu.numerics.math import sigmoid as logistic
from opgrad.cpu.numerics.math import tanh as hyperbolic_tangent
from opgrad.cpu.runtime.execute import Program
from opgrad.problem import Problem


@inline
def _relu(x: Vector, alpha: float) -> Vector:
    return select(x <= 0.0, 0.0, x)


@inline
def _relu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return select(x > 0.0, dy, 0.0)


@inline
def _sigmoid(x: Vector, alpha: float) -> Vector:
    return logistic(x)


@inline
def _sigmoid_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * y * (1.0 - y)


@inline
def _tanh(x: Vector, alpha: float) -> Vector:
    return hyperbolic_tangent(x)


@inline
def _tanh_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * fma(-y, y, 1.0)


@inline
def _quick_gelu(x: Vector, alpha: float) -> Vector:
    return x * logistic(x * alpha)


@inline
def _quick_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    v = x * alpha
    s = logistic(v)
    return dy * s * fma(v, 1.0 - s, 1.0)


@inline
def _leaky_relu(x: Vector, alpha: float) -> Vector:
    return select(x > 0.0, x, x * alpha)


@inline
def _leaky_relu_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return select(y > 0.0, dy, dy * alpha)


RELU, SIGMOID, TANH = (elements.unary(f) for f in (_relu, _sigmoid, _tanh))
QUICK_GELU, LEAKY_RELU = (elements.unary(f) for f in (_quick_gelu, _leaky_relu))
RELU_GRAD, SIGMOID_GRAD, TANH_GRAD = (elements.binary(f) for f in (_relu_grad, _sigmoid_grad, _tanh_grad))
QUICK_GELU_GRAD, LEAKY_RELU_GRAD = (elements.binary(f) for f in (_quick_gelu_grad, _leaky_relu_grad))


def relu(problem: Problem) -> Program:
    return elements.program(problem, RELU, "y", x=problem["x"])


def relu_grad(problem: Problem) -> Program:
    return elements.program(problem, RELU_GRAD, "dx", a=problem["dy"], b=problem["x"])


def sigmoid(problem: Problem) -> Program:
    return elements.program(problem, SIGMOID, "y", x=problem["x"])


def sigmoid_grad(problem: Problem) -> Program:
    return elements.program(problem, SIGMOID_GRAD, "dx", a=problem["dy"], b=problem["y"])


def tanh(problem: Problem) -> Program:
    return elements.program(problem, TANH, "y", x=problem["x"])


def tanh_grad(problem: Problem) -> Program:
    return elements.program(problem, TANH_GRAD, "dx", a=problem["dy"], b=problem["y"])


def quick_gelu(problem: Problem) -> Program:
    return elements.program(problem, QUICK_GELU, "y", problem.attributes["alpha"], x=problem["x"])


def quick_gelu_grad(problem: Problem) -> Program:
    alpha = problem.attributes["alpha"]
    return elements.program(problem, QUICK_GELU_GRAD, "dx", alpha, a=problem["dy"], b=problem["x"])


def leaky_relu(problem: Problem) -> Program:
    return elements.program(problem, LEAKY_RELU, "y", problem.attributes["alpha"], x=problem["x"])


def leaky_relu_grad(problem: Problem) -> Program:
    alpha = problem.attributes["alpha"]
    return elements.program(problem, LEAKY_RELU_GRAD, "dx", alpha, a=problem["dy"], b=problem["y"])
