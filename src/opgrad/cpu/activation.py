"""Activations and their gradients: the formula of one vector for each operator."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.elements import elementwise, program
from opgrad.cpu.numerics.math import sigmoid as logistic
from opgrad.cpu.numerics.math import tanh as hyperbolic_tangent
from opgrad.cpu.runtime.execute import Program
from opgrad.problem import Problem


@inline
def _relu(x: Vector, alpha: float) -> Vector:
    return v.select(x <= 0.0, 0.0, x)


@inline
def _relu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, dy, 0.0)


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
    return dy * v.fma(-y, y, 1.0)


@inline
def _quick_gelu(x: Vector, alpha: float) -> Vector:
    return x * logistic(x * alpha)


@inline
def _quick_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    value = x * alpha
    s = logistic(value)
    return dy * s * v.fma(value, 1.0 - s, 1.0)


@inline
def _leaky_relu(x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, x, x * alpha)


@inline
def _leaky_relu_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return v.select(y > 0.0, dy, dy * alpha)


RELU, SIGMOID, TANH = (elementwise(f) for f in (_relu, _sigmoid, _tanh))
QUICK_GELU, LEAKY_RELU = (elementwise(f) for f in (_quick_gelu, _leaky_relu))
RELU_GRAD, SIGMOID_GRAD, TANH_GRAD = (elementwise(f) for f in (_relu_grad, _sigmoid_grad, _tanh_grad))
QUICK_GELU_GRAD, LEAKY_RELU_GRAD = (elementwise(f) for f in (_quick_gelu_grad, _leaky_relu_grad))


def relu(problem: Problem) -> Program:
    return program(problem, RELU, "y", "x")


def relu_grad(problem: Problem) -> Program:
    return program(problem, RELU_GRAD, "dx", "dy", "x")


def sigmoid(problem: Problem) -> Program:
    return program(problem, SIGMOID, "y", "x")


def sigmoid_grad(problem: Problem) -> Program:
    return program(problem, SIGMOID_GRAD, "dx", "dy", "y")


def tanh(problem: Problem) -> Program:
    return program(problem, TANH, "y", "x")


def tanh_grad(problem: Problem) -> Program:
    return program(problem, TANH_GRAD, "dx", "dy", "y")


def quick_gelu(problem: Problem) -> Program:
    return program(problem, QUICK_GELU, "y", "x", alpha=problem.attributes["alpha"])


def quick_gelu_grad(problem: Problem) -> Program:
    return program(problem, QUICK_GELU_GRAD, "dx", "dy", "x", alpha=problem.attributes["alpha"])


def leaky_relu(problem: Problem) -> Program:
    return program(problem, LEAKY_RELU, "y", "x", alpha=problem.attributes["alpha"])


def leaky_relu_grad(problem: Problem) -> Program:
    return program(problem, LEAKY_RELU_GRAD, "dx", "dy", "y", alpha=problem.attributes["alpha"])
